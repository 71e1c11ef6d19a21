"""Two releases in one pool lose nothing, in a short run; `make releases` does a long one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.releases.checkout import LAST, NEXT


@pytest.mark.parametrize("other", [LAST, NEXT])
def test_a_pool_of_two_releases_loses_nothing(other: str) -> None:
    command = [sys.executable, "-m", "tests.releases", "--with", other, "--seconds", "3", "--seed", "3", "--small"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines[-1] == "all promises kept"
    for name in ("lost", "wrong", "wrong batches", "late", "leaked keys", "leaked processes"):
        assert f"{name:<17} 0" in lines
