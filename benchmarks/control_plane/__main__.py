"""The server's time for the control plane, without rows: `python -m benchmarks.control_plane [--write FILE]`.

The program prints three tables: the server's processor time per worker and client, and for the views of a pool, from
`INFO cpu`, and the time for which single scripts block the server, from `INFO commandstats`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import redis
from redis.asyncio import Redis

from benchmarks.control_plane.script_calls import REPEATS, measure_calls
from benchmarks.control_plane.views import TITLE, measure_views
from benchmarks.harness.report import NOTES_BEGIN, NOTES_END, describe_run, read_notes
from lmpool.broker import scripts
from lmpool.broker.connection import CommandConnection
from lmpool.broker.server import Server
from lmpool.embedded import EmbeddedServer
from lmpool.producer.client.discovery import Discovery
from lmpool.protocol.keys import GROUP, Keys
from lmpool.protocol.model_info import ModelInfo
from lmpool.workers.membership.heartbeat import Heartbeat
from lmpool.workers.metrics.counters import WorkerCounters
from lmpool.workers.queue.consumer import Consumer
from lmpool.workers.queue.jobs import JobReader
from lmpool.workers.queue.leases import Leases
from lmpool.workers.settings import WorkerSettings

_KEYS = Keys()
_INFO = ModelInfo("m", "synthetic", 512, 131_072, "seed-0", "float32")
_MODEL = _KEYS.model(_INFO.name)
_WORKERS, _QUICK_WORKERS = (1, 10, 100, 1000), (1, 4)  # Numbers of workers, in full and in quick runs.
_BATCH = 32  # Prompts per step of a worker.
_READS_PER_S = 0.1  # Blocking reads of the queue per second and idle worker.
_READERS = 50  # Reads that block at once: with one read, the server's timer (10 ticks/s) would dominate the time.
_COUNTERS: dict[str, str | int | float] = {f"counter_{i}": "12345.678" for i in range(18)}


def main() -> int:
    """Measure the tables (workers and clients, views, single scripts), print them, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.control_plane", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page to FILE")
    parser.add_argument("--quick", action="store_true", help="only small fleets, to check that everything runs")
    given = parser.parse_args()
    write, quick = given.write, given.quick
    if quick and write:
        parser.error("--write needs all measures; omit --quick")
    with tempfile.TemporaryDirectory(prefix="lp") as folder, EmbeddedServer(8 << 30, Path(folder) / "s") as server:
        run = describe_run(server.url, {})
        fleet = asyncio.run(_measure_fleets(server.url, _QUICK_WORKERS if quick else _WORKERS))
        views = asyncio.run(_measure_views(server.url, _QUICK_WORKERS if quick else _WORKERS))
        with redis.Redis.from_url(server.url) as client:
            calls = [] if quick else list(measure_calls(client))
    page = _page(fleet, views, calls, run, read_notes(write) if write else "")
    print(page)
    if write:
        write.write_text(page)
    return 0


async def _measure_fleets(url: str, counts: Sequence[int]) -> list[str]:
    rows = []
    for count in counts:
        client = Server(url).client()
        await client.flushall()
        connections = [CommandConnection(Server(url), _MODEL.jobs) for _ in range(_READERS)]
        try:
            rows.append(await _Fleet(client, connections, count).row())
        finally:
            for connection in connections:
                connection.close()
            await client.aclose()
    return rows


async def _measure_views(url: str, counts: Sequence[int]) -> list[str]:
    client = Server(url).client()
    await client.flushall()
    await client.aclose()
    return [await measure_views(url, count) for count in counts]


