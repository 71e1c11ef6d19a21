"""Command line of the chaos run: runs it and prints the report; exits with 1 if a limit of the outcome is exceeded."""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import redis

from lmpool.embedded import EmbeddedServer
from lmpool.protocol.keys import Keys
from lmpool.rows import shared_memory
from tests.faults.chaos.fleet import Fleet
from tests.faults.chaos.leaks import leaked_keys, leaked_processes, settle
from tests.faults.chaos.observer import Observer
from tests.faults.chaos.plan import Strike, draw_plan
from tests.faults.chaos.report import Report
from tests.faults.chaos.settings import MODEL, ChaosSettings
from tests.faults.chaos.striker import Striker
from tests.faults.chaos.tally import count, count_computed, read_requests, recoveries
from tests.support.servers.proxy import Proxy

T = TypeVar("T")
F = TypeVar("F", bound=Fleet)

_PREFIX = "chaos"
_MEMORY = 1 << 29
_SETTLED_S = 60.0
_PATIENCE_S = 10.0
"""The key of a waiting client may live for this many seconds after the request's deadline."""


async def run(
    settings: ChaosSettings,
    plan: list[Strike],
    folder: Path,
    hosts: tuple[Path, Path],
    kind: Callable[..., F],
) -> tuple[Report, F]:
    """Do one chaos run, from the start of its server to the end of its last process. `kind` makes the fleet."""
    # fsync once a second (Redis's default) is enough: the kernel keeps the writes of a killed server.
    server = EmbeddedServer(_MEMORY, folder / "s", appendonly=True)
    await asyncio.to_thread(server.start)
    try:
        async with (
            Proxy(folder / "s" / "redis.sock", folder / "p.sock", settings.seed) as proxy,
            Observer(server.url, _PREFIX, settings.partitions) as observer,
        ):
            fleet = kind(settings, folder, hosts, lambda number: proxy.url if number % 2 else server.url, _PREFIX)
            striker = Striker(fleet, proxy, server, observer, settings.seed)
            try:
                await asyncio.to_thread(fleet.start)
                await striker.run(plan, settings.seconds)
                await striker.end_clients()
                left = await asyncio.to_thread(_end, settings, fleet, server)
            finally:
                await asyncio.to_thread(fleet.kill)
    finally:
        await asyncio.to_thread(server.stop)
    requests = [request for number, log in enumerate(fleet.logs) for request in read_requests(log, number)]
    report = Report(
        settings,
        count(requests, settings.timeout_s + settings.grace_s),
        count_computed(fleet.traces),
        recoveries(striker.troubles, requests),
        observer.counted,
        striker.full_lanes,
        left,
        # Replacements of killed workers remove old segments at their start, so no segment may be left.
        [str(path) for path in fleet.segments],
        fleet.leaked + leaked_processes(folder),
        fleet.failed,
    )
    return report, fleet


def _end(settings: ChaosSettings, fleet: Fleet, server: EmbeddedServer) -> list[str]:
    """End the workers when no request is pending; return the leaked keys."""
    client = redis.Redis.from_url(server.url)
    try:
        keys = Keys(_PREFIX)
        partitions = [keys.model(MODEL, number) for number in range(settings.partitions)]
        settle(client, partitions, settings.workers, _SETTLED_S)
        fleet.end_workers()
        return leaked_keys(client, keys, partitions, settings.timeout_s + _PATIENCE_S, settings.lease_s)
    finally:
        client.close()


def in_folders(do: Callable[[Path, tuple[Path, Path]], T], *, keep: bool) -> T:
    """Call a function with a folder for logs, and with a folder in shared memory for each of two hosts."""
    folder = Path(tempfile.mkdtemp(prefix="lmp"))
    try:
        with tempfile.TemporaryDirectory(prefix="lmp", dir=shared_memory.folder().parent) as memory:
            hosts = Path(memory, "0"), Path(memory, "1")
            for host in hosts:
                host.mkdir()
            return do(folder, hosts)
    finally:
        if keep:
            print(f"logs and traces are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def untimed(settings: ChaosSettings) -> ChaosSettings:
    """Settings of a run that promises nothing about times, because other programs use the machine too."""
    return replace(settings, timeout_s=120.0, grace_s=60.0, most_leases=math.inf, most_twice=math.inf)


def main() -> int:
    """Do the chaos run that the command line describes, and print its report."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=180, help="for how long clients ask (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="decides the schedule (default: a new one)")
    parser.add_argument("--partitions", type=int, default=2, help="partitions of the queue (default: %(default)s)")
    parser.add_argument("--untimed", action="store_true", help="promise nothing of times: others use the machine too")
    parser.add_argument("--keep", action="store_true", help="keep the folder of logs and traces and say where it is")
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    settings = ChaosSettings(seconds=given.seconds, seed=seed, partitions=given.partitions)
    if given.untimed:
        settings = untimed(settings)
    plan = draw_plan(seed, given.seconds)
    print(
        f"chaos for {given.seconds:g} s with seed {seed}: {settings.workers} workers in {settings.partitions} "
        f"partitions, {settings.clients} clients, V = {settings.vocab_size}, a lease of {settings.lease_s:g} s, "
        f"deadlines of {settings.timeout_s:g} s"
    )
    print(*plan, sep="\n", flush=True)
    report, _ = in_folders(
        lambda folder, hosts: asyncio.run(run(settings, plan, folder, hosts, Fleet)), keep=given.keep
    )
    print(report)
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
