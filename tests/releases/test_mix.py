"""Two releases in one pool lose nothing, in a short run; `make releases` does a long one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.releases.checkout import LAST, NEXT
from tests.releases.fleet import ROLES


@pytest.mark.parametrize("other", [LAST, NEXT])
def test_a_pool_of_two_releases_loses_nothing(other: str) -> None:
    command = [sys.executable, "-m", "tests.releases", "--with", other, "--seconds", "5", "--seed", "3", "--small"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines[-1] == "all promises kept"
    for name in ("lost", "wrong", "late", "leaked keys", "leaked processes"):
        assert f"{name:<17} 0" in lines
    for role in ROLES:
        (line,) = (line for line in lines if line.startswith(f"{role}s "))
        assert " 0 of " not in line
