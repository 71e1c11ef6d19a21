"""Sessions: prompts whose keys and values the engine holds ready, so that their next tokens cost these tokens.

Prefix caching alone reuses full blocks only, and looks each of them up again. A session is a request of the
engine that stays open when its row has been taken. It holds memory that nothing else can have, so sessions are
opened for prompts that have begun to grow only, are few, and are closed oldest first.

A prompt grows by a block of tokens at most: of what is longer, prefix caching finds so much that a session would
save little. Nor does it grow by more tokens than it had: many prompts begin with the same few.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple
from zlib import crc32

_ID_BYTES = 4
_RECENT = 100_000
_MAX_NEW = 64
"""Tokens by which a prompt grows at most where blocks are larger; each is a look-up."""


class Session(NamedTuple):
    """A request of the engine that stays open.

    Attributes:
        adapter: of its prompt.
        ids: the prompt that it has computed, as little-endian uint32 bytes.
        request: the engine's name of it.
    """

    adapter: str
    ids: bytes
    request: str


class Sessions:
    """The sessions of an engine, which of them wait for their next tokens, and which prompts were seen lately.

    Args:
        most: sessions that may wait at once.
        most_tokens: tokens that all sessions may hold together.
        block: tokens of a block of memory; a session holds whole blocks.
    """

    def __init__(self, most: int, most_tokens: int, block: int = 1) -> None:
        self._most = most
        self._most_tokens = most_tokens
        self._block = block
        # By the prompts' checksums: of two prompts that share one, the later has the place.
        self._idle: OrderedDict[int, Session] = OrderedDict()
        self._held: dict[str, int] = {}  # Request -> tokens, of those too that do not wait at the moment.
        self._tokens = 0
        # Checksums here too: that two prompts share one costs a session that nobody continues, no more.
        self._recent: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._idle)

    def take(self, adapter: str, ids: bytes) -> Session | None:
        """The session that a prompt continues, the longest one, if there is any.

        It waits no longer, and holds its memory until it is kept again or forgotten.
        """
        if not self._idle:
            return None
        for checksum in self._checksums_before(adapter, ids):
            session = self._idle.get(checksum)
            # Never another's: its keys and values would make a wrong row.
            if session is not None and session.adapter == adapter and ids.startswith(session.ids):
                return self._idle.pop(checksum)
        return None

    def forget(self, request: str) -> None:
        """A session is no more."""
        self._tokens -= self._held.pop(request, 0)

    def is_growing(self, adapter: str, ids: bytes) -> bool:
        """Whether a prompt is worth a session: it is some tokens longer than one that was seen lately."""
        if not self._most:
            return False
        recent, checksum = self._recent, _checksum(adapter, ids)
        is_growing = any(before in recent for before in self._checksums_before(adapter, ids))
        recent[checksum] = None
        recent.move_to_end(checksum)
        if len(recent) > _RECENT:
            recent.popitem(last=False)
        return is_growing

    def keep(self, adapter: str, ids: bytes, request: str) -> list[str]:
        """Have a session wait; returns the requests to close instead."""
        checksum, closed = _checksum(adapter, ids), []
        if (other := self._idle.pop(checksum, None)) is not None:
            closed.append(other.request)
            self.forget(other.request)
        self.forget(request)
        tokens = -(-len(ids) // _ID_BYTES // self._block) * self._block
        if tokens > self._most_tokens:
            return [*closed, request]  # All others would be closed, and then this one too.
        self._idle[checksum] = Session(adapter, ids, request)
        self._held[request] = tokens
        self._tokens += tokens
        while self._idle and (len(self._idle) > self._most or self._tokens > self._most_tokens):
            closed += self.close_oldest(1)
        return closed

    def close_adapter(self, adapter: str) -> list[str]:
        """Forget the sessions of an adapter that wait; returns their requests."""
        checksums = [checksum for checksum, session in self._idle.items() if session.adapter == adapter]
        closed = [self._idle.pop(checksum).request for checksum in checksums]
        for request in closed:
            self.forget(request)
        return closed

    def close_oldest(self, number: int) -> list[str]:
        """Forget the sessions that have waited longest; returns their requests."""
        closed = []
        for _ in range(min(number, len(self._idle))):
            _, session = self._idle.popitem(last=False)
            self.forget(session.request)
            closed.append(session.request)
        return closed

    def _checksums_before(self, adapter: str, ids: bytes) -> Iterator[int]:
        """The checksums of the prompts that a prompt may have grown from, the longest first."""
        length = len(ids) // _ID_BYTES
        shortest = max(length - min(self._block, _MAX_NEW), (length + 1) // 2, 1)
        if shortest >= length:
            return
        checksum = _checksum(adapter, ids[: shortest * _ID_BYTES])
        checksums = [checksum]
        # One goes on from the other: so all of them together cost little more than the prompt's own.
        for end in range((shortest + 1) * _ID_BYTES, len(ids), _ID_BYTES):
            checksum = _extended(checksum, ids[end - _ID_BYTES : end])
            checksums.append(checksum)
        yield from reversed(checksums)


def _checksum(adapter: str, ids: bytes) -> int:
    """A checksum of a prompt: above its CRC the length."""
    return len(ids) << 32 | crc32(ids, crc32(adapter.encode()))


def _extended(checksum: int, ids: bytes) -> int:
    """The checksum of a prompt that goes on with further ids."""
    return ((checksum >> 32) + len(ids)) << 32 | crc32(ids, checksum & 0xFFFFFFFF)
