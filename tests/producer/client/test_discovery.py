"""Discovery finds the models that a pool serves, even if the info of one model cannot be read."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import fakeredis.aioredis
import pytest
import redis.asyncio as redis_async

from lmpool.errors import AmbiguousModel, ProtocolError, UnknownModel
from lmpool.producer.client.discovery import Discovery
from lmpool.protocol.keys import Keys
from lmpool.protocol.model_info import ModelInfo

KEYS = Keys("test")
NO_INFOS = [b"", b"\xc1", b"\x80", b"x" * 70_000]


def info(name: str) -> ModelInfo:
    return ModelInfo(name, "synthetic", 64, 32, "seed-0", "float32")


@pytest.fixture
async def redis() -> AsyncIterator[redis_async.Redis]:
    client: redis_async.Redis = fakeredis.aioredis.FakeRedis()
    yield client
    await client.aclose()


async def serve(redis: redis_async.Redis, infos: dict[str | bytes, bytes]) -> Discovery:
    await redis.hset(KEYS.models(), mapping=infos)  # type: ignore[arg-type]
    return Discovery(redis, KEYS)


@pytest.mark.parametrize("bad", NO_INFOS, ids=["empty", "no MessagePack", "no fields", "too large"])
async def test_an_unreadable_info_leaves_the_other_models_usable(
    redis: redis_async.Redis, bad: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    discovery = await serve(redis, {"a": info("a").pack(), "broken": bad, "z": info("z").pack()})
    with caplog.at_level(logging.WARNING, "lmpool.producer"):
        assert await discovery.infos() == {"a": info("a"), "z": info("z")}
    assert "'broken'" in caplog.text
    assert await discovery.info("z") == info("z")
    with pytest.raises(UnknownModel, match="served are: a, z"):
        await discovery.info("m")
    with pytest.raises(AmbiguousModel, match="a, z"):
        await discovery.info(None)


async def test_the_error_names_the_model_of_an_unreadable_info(redis: redis_async.Redis) -> None:
    discovery = await serve(redis, {"a": info("a").pack(), "broken": b"\xc1"})
    with pytest.raises(ProtocolError, match="'broken'"):
        await discovery.info("broken")


async def test_the_only_readable_info_is_the_only_model(redis: redis_async.Redis) -> None:
    discovery = await serve(redis, {"a": info("a").pack(), "broken": b"\xc1"})
    assert await discovery.info(None) == info("a")


async def test_a_pool_with_unreadable_infos_only_is_not_reported_as_empty(redis: redis_async.Redis) -> None:
    discovery = await serve(redis, {"broken": b"\xc1"})
    assert await discovery.infos() == {}
    with pytest.raises(ProtocolError, match="'broken'"):
        await discovery.info(None)


async def test_a_model_name_that_is_not_utf8_is_skipped(redis: redis_async.Redis) -> None:
    discovery = await serve(redis, {"a": info("a").pack(), b"\xff": b"\xc1"})
    assert await discovery.info(None) == info("a")


async def test_the_error_for_an_empty_pool_names_the_command_that_serves_a_model(redis: redis_async.Redis) -> None:
    discovery = Discovery(redis, KEYS)
    for name in ("m", None):
        with pytest.raises(UnknownModel, match="lmpool worker"):
            await discovery.info(name)
