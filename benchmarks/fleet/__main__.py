"""`python -m benchmarks fleet`: what workers and clients cost the server, for growing numbers of both.

Real workers with the synthetic backend, and real producers, run in few processes on a real server. For each fleet the
program prints what the server does without requests and with requests.
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import NoReturn

from benchmarks.fleet import page
from benchmarks.fleet.measure import Fleet, Plan, measure
from benchmarks.fleet.servers import open_server
from benchmarks.harness.processes import BenchmarkError
from benchmarks.harness.report import describe_run, read_notes
from lmpool.workers.settings import WorkerSettings

# Workers and clients of each row of the table.
_FLEETS = ((1, 1), (4, 4), (10, 10), (100, 10), (100, 100), (300, 10), (300, 100))
_SATURATED = ((1, 1), (4, 4), (16, 16), (64, 16))  # The same for as many requests as possible.
_LARGE_V, _OF_LARGE = (49_152, 128_256), (4, 4)  # Vocabulary sizes of large rows in bf16; workers and clients.
_ON_MASTERS = (16, 16)  # Workers and clients on one master and on three masters.
_SATURATED_CHECK = 16  # With --saturate, the row of every 16th request is checked: checking would slow the clients.
_LARGE_IN_FLIGHT = 128  # Requests in flight with large rows, so that unread rows fit into the server's memory.


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
        encoding="f32",
        # Without shared memory, rows go through the server, as they do between machines.
        settings={"shm_bytes": 0, **dict(given.set)},
    )
    chosen = [(given.workers or 1, given.clients or 1)] if given.workers or given.clients else list(_FLEETS)
    try:
        if given.write is not None:
            fleets = _write(given.write, plan)
        else:
            fleets = _table(((plan, given.cluster, *numbers) for numbers in chosen), given.redis)
    except KeyboardInterrupt:
        return 130
    except BenchmarkError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    if given.commands:
        for fleet in fleets:
            print(*page.commands(fleet), sep="\n")
    return 1 if any(fleet.lost or fleet.wrong for fleet in fleets) else 0


def _table(todo: Iterable[tuple[Plan, int, int, int]], url: str | None = None) -> list[Fleet]:
    """Measure fleets, each on a new server: plan, masters of the cluster (0 for no cluster), workers and clients."""
    fleets = []
    print(*page.HEAD, sep="\n", flush=True)
    for plan, masters, workers, clients in todo:
        with open_server(url, masters) as testbed:
            fleet = measure(testbed, plan, workers, clients)
        fleets.append(fleet)
        print(page.row(fleet), flush=True)
        ready = f"ready after {fleet.workers_ready_s:.1f} s and {fleet.clients_ready_s:.1f} s"
        each = (
            f"{fleet.connections_per_worker:g} connections per worker and {fleet.connections_per_client:g} per client"
        )
        print(f"{workers:,} workers and {clients:,} clients: {ready}; {each}", file=sys.stderr, flush=True)
        for error, number in fleet.failed.most_common():
            print(f"{number:,} requests failed: {error}", file=sys.stderr, flush=True)
    for line in page.ratios(fleets):
        print(line)
    return fleets


def _write(path: Path, plan: Plan) -> list[Fleet]:
    """Measure all fleets of the page, and write the page."""
    with open_server(None, 0) as testbed:
        run = describe_run(testbed.url, {})
    fast = replace(plan, step_ms=0.0, in_flight=1024, check_every=_SATURATED_CHECK)
    large = [
        replace(fast, vocab_size=size, encoding="bf16", in_flight=_LARGE_IN_FLIGHT, check_every=1) for size in _LARGE_V
    ]
    on_masters = [(chosen, masters, *_ON_MASTERS) for chosen in (fast, large[0]) for masters in (1, 3)]
    at_rate = _table((plan, 0, *numbers) for numbers in _FLEETS)
    saturated = _table(
        [*((fast, 0, *numbers) for numbers in _SATURATED), *((chosen, 0, *_OF_LARGE) for chosen in large)]
    )
    spread = _table(on_masters)
    path.write_text(page.write(at_rate, saturated, spread, run, read_notes(path)))
    return [*at_rate, *saturated, *spread]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks fleet", description=__doc__)
    option = parser.add_argument
    option("--workers", type=int, help="number of workers (default: a table of several fleets)")
    option("--clients", type=int, help="number of clients")
    option("--rate", type=float, default=200.0, help="requests per second of all clients (default: 200)")
    option(
        "--seconds", type=float, default=15.0,
        help="length of each of three periods (default: 15, a multiple of the intervals of heartbeats and renewals)",
    )  # fmt: skip
    option("--vocab", type=int, default=512, help="V (default: 512)")
    option("--step-ms", type=float, default=5.0, help="simulated time of a step (default: 5)")
    option(
        "--prompts", choices=("mixed", "fresh", "growing"), default="mixed",
        help="fresh: all prompts differ; growing: each client extends its own prompt; mixed: half of each (default)",
    )  # fmt: skip
    option("--saturate", action="store_true", help="send requests as fast as possible, not at a rate")
    option("--in-flight", type=int, default=1024, help="requests in flight with --saturate (default: 1024)")
    option("--commands", action="store_true", help="also list the commands by name")
    option("--per-process", type=int, default=500, help="max workers or clients in one process (default: 500)")
    option(
        "--set", type=_setting, action="append", default=[], metavar="NAME=VALUE",
        help="a setting of the workers, such as lease_s=5; may be given several times (default: shm_bytes=0)",
    )  # fmt: skip
    option(
        "--cluster", type=int, nargs="?", const=3, default=0, metavar="MASTERS",
        help="start a cluster on this machine (of 3 masters unless given) instead of an embedded server",
    )  # fmt: skip
    option("--redis", metavar="URL", help="use a running server or cluster; other programs' commands are counted too")
    option("--write", type=Path, metavar="PAGE", help="measure everything that the page shows, and write the page")
    given = parser.parse_args(arguments)
    for name in ("workers", "clients", "rate", "seconds", "in_flight", "per_process"):
        if (value := getattr(given, name)) is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be more than 0")
    return given


def _setting(text: str) -> tuple[str, object]:
    """A setting of workers, from NAME=VALUE; the value is a number, true, false or a text."""
    name, mark, value = text.partition("=")
    known = [field.name for field in fields(WorkerSettings)]
    if not mark or name not in known:
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=VALUE, with a name of {', '.join(known)}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _exit(number: int, frame: object) -> NoReturn:
    """Exit with an exception on SIGTERM, so that the context managers end all processes."""
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
