"""The package stays within the limits of its size and structure in `limits.toml`."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tools.structure import bare_constants, folder_entries, lua_lines, modules, shared_class_names, sizes

ROOT = Path(__file__).resolve().parents[2]
FILE = tomllib.loads((Path(__file__).parent / "limits.toml").read_text("utf-8"))
RAISED = FILE.get("raised", [])
LIMITS = FILE["limits"] | {raised["limit"]: raised["to"] for raised in RAISED}


def measured(name: str) -> int:
    per_folder = sizes(ROOT).values()
    match name:
        case "code_lines":
            return sum(size.code for size in per_folder)
        case "lines":
            return sum(size.lines for size in per_folder)
        case "files":
            return sum(size.files for size in per_folder)
        case "lua_lines":
            return lua_lines(ROOT)
        case "lines_per_file":
            return max(path.read_bytes().count(b"\n") for path in modules(ROOT).values())
        case "names_per_folder":
            return max(map(len, folder_entries(ROOT).values()))
        case "bare_constants":
            return len(bare_constants(ROOT))
        case "shared_class_names":
            return len(shared_class_names(ROOT))
    raise AssertionError(f"limits.toml has {name!r}, which no test measures")


@pytest.mark.parametrize("name", sorted(FILE["limits"].keys() - {"cold_request_files"}))
def test_the_package_is_within_the_limit(name: str) -> None:
    assert measured(name) <= LIMITS[name], "see the head of limits.toml"


def test_a_cold_request_enters_few_files() -> None:
    # Measure in another process, because the profile hook would slow down other tests.
    command = [sys.executable, "-m", "tools.structure"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (line,) = (line for line in printed.splitlines() if line.startswith("files that a cold request enters"))
    assert int(line.split()[-1]) <= LIMITS["cold_request_files"]


def test_each_raised_limit_has_a_reason() -> None:
    for raised in RAISED:
        assert raised["to"] > FILE["limits"][raised["limit"]]
        assert len(raised["reason"]) > 20, raised