class _Fleet:
    """The commands that idle workers and producers of one model send to the server."""

    def __init__(self, client: Redis, connections: Sequence[CommandConnection], count: int) -> None:
        self._client, self._connections, self._count = client, connections, count
        counters = WorkerCounters()
        self._names = names = [f"host-{number}-{os.urandom(8).hex()}" for number in range(count)]
        readers = [JobReader(client, _MODEL, _INFO, name, counters) for name in names]
        self._workers = [
            (
                Heartbeat(client, _KEYS, _INFO, name, _BATCH),
                Consumer(reader, connections[0]),
                Leases(reader, 3),
            )
            for name, reader in zip(names, readers, strict=True)
        ]
        self._takers = [Consumer(readers[0], connection) for connection in connections]
        self._discovery = Discovery(client, _KEYS)
        self._settings = WorkerSettings(lease_s=_INFO.lease_s)

    async def row(self) -> str:
        """The row of the first table for this number of workers."""
        await self._workers[0][1].ensure_group()
        for heartbeat, _, _ in self._workers:
            await heartbeat.join(_COUNTERS)
        submit = await self._submit_us()
        self._held = [await self._hold(name) for name in self._names]
        poll = await self._server_s(self._poll, 2000)
        workers = await self._workers_second()
        producers = self._count * (poll + await self._server_s(self._read_replies, 4) / _READERS)
        cells = (
            f"{self._count:,}",
            f"{1000 * poll:.3f}",
            f"{submit:.1f}",
            f"{1e6 * workers / self._count:.0f}",
            f"{100 * workers:.2f}",
            f"{100 * (workers + producers):.1f}",
        )
        return f"| {' | '.join(cells)} |"

    async def _hold(self, worker: str) -> list[bytes]:
        """Make a worker hold two batches of jobs; return the stream entries of these jobs."""
        async with self._client.pipeline(transaction=False) as pipe:
            for _ in range(2 * _BATCH):
                pipe.xadd(_MODEL.jobs, {"m": b"x" * 512})
            await pipe.execute()
        reply: Any = await self._client.xreadgroup(GROUP, worker, {_MODEL.jobs: ">"}, count=2 * _BATCH)
        return [entry for entry, _ in reply[0][1]]

    async def _poll(self) -> None:
        """The commands that a waiting producer sends each second."""
        await self._discovery.info(_INFO.name)
        await self._discovery.alive(_INFO.name)

    async def _read_replies(self) -> None:
        command = (b"XREAD", b"COUNT", 1000, b"BLOCK", 1, b"STREAMS", _MODEL.reply("c"), b"0-0")
        await asyncio.gather(*(connection.call(*command) for connection in self._connections))

    async def _workers_second(self) -> float:
        """The server's processor time for the commands of all workers in one second, without prompts and rows."""
        beat = await self._server_s(self._heartbeats, 1) / self._settings.heartbeat_s
        claim = await self._server_s(self._claims, 1) * 3 / self._settings.lease_s
        take = await self._server_s(self._take, 4) / _READERS * _READS_PER_S
        return beat + claim + self._count * take

    async def _heartbeats(self) -> None:
        for heartbeat, _, _ in self._workers:
            await heartbeat.send(_COUNTERS, takes_turns=True)

    async def _claims(self) -> None:
        """Do the work of a third of a lease: all workers renew entries; one claims entries and removes dead workers."""
        for name, held in zip(self._names, self._held, strict=True):
            await scripts.RENEW(self._client, [_MODEL.jobs], [GROUP, name, *held])
        (heartbeat, _, leases), held = self._workers[0], self._held[0]
        _, _, further = await leases.claim(_BATCH, held)
        for _ in range(int(further)):  # No lease has expired, so the number is finite.
            await leases.claim(_BATCH, held)
        await heartbeat.sweep(is_complete=True)

    async def _take(self) -> None:
        await asyncio.gather(*(consumer.take(_BATCH, 1) for consumer in self._takers))

    async def _submit_us(self) -> float:
        """Microseconds of one call of `submit.lua` for one new prompt, with other prompts in the stream."""
        await self._client.xadd(_MODEL.jobs, {"m": b"x" * 512})
        samples = []
        for number in range(400):
            before = await self._spent_us()
            keys = [_MODEL.jobs, _MODEL.reply("c"), _MODEL.waiting + number.to_bytes(16, "big")]
            await scripts.SUBMIT(self._client, keys, [100_000, 60_000, "", 0, 1, b"x" * 512])
            samples.append(await self._spent_us() - before)
            if number % 50 == 49:
                await self._client.xtrim(_MODEL.jobs, 1)
        await self._client.delete(_MODEL.backlog, _MODEL.backlog_jobs, _MODEL.virtual_time, _MODEL.sole_client)
        await self._client.xtrim(_MODEL.jobs, 0)
        return statistics.median(samples)

    async def _spent_us(self) -> float:
        stats: Any = await self._client.info("commandstats")
        return float(stats.get("cmdstat_evalsha", {"usec": 0})["usec"])

    async def _server_s(self, work: Callable[[], Awaitable[object]], times: int) -> float:
        """The server's processor time in seconds for one call of `work`."""
        await work()
        samples = []
        for _ in range(3):
            before = await self._cpu_s()
            for _ in range(times):
                await work()
            samples.append((await self._cpu_s() - before) / times)
        return statistics.median(samples)

    async def _cpu_s(self) -> float:
        info: Any = await self._client.info("cpu")
        return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


def _page(fleet: Sequence[str], views: Sequence[str], calls: Sequence[str], run: Mapping[str, str], notes: str) -> str:
    facts = "\n".join(f"- **{name}**: {fact}" for name, fact in run.items() if "peers" not in name)
    return f"""\
# The control plane

The server's processor time for the control plane, without rows, on the embedded server through a Unix socket. Written
by `python -m benchmarks.control_plane --write docs/benchmarks/control-plane.md`.

## By the number of workers

*Poll*: a waiting producer reads its model's info and counts the live workers, once per second. *Submit*: one call of
`submit.lua` for one new prompt, with other prompts in the stream. *Worker, 1 s*: the commands that a worker sends in
one second while it computes and holds {2 * _BATCH} prompts, with a lease of {_INFO.lease_s:g} s. The commands are
heartbeats, renewals, claims, sweeps and reads, without prompts and rows. The last column adds one busy producer per
worker.

| workers | poll, ms | submit, µs | worker, 1 s, µs | all workers, % of a core | workers and producers, % of a core |
|---|---|---|---|---|---|
{chr(10).join(fleet)}

{TITLE}{chr(10).join(views)}

## The longest calls

A script blocks the server while it runs. Each call therefore does a bounded amount of work, and the next calls
continue. The table shows milliseconds in the server, of at least {REPEATS} calls, with more stored data than a pool
should ever have.

| call | median, ms | maximum, ms |
|---|---|---|
{chr(10).join(calls)}

## Environment

{facts}

## Notes

{NOTES_BEGIN}
{notes}
{NOTES_END}
"""


if __name__ == "__main__":
    sys.exit(main())
