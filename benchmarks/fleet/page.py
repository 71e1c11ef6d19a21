"""The page of the simulated fleet: its tables, and the arithmetic for 10, 100 and 1,000 GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from benchmarks.fleet import arithmetic
from benchmarks.fleet.arithmetic import Costs
from benchmarks.fleet.measure import Fleet
from benchmarks.harness.pairs import show
from benchmarks.harness.report import NOTES_BEGIN, NOTES_END

_SMALL = (4, 4)  # Workers and clients of the fleet with which the largest fleet is compared.
_MIN_SHOWN = 0.005  # Commands with fewer calls per request or second are left out.

_COLUMNS: Mapping[str, Callable[[Fleet], str]] = {
    "workers × clients": lambda fleet: f"{fleet.workers:,} × {fleet.clients:,}",
    "V": lambda fleet: f"{fleet.plan.vocab_size:,}",
    "rows/s": lambda fleet: show(fleet.rate),
    "server µs/request": lambda fleet: show(fleet.processor_us(net=False)),
    "net": lambda fleet: show(fleet.processor_us(net=True)),
    "commands/request": lambda fleet: show(sum(fleet.commands(net=False).values())),
    "net commands": lambda fleet: show(sum(fleet.commands(net=True).values())),
    "median ms": lambda fleet: show(fleet.latency_ms(50)),
    "p99 ms": lambda fleet: show(fleet.latency_ms(99)),
    "late ms": lambda fleet: show(fleet.late_ms),
    "idle worker commands/s": lambda fleet: show(sum(fleet.idle_worker.values())),
    "idle client commands/s": lambda fleet: show(sum(fleet.idle_client.values())),
    "server core %": lambda fleet: show(100 * fleet.loaded.busiest_s / fleet.loaded.seconds),
    "other cores": lambda fleet: show((fleet.workers_s + fleet.clients_s) / fleet.loaded.seconds),
    "lost": lambda fleet: f"{fleet.lost:,}",
    "wrong": lambda fleet: f"{fleet.wrong:,}",
}
HEAD = (f"| {' | '.join(_COLUMNS)} |", f"|{'---|' * len(_COLUMNS)}")
"""The first two lines of a table of fleets."""


def row(fleet: Fleet) -> str:
    """The line of a table for a fleet."""
    return f"| {' | '.join(cell(fleet) for cell in _COLUMNS.values())} |"


def commands(fleet: Fleet) -> Iterator[str]:
    """The commands of a fleet by name, most frequent first."""
    yield f"\n{fleet.workers:,} × {fleet.clients:,}"
    for title, calls in (
        ("per request", fleet.commands(net=False)),
        ("per request, net", fleet.commands(net=True)),
        ("per second of an idle worker", fleet.idle_worker),
        ("per second of an idle client", fleet.idle_client),
    ):
        yield f"  {title}: {_listed(calls)}"
    shares = [100 * busy_s / fleet.loaded.seconds for busy_s in fleet.loaded.processor_s]
    yield f"  percent of a core of each master: {', '.join(map(show, shares))}"


def _listed(calls: Mapping[str, float]) -> str:
    kept = sorted((item for item in calls.items() if abs(item[1]) >= _MIN_SHOWN), key=lambda item: -item[1])
    return ", ".join(f"{name} {calls:.2f}" for name, calls in kept) or "none"


def ratios(fleets: Sequence[Fleet]) -> Iterator[str]:
    """Compare the largest fleet with the fleet of four workers and four clients, if both were measured."""
    largest = max(fleets, key=lambda fleet: fleet.workers * fleet.clients)
    for small in fleets:
        if (small.workers, small.clients) == _SMALL and largest is not small:
            yield f"{largest.workers:,} × {largest.clients:,} ÷ {small.workers} × {small.clients}:"
            for title, net in (("", False), (" net", True)):
                both = [sum(fleet.commands(net=net).values()) for fleet in (largest, small)]
                processor = largest.processor_us(net=net) / small.processor_us(net=net)
                yield f"- {show(both[0] / both[1])} times the{title} commands per request"
                yield f"- {show(processor)} times the{title} processor time of the server per request"


def write(
    at_rate: Sequence[Fleet], saturated: Sequence[Fleet], masters: Sequence[Fleet], run: Mapping[str, str], notes: str
) -> str:
    """The page.

    Args:
        at_rate: fleets whose clients sent requests at a rate.
        saturated: fleets whose clients sent as many requests as possible, with small rows and with large rows.
        masters: fleets on a cluster of one master and of three masters, in pairs of equal V.
        run: facts about the run.
        notes: the notes of the previous page.
    """
    costs, plan = _costs(at_rate, saturated), at_rate[0].plan
    parts = [
        "# A simulated fleet",
        _INTRODUCTION.format(rate=plan.rate, seconds=plan.seconds, step_ms=plan.step_ms),
        f"## {plan.rate:g} requests per second",
        "\n".join([*HEAD, *map(row, at_rate)]),
        "\n".join(ratios(at_rate)).replace(":\n", ":\n\n"),
        "## As many requests as possible",
        "\n".join([*HEAD, *map(row, saturated)]),
        "## One model on three masters",
        _MASTERS,
        "\n".join(_pairs(masters)),
        "## 10, 100 and 1,000 GPUs",
        _arithmetic(costs, _spread(masters)),
        "## Environment",
        "\n".join(f"- **{name}**: {fact}" for name, fact in run.items() if "peers" not in name),
        "## Notes",
        f"{NOTES_BEGIN}\n{notes}\n{NOTES_END}",
    ]
    return "\n\n".join(parts) + "\n"


_INTRODUCTION = """\
This page measures what workers and clients cost the server when both grow in number. `python -m benchmarks fleet
--write docs/benchmarks/fleet.md` writes the page. `python -m benchmarks fleet --workers 1000 --clients 1000 --commands`
measures one fleet, and lists the commands per request by name.

