"""A short run of chaos keeps all promises, and what counts its outcome sees what is broken."""

from __future__ import annotations

import subprocess
import sys

from tests.faults.chaos.plan import Kind, draw_plan
from tests.faults.chaos.recovery import Trouble, percentile, recoveries
from tests.faults.chaos.report import Report
from tests.faults.chaos.settings import ChaosSettings
from tests.faults.chaos.tally import Computed, Request, count

SEED = 38


def test_twenty_seconds_of_chaos_keep_all_promises_but_those_of_times() -> None:
    command = [sys.executable, "-m", "tests.faults.chaos", "--seconds", "20", "--seed", str(SEED), "--untimed"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.stdout.splitlines()[-1:] == ["all promises kept"], done.stdout + done.stderr
    assert done.returncode == 0
    for line in ("lost              0", "wrong             0", "late              0", "leaked keys       0"):
        assert line in done.stdout.splitlines()


def test_a_seed_decides_the_schedule_and_all_kinds_of_trouble_come() -> None:
    assert draw_plan(SEED, 180) == draw_plan(SEED, 180) != draw_plan(SEED + 1, 180)
    assert {strike.kind for strike in draw_plan(SEED, 180)} == set(Kind)


def report(requests: list[Request], rows: int = 100, recovered: tuple[float, ...] = ()) -> Report:
    """A report of a run that left nothing behind."""
    settings = ChaosSettings(seconds=1, seed=SEED)
    tally = count(requests, settings.timeout_s + settings.grace_s)
    return Report(settings, tally, Computed(rows, 100), list(recovered), [], [], [])


GOOD = Request(0, 1.0, 2.0, "ok")


def test_what_is_not_allowed_is_named() -> None:
    assert report([GOOD]).faults == []
    assert str(report([GOOD])).endswith("all promises kept")
    assert report([]).faults == ["no requests"]
    assert report([GOOD, Request(0, 1.0, 2.0, "wrong")]).faults == ["wrong 1"]
    assert report([GOOD, Request(0, 1.0, 2.0, "NoWorker: none")]).faults == ["lost 1"]
    assert report([GOOD, Request(0, 1.0, None, "never ended")]).faults == ["lost 1"]
    assert report([GOOD, Request(0, 1.0, 40.0, "ok")]).faults == ["late 1"]
    assert report([GOOD], rows=106).faults == ["computed twice over 5%"]
    assert report([GOOD], recovered=(1.0, 6.1)).faults == ["p99 recovery over 6 s"]


def test_a_recovery_ends_with_what_was_under_way_and_the_first_request_after_it() -> None:
    before, during, after = Request(0, 0.0, 4.0, "ok"), Request(0, 2.5, 3.0, "ok"), Request(0, 3.5, 6.0, "ok")
    later = Request(0, 3.6, 9.0, "ok")
    assert recoveries([Trouble(2.0, 3.0)], [before, during]) == [1.0]
    assert recoveries([Trouble(2.0, 3.0)], [before, during, after, later]) == [3.0]
    assert recoveries([Trouble(2.0, 3.0)], [during, after, Request(1, 1.0, 8.0, "ok")]) == [5.0]


def test_a_trouble_before_the_recovery_from_another_makes_one_of_both() -> None:
    requests = [Request(0, 0.0, 5.0, "ok"), Request(0, 6.0, 6.5, "ok")]
    assert recoveries([Trouble(1.0, 1.0), Trouble(4.0, 4.5)], requests) == [2.0]
    assert recoveries([Trouble(1.0, 1.0), Trouble(7.0, 7.0)], requests) == [5.5, 0.0]


def test_percentiles_round_up() -> None:
    assert percentile([], 0.99) == 0.0
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert percentile([float(number) for number in range(1000)], 0.99) == 990.0
