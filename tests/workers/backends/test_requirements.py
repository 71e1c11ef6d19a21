"""What must be installed: refused in one line that says what to install, without importing anything."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from lmpool.errors import SettingsError
from lmpool.workers.backends.requirements import first_line, named_plugins, other_plugins, require, require_version

LEAST, BELOW = (0, 32), (0, 34)


class Installed:
    """Packages in a folder of their own, which comes first on the path."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def module(self, name: str, text: str) -> None:
        """A module."""
        (self._folder / f"{name}.py").write_text(text)

    def distribution(self, name: str, version: str, entry_points: str = "") -> None:
        """What pip leaves of a distribution."""
        info = self._folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(entry_points)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    """A folder of packages to fill."""
    monkeypatch.syspath_prepend(tmp_path)
    return Installed(tmp_path)


# Packages


def test_what_is_installed_passes_and_is_not_imported(installed: Installed) -> None:
    installed.module("lmpool_test_engine", "raise RuntimeError('imported')")
    require("backend", "lmpool[engine]", "lmpool_test_engine", "numpy")
    require("backend", "lmpool[engine]")


@pytest.mark.parametrize(
    ("packages", "missing"),
    [
        (["no_engine"], "no_engine"),
        (["numpy", "no_engine", "redis"], "no_engine"),
        (["no_engine", "no_kernels"], "no_engine and no_kernels"),
    ],
)
def test_what_is_missing_is_named_with_how_to_install_it(packages: list[str], missing: str) -> None:
    with pytest.raises(SettingsError) as caught:
        require("backend", "lmpool[engine]", *packages)
    assert str(caught.value) == f'backend: needs {missing}; install them with: pip install "lmpool[engine]"'


# Versions


@pytest.mark.parametrize(
    "version",
    ["0.32", "0.32.0", "0.32.0+cu129", "0.32.1", "0.33", "0.33.0rc1", "0.33.0.dev5+g0a1b2c", "0.33.1.post1", "0.33.99"],
)
def test_a_version_in_the_range_passes_and_is_told(installed: Installed, version: str) -> None:
    installed.distribution("some-engine", version)
    assert require_version("backend", ("some-engine",), LEAST, BELOW) == version


@pytest.mark.parametrize(
    "version",
    ["0.31.9", "0.31", "0.4", "0", "0.34", "0.34.0", "0.34.0+cu129", "0.34.0rc1", "0.34.0.dev1", "0.100", "1.0", "dev"],
)
def test_a_version_outside_is_refused_with_the_range_and_what_to_install(installed: Installed, version: str) -> None:
    installed.distribution("some-engine", version)
    with pytest.raises(SettingsError) as caught:
        require_version("backend", ("some-engine",), LEAST, BELOW)
    assert str(caught.value) == (
        f"backend: some-engine {version} is installed; this backend is made for some-engine >= 0.32, < 0.34: "
        "pip install 'some-engine>=0.32,<0.34'"
    )


@pytest.mark.parametrize(
    ("least", "below", "passes"),
    [
        ((0, 33, 1), (0, 34), True),
        ((0, 33, 2), (0, 34), False),
        ((0, 32), (0, 33, 2), True),
        ((0, 32), (0, 33, 1), False),
        ((0,), (1,), True),
        ((1,), (2,), False),
    ],
)
def test_a_range_may_be_given_as_finely_as_one_likes(
    installed: Installed, least: tuple[int, ...], below: tuple[int, ...], passes: bool
) -> None:
    installed.distribution("some-engine", "0.33.1")
    if passes:
        assert require_version("backend", ("some-engine",), least, below) == "0.33.1"
    else:
        with pytest.raises(SettingsError, match=r"some-engine 0\.33\.1 is installed"):
            require_version("backend", ("some-engine",), least, below)


NAMES = ("some-engine", "some-engine-cpu")


def test_an_engine_may_be_published_under_another_name(installed: Installed) -> None:
    installed.distribution("some-engine-cpu", "0.33.0")
    assert require_version("backend", NAMES, LEAST, BELOW) == "0.33.0"