The workers are real workers with the synthetic backend: a step sleeps for {step_ms:g} ms and uses no core. At
saturation a step takes no time. The clients are real producers. Hundreds of both share a process, so a machine with few
cores can run a thousand. Half of the prompts are new (32 tokens). The other half extend an earlier prompt of the same
client by one token, so these prompts have a home. The clients compare rows with the synthetic model's rows: every row,
or at saturation every 16th row of V = 512. They count requests that returned no row (*lost*) and rows with another
value (*wrong*). The program exits with code 1 if it counted any.

In the first table the clients send {rate:g} requests per second at random times, whether or not earlier requests have
ended. *Median* and *p99* are the times from the moment at which a request was due until its row was returned. *Late* is
the 99th percentile of the times by which requests were sent late: if it is large, the machine has too few cores.

*Server µs/request* is the processor time of the server (`INFO cpu`) divided by the requests, and *commands/request* the
calls in `INFO commandstats`, which contain the calls inside scripts. On a cluster, the processor time is the time of
the busiest master, and the commands are those of all masters. *Net* values do not contain what the same fleet costs
without requests, measured for {seconds:g} s before. Net values mean nothing if the machine has no core left: *server
core %* is the share of a core that the server used, and *other cores* the cores that the processes of workers and
clients used. The workers have no shared memory, so rows go through the server, as they do between machines without
direct connections."""

_MASTERS = """\
A cluster of three masters and a cluster of one master, both on this machine, with 16 workers, 16 clients and as many
requests as possible. The ratio is the processor time per request of the only master ÷ that of the busiest master."""


def _pairs(fleets: Sequence[Fleet]) -> Iterator[str]:
    columns = ("V", "one master, µs/request", "busiest of three, µs/request", "ratio", "lost", "wrong")
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for one, three in zip(fleets[::2], fleets[1::2], strict=True):
        single_us, busiest_us = one.processor_us(net=False), three.processor_us(net=False)
        lost, wrong = one.lost + three.lost, one.wrong + three.wrong
        cells = (f"{one.plan.vocab_size:,}", show(single_us), show(busiest_us), show(single_us / busiest_us))
        yield f"| {' | '.join(cells)} | {lost:,} | {wrong:,} |"


def _spread(fleets: Sequence[Fleet]) -> float:
    """Processor time per request of three masters together ÷ that of the only master of a cluster, for small rows."""
    one, three = (1e6 * sum(fleet.loaded.processor_s) / fleet.sent for fleet in fleets[:2])
    return three / one


def _costs(at_rate: Sequence[Fleet], saturated: Sequence[Fleet]) -> Costs:
    """The costs that the arithmetic uses: idle costs of the largest fleet, and costs per request at saturation."""
    largest = max(at_rate, key=lambda fleet: fleet.workers * fleet.clients)
    many = max(saturated, key=lambda fleet: fleet.workers)
    large = max(saturated, key=lambda fleet: fleet.plan.vocab_size)
    small = next(fleet for fleet in saturated if fleet.workers == large.workers)
    more_bytes = (large.loaded.received / large.sent) - (small.loaded.received / small.sent)
    return Costs(
        many.processor_us(net=False),
        (large.processor_us(net=False) - small.processor_us(net=False)) / more_bytes,
        largest.idle_worker_us,
        largest.idle_client_us,
        1e6 * many.clients_s / many.sent,
        largest.connections_per_worker,
        largest.connections_per_client,
    )


_CONSTANTS = """\
- q = {request} µs: processor time of the masters per request with a small result, from the fleet with the most workers
  in the table of as many requests as possible, which has one server. In the table of three masters, a request costs all
  masters together {spread} times what it costs the only master of a cluster; the arithmetic lacks this factor.
