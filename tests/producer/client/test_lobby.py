"""The lobby: what a pool serves, even when one of its cards is none."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import fakeredis.aioredis
import pytest
import redis.asyncio as redis_async

from lmpool.errors import AmbiguousModel, ProtocolError, UnknownModel
from lmpool.producer.client.discovery import Lobby
from lmpool.protocol.keys import Keys
from lmpool.protocol.model_info import ModelCard

KEYS = Keys("test")
NO_CARDS = [b"", b"\xc1", b"\x80", b"x" * 70_000]


def card(name: str) -> ModelCard:
    return ModelCard(name, "synthetic", 64, 32, "seed-0", "float32")


@pytest.fixture
async def redis() -> AsyncIterator[redis_async.Redis]:
    client: redis_async.Redis = fakeredis.aioredis.FakeRedis()
    yield client
    await client.aclose()


async def serve(redis: redis_async.Redis, cards: dict[str | bytes, bytes]) -> Lobby:
    await redis.hset(KEYS.models(), mapping=cards)  # type: ignore[arg-type]
    return Lobby(redis, KEYS)


@pytest.mark.parametrize("bad", NO_CARDS, ids=["empty", "no MessagePack", "no fields", "too large"])
async def test_a_card_that_cannot_be_read_leaves_the_others_usable(
    redis: redis_async.Redis, bad: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    lobby = await serve(redis, {"a": card("a").pack(), "broken": bad, "z": card("z").pack()})
    with caplog.at_level(logging.WARNING, "lmpool.producer"):
        assert await lobby.cards() == {"a": card("a"), "z": card("z")}
    assert "'broken'" in caplog.text
    assert await lobby.card("z") == card("z")
    with pytest.raises(UnknownModel, match="served are: a, z"):
        await lobby.card("m")
    with pytest.raises(AmbiguousModel, match="a, z"):
        await lobby.card(None)


async def test_the_model_of_a_card_that_cannot_be_read_is_named(redis: redis_async.Redis) -> None:
    lobby = await serve(redis, {"a": card("a").pack(), "broken": b"\xc1"})
    with pytest.raises(ProtocolError, match="'broken'"):
        await lobby.card("broken")


async def test_the_only_card_that_can_be_read_is_the_only_one(redis: redis_async.Redis) -> None:
    lobby = await serve(redis, {"a": card("a").pack(), "broken": b"\xc1"})
    assert await lobby.card(None) == card("a")


async def test_a_pool_without_any_readable_card_is_not_said_to_be_empty(redis: redis_async.Redis) -> None:
    lobby = await serve(redis, {"broken": b"\xc1"})
    assert await lobby.cards() == {}
    with pytest.raises(ProtocolError, match="'broken'"):
        await lobby.card(None)


async def test_a_name_that_is_no_utf8_does_no_harm(redis: redis_async.Redis) -> None:
    lobby = await serve(redis, {"a": card("a").pack(), b"\xff": b"\xc1"})
    assert await lobby.card(None) == card("a")


async def test_an_empty_pool_says_how_to_serve_a_model(redis: redis_async.Redis) -> None:
    lobby = Lobby(redis, KEYS)
    for name in ("m", None):
        with pytest.raises(UnknownModel, match="lmpool worker"):
            await lobby.card(name)