def test_the_other_name_is_the_one_in_the_message(installed: Installed) -> None:
    installed.distribution("some-engine-cpu", "0.31.0")
    with pytest.raises(SettingsError, match=r"some-engine-cpu 0\.31\.0 .* pip install 'some-engine-cpu>=0\.32,<0\.34'"):
        require_version("backend", NAMES, LEAST, BELOW)


def test_of_two_that_are_installed_the_first_counts(installed: Installed) -> None:
    installed.distribution("some-engine", "0.31.0")
    installed.distribution("some-engine-cpu", "0.33.0")
    with pytest.raises(SettingsError, match=r"some-engine 0\.31\.0 is installed"):
        require_version("backend", NAMES, LEAST, BELOW)


def test_none_installed_is_refused_with_all_names() -> None:
    with pytest.raises(SettingsError) as caught:
        require_version("backend", NAMES, LEAST, BELOW)
    assert str(caught.value) == "backend: needs some-engine or some-engine-cpu, and none is installed"


def test_a_package_that_is_really_installed_is_found() -> None:
    assert require_version("backend", ("numpy",), (1,), (99,)) == version("numpy")


# Exceptions in one line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("no such file"), "no such file"),
        (ValueError("first\nsecond"), "first"),
        (ValueError("\n\n   first   \n\nsecond"), "first"),
        (ValueError("first\r\nsecond"), "first"),
        (AssertionError(), "AssertionError"),
        (ValueError(" \n\t"), "ValueError"),
        (OSError(2, "No such file", "x"), "[Errno 2] No such file: 'x'"),
        (ValueError("x" * 300), "x" * 300),
        (ValueError("x" * 301), "x" * 297 + "..."),
        (ValueError("x" * 10_000 + "\ny"), "x" * 297 + "..."),
    ],
)
def test_of_an_exception_its_first_line_is_told(error: Exception, line: str) -> None:
    assert first_line(error) == line


# Plugins

_PROCESSORS, _GENERAL = "lmpool_test.processors", "lmpool_test.plugins"


def test_a_plugin_that_changes_rows_is_refused_by_name_until_it_is_named(installed: Installed) -> None:
    assert named_plugins("logits_processors", _PROCESSORS, []) == []
    # Nothing is imported: there is no such module.
    installed.distribution("tinkered", "1.2", f"[{_PROCESSORS}]\nshift = tinkered.rows:Shift\n")
    told = "'shift' (tinkered.rows:Shift of tinkered 1.2)"
    with pytest.raises(SettingsError) as caught:
        named_plugins("logits_processors", _PROCESSORS, ["other"])
    assert str(caught.value).startswith(f"logits_processors: {told} is installed")
    assert "name it with --logits-processors shift, which" in str(caught.value)
    assert named_plugins("logits_processors", _PROCESSORS, ["shift"]) == [told]
    with pytest.raises(SettingsError, match=f"no entry point 'lift' of {_PROCESSORS} is installed"):
        named_plugins("logits_processors", _PROCESSORS, ["shift", "lift"])


def test_other_plugins_are_told_in_the_log_but_for_the_engines_own(
    installed: Installed, caplog: pytest.LogCaptureFixture
) -> None:
    installed.distribution("engine", "3.0", f"[{_GENERAL}]\nown = engine.resolvers:register\n")
    assert other_plugins(_GENERAL, ("engine",), None) == []
    assert not caplog.records
    installed.distribution("tinkered", "1.2", f"[{_GENERAL}]\npatch = tinkered:patch\nleft_out = tinkered:more\n")
    assert other_plugins(_GENERAL, ("engine",), ["own", "patch"]) == ["'patch' (tinkered:patch of tinkered 1.2)"]
    assert "'patch' (tinkered:patch of tinkered 1.2)" in caplog.text
    assert len(other_plugins(_GENERAL, ("engine",), None)) == 2
