"""Some fixed seeds find nothing, a seed gives the same log every time, and planted defects are found."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SEEDS = 10

pytestmark = pytest.mark.timeout(600)


def simulate(*arguments: str | int, code: int = 0) -> str:
    """Run simulations in a process of their own, which isolation changes for good; return what it printed."""
    command = [sys.executable, "-m", "tests.simulation", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


@pytest.mark.parametrize("first", range(1, 1 + SEEDS, 5))
def test_no_defect_is_found_with_fixed_seeds(first: int) -> None:
    printed = simulate("--first", first, "--count", 5, "--requests", 200, "--jobs", 1)
    assert re.search(r"^5 seeds, \d+ requests .*, 0 failed", printed, re.MULTILINE), printed


def test_a_seed_gives_the_same_log_every_time() -> None:
    # Deadlines expire together in the first run, and the second one serves adapters from a folder with a random name.
    for seed in (1, 2):
        first, second = (simulate("--seed", seed, "--requests", 100) for _ in range(2))
        assert first == second
        assert re.search(r"log [0-9a-f]{32}$", first, re.MULTILINE)
    assert simulate("--seed", 1, "--requests", 100) != first


@pytest.mark.parametrize("defect", ["a finished job stays in its stream", "a heartbeat has no lifetime"])
def test_a_planted_defect_is_found(defect: str) -> None:
    printed = simulate("--mutant", defect, "--count", 2, "--requests", 50, "--jobs", 1)
    assert re.search(rf"^\| {defect} \| [12] \| .+ \|$", printed, re.MULTILINE), printed


def test_each_defect_can_be_planted() -> None:
    """The text that a defect replaces must occur in the package."""
    printed = simulate("--apply")
    assert re.fullmatch(r"\d+ defects can be planted\n", printed), printed
