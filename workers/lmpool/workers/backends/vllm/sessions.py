"""Sessions: prompts whose keys and values stay in the engine, so that only their next tokens are computed.

Prefix caching alone reuses only full blocks, and looks up each of them again. A session is a request of the engine that
stays open after its row has been taken. No other request can use its memory, so sessions are opened only for prompts
that have begun to grow, their number is limited, and the oldest is closed first.

A prompt continues a session by one block of tokens at most: for a longer prompt, prefix caching finds nearly all. Nor
does a prompt continue one by more tokens than the session has: many prompts begin with the same few tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple
from zlib import crc32

_ID_BYTES = 4  # Bytes of a token id.
_RECENT = 100_000  # Prompts that are remembered, to recognise those that grow; about 10 MB.
_MAX_NEW = 64  # Max new tokens of a prompt that continues a session, even if blocks are larger: each is a look-up.


class KvSession(NamedTuple):
    """A request of the engine that stays open; `ids` is its computed prompt as little-endian uint32 bytes."""

    adapter: str
    ids: bytes
    request: str


class KvSessions:
    """The sessions of an engine, and the recent prompts.

    Args:
        most: sessions that may wait at once.
        most_tokens: tokens that all sessions may hold together.
        block: tokens per block of memory; a session holds whole blocks.
    """

    def __init__(self, most: int, most_tokens: int, block: int = 1) -> None:
        self._most = most
        self._most_tokens = most_tokens
        self._block = block
        # The sessions that wait, by the checksums of their prompts: of two equal checksums the later one stays.
        self._idle: OrderedDict[int, KvSession] = OrderedDict()
        self._held: dict[str, int] = {}  # Request -> tokens, also of sessions that are running.
        # Checksums too: if two prompts share one, a session is opened that no prompt continues.
        self._recent: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._idle)

    def take(self, adapter: str, ids: bytes) -> KvSession | None:
        """Remove and return the longest session that a prompt continues, if there is one.

        The session holds its memory until it is kept again or forgotten.
        """
        if not self._idle:
            return None
        for checksum in self._checksums_before(adapter, ids):
            session = self._idle.get(checksum)
            # Compare the ids too: another prompt's keys and values would make a wrong row.
            if session is not None and session.adapter == adapter and ids.startswith(session.ids):
                return self._idle.pop(checksum)
        return None

    def forget(self, request: str) -> None:
        """A session was closed."""
        self._held.pop(request, None)

    def is_growing(self, adapter: str, ids: bytes) -> bool:
        """Whether a prompt extends a recent one by a few tokens, which is worth a session. Records the prompt."""
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
        """Let a session wait; returns the requests to close in exchange."""
        checksum = _checksum(adapter, ids)
        closed = self._close([checksum] if checksum in self._idle else [])
        self.forget(request)
        tokens = -(-len(ids) // _ID_BYTES // self._block) * self._block
        if tokens > self._most_tokens:
            return [*closed, request]  # Otherwise all others would be closed, and then this one too.
        self._idle[checksum] = KvSession(adapter, ids, request)
        self._held[request] = tokens
        while self._idle and (len(self._idle) > self._most or sum(self._held.values()) > self._most_tokens):
            closed += self.close_oldest(1)
        return closed

    def close_adapter(self, adapter: str) -> list[str]:
        """Forget the waiting sessions of an adapter; returns their requests."""
        return self._close([checksum for checksum, session in self._idle.items() if session.adapter == adapter])

    def close_oldest(self, number: int) -> list[str]:
        """Forget the sessions that have waited longest; returns their requests."""
        return self._close(list(islice(self._idle, number)))

    def _close(self, checksums: Iterable[int]) -> list[str]:
        closed = [self._idle.pop(checksum).request for checksum in checksums]
        for request in closed:
            self.forget(request)
        return closed

    def _checksums_before(self, adapter: str, ids: bytes) -> Iterator[int]:
        """The checksums of the prompts that a prompt may extend, longest first."""
        length = len(ids) // _ID_BYTES
        shortest = max(length - min(self._block, _MAX_NEW), (length + 1) // 2, 1)
        if shortest >= length:
            return
        checksum = _checksum(adapter, ids[: shortest * _ID_BYTES])
        checksums = [checksum]
        # Each checksum continues the one before it, so all together cost little more than the prompt's own.
        for end in range((shortest + 1) * _ID_BYTES, len(ids), _ID_BYTES):
            checksum = ((checksum >> 32) + _ID_BYTES) << 32 | crc32(ids[end - _ID_BYTES : end], checksum & 0xFFFFFFFF)
            checksums.append(checksum)
        yield from reversed(checksums)


def _checksum(adapter: str, ids: bytes) -> int:
    """A checksum of a prompt: its length in bytes above its CRC."""
    return len(ids) << 32 | crc32(ids, crc32(adapter.encode()))
