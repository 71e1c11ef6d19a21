"""Entries of rows that are in the cache, read there: only they travel."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from lmpool import scripts
from lmpool.errors import CorruptRow, ProtocolError
from lmpool.producer.channel import TROUBLE, Channel
from lmpool.producer.tasks import Tasks
from lmpool.rowcache import Row
from lmpool.rows import decode_entries


class Wanted(NamedTuple):
    """Entries of one prompt's row.

    Attributes:
        digest: the prompt.
        numbers: which entries, as `entries.lua` takes them.
        size: how many.
    """

    digest: bytes
    numbers: bytes
    size: int


Found = Row | CorruptRow | None
"""float32 of shape (size,); None when the row is not in the cache (an error is a value here)."""


class EntryReader:
    """Reads entries for one session; all that are asked for in one tick of the event loop are read together.

    Args:
        channel: the connections.
        tasks: where background work runs.
    """

    def __init__(self, channel: Channel, tasks: Tasks) -> None:
        self._channel = channel
        self._tasks = tasks
        self._asked: list[tuple[Wanted, asyncio.Future[Found]]] = []

    async def read(self, wanted: Wanted) -> Found:
        """The entries of one row. A server that cannot be used has no rows: who asks then will hear of it."""
        if not self._asked:
            self._tasks.loop.call_soon(self._flush)
        future: asyncio.Future[Found] = self._tasks.loop.create_future()
        self._asked.append((wanted, future))
        return await future

    async def read_all(self, wanted: Sequence[Wanted]) -> list[Found]:
        """As `read`, for several rows."""
        found: list[Found] = []
        for at in range(0, len(wanted), scripts.MOST_AT_ONCE):
            found += await self._read_part(wanted[at : at + scripts.MOST_AT_ONCE])
        return found

    def _flush(self) -> None:
        asked, self._asked = self._asked, []
        for at in range(0, len(asked), scripts.MOST_AT_ONCE):
            self._tasks.spawn(self._answer(asked[at : at + scripts.MOST_AT_ONCE]))

    async def _answer(self, asked: list[tuple[Wanted, asyncio.Future[Found]]]) -> None:
        asked = [one for one in asked if not one[1].done()]
        found: list[Found] = [None] * len(asked)
        try:
            found = await self._read_part([wanted for wanted, _ in asked])
        finally:  # The session may end meanwhile.
            for (_, future), entries in zip(asked, found, strict=True):
                if not future.done():
                    future.set_result(entries)

    async def _read_part(self, wanted: Sequence[Wanted]) -> list[Found]:
        channel = self._channel
        keys = [channel.row_prefix + one.digest for one in wanted]
        try:
            replies = await scripts.ENTRIES.on(channel.line.call, keys, [one.numbers for one in wanted])
        except TROUBLE as error:
            channel.note(error)
            return [None] * len(wanted)
        vocab_size = channel.card.vocab_size
        return [_read(data, one, vocab_size) for data, one in zip(replies, wanted, strict=True)]


def _read(data: bytes | None, wanted: Wanted, vocab_size: int) -> Found:
    if data is None:
        return None
    try:
        return decode_entries(data, vocab_size, wanted.size)
    except ProtocolError as error:
        return CorruptRow(f"the cached row of prompt {wanted.digest.hex()} is damaged: {error}")
