"""Required packages: an error names a missing package and the command that installs it, without an import."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from lmpool.errors import SettingsError, first_line
from lmpool.workers.backends.settings import require, require_version

VERSIONS = ">=0.32,<0.34"


class Installed:
    """Fake packages in a folder that is first on the import path."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def module(self, name: str, text: str) -> None:
        """Write a module with the given source text."""
        (self._folder / f"{name}.py").write_text(text)

    def distribution(self, name: str, version: str) -> None:
        """Write the metadata of an installed distribution."""
        info = self._folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    """An empty folder for fake packages, first on the import path."""
    monkeypatch.syspath_prepend(tmp_path)
    return Installed(tmp_path)


# Missing packages


def test_an_installed_package_passes_without_an_import(installed: Installed) -> None:
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
def test_a_missing_package_is_named_with_the_command_that_installs_it(packages: list[str], missing: str) -> None:
    with pytest.raises(SettingsError) as caught:
        require("backend", "lmpool[engine]", *packages)
    assert str(caught.value) == f'backend: needs {missing}; install with: pip install "lmpool[engine]"'


# Supported versions


@pytest.mark.parametrize(
    "version",
    ["0.32", "0.32.0", "0.32.0+cu129", "0.32.1", "0.33", "0.33.0rc1", "0.33.0.dev5+g0a1b2c", "0.33.1.post1", "0.33.99"],
)
def test_a_version_in_the_range_is_returned(installed: Installed, version: str) -> None:
    installed.distribution("some-engine", version)
    assert require_version(("some-engine",), VERSIONS) == version


@pytest.mark.parametrize(
    "version",
    ["0.31.9", "0.31", "0.4", "0", "0.34", "0.34.0", "0.34.0+cu129", "0.34.0rc1", "0.34.0.dev1", "0.100", "1.0"],
)
def test_a_version_outside_the_range_is_refused_with_the_range(installed: Installed, version: str) -> None:
    installed.distribution("some-engine", version)
    with pytest.raises(SettingsError) as caught:
        require_version(("some-engine",), VERSIONS)
    assert str(caught.value) == (
        f"backend: some-engine {version} is installed; lmpool needs some-engine >=0.32,<0.34. "
        "Install one with: pip install 'some-engine>=0.32,<0.34'"
    )


@pytest.mark.parametrize(
    ("versions", "passes"),
    [(">=0.33.1,<0.34", True), (">=0.33.2,<0.34", False), (">=0.32,<0.33.2", True), (">=0.32,<0.33.1", False)],
)
def test_a_range_may_end_at_any_release(installed: Installed, versions: str, passes: bool) -> None:
    installed.distribution("some-engine", "0.33.1")
    if passes:
        assert require_version(("some-engine",), versions) == "0.33.1"
    else:
        with pytest.raises(SettingsError, match=r"some-engine 0\.33\.1 is installed"):
            require_version(("some-engine",), versions)


NAMES = ("some-engine", "some-engine-cpu")


def test_an_engine_may_be_published_under_another_name(installed: Installed) -> None:
    installed.distribution("some-engine-cpu", "0.33.0")
    assert require_version(NAMES, VERSIONS) == "0.33.0"


def test_the_message_names_the_installed_distribution(installed: Installed) -> None:
    installed.distribution("some-engine-cpu", "0.31.0")
    with pytest.raises(SettingsError, match=r"some-engine-cpu 0\.31\.0 .* pip install 'some-engine-cpu>=0\.32,<0\.34'"):
        require_version(NAMES, VERSIONS)


def test_the_first_installed_distribution_counts(installed: Installed) -> None:
    installed.distribution("some-engine", "0.31.0")
    installed.distribution("some-engine-cpu", "0.33.0")
    with pytest.raises(SettingsError, match=r"some-engine 0\.31\.0 is installed"):
        require_version(NAMES, VERSIONS)


def test_no_installed_engine_is_refused_with_all_names() -> None:
    with pytest.raises(SettingsError) as caught:
        require_version(NAMES, VERSIONS)
    assert str(caught.value) == "backend: needs some-engine or some-engine-cpu, and none of them is installed"


def test_the_version_of_a_real_package_is_found() -> None:
    assert require_version(("numpy",), ">=1,<99") == version("numpy")


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
def test_the_first_line_of_an_exception_is_shown(error: Exception, line: str) -> None:
    assert first_line(error) == line
