"""`python -m benchmarks fleet`: what workers and clients cost the server, for growing numbers of both.

Real workers with the synthetic backend, and real producers, run in few processes on a real server. For each fleet the
program prints what the server does without requests and with requests.
"""

from __future__ import annotations

import argparse
import resource
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

from benchmarks.fleet.measure import Fleet, Plan, measure
from benchmarks.harness.pairs import show
from benchmarks.harness.processes import BenchmarkError
from benchmarks.harness.testbed import open_testbed

# Workers and clients of each row of the table.
_FLEETS = ((1, 1), (4, 4), (10, 10), (100, 10), (100, 100), (300, 10), (300, 100))
_MEMORY_BYTES = 2**30  # The server's memory limit.
_SATURATED_CHECK = 16  # With --saturate, the row of every 16th request is checked: checking would slow the clients.
_MIN_SHOWN = 0.005  # Commands with fewer calls per request or second are left out.


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure fleets and print the table; return 1 if a request was lost or a row was wrong."""
    given = _parse(arguments)
    signal.signal(signal.SIGTERM, _exit)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # The server and all processes inherit the limit.
    plan = Plan(
        rate=given.rate,
        seconds=given.seconds,
        vocab_size=given.vocab,
        step_ms=given.step_ms,
        prompts=given.prompts,
        in_flight=given.in_flight if given.saturate else 0,
        per_process=given.per_process,
        check_every=_SATURATED_CHECK if given.saturate else 1,
        shm_bytes=given.shm_mb << 20,
    )
    chosen = [(given.workers or 1, given.clients or 1)] if given.workers or given.clients else list(_FLEETS)
    fleets = []
    print(*_HEAD, sep="\n", flush=True)
    try:
        for workers, clients in chosen:
            with open_testbed(1, quick=False, memory_bytes=_MEMORY_BYTES) as testbed:
                fleet = measure(testbed, plan, workers, clients)
            fleets.append(fleet)
            print(_row(fleet), flush=True)
            for line in _errors(fleet):
                print(line, file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        return 130
    except BenchmarkError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    if given.commands:
        for fleet in fleets:
            print(*_commands(fleet), sep="\n")
    return 1 if any(fleet.lost or fleet.wrong for fleet in fleets) else 0


_COLUMNS = (
    "workers × clients",
    "rows/s",
    "server CPU µs per request",
    "without idle",
    "commands per request",
    "without idle",
    "median ms",
    "p99 ms",
    "commands/s of an idle worker",
    "of an idle client",
    "ready after s",
    "lost",
    "wrong",
)
_HEAD = (f"| {' | '.join(_COLUMNS)} |", f"|{'---|' * len(_COLUMNS)}")


def _row(fleet: Fleet) -> str:
    cells = (
        f"{fleet.workers:,} × {fleet.clients:,}",
        show(fleet.rate),
        show(fleet.processor_us(net=False)),
        show(fleet.processor_us(net=True)),
        show(sum(fleet.commands(net=False).values())),
        show(sum(fleet.commands(net=True).values())),
        show(fleet.latency_ms(50)),
        show(fleet.latency_ms(99)),
        show(sum(fleet.idle_worker.values())),
        show(sum(fleet.idle_client.values())),
        show(fleet.workers_ready_s),
        f"{fleet.lost:,}",
        f"{fleet.wrong:,}",
    )
    return f"| {' | '.join(cells)} |"


def _commands(fleet: Fleet) -> Iterator[str]:
    """The commands by name, most frequent first."""
    yield f"\n{fleet.workers:,} × {fleet.clients:,}"
    for title, calls in (
        ("per request", fleet.commands(net=False)),
        ("per request, without the idle fleet's", fleet.commands(net=True)),
        ("per second of an idle worker", fleet.idle_worker),
        ("per second of an idle client", fleet.idle_client),
    ):
        yield f"  {title}: {_listed(calls)}"


def _listed(calls: Mapping[str, float]) -> str:
    kept = sorted((item for item in calls.items() if abs(item[1]) >= _MIN_SHOWN), key=lambda item: -item[1])
    return ", ".join(f"{name} {calls:.2f}" for name, calls in kept) or "none"


def _errors(fleet: Fleet) -> Iterator[str]:
    for error, number in fleet.failed.most_common():
        yield f"{fleet.workers} × {fleet.clients}: {number:,} requests: {error}"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks fleet", description=__doc__)
    parser.add_argument("--workers", type=int, help="number of workers (default: a table of several fleets)")
    parser.add_argument("--clients", type=int, help="number of clients")
    parser.add_argument("--rate", type=float, default=200.0, help="requests per second of all clients (default: 200)")
    parser.add_argument("--seconds", type=float, default=15.0, help="length of each period (default: 15)")
    parser.add_argument("--vocab", type=int, default=512, help="V (default: 512)")
    parser.add_argument("--step-ms", type=float, default=5.0, help="simulated time of a step (default: 5)")
    parser.add_argument(
        "--prompts", choices=("mixed", "fresh", "growing"), default="mixed",
        help="fresh: all prompts differ; growing: each client extends its own prompt; mixed: half of each (default)",
    )  # fmt: skip
    parser.add_argument("--saturate", action="store_true", help="send requests as fast as possible, not at a rate")
    parser.add_argument(
        "--in-flight", type=int, default=1024, help="requests in flight of all clients with --saturate (default: 1024)"
    )
    parser.add_argument("--commands", action="store_true", help="also list the commands by name")
    parser.add_argument(
        "--per-process", type=int, default=500, help="max workers or clients in one process (default: 500)"
    )
    parser.add_argument("--shm-mb", type=int, default=0, help="megabytes of each worker's shared memory (default: 0)")
    return parser.parse_args(arguments)


def _exit(number: int, frame: object) -> NoReturn:
    """Exit with an exception on SIGTERM, so that the context managers end all processes."""
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
