"""Writes the keys of many workers without starting processes, by the same scripts as real workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from redis.asyncio import Redis

from lmpool.protocol.keys import GROUP, Keys
from lmpool.protocol.model_info import ModelInfo
from lmpool.workers.execution.contract import BackendStats
from lmpool.workers.membership.heartbeat import Heartbeat
from lmpool.workers.metrics.counters import WorkerCounters

INFO = ModelInfo("fleet", "synthetic", 512, 131_072, "seed-0", "float32", lease_s=600.0)
"""The model of the fleet; its lease is long, so that heartbeats which are written once stay fresh during a test."""
BATCH = 32


def heartbeat_fields(number: int) -> dict[str, str | int | float]:
    """The counters in the heartbeat of the worker `number`, which has computed rows for an hour."""
    counters, rows = WorkerCounters(), 40_000 + number
    for wait_s in (0.004, 0.008, 0.012, 0.03, 0.07):
        counters.job_s.observe(wait_s * (1 + number % 7 / 10), 20)
    counters.stepped(4.0, 100)
    stats = BackendStats(steps=rows // 8, rows=rows, tokens=64 * rows, reused=48 * rows)
    fields: dict[str, str | int | float] = {
        "state": "ready",
        "version": "0.1.0",
        "capacity": BATCH,
        "in_flight": 24 + number % 16,
        "failures": 0,
    }
    fields |= {"homed": rows // 2, "stolen": rows // 100, "claimed": 0, "shared": rows}
    fields |= {**counters.since_heartbeat(stats), "rows_per_s": 33.3, "adapters": "[]", **stats._asdict()}
    return fields


async def write_fleet(
    redis: Redis, keys: Keys, count: int, fields: Callable[[int], Mapping[str, str | int | float]] | None = None
) -> list[str]:
    """Register `count` workers of `INFO`; return their ids. `fields` changes the heartbeat of the worker with a number.

    A worker has no process, so its heartbeat expires after a lease.
    """
    model, names = (
        keys.model(INFO.name),
        [f"node-{number // 8:03}.example.org-{number:016x}" for number in range(count)],
    )
    if not await redis.exists(model.jobs):
        await redis.xgroup_create(model.jobs, GROUP, id="0", mkstream=True)
    for number, name in enumerate(names):
        changed = fields(number) if fields else {}
        if number % 8 == 0 and not await redis.exists(model.lane(name)):
            await redis.xgroup_create(model.lane(name), GROUP, id="0", mkstream=True)
            await redis.xadd(model.lane(name), {"m": bytes(500)})
        await Heartbeat(redis, keys, INFO, name, BATCH).join({**heartbeat_fields(number), **changed})
    return names
