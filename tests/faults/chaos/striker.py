"""Applies the faults of a chaos run's schedule to workers, connections, the proxy and the server."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import redis

from lmpool.embedded import EmbeddedServer
from lmpool.rows.shared_memory import NAME
from tests.faults.chaos.fleet import SERVING, START_S, Fleet, Process
from tests.faults.chaos.observer import Observer
from tests.faults.chaos.plan import Kind, Strike
from tests.faults.chaos.tally import Trouble
from tests.support.servers.proxy import Proxy

_TICK_S = 0.05
_FULL_LANE_S = 2.0
"""Max seconds to wait for a full lane; clients send requests all the time, so a lane fills up soon."""
_STEALING_S = 6.0
"""Longer than the time between two pauses of all clients (`ChaosSettings.lulls_s`), in which workers become idle."""
_PIECE = 65_536


class Striker:
    """Applies the faults of a schedule to the processes of a run.

    Args:
        fleet: the processes of the run.
        proxy: proxy through which some of the processes connect.
        server: server of the pool.
        observer: polls the workers' lanes (job streams) and counters.
        seed: determines which connections are killed.

    Attributes:
        troubles: start and end of each fault so far.
        full_lanes: number of waiting jobs in each lane whose worker a fault hit because the lane was full.
    """

    def __init__(self, fleet: Fleet, proxy: Proxy, server: EmbeddedServer, observer: Observer, seed: int) -> None:
        self._fleet = fleet
        self._proxy = proxy
        self._server = server
        self._observer = observer
        self._draw = random.Random(seed)
        self._restarting = asyncio.Lock()
        self.troubles: list[Trouble] = []
        self.full_lanes: list[int] = []

    async def run(self, plan: Sequence[Strike], seconds: float) -> None:
        """Apply faults and replace killed workers for some seconds; then end the faults that still last."""
        began = time.monotonic()
        under_way: set[asyncio.Task[None]] = set()
        left = list(plan)
        while (now := time.monotonic() - began) < seconds:
            while left and left[0].at <= now:
                under_way.add(asyncio.create_task(self._strike(left.pop(0))))
            self._fleet.mend()
            for task in [task for task in under_way if task.done()]:
                under_way.remove(task)
                task.result()
            await asyncio.sleep(_TICK_S)
        await asyncio.gather(*under_way)
        self._fleet.thaw()
        self._proxy.heal()
        # Wait for the last replacements: some still load, and some found no server and must be started again.
        end = time.monotonic() + START_S
        while not self._fleet.is_whole and time.monotonic() < end:
            self._fleet.mend()
            await asyncio.sleep(_TICK_S)

    async def end_clients(self) -> None:
        """End the clients. Before, freeze workers until another worker has stolen a job, if none was stolen yet."""
        end = time.monotonic() + START_S
        while not self._observer.counted.stolen and time.monotonic() < end:
            await self._let_others_steal()
        self._fleet.stop_clients()
        await asyncio.to_thread(self._fleet.end_clients)

    async def _let_others_steal(self) -> None:
        """Freeze a worker with jobs in its lane for some seconds, so that idle workers steal these jobs."""
        lanes, ready = {lane.pid for lane in await self._observer.full_lanes(_FULL_LANE_S)}, self._ready()
        victims = [worker for worker in ready if worker.pid in lanes and len(ready) > 1]
        await self._freeze_all(victims[:1], _STEALING_S if victims else _TICK_S)

    async def _strike(self, strike: Strike) -> None:
        hit = time.monotonic()
        strikes = {
            Kind.KILL: self._kill,
            Kind.KILL_FULL: self._kill_full,
            Kind.DRAIN: self._drain,
            Kind.FREEZE: self._freeze,
            Kind.FREEZE_FULL: self._freeze_full,
            Kind.STALL: self._freeze_full,
            Kind.JUNK: self._spoil,
            Kind.UNLINK: self._spoil,
            Kind.LOSE_LANES: self._lose_lanes,
            Kind.KILL_CONNECTIONS: self._kill_connections,
            Kind.RESTART: self._restart,
            Kind.CRASH: self._restart,
            Kind.REFUSE: self._refuse,
            Kind.DELAY: self._delay,
        }
        if strike.kind in strikes:
            over = await strikes[strike.kind](strike)
        else:
            self._damage(strike)
            over = hit
        self.troubles.append(Trouble(hit, over))

    def _ready(self) -> list[Process]:
        """List the workers that are serving: not frozen, starting or ending."""
        return [
            worker
            for worker in self._fleet.workers
            if worker.code is None and not (worker.is_frozen or worker.is_draining) and worker.says(SERVING)
        ]

    def _victims(self, strike: Strike) -> list[Process]:
        """List workers for a fault to hit; at least one serving worker is left out."""
        ready = self._ready()
        count = min(len(ready) - 1, max(1, round(strike.share * len(ready) / 2)))
        start = strike.number % max(1, len(ready))
        return (ready[start:] + ready[:start])[: max(0, count)]

    async def _full_lane(self, strike: Strike) -> list[Process]:
        """Choose a worker with waiting jobs in its lane. If no lane has jobs, choose any worker for the fault."""
        lanes = {lane.pid: lane.waiting for lane in await self._observer.full_lanes(_FULL_LANE_S)}
        ready = self._ready()
        full = [worker for worker in ready if worker.pid in lanes]
        if not full or len(ready) < 2:
            return self._victims(strike)[:1]
        victim = full[strike.number % len(full)]
        self.full_lanes.append(lanes[victim.pid])
        return [victim]

    async def _kill(self, strike: Strike) -> float:
        self._kill_all(self._victims(strike))
        return time.monotonic()

    async def _kill_full(self, strike: Strike) -> float:
        self._kill_all(await self._full_lane(strike))
        return time.monotonic()

    def _kill_all(self, victims: Sequence[Process]) -> None:
        for worker in victims:
            worker.is_struck = True
            worker.signal(signal.SIGKILL)

    async def _drain(self, strike: Strike) -> float:
        for worker in await self._full_lane(strike):
            worker.is_draining = True
            worker.signal(signal.SIGTERM)
        return time.monotonic()

    async def _freeze(self, strike: Strike) -> float:
        return await self._freeze_all(self._victims(strike)[:1], strike.lasts)

    async def _freeze_full(self, strike: Strike) -> float:
        return await self._freeze_all(await self._full_lane(strike), strike.lasts)

    async def _freeze_all(self, victims: Sequence[Process], seconds: float) -> float:
        hit = time.monotonic()
        for worker in victims:
            worker.is_frozen = True
            worker.signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        for worker in victims:
            worker.signal(signal.SIGCONT)
            worker.is_frozen = False
        return hit

    async def _spoil(self, strike: Strike) -> float:
        """Try to overwrite and shrink the segments of shared memory, or remove the socket of one segment."""
        if strike.kind is Kind.JUNK:
            for worker in self._fleet.workers:
                await asyncio.to_thread(_write_junk, worker.pid, strike.share, self._draw)
        elif segments := self._fleet.segments:
            with suppress(FileNotFoundError):  # The segment's worker has just ended.
                segments[strike.number % len(segments)].unlink()
        return time.monotonic()

    async def _lose_lanes(self, strike: Strike) -> float:
        await self._observer.lose_lanes()
        return time.monotonic()

    async def _kill_connections(self, strike: Strike) -> float:
        await asyncio.to_thread(self._kill_some, strike.share)
        return time.monotonic()

    def _kill_some(self, share: float) -> None:
        client = redis.Redis.from_url(self._server.url)
        try:
            for connection in client.client_list():
                if self._draw.random() < share:
                    client.client_kill_filter(_id=connection["id"])
        except redis.ConnectionError:
            pass  # The server is down, so there is no connection to kill.
        finally:
            client.close()

    async def _restart(self, strike: Strike) -> float:
        async with self._restarting:  # Two faults must not restart the server concurrently.
            if strike.kind is Kind.CRASH:
                os.kill(self._server.pid, signal.SIGKILL)
            await asyncio.to_thread(self._server.stop)
            await asyncio.sleep(strike.lasts)
            await asyncio.to_thread(self._server.start)
        return time.monotonic()

    async def _refuse(self, strike: Strike) -> float:
        self._proxy.refuse()
        await asyncio.sleep(strike.lasts)
        self._proxy.heal()
        return time.monotonic()

    async def _delay(self, strike: Strike) -> float:
        self._proxy.delay(strike.way, 0.02 + 0.1 * strike.share)
        await asyncio.sleep(strike.lasts)
        self._proxy.heal()
        return time.monotonic()

    def _damage(self, strike: Strike) -> None:
        if strike.kind is Kind.CUT:
            self._proxy.cut(strike.share)
        elif strike.kind is Kind.SWALLOW:
            self._proxy.swallow(strike.way, strike.share)
        elif strike.kind is Kind.DROP:
            self._proxy.drop(strike.way, strike.share)
        else:
            self._proxy.truncate(strike.way, strike.share)


def _write_junk(pid: int, share: float, draw: random.Random) -> None:
    """Try to shrink and overwrite a worker's segments as the same user; if Linux allows it, rows become wrong."""
    with suppress(OSError):  # The worker has ended.
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if str(link.readlink()).startswith(f"/memfd:{NAME}"):
                with suppress(PermissionError), link.open("r+b", buffering=0) as memory:
                    with suppress(PermissionError):
                        memory.truncate(_PIECE)
                    for at in range(0, link.stat().st_size, _PIECE):
                        if draw.random() < share:
                            os.pwrite(memory.fileno(), os.urandom(_PIECE), at)
