"""`python -m benchmarks fleet` measures fleets of real workers and clients, and counts lost and wrong rows."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from benchmarks.__main__ import main
from benchmarks.fleet import page
from benchmarks.fleet.arithmetic import ROADS, Costs, Demand
from benchmarks.fleet.clients import Load
from benchmarks.fleet.counters import Usage
from benchmarks.fleet.measure import Fleet, Plan

from lmpool.errors import NoWorker
from lmpool.synthetic import synthetic_row

V = 512
PLAN = Plan(200, 1, V, 5, "mixed", in_flight=0, per_process=500, check_every=1, encoding="f32", settings={})


@pytest.mark.parametrize(
    "options", [(), ("--saturate", "--step-ms", "0", "--in-flight", "16"), ("--cluster", "--set", "lease_s=5")]
)
def test_a_small_fleet_loses_no_request(
    options: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMPOOL_RUNTIME_DIR", "")  # The program sets this variable; pytest restores it.
    numbers = ["--workers", "3", "--clients", "3", "--rate", "50", "--seconds", "1", "--per-process", "2"]
    assert main(["fleet", *numbers, "--commands", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    names, values = ([cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], lines[2]))
    measured = dict(zip(names, values, strict=True))
    assert measured["workers × clients"] == "3 × 3"
    assert (measured["lost"], measured["wrong"]) == ("0", "0")
    assert float(measured["rows/s"].replace(",", "")) > 0
    assert "evalsha" in next(line for line in lines if line.startswith("  per request: "))


class FakeProducer:
    """Returns the row of another prompt for prompts of two tokens, and raises for prompts of three tokens."""

    async def logprobs(self, ids: list[int]) -> Any:
        if len(ids) == 3:
            raise NoWorker("no worker serves the model")
        return synthetic_row(ids[:1], vocab_size=V)


def test_wrong_rows_and_failed_requests_are_counted() -> None:
    async def request_all() -> dict[str, Any]:
        load, producer = Load(V, check_every=1), FakeProducer()
        for ids in ([1], [1, 2], [1, 2, 3], [4]):
            await load.request(producer, ids, 0.0)  # type: ignore[arg-type]
        return load.report()

    report = asyncio.run(request_all())
    assert report["sent"] == 4
    assert report["wrong"] == 1
    assert report["failed"] == {"NoWorker: no worker serves the model": 1}
    assert len(report["latencies_s"]) == 3


def usage(seconds: float, processor_s: tuple[float, ...], **calls: int) -> Usage:
    return Usage(seconds, processor_s, Counter(calls), received=1e6, sent=2e6)


def fleet(plan: Plan = PLAN, workers: int = 4, busy_s: float = 1.0) -> Fleet:
    """A fleet of two masters. The second master is busier with requests, and the first without requests."""
    idle_workers, idle = usage(10, (0.1, 0.04), evalsha=40), usage(10, (0.5, 0.2), evalsha=80, xread=8)
    loaded = usage(5, (0.3, busy_s), evalsha=1040, xadd=500, xread=4)
    ends = 500, 0, Counter[str](), [0.005] * 499, [0.001] * 500, 0.5, 0.25, (20, 7)
    return Fleet(plan, workers, 2, 1.0, 1.0, idle_workers, idle, loaded, *ends)


def test_net_values_lack_what_the_same_fleet_costs_without_requests() -> None:
    measured = fleet()
    assert measured.lost == 1
    assert measured.processor_us(net=False) == pytest.approx(2000)
    assert measured.processor_us(net=True) == pytest.approx(1800)  # The busiest master costs 0.1 s in 5 s without them.
    assert measured.commands(net=False) == {"evalsha": 2.08, "xadd": 1.0, "xread": 0.008}
    assert measured.commands(net=True) == pytest.approx({"evalsha": 2.0, "xadd": 1.0, "xread": 0.0})
    assert measured.idle_worker == {"evalsha": 1.0}
    assert measured.idle_client == {"evalsha": 2.0, "xread": pytest.approx(0.4)}
    assert measured.idle_worker_us == pytest.approx(2500)
    assert measured.idle_client_us == pytest.approx(20_000)


def test_the_largest_fleet_is_compared_with_four_workers_and_clients() -> None:
    small, large = replace(fleet(), clients=4), replace(fleet(workers=300, busy_s=1.5), clients=100)
    assert list(page.ratios([small, large])) == [
        "300 × 100 ÷ 4 × 4:",
        "- 1 times the commands per request",
        "- 1.5 times the processor time of the server per request",
        "- 1 times the net commands per request",
        "- 1.56 times the net processor time of the server per request",
    ]


def test_the_counters_of_a_period_are_those_of_its_end_without_those_of_its_start() -> None:
    period = usage(12, (3.0, 5.0), xadd=7, get=2).since(usage(10, (1.0, 4.5), xadd=3, get=2))
    assert (period.seconds, period.processor_s, period.busiest) == (2, (2.0, 0.5), 0)
    assert period.calls == {"xadd": 4}


def test_rows_that_pass_the_masters_need_more_masters() -> None:
    costs = Costs(20.0, 0.001, 100.0, 100.0, 30.0, 5.0, 4.0)
    through, straight, top = (Demand(costs, road, 1000) for road in ROADS)
    assert straight.requests == 922_000
    assert straight.master_cores == pytest.approx(922_000 * 20e-6 + 2000 * 100e-6)
    assert (straight.masters, top.masters) == (32, 32)  # Each master's core is used to 60 %.
    assert through.master_cores == pytest.approx(straight.master_cores + 922_000 * (256_512 - 2048) * 1e-9)
    assert through.masters > 5 * straight.masters
    assert straight.host_gbit == pytest.approx(8 * 8 * 922 * 256_512 / 1e9)
    assert through.client_cores == pytest.approx(27.66)


def test_the_page_has_every_fleet_and_keeps_its_notes() -> None:
    small, large = fleet(), fleet(replace(PLAN, vocab_size=49_152, encoding="bf16"), busy_s=2.0)
    large = replace(large, loaded=replace(large.loaded, received=1e8))
    text = page.write(
        [fleet(), fleet(workers=300)], [small, large], [fleet(), fleet(busy_s=0.5)], {"date": "now"}, "a note"
    )
    assert "| 300 × 2 | 512 |" in text
    assert "| 512 | 2,000 | 1,000 | 2 | 2 | 0 |" in text  # One master, three masters, and their ratio.
    assert "300 × 2 ÷ 4 × 4" not in text  # No fleet of four workers and four clients was measured.
    assert "- q = 2,000 µs" in text
    assert "together 0.615 times what" in text  # 0.8 s ÷ 1.3 s.
    assert "a note" in text.partition("<!-- notes")[2]
    assert max(map(len, (line for line in text.splitlines() if line[:1] != "|"))) <= 120
