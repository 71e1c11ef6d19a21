"""A short chaos run stays within all limits, and a report lists each limit that an outcome exceeds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.faults.chaos.load import ALL_KINDS
from tests.faults.chaos.observer import Counted
from tests.faults.chaos.plan import Kind, draw_plan
from tests.faults.chaos.report import Report
from tests.faults.chaos.settings import ChaosSettings
from tests.faults.chaos.tally import Computed, Request, Trouble, count, is_stale, percentile, recoveries

SEED = 7260
SHORT_S, USUAL_S = 20, 180


@pytest.mark.parametrize("partitions", [1, 2])
def test_twenty_seconds_of_chaos_keep_all_promises_except_those_about_time(partitions: int) -> None:
    options = ["--seconds", str(SHORT_S), "--seed", str(SEED), "--partitions", str(partitions), "--untimed"]
    command = [sys.executable, "-m", "tests.faults.chaos", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.stdout.splitlines()[-1:] == ["all promises kept"], done.stdout + done.stderr
    assert done.returncode == 0
    for name in ("lost", "wrong", "late", "leaked keys", "leaked files"):
        assert f"{name:<17} 0" in done.stdout.splitlines()


def test_a_seed_determines_the_schedule_and_every_kind_of_fault_occurs() -> None:
    assert draw_plan(SEED, USUAL_S) == draw_plan(SEED, USUAL_S) != draw_plan(SEED + 1, USUAL_S)
    assert {strike.kind for strike in draw_plan(SEED, USUAL_S)} == set(Kind)


def test_the_short_run_has_every_fault_of_lanes_and_shared_memory() -> None:
    of_lanes = {Kind.KILL_FULL, Kind.DRAIN, Kind.FREEZE_FULL, Kind.STALL, Kind.LOSE_LANES}
    assert of_lanes | {Kind.KILL, Kind.JUNK, Kind.UNLINK} <= {strike.kind for strike in draw_plan(SEED, SHORT_S)}


GOOD = Request(0, 1.0, 2.0, "ok")
ALL_GOOD = [Request(0, 1.0, 2.0, "ok 0" if kind == "adapter" else "ok", kind) for kind in ALL_KINDS]


def report(
    requests: list[Request],
    rows: int = 100,
    recovered: tuple[float, ...] = (),
    counted: Counted = Counted(1, 1, 1),  # noqa: B008  an immutable default
) -> Report:
    """A report of a run without leaks, with the given requests and one request of each kind."""
    settings = ChaosSettings(seconds=1, seed=SEED)
    tally = count([*ALL_GOOD, *requests], settings.timeout_s + settings.grace_s)
    return Report(settings, tally, Computed(rows, 100), list(recovered), counted, [], [], [], [], [])


def test_an_unknown_fault_is_refused_by_name() -> None:
    assert report([GOOD]).faults == []
    assert str(report([GOOD])).endswith("all promises kept")
    assert report([GOOD, Request(0, 1.0, 2.0, "wrong")]).faults == ["wrong 1"]
    assert report([GOOD, Request(0, 1.0, 2.0, "NoWorker: none")]).faults == ["lost 1"]
    assert report([GOOD, Request(0, 1.0, None, "never ended")]).faults == ["lost 1"]
    assert report([GOOD, Request(0, 1.0, 40.0, "ok")]).faults == ["late 1"]
    assert report([GOOD], counted=Counted(homed=0, stolen=1, shared=1)).faults == ["nothing homed"]
    assert report([GOOD], counted=Counted(homed=1, stolen=0, shared=1)).faults == ["nothing stolen"]
    assert report([GOOD], counted=Counted(homed=1, stolen=1)).faults == ["nothing shared"]
    assert report([GOOD], rows=106).faults == ["computed twice over 5%"]
    assert report([GOOD], recovered=(1.0, 6.1)).faults == ["p99 recovery over 6 s"]


def test_a_recovery_ends_with_the_requests_in_flight_and_the_first_request_after_it() -> None:
    before, during, after = Request(0, 0.0, 4.0, "ok"), Request(0, 2.5, 3.0, "ok"), Request(0, 3.5, 6.0, "ok")
    later = Request(0, 3.6, 9.0, "ok")
    assert recoveries([Trouble(2.0, 3.0)], [before, during]) == [1.0]
    assert recoveries([Trouble(2.0, 3.0)], [before, during, after, later]) == [3.0]
    assert recoveries([Trouble(2.0, 3.0)], [during, after, Request(1, 1.0, 8.0, "ok")]) == [5.0]


def test_two_faults_without_a_recovery_between_them_count_as_one() -> None:
    requests = [Request(0, 0.0, 5.0, "ok"), Request(0, 6.0, 6.5, "ok")]
    assert recoveries([Trouble(1.0, 1.0), Trouble(4.0, 4.5)], requests) == [2.0]
    assert recoveries([Trouble(1.0, 1.0), Trouble(7.0, 7.0)], requests) == [5.5, 0.0]


def test_percentiles_round_up() -> None:
    assert percentile([], 0.99) == 0.0
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert percentile([float(number) for number in range(1000)], 0.99) == 990.0


def change(began: float, ended: float | None, outcome: str = "ok") -> Request:
    """A logged request that put an adapter in service."""
    return Request(0, began, ended, outcome, "change")


def test_a_run_without_every_kind_of_request_is_no_evidence() -> None:
    settings, counted = ChaosSettings(seconds=1, seed=SEED), Counted(1, 1, 1)
    for missing in ALL_KINDS:
        tally = count([request for request in ALL_GOOD if request.kind != missing], 1.0)
        assert f"no {missing}" in Report(settings, tally, Computed(1, 1), [], counted, [], [], [], [], []).faults


def test_a_row_of_an_adapter_that_was_not_in_service_is_detected() -> None:
    changes = [change(1.0, 2.0), change(3.0, 4.0), change(5.0, 6.0, REFUSED), change(7.0, None, "never ended")]

    def is_wrong(began: float, ended: float, number: int) -> bool:
        return is_stale(Request(1, began, ended, f"ok {number}", "adapter"), changes)

    assert not is_wrong(2.5, 2.6, 0)
    assert not is_wrong(3.5, 4.5, 0), "it may have been asked for before the change was over"
    assert is_wrong(4.1, 4.5, 0)
    assert not is_wrong(2.0, 3.1, 1)
    assert is_wrong(2.0, 2.9, 1), "nobody had put it in service by then"
    assert is_wrong(5.0, 6.5, 2), "it was refused"
    assert not is_wrong(9.0, 9.5, 1), "it is not known which of the two is in service"
    assert not is_wrong(9.0, 9.5, 3)
    assert is_wrong(9.0, 9.5, 4), "there is none"


def test_an_adapter_may_be_refused_only_when_its_worker_ends() -> None:
    assert report([change(1.0, 2.0, REFUSED)]).faults == []
    assert report([change(1.0, 2.0, "AdapterRefused: somebody else")]).faults == ["lost 1"]
    assert report([change(1.0, 2.0, "DeadlineExceeded: late")]).faults == ["lost 1"]


REFUSED = (
    "AdapterRefused: a worker cannot load the adapter 'poet': adapters: the worker a-1-b terminated while it loaded "
    "this adapter, so for 10 minutes no worker loads it"
)
