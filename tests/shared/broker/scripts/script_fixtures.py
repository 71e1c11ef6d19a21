"""Fixtures for tests of scripts: fakeredis, a real Redis server, and a variant of a script."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import fakeredis.aioredis
import pytest
import redis.asyncio as redis_async

from lmpool.broker import scripts
from lmpool.embedded import EmbeddedServer
from lmpool.protocol.keys import GROUP
from tests.shared.broker.scripts.script_calls import JOBS
from tests.support.pool import PATIENCE, spoken


@pytest.fixture(scope="module", name="server")
def script_server() -> Iterator[str]:
    """URL of a real server for the tests of one module."""
    with tempfile.TemporaryDirectory(prefix="lp") as folder, EmbeddedServer(64 * 2**20, Path(folder) / "s") as running:
        yield spoken(running.url)


@pytest.fixture(params=["fake", "real"], name="redis")
async def script_redis(request: pytest.FixtureRequest) -> AsyncIterator[redis_async.Redis]:
    """A client of fakeredis or of a real server, with an empty queue."""
    client: redis_async.Redis
    if request.param == "fake":
        client = fakeredis.aioredis.FakeRedis()
    else:
        client = redis_async.Redis.from_url(request.getfixturevalue("server"), **PATIENCE)
        await client.flushall()
    await client.xgroup_create(JOBS, GROUP, id="0", mkstream=True)
    yield client
    await client.aclose()


@pytest.fixture
def nobody_asks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a client that is alone fill only as much of the streams as each of several clients may fill."""
    source = scripts.SUBMIT.source.replace("SOLE_EXTRA = 1200 ", "SOLE_EXTRA = 0 ")
    assert source != scripts.SUBMIT.source
    monkeypatch.setattr(scripts.SUBMIT, "source", source)
    monkeypatch.setattr(scripts.SUBMIT, "sha", hashlib.sha1(source.encode()).hexdigest())
