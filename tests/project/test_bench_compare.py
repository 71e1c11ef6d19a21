"""`make bench-compare` compares two pools; it reports "worse" only if the confidence interval proves it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from benchmarks.compare.__main__ import main, summary, verdict
from benchmarks.compare.measures import MEASURES, Burst
from benchmarks.harness.pairs import Interval
from benchmarks.harness.processes import run


def rounds(*ratios: float) -> list[list[tuple[Burst, Burst]]]:
    """Five rounds of measurements, whose pairs have the given ratios of new rate to base rate."""
    return [[(Burst(100 * ratio, {}), Burst(100, {})) for ratio in ratios] for _ in range(5)]


@pytest.mark.parametrize(
    ("ratios", "says"),
    [
        ((0.95, 0.96, 0.97), "worse"),
        ((0.99, 1.0, 1.01), "no worse"),
        ((1.03, 1.04, 1.05), "better"),
        ((0.9, 1.0, 1.1), "cannot tell"),
    ],
)
def test_a_verdict_needs_the_whole_interval(ratios: tuple[float, ...], says: str) -> None:
    assert verdict(rounds(*ratios)).startswith(says)


def test_few_pairs_have_no_verdict() -> None:
    assert verdict(rounds(0.5)).startswith("cannot tell from fewer")


def test_a_process_that_used_less_than_a_tick_has_no_ratio() -> None:
    used = [({"server": 2.0}, {"server": 0.0}), ({"server": 2.0}, {"server": 2.0})]
    pairs = [(Burst(100, new), Burst(100, base)) for new, base in used]
    assert "processor time, server: less than" in summary("tiny", MEASURES["tiny"], [pairs])


def test_interval_holds_the_median_and_knows_that_rounds_differ() -> None:
    alike = Interval.of([[0.9, 1.0, 1.1, 1.2]] * 5)
    apart = Interval.of([[ratio] * 4 for ratio in (0.8, 0.9, 1.0, 1.1, 1.2)])
    assert alike.low <= alike.median <= alike.high
    # Each process has four equal pairs; they must not count as more evidence than one pair.
    assert apart.median == 1.0
    assert apart.low <= 0.9
    assert apart.high >= 1.1


def test_a_pool_is_compared_with_itself(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMPOOL_RUNTIME_DIR", "")  # `main` sets this variable; pytest restores it.
    sides = ["--base-python", sys.executable, "--new-python", sys.executable]
    assert main([*sides, "--quick", "--pairs", "1", "--measures", "tiny"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "of 1 pairs" in next(line for line in shown if line.startswith("tiny: "))
    measured = [line.split(":")[0].split()[-1] for line in shown if line.startswith("  processor time")]
    assert measured == ["client", "workers", "server", "together"]


@pytest.mark.parametrize("commit", ["no-such-commit", "--all", "HEAD:README.md", "0" * 40])
def test_an_unknown_commit_is_named(commit: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--new-python", sys.executable, "--", commit]) == 2
    assert f"has no commit {commit!r}" in capsys.readouterr().err


def test_a_missing_interpreter_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--base-python", "/nowhere/bin/python", "--new-python", sys.executable]) == 2
    assert "there is no /nowhere/bin/python" in capsys.readouterr().err


def test_a_program_of_another_environment_imports_what_is_installed_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise ImportError('of another checkout')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run(sys.executable, "-c", "import json; print(json.dumps(1))") == "1\n"
