"""Liveness: when a client concludes that no worker serves its model."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lmpool.broker.registries import VersionRegistry
from lmpool.broker.scripts import Alive
from lmpool.broker.server import Server
from lmpool.errors import NoWorker
from lmpool.producer.client.discovery import Discovery, Liveness
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.version import Version
from tests.support.pool import Pool, deadline_ms

INFO = replace(ModelInfo("syn", "synthetic", 64, 32, "seed-0", "float32"), lease_s=4.0)


class Empty:
    """Stand-in for `Connections` and `Discovery` of a pool without workers."""

    model = SimpleNamespace(info=INFO)

    async def alive(self, model: str) -> Alive:
        return Alive(0, 0, ())

    async def is_changing(self, info: ModelInfo) -> bool:
        return False

    async def check_writes(self, model: str) -> None:
        pass


async def checks(*times: float) -> list[NoWorker | None]:
    """Check at these loop times whether a pool without workers has live workers."""
    empty = cast(Any, Empty())
    liveness = Liveness(empty, empty)
    return [await liveness.check(time) for time in times]


async def test_workers_are_not_missing_before_a_lease_and_a_restart_have_passed() -> None:
    *before, last = await checks(100, 101, 103, 104.9, 105)
    assert before == [None] * 4
    assert "no live worker has served 'syn' for 5 s" in str(last)


async def test_a_worker_that_loads_a_later_version_is_not_missing(pool: Pool) -> None:
    info = replace(INFO, name="syn@2")
    keys = pool.keys.model("syn")
    async with Server(pool.url).client() as redis:
        discovery, registry = Discovery(redis, pool.keys), VersionRegistry(redis, keys)
        liveness = Liveness(cast(Any, SimpleNamespace(model=SimpleNamespace(info=info))), discovery)
        for number in (1, 2, 3):
            await registry.add(Version(number, 16 * "0", source="/weights"))
        for name, is_changing in (("syn@2", False), ("syn", False), ("syn@1", False), ("syn@3", True)):
            pool.redis.zadd(pool.keys.model(name).loading, {"w": deadline_ms()})
            assert await discovery.is_changing(info) == is_changing, name
        pool.redis.delete(pool.keys.model("syn@2").loading)
        assert [await liveness.check(time) for time in (100, 103, 106, 109)] == [None] * 4


@pytest.mark.parametrize("gap", [4.5, 600])
async def test_a_client_blocked_between_two_checks_starts_the_time_without_workers_again(gap: float) -> None:
    """While a client is blocked for more than a lease, a worker may join and leave without being seen."""
    assert await checks(100, 100 + gap, 100 + 2 * gap, 101 + 2 * gap) == [None] * 4
    *_, last = await checks(100, 100 + gap, 103 + gap, 105 + gap)
    assert "for 5 s" in str(last), "counted from the check after the gap"
