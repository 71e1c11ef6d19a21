"""When a session closes, all calls that wait for it end."""

from __future__ import annotations

import asyncio
from typing import Any

from lmpool.producer.client.receive import EntryReader
from lmpool.producer.client.requests import Tasks


async def test_reads_of_entries_end_if_the_session_closes_before_they_begin() -> None:
    connections: Any = Tasks()
    read = EntryReader(connections).read(b"d", [1], connections.loop.time() + 60)
    await asyncio.sleep(0)  # In this tick the reader creates its task, and the task has not begun.
    await connections.end_tasks()
    assert read.done()
    assert read.result() is None
