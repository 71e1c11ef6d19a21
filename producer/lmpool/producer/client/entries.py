"""Entries of rows that are in the cache, read there: only they travel."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lmpool.errors import CorruptRow, ProtocolError
from lmpool.producer.client.connections import TROUBLE, Channel
from lmpool.producer.tasks import Tasks
from lmpool.protocol.row import decode_alike, decode_entries, entry_ranges
from lmpool.rows.cache import Row


class WantedEntries(NamedTuple):
    """Entries of one prompt's row.

    Attributes:
        digest: the prompt.
        ids: which entries.
    """

    digest: bytes
    ids: Sequence[int]


Found = Row | CorruptRow | None
"""float32 of shape (k,); None when the row is not in the cache (an error is a value here)."""


_AT_ONCE = 32
"""Rows that are read together: while the server looks at some, others are answered here."""

_MOST_ENTRIES = 2048
"""Entries that are read together."""


class EntryReader:
    """Reads entries for one session; what is asked for in one tick of the event loop is read together.

    Args:
        channel: the connections.
        tasks: where background work runs.
    """

    def __init__(self, channel: Channel, tasks: Tasks) -> None:
        self._channel = channel
        self._tasks = tasks
        self._asked: list[tuple[WantedEntries, asyncio.Future[Found]]] = []
        self._until = math.inf

    def read(self, wanted: WantedEntries, until: float) -> asyncio.Future[Found]:
        """The entries of one row.

        Args:
            wanted: which.
            until: loop time after which the answer is None. So it is when the server cannot be used: who asks for the
                row then is told what the matter is.
        """
        if not self._asked:
            self._tasks.loop.call_soon(self._flush)
        future: asyncio.Future[Found] = self._tasks.loop.create_future()
        self._asked.append((wanted, future))
        self._until = min(self._until, until)
        return future

    def _flush(self) -> None:
        asked, self._asked = self._asked, []
        until, self._until = self._until, math.inf
        for part in _parts(asked):
            self._tasks.spawn(self._answer(part, until))

    async def _answer(self, asked: list[tuple[WantedEntries, asyncio.Future[Found]]], until: float) -> None:
        found: list[Found] = [None] * len(asked)
        timer = self._tasks.loop.call_at(until, _settle, asked, found)
        try:
            found = await self._read([wanted for wanted, _ in asked])
        finally:  # The session may end meanwhile.
            timer.cancel()
            _settle(asked, found)

    async def _read(self, wanted: list[WantedEntries]) -> list[Found]:
        channel = self._channel
        # Only now: the model may have changed since they were asked for, and its rows' encoding with it.
        card = channel.model.card
        encoding = card.row_encoding
        ranges = [entry_ranges(one.ids, encoding) for one in wanted]
        try:
            replies = await channel.model.rows.entries([one.digest for one in wanted], encoding, ranges)
        except TROUBLE as error:
            channel.note(error)
            return [None] * len(wanted)
        sizes = {len(one.ids) for one in wanted}
        if len(sizes) == 1 and (found := decode_alike(replies, card.vocab_size, sizes.pop())) is not None:
            return list(found)
        pairs = zip(replies, wanted, strict=True)
        return [None if data is None else _decode(data, one, card.vocab_size) for data, one in pairs]


def _parts(
    asked: list[tuple[WantedEntries, asyncio.Future[Found]]],
) -> Iterator[list[tuple[WantedEntries, asyncio.Future[Found]]]]:
    """Requests in portions for one call of the script, which serves nobody else meanwhile."""
    begin = entries = 0
    for at, (wanted, _) in enumerate(asked):
        own = len(wanted.ids)
        if at > begin and (at - begin == _AT_ONCE or entries + own > _MOST_ENTRIES):
            yield asked[begin:at]
            begin = at
            entries = 0
        entries += own
    if begin < len(asked):
        yield asked[begin:]


def _settle(asked: list[tuple[WantedEntries, asyncio.Future[Found]]], found: list[Found]) -> None:
    for (_, future), entries in zip(asked, found, strict=True):
        if not future.done():  # Who asked may have been cancelled.
            future.set_result(entries)


def _decode(data: bytes, wanted: WantedEntries, vocab_size: int) -> Row | CorruptRow:
    try:
        return decode_entries(data, vocab_size, len(wanted.ids))
    except ProtocolError as error:
        return CorruptRow(f"the cached row of prompt {wanted.digest.hex()} is damaged: {error}")
