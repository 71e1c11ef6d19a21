"""Sessions: prompts whose keys and values stay in vLLM's engine, so that only their next tokens are computed.

Prefix caching alone reuses only full blocks, and looks up each block again. A session is a request of the engine that
stays open after its row was computed. No other request can use a session's memory. So a session is opened only for a
prompt that has begun to grow, the number of sessions is limited, and the oldest session is closed first.

A prompt may extend a session by at most one block of tokens, because prefix caching finds nearly all tokens of a longer
prompt. An extension is at most as long as the session, because many unrelated prompts share their first few tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple
from zlib import crc32

_ID_BYTES = 4  # Bytes of a token id.
_RECENT = 100_000  # Max recent prompts remembered (about 10 MB), to recognise prompts that grow.
_MAX_NEW = 64  # Max new tokens of a prompt that extends a session, for any block size: each new token costs a look-up.


class KvSession(NamedTuple):
    """A request of the engine that stays open; `ids` holds the computed token ids as little-endian uint32 bytes."""

    adapter: str
    ids: bytes
    request: str


class KvSessions:
    """The sessions of an engine, and checksums of recent prompts. A session waits while no prompt uses it.

    Args:
        most: max number of waiting sessions.
        most_tokens: max tokens that all sessions hold together.
        block: tokens per block of memory; a session holds whole blocks.
    """

    def __init__(self, most: int, most_tokens: int, block: int = 1) -> None:
        self._most = most
        self._most_tokens = most_tokens
        self._block = block
        # Checksum of a prompt -> waiting session. A new session replaces a session with the same checksum.
        self._idle: OrderedDict[int, KvSession] = OrderedDict()
        self._held: dict[str, int] = {}  # Request of each session, waiting or in use -> tokens in the session.
        # Checksums of recent prompts. At worst, two prompts with one checksum open a session that no prompt extends.
        self._recent: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._idle)

    def take(self, adapter: str, ids: bytes) -> KvSession | None:
        """Remove and return the longest waiting session that a prompt extends; None if the prompt extends no session.

        The session's memory counts as used until the caller passes the session's request to `keep` or `forget`.
        """
        if not self._idle:
            return None
        for checksum in self._checksums_before(adapter, ids):
            session = self._idle.get(checksum)
            # Compare the ids too, because two prompts may share a checksum, and the row would be wrong.
            if session is not None and session.adapter == adapter and ids.startswith(session.ids):
                return self._idle.pop(checksum)
        return None

    def forget(self, request: str) -> None:
        """Record that a session was closed, so that its memory does not count as used."""
        self._held.pop(request, None)

    def is_growing(self, adapter: str, ids: bytes) -> bool:
        """Record a prompt; returns whether it extends a recent prompt by a few tokens, and so is worth a session."""
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
        """Add a waiting session; returns the requests of sessions that the caller must close to stay in the limits."""
        checksum = _checksum(adapter, ids)
        closed = self._close([checksum] if checksum in self._idle else [])
        self.forget(request)
        tokens = -(-len(ids) // _ID_BYTES // self._block) * self._block
        if tokens > self._most_tokens:
            return [*closed, request]  # Close this large session now: the loop below would close all others.
        self._idle[checksum] = KvSession(adapter, ids, request)
        self._held[request] = tokens
        while self._idle and (len(self._idle) > self._most or sum(self._held.values()) > self._most_tokens):
            closed += self.close_oldest(1)
        return closed

    def close_adapter(self, adapter: str) -> list[str]:
        """Remove the waiting sessions of an adapter; returns their requests, which the caller must close."""
        return self._close([checksum for checksum, session in self._idle.items() if session.adapter == adapter])

    def close_oldest(self, number: int) -> list[str]:
        """Remove the sessions that have waited longest; returns their requests, which the caller must close."""
        return self._close(list(islice(self._idle, number)))

    def _close(self, checksums: Iterable[int]) -> list[str]:
        closed = [self._idle.pop(checksum).request for checksum in checksums]
        for request in closed:
            self.forget(request)
        return closed

    def _checksums_before(self, adapter: str, ids: bytes) -> Iterator[int]:
        """The checksums of the prefixes of a prompt that a session may hold, longest prefix first."""
        length = len(ids) // _ID_BYTES
        shortest = max(length - min(self._block, _MAX_NEW), (length + 1) // 2, 1)
        if shortest >= length:
            return
        checksum = _checksum(adapter, ids[: shortest * _ID_BYTES])
        checksums = [checksum]
        # Compute each checksum from the previous checksum, so that all cost little more than a single checksum.
        for end in range((shortest + 1) * _ID_BYTES, len(ids), _ID_BYTES):
            checksum = ((checksum >> 32) + _ID_BYTES) << 32 | crc32(ids[end - _ID_BYTES : end], checksum & 0xFFFFFFFF)
            checksums.append(checksum)
        yield from reversed(checksums)


def _checksum(adapter: str, ids: bytes) -> int:
    """A checksum of a prompt: its length in bytes in the upper bits, its CRC-32 in the lower 32 bits."""
    return len(ids) << 32 | crc32(ids, crc32(adapter.encode()))
