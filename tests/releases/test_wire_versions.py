"""Workers and clients work with a worker of the next release, and refuse a worker of a much later release."""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack
import pytest
from redis.asyncio import Redis

from lmpool.broker.server import Server
from lmpool.errors import LMPoolError, ModelMismatch, ProtocolError
from lmpool.producer.client.discovery import Discovery
from lmpool.protocol.job import WIRE_VERSION, Job
from lmpool.protocol.keys import Keys
from lmpool.protocol.model_info import ModelInfo
from tests.faults.test_worker_faults import beat, info_of, joined
from tests.support.pool import Pool, deadline_ms, until_async


def of_version(info: ModelInfo, version: int) -> tuple[bytes, dict[Any, Any]]:
    """The info and the heartbeat of a worker of a later release: with another wire version, and more fields."""
    packed = msgpack.packb({**msgpack.unpackb(info.pack()), "wire_version": version, "of a later release": 1})
    heartbeat = {"model": info.name, "fingerprint": f"{version}-{info.fingerprint}", "state": "ready", "later": 1}
    return packed, heartbeat


async def register(redis: Redis, keys: Keys, name: str, info: ModelInfo, version: int) -> bytes:
    """Register a worker of a later release; returns its info."""
    packed, heartbeat = of_version(info, version)
    await redis.hset(keys.worker(name), mapping=heartbeat)
    await redis.zadd(keys.model("syn").workers, {name: deadline_ms()})
    await redis.hset(keys.models(), "syn", packed)
    return packed


async def test_workers_of_the_next_release_serve_together(pool: Pool) -> None:
    redis, keys, info = Server(pool.url).client(), pool.keys, info_of(1)
    try:
        theirs = await register(redis, keys, "newer", info, WIRE_VERSION + 1)
        ours = await joined(redis, keys, info, "ours")
        # A running worker keeps the info of a newer one, and does not remove it while the newer worker serves.
        await redis.hset(keys.models(), "syn", theirs)
        await beat(ours)
        await ours.leave()
        assert await redis.hget(keys.models(), "syn") == theirs
        assert (await Discovery(redis, keys).info("syn")) == info
        other = info_of(2)
        with pytest.raises(ModelMismatch, match="served by newer with another fingerprint"):
            await joined(redis, keys, other, "other")
    finally:
        await redis.aclose()


async def test_a_worker_does_not_join_workers_that_are_two_wire_versions_ahead(pool: Pool) -> None:
    redis, keys, info = Server(pool.url).client(), pool.keys, info_of(1)
    try:
        theirs = await register(redis, keys, "newest", info, WIRE_VERSION + 2)
        text = f"served by newest .*wire version {WIRE_VERSION + 2}, and this release of lmpool speaks {WIRE_VERSION}"
        with pytest.raises(ModelMismatch, match=text):
            await joined(redis, keys, info, "ours")
        with pytest.raises(ProtocolError, match=f"wire version {WIRE_VERSION + 2}, and .*speaks {WIRE_VERSION}"):
            await Discovery(redis, keys).info("syn")
        assert await redis.hget(keys.models(), "syn") == theirs
    finally:
        await redis.aclose()


async def test_a_job_of_an_unknown_wire_version_becomes_a_dead_letter_with_both_versions(pool: Pool) -> None:
    pool.start("--lease-s", 0.5)
    version, keys = WIRE_VERSION + 2, pool.keys.model("syn")
    job = Job(b"\7\0\0\0", "", "f").pack()
    pool.redis.xadd(keys.jobs, {"m": job[:1] + bytes([version]) + job[2:]})
    ((_, letter),) = await until_async(lambda: asyncio.to_thread(pool.redis.xrange, keys.dead), "the job is dead")
    assert f"wire version {version}, and this release of lmpool speaks {WIRE_VERSION}" in letter[b"e"].decode("latin-1")
    assert pool.redis.xlen(keys.jobs) == 0, "no worker gets the job again"
    async with pool.producer("syn") as producer:
        assert (await producer.logprobs([1])).size


async def test_a_connected_client_ends_with_both_versions_when_much_later_workers_take_over(pool: Pool) -> None:
    worker = pool.start("--lease-s", 0.5)
    async with pool.producer("syn", timeout=4) as producer:
        assert (await producer.logprobs([1])).size
        worker.end()
        theirs, _ = of_version(producer.model, WIRE_VERSION + 2)
        pool.redis.hset(pool.keys.models(), "syn", theirs)
        with pytest.raises(LMPoolError, match=f"wire version {WIRE_VERSION + 2}, and .*speaks {WIRE_VERSION}"):
            await producer.logprobs([2])
