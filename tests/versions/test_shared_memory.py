"""Rows in shared memory, and in the memory of a producer, are not taken for rows of another version."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
import pytest

from lmpool.errors import SettingsError
from lmpool.protocol.version import Version
from lmpool.synthetic import synthetic_row
from tests.support.pool import Pool, until_async
from tests.versions.traffic import weights

LARGE_V = 8192
"""Entries of a row that is large enough for shared memory."""
SHARED_BYTES = 2**24
"""Bytes of shared memory for each worker: 400 rows."""
PROMPTS = [[prompt] for prompt in range(16)]


async def test_old_rows_in_shared_memory_are_not_found_for_a_new_version(pool: Pool) -> None:
    for _ in range(3):
        pool.start("--vocab-size", LARGE_V, "--shm-bytes", SHARED_BYTES)
    async with pool.producer("syn", cache_bytes=0) as producer:
        session: Any = producer._sessions.session
        numbers = itertools.count(LARGE_V)

        async def shared() -> bytes | None:
            # Workers make a segment while they answer; rows from before it stay in Redis, so this asks a new prompt.
            prompt = list(divmod(next(numbers), LARGE_V))
            await producer.logprobs(prompt)
            digest = session.encode(prompt).digest
            return None if session._segments.find(digest, LARGE_V) is None else digest

        await until_async(shared, "a row is found in shared memory")
        for version in (1, 2, 3):
            await producer.publish_weights(weights(version))
            for prompt in PROMPTS:
                row, named = await producer.versioned(producer.logprobs, prompt)
                assert named == version
                assert np.array_equal(row, synthetic_row(prompt, vocab_size=LARGE_V, seed=version))
        digest = await until_async(shared, "a row of the new version is found in shared memory")
        # From the change on, before the next search for segments, no row of the old version is found.
        session._connections.adopt(session.info.of_version(Version(4, "0" * 16)))
        assert session._segments.find(digest, LARGE_V) is None


async def test_a_producer_for_one_version_stays_with_it(pool: Pool) -> None:
    pool.start()
    async with pool.producer("syn") as producer:
        await producer.publish_weights(weights(1))
        await producer.publish_weights(weights(2))
        pinned = producer.at(1)
        with pytest.raises(SettingsError, match="min_version: 2 is above 1, the version of this producer"):
            await producer.logprobs([1], version=1, min_version=2)
        assert await pinned.publish_weights(weights(3)) == 3
        assert pinned.model.version == 1
        for options in ({"version": 1}, {"min_version": 1}):
            with pytest.raises(SettingsError, match="give a method of this producer, without version="):
                await producer.versioned(producer.logprobs, [1], **options)
        with pytest.raises(SettingsError, match="give a method of this producer"):
            await producer.versioned(pinned.logprobs, [1])


def test_event_loops_with_different_versions_do_not_share_rows(pool: Pool) -> None:
    pool.start()
    producer = pool.producer("syn")

    async def ask() -> tuple[np.ndarray, int]:
        return await producer.versioned(producer.logprobs, [5])

    async def publish() -> None:
        async with pool.producer("syn") as other:
            await other.publish_weights(weights(4))

    first = asyncio.new_event_loop()
    try:
        row, version = first.run_until_complete(ask())
        assert (version, np.array_equal(row, synthetic_row([5], vocab_size=512))) == (0, True)
        asyncio.run(publish())
        # Another loop opens a session with the new version, while the session of the first loop still has the old one.
        row, version = asyncio.run(ask())
        assert (version, np.array_equal(row, synthetic_row([5], vocab_size=512, seed=4))) == (1, True)
        batch, version = first.run_until_complete(producer.versioned(producer.batch_logprobs, [[5]]))
        assert np.array_equal(batch[0], synthetic_row([5], vocab_size=512, seed=4 if version else 0))
        row, version = first.run_until_complete(ask())
        assert np.array_equal(row, synthetic_row([5], vocab_size=512, seed=4 if version else 0))
    finally:
        first.run_until_complete(producer.close())
        first.close()
