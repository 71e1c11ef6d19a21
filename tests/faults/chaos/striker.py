"""Strikes workers, connections, the proxy and the server as the schedule says."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Sequence

import redis

from lmpool.embedded import EmbeddedServer
from tests.faults.chaos.fleet import START_S, Fleet, Process
from tests.faults.chaos.plan import Kind, Strike
from tests.faults.chaos.recovery import Trouble
from tests.support.servers.proxy import Proxy

_TICK_S = 0.05


class Striker:
    """Carries out a schedule.

    Args:
        fleet: the processes.
        proxy: what part of them connects through.
        server: their server.
        seed: decides which connections are killed.

    Attributes:
        troubles: when each strike hit and was over, so far.
    """

    def __init__(self, fleet: Fleet, proxy: Proxy, server: EmbeddedServer, seed: int) -> None:
        self._fleet = fleet
        self._proxy = proxy
        self._server = server
        self._draw = random.Random(seed)
        self._restarting = asyncio.Lock()
        self.troubles: list[Trouble] = []

    async def run(self, plan: Sequence[Strike], seconds: float) -> None:
        """Strike, and replace what was killed, for so many seconds; then let go of what still lasts."""
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
        # A replacement that found no server, or has not loaded yet, has done nothing wrong.
        end = time.monotonic() + START_S
        while not self._fleet.is_whole and time.monotonic() < end:
            self._fleet.mend()
            await asyncio.sleep(_TICK_S)

    async def _strike(self, strike: Strike) -> None:
        hit = time.monotonic()
        strikes = {
            Kind.KILL: self._kill,
            Kind.FREEZE: self._freeze,
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
        self.troubles.append(Trouble(hit, hit if strike.kind is Kind.FREEZE else over))

    def _victims(self, strike: Strike) -> list[Process]:
        """Workers that are neither frozen nor just starting, but never all: somebody has to serve."""
        ready = [
            worker
            for worker in self._fleet.workers
            if worker.code is None and not worker.is_frozen and worker.says("serving ")
        ]
        count = min(len(ready) - 1, max(1, round(strike.share * len(ready) / 2)))
        start = strike.number % max(1, len(ready))
        return (ready[start:] + ready[:start])[: max(0, count)]

    async def _kill(self, strike: Strike) -> float:
        for worker in self._victims(strike):
            worker.is_struck = True
            worker.signal(signal.SIGKILL)
        return time.monotonic()

    async def _freeze(self, strike: Strike) -> float:
        for worker in self._victims(strike)[:1]:
            worker.is_frozen = True
            worker.signal(signal.SIGSTOP)
            await asyncio.sleep(strike.lasts)
            worker.signal(signal.SIGCONT)
            worker.is_frozen = False
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
            pass  # The server is away just now: nobody is connected.
        finally:
            client.close()

    async def _restart(self, strike: Strike) -> float:
        async with self._restarting:  # Another strike may be at it.
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
