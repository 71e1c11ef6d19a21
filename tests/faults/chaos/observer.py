"""Polls the server during a chaos run for the workers' lanes (job streams) and the counters in their heartbeats."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Self

import redis

from lmpool.aio import end_tasks
from lmpool.protocol.keys import GROUP, Keys
from tests.faults.chaos.settings import MODEL

_LOOK_S = 0.3
_REPLY_S = 2.0
_TICK_S = 0.02


class Counted(NamedTuple):
    """Sums of the counters of all workers of a run, up to their last observed heartbeats.

    Attributes:
        homed: jobs taken whose prompts extend prompts that the worker has computed.
        stolen: jobs taken from the lanes (job streams) of other workers.
        shared: rows written to shared memory.
    """

    homed: int = 0
    stolen: int = 0
    shared: int = 0


class FullLane(NamedTuple):
    """A worker's lane (job stream) with jobs that the worker has not read.

    Attributes:
        pid: process id of the lane's worker.
        waiting: number of jobs that the worker has not read.
    """

    pid: int
    waiting: int


class Observer:
    """Context manager that polls a server, which may be down at times.

    Args:
        url: URL of the server.
        prefix: prefix of all keys.
        partitions: number of partitions of the model's queue.
    """

    def __init__(self, url: str, prefix: str, partitions: int) -> None:
        self._keys = Keys(prefix)
        self._partitions = [self._keys.model(MODEL, number) for number in range(partitions)]
        self._redis = redis.Redis.from_url(url, socket_timeout=_REPLY_S)
        self._counted: dict[bytes, Counted] = {}

    async def __aenter__(self) -> Self:
        self._looking = asyncio.create_task(self._look_on(), name="observer")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await end_tasks([self._looking])
        self._redis.close()

    @property
    def counted(self) -> Counted:
        """Sums of the counters of all observed workers, including killed workers."""
        return Counted(*map(sum, zip(Counted(), *self._counted.values(), strict=True)))

    async def full_lanes(self, within_s: float) -> list[FullLane]:
        """List the lanes with waiting jobs, the longest first; if there are none, wait up to `within_s` seconds."""
        return await asyncio.to_thread(self._until_full, time.monotonic() + within_s)

    async def lose_lanes(self) -> None:
        """Delete the key with the lengths of the lanes: a server that is short of memory may evict this key."""
        await asyncio.to_thread(self._try, lambda: self._redis.delete(*(model.lanes for model in self._partitions)))

    async def _look_on(self) -> None:
        while True:
            await asyncio.to_thread(self._try, self._read_heartbeats)
            await asyncio.sleep(_LOOK_S)

    def _until_full(self, end: float) -> list[FullLane]:
        while not (lanes := self._try(self._read_lanes)) and time.monotonic() < end:
            time.sleep(_TICK_S)
        return lanes or []

    def _try(self, look: Callable[[], Any]) -> Any:
        """Call a function that reads from the server; return None while the server is down."""
        try:
            return look()
        except (redis.ConnectionError, redis.TimeoutError, redis.ResponseError):
            return None

    def _read_heartbeats(self) -> None:
        for key in self._redis.scan_iter(self._keys.worker("*"), 1000):
            homed, stolen, shared = self._redis.hmget(key, Counted._fields)
            if homed is not None and stolen is not None:
                self._counted[key] = Counted(int(homed), int(stolen), int(shared or 0))

    def _read_lanes(self) -> list[FullLane]:
        lanes = []
        for model in self._partitions:
            workers: Any = self._redis.zrevrange(model.lanes, 0, -1)
            for worker in filter(None, workers):
                lane = model.lane(worker)
                groups: Any = self._redis.xinfo_groups(lane) if self._redis.exists(lane) else []
                read = [group["last-delivered-id"] for group in groups if group["name"] == GROUP.encode()]
                entries: Any = self._redis.xrange(lane, b"(" + read[0]) if read else []
                # Entries without a message only wake the worker.
                if waiting := sum(b"m" in fields for _, fields in entries):
                    # A worker's id ends with its process id and random characters.
                    lanes.append(FullLane(int(worker.rsplit(b"-", 2)[1]), waiting))
        return sorted(lanes, key=lambda lane: -lane.waiting)
