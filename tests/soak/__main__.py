"""Command line of the soak run: runs it and prints the outcome; exits with 1 after any violation."""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import redis

from lmpool.aio import end_tasks
from lmpool.embedded import EmbeddedServer
from lmpool.errors import ServerError
from lmpool.protocol.keys import Keys
from tests.faults.chaos.__main__ import in_folders
from tests.faults.chaos.leaks import leaked_keys, leaked_processes, settle
from tests.faults.chaos.observer import Counted, Observer
from tests.faults.chaos.settings import MODEL, ChaosSettings
from tests.soak.strikes import MEMORY_BYTES, SoakFleet, SoakStriker, draw_faults
from tests.soak.traffic import ALL_KINDS
from tests.soak.watch import Ceilings, Judge, Sample
from tests.support.servers.proxy import Proxy

_PREFIX = "soak"
_SAMPLE_S = 5.0
_MINUTE_S = 60.0
_SETTLED_S, _PATIENCE_S = 60.0, 10.0  # As in a chaos run.
_OF_MODELS = (
    "jobs|lanes|capacity|virtual_time|sole_client|moved|wanted|versions:state|turn|complete_turn|watcher|claim_cursor"
)
_OF_REQUESTS = "waiting|partition|reply|adapter_check|adapter_load"
_LEFT = re.compile(
    rf"{_PREFIX}:(row_token|(row|trie|tokens|weights):.*|{{{MODEL}({{1)?}}:({_OF_MODELS}|({_OF_REQUESTS}):.*))".encode(),
    re.S,
)
"""Keys that may be left for a time when clients and workers have ended; `leaked_keys` checks their lifetimes."""
_REPLY_S = 2.0  # Max seconds to wait for the server's reply to INFO.


class Run:
    """One soak run.

    Args:
        settings: settings of the run.
        folder: folder for sockets, logs and reports.
        hosts: folders of shared memory of two hosts.
        is_quiet: whether the run has no faults.
    """

    def __init__(self, settings: ChaosSettings, folder: Path, hosts: tuple[Path, Path], *, is_quiet: bool) -> None:
        self._settings = settings
        self._folder = folder
        self._hosts = hosts
        self._plan = [] if is_quiet else draw_faults(settings.seed, settings.seconds)
        self._server = EmbeddedServer(MEMORY_BYTES, folder / "s", appendonly=True)
        self._client = redis.Redis.from_url(self._server.url, socket_timeout=_REPLY_S)
        self._began = time.monotonic()

    async def run(self) -> bool:
        """Do the run, print its outcome, and return whether nothing went wrong."""
        settings, folder, server = self._settings, self._folder, self._server
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        await asyncio.to_thread(server.start)
        try:
            async with (
                Proxy(folder / "s" / "redis.sock", folder / "p.sock", settings.seed) as proxy,
                Observer(server.url, _PREFIX, settings.partitions) as observer,
            ):
                # The long-lived worker and client connect without the proxy.
                fleet = SoakFleet(
                    settings, folder, self._hosts, lambda number: proxy.url if number else server.url, _PREFIX
                )
                striker = SoakStriker(folder / "s", _PREFIX, fleet, proxy, server, observer, settings.seed)
                judge = Judge(settings, striker.windows)
                ceilings = Ceilings(judge)
                try:
                    await asyncio.to_thread(fleet.start)
                    self._began = time.monotonic()
                    watching = asyncio.create_task(self._watch(fleet, judge, ceilings))
                    striking = asyncio.create_task(striker.run(self._plan, settings.seconds))
                    # The first task to end is `striking`, unless `watching` fails.
                    done, _ = await asyncio.wait([watching, striking], return_when=asyncio.FIRST_COMPLETED)
                    done.pop().result()
                    ended = time.monotonic()
                    await end_tasks([watching])
                    fleet.stop_clients()
                    await asyncio.to_thread(fleet.end_clients)
                    judge.read(fleet.reports, is_end=True)
                    await asyncio.to_thread(self._check_end, fleet, judge)
                finally:
                    await asyncio.to_thread(fleet.kill)
        finally:
            self._client.close()
            await asyncio.to_thread(server.stop)
        self._check_leaks(fleet, judge)
        _print_table(judge, ceilings, observer.counted, ceilings.compare(self._began, ended), ended - self._began)
        return not judge.violations

    async def _watch(self, fleet: SoakFleet, judge: Judge, ceilings: Ceilings) -> None:
        """Read reports and measure processes, and print a line each minute."""
        minute, before = self._began, 0
        while True:
            await asyncio.sleep(min(_SAMPLE_S, self._settings.seconds / 40))
            judge.read(fleet.reports)
            try:
                pid = self._server.pid
            except (ServerError, KeyError):  # A fault: the server restarts.
                continue
            await asyncio.to_thread(ceilings.measure, fleet, pid, self._client)
            if (now := time.monotonic()) - minute >= _MINUTE_S:
                total = judge.ended.total()
                rate, minute, before = (total - before) / (now - minute), now, total
                self._print_minute(now, judge, ceilings, rate)

    def _print_minute(self, now: float, judge: Judge, ceilings: Ceilings, rate: float) -> None:
        keys, persistent = ceilings.keys[-1] if ceilings.keys else (0, 0)
        live = {name: taken[-1] for name, taken in ceilings.samples.items() if taken[-1].at > now - 2 * _SAMPLE_S}
        print(
            f"{(now - self._began) / 60:5.1f} min  {judge.ended.total():,} requests, {rate:,.0f}/s, "
            f"{judge.expired:,} expired, {len(judge.violations)} violations; {keys:,} keys, {persistent} without a "
            f"lifetime; " + ", ".join(f"{name}: {_shown(sample)}" for name, sample in live.items()),
            flush=True,
        )

    def _check_end(self, fleet: SoakFleet, judge: Judge) -> None:
        """When no request is pending, end the workers; report the keys that are left."""
        settings, keys = self._settings, Keys(_PREFIX)
        for name, process in fleet.names.items():
            if process in fleet.clients and (pending := judge.pending_of(name)):
                judge.violate({"event": "never ended", "client": name, "value": pending})
        partitions = [keys.model(MODEL, number) for number in range(settings.partitions)]
        settle(self._client, partitions, settings.workers, _SETTLED_S)
        fleet.end_workers()
        left = leaked_keys(self._client, keys, partitions, settings.timeout_s + _PATIENCE_S, settings.lease_s)
        left += [f"{key!r}: not a key that may be left" for key in self._client.scan_iter() if not _LEFT.fullmatch(key)]
        for text in left:
            judge.violate({"event": "leaked", "what": text})

    def _check_leaks(self, fleet: SoakFleet, judge: Judge) -> None:
        """Report failed processes, and processes and shared memory that are left."""
        for text in fleet.failed:
            judge.violate({"event": "failed", "what": text})
        for text in [*fleet.leaked, *leaked_processes(self._folder), *map(str, fleet.segments)]:
            judge.violate({"event": "leaked", "what": text})


