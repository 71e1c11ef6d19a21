"""A server without memory for the rows of all positions of a text: the client gets an error, and nothing hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lmpool.embedded import EmbeddedServer
from lmpool.errors import LMPoolError, ServerError
from lmpool.producer import Producer
from lmpool.producer.client.session import WhenFull
from lmpool.synthetic import synthetic_row
from tests.support.pool import Pool, until_done

SIZE = 8192
TEXT = list(range(400))
"""Token ids of a text whose rows take 13 MB: one result of 8 MB, and one of 5 MB."""
NO_MEMORY = "has no memory left and may evict no key: give it more"


@pytest.fixture
def full(own_server: EmbeddedServer, tmp_path: Path) -> Iterator[Pool]:
    """A pool on its own server; tests fill the server's memory."""
    pool = Pool(own_server.url, "full", tmp_path)
    pool.start("--vocab-size", SIZE, "--lease-s", 2)
    yield pool
    pool.end()


def leave_room(pool: Pool, policy: str, size: int) -> None:
    """Limit the server's memory to `size` bytes more than it uses now."""
    pool.redis.config_set("maxmemory-policy", policy)
    pool.redis.config_set("maxmemory", int(pool.redis.info("memory")["used_memory"]) + size)


def leave_no_room(pool: Pool, policy: str) -> None:
    """Limit the server's memory to 1 byte: buffers that shrink later cannot make room for a submission."""
    pool.redis.config_set("maxmemory-policy", policy)
    pool.redis.config_set("maxmemory", 1)


def give_memory(pool: Pool) -> None:
    """Raise the server's memory limit to 256 MiB, which is enough for all rows."""
    pool.redis.config_set("maxmemory", 1 << 28)


async def assert_answered(producer: Producer) -> None:
    """Request the rows of every position, and check the last row."""
    rows = np.asarray((await producer.positions(TEXT, full=True)).full)
    assert rows.shape == (len(TEXT), SIZE)
    assert np.array_equal(rows[-1], synthetic_row(TEXT, vocab_size=SIZE))


@pytest.mark.parametrize(
    ("policy", "timeout", "message"),
    [
        ("noeviction", 60, f"the server refused the row: it {NO_MEMORY}"),
        # The server may evict the client's waiting key, so the client may get no message about refused results.
        (
            "volatile-lru",
            15,
            rf"{NO_MEMORY}|evicts rows of \d\.\d+ MB",
        ),
    ],
)
async def test_an_answer_that_the_server_cannot_store_is_an_error(
    full: Pool, policy: str, timeout: float, message: str
) -> None:
    async with full.producer(cache_bytes=0) as producer:
        leave_room(full, policy, 6_000_000)
        with pytest.raises(LMPoolError, match=message):
            await producer.positions(TEXT, full=True, timeout=timeout)
        give_memory(full)
        await until_done(full)
        await assert_answered(producer)
    assert full.workers[0].is_running


@pytest.mark.parametrize(("policy", "when_full"), [("noeviction", "raise"), ("volatile-lru", "wait")])
async def test_requests_to_an_unreachable_server_wait_until_their_deadlines(
    full: Pool, policy: str, when_full: WhenFull
) -> None:
    async with full.producer(cache_bytes=0, when_full=when_full) as producer:
        leave_no_room(full, policy)
        asked = asyncio.ensure_future(assert_answered(producer))
        with pytest.raises(ServerError, match=f"no row within 8 s: .* {NO_MEMORY}"):
            await producer.positions(TEXT, 1, full=True, timeout=8)
        assert not asked.done()
        give_memory(full)
        await asked