- b = {kib:.3g} µs per KiB: processor time of the masters for a row that goes through them, from the smallest and the
  largest V with equal numbers of workers.
- w = {worker} µs/s and c = {client} µs/s: processor time of the master for an idle worker and an idle client.
- p = {client_request} µs: processor time of a client per request, without the conversion of a row.
- g = {gpu_rows:,} rows/s of a GPU, with rows of B = {row_bytes:,} bytes: Llama 8B on one H200, bf16, V = 128,256
  ([measured](devices.md))."""

_FORMULAS = """\
The pool needs R = N g requests per second, and the masters need R (q + b B) + N (w + c) of a core. Rows that go
straight to clients or stay in shared memory have no term b B. The masters receive and send R B, or R × {small_bytes:,}
bytes for small results. A machine with {host_gpus} GPUs sends {host_gpus} g B. The clients need R p. The table counts a
core or a link as full at {busy:.0%}, with {master_gbit} Gbit/s for a master and {host_gbit} Gbit/s for a machine with
GPUs. The number of masters assumes that the queue of the model is spread over all masters. The queue of a model with
one partition is on one master."""

_LIMITS = """\
Two more limits depend on settings. A worker's shared memory of {segment_gib} GiB holds the rows of {shared_s:.0f} s. A
worker has {worker_connections} connections to one server and a client {client_connections}, so 1,000 of both have
{connections:,.0f}. On a cluster, a client has connections to each master whose partitions it uses. A Redis server
permits {max_connections:,} by default ([`maxclients`](../operations.md#sizing)).

The arithmetic does not contain connections to row servers. A row server accepts 512 clients, and a client keeps 128
connections, so with more clients or workers some rows need a new connection, or come through the masters."""


def _arithmetic(costs: Costs, spread: float) -> str:
    a = arithmetic
    parts = (
        "A pool of N GPUs with one worker and one client for each GPU uses these constants:",
        _CONSTANTS.format(
            request=show(costs.request_us),
            spread=show(spread),
            kib=1024 * costs.byte_us,
            worker=show(costs.worker_us),
            client=show(costs.client_us),
            client_request=show(costs.client_request_us),
            gpu_rows=a.GPU_ROWS,
            row_bytes=a.ROW_BYTES,
        ),
        _FORMULAS.format(
            small_bytes=a.SMALL_BYTES,
            host_gpus=a.HOST_GPUS,
            busy=a.BUSY,
            master_gbit=a.MASTER_GBIT,
            host_gbit=a.HOST_GBIT,
        ),
        _LIMITS.format(
            segment_gib=a.SEGMENT_BYTES >> 30,
            shared_s=a.shared_memory_s(),
            worker_connections=show(costs.worker_connections),
            client_connections=show(costs.client_connections),
            connections=1000 * (costs.worker_connections + costs.client_connections),
            max_connections=a.MAX_CONNECTIONS,
        ),
        "\n".join(a.table(costs)),
    )
    return "\n\n".join(parts)