def _shown(sample: Sample) -> str:
    return f"{sample.resident / 2**20:.0f} MiB, {sample.descriptors} fds"


def _print_table(
    judge: Judge, ceilings: Ceilings, counted: Counted, grown: list[tuple[str, Sample, Sample]], seconds: float
) -> None:
    ended, found = judge.ended, Counter(violation["event"] for violation in judge.violations)
    for kind in ALL_KINDS:
        if not ended[kind]:
            judge.violate({"event": "failed", "what": f"the run had no request of the kind {kind}"})
    faults = Counter(window.kind.value for window in judge.windows)
    rows = [
        ("requests", f"{ended.total():,} in {seconds:,.0f} s, {ended.total() / seconds:,.0f}/s"),
        *((f"  {kind}", f"{ended[kind]:,}") for kind in ALL_KINDS),
        ("expired", f"{judge.expired:,} of {ended['hurried']:,} with a short deadline"),
        ("jobs", f"{counted.homed:,} taken at home, {counted.stolen:,} stolen"),
        ("faults", f"{faults.total()}"),
        *((f"  {kind}", f"{count}") for kind, count in faults.most_common()),
        ("permitted", ", ".join(f"{count} {name}" for name, count in judge.permitted.items()) or "none"),
        ("max keys", f"{max((keys for keys, _ in ceilings.keys), default=0):,}"),
        *((name, f"{_shown(first)}, at the end {_shown(last)}") for name, first, last in grown),
        ("lost", f"{found['error'] + found['never ended']}"),
        *((name, f"{found[name]}") for name in ("wrong", "late", "leaked", "failed")),
    ]
    print(*(f"{name:<48} {value}" for name, value in rows), sep="\n")
    print(f"{len(judge.violations)} VIOLATIONS" if judge.violations else "nothing lost, wrong, late or leaked")


def main() -> int:
    """Do the soak run that the command line describes."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--hours", type=float, default=1.0, help="duration (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="decides faults and requests (default: a new one)")
    parser.add_argument("--workers", type=int, default=3, help="worker processes (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=2, help="client processes (default: %(default)s)")
    parser.add_argument("--quiet", action="store_true", help="no faults")
    parser.add_argument("--keep", action="store_true", help="keep the folder of logs and reports, and print its path")
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    settings = ChaosSettings(
        seconds=given.hours * 3600, seed=seed, workers=given.workers, clients=given.clients, partitions=2,
        vocab_size=64, step_ms=0.0, token_ms=0.0, slow_ms=0.0, max_batch=64, row_ttl_s=20.0, grace_s=2.0, tasks=12,
    )  # fmt: skip
    print(f"soak run of {given.hours:g} hours with seed {seed}", flush=True)
    is_good = in_folders(
        lambda *folders: asyncio.run(Run(settings, *folders, is_quiet=given.quiet).run()), keep=given.keep
    )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
