"""When a session closes, all calls that wait for it end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lmpool.errors import ProducerClosed
from lmpool.producer.client.receive import EntryReader
from lmpool.producer.client.requests import Tasks
from lmpool.rows.shared_memory import SegmentReader
from tests.support.pool import Pool


async def test_reads_of_entries_end_if_the_session_closes_before_they_begin() -> None:
    connections: Any = Tasks()
    read = EntryReader(connections).read(b"d", [1], connections.loop.time() + 60)
    await asyncio.sleep(0)  # In this tick the reader creates its task, and the task has not begun.
    await connections.end_tasks()
    assert read.done()
    assert read.result() is None


async def test_a_batch_ends_if_the_producer_closes_while_the_batch_reads_shared_memory(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.start()
    producer = pool.producer()
    await producer.warm([1])
    session: Any = producer._sessions.session

    # The first lookup closes the session. The batch yields several times, so the session ends before the last lookup.
    def find(*_: object) -> None:
        monkeypatch.setattr(SegmentReader, "find", lambda *_: None)
        session.close_soon()

    monkeypatch.setattr(SegmentReader, "has_any", True)
    monkeypatch.setattr(SegmentReader, "find", find)
    with pytest.raises(ProducerClosed):
        await producer.batch_logprobs([[1, at] for at in range(200)], timeout=5)
    await producer.close()
