"""Sessions: prompts whose keys and values the engine holds ready, so that one more token costs one token.

Prefix caching alone reuses full blocks only, and looks each of them up again. A session is a request of the
engine that stays open when its row has been taken. It holds memory that nothing else can have, so sessions are
opened for prompts that have begun to grow only, are few, and are closed oldest first.
"""

from __future__ import annotations

from collections import OrderedDict

_ID_BYTES = 4
_RECENT = 100_000


class Sessions:
    """The sessions of an engine, which of them wait for their next token, and which prompts were seen lately.

    Args:
        most: sessions that may wait at once.
        most_tokens: tokens that all sessions may hold together.
        block: tokens of a block of memory; a session holds whole blocks.
    """

    def __init__(self, most: int, most_tokens: int, block: int = 1) -> None:
        self._most = most
        self._most_tokens = most_tokens
        self._block = block
        self._idle: OrderedDict[tuple[str, bytes], str] = OrderedDict()
        self._held: dict[str, int] = {}  # Request -> tokens, of those too that do not wait at the moment.
        self._tokens = 0
        # Hashes: that two prompts share one costs a session that nobody continues, no more.
        self._recent: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._idle)

    def take(self, adapter: str, ids: bytes) -> str | None:
        """The request whose session a prompt continues by one token, if there is one.

        It waits no longer, and holds its memory until it is kept again or forgotten.
        """
        return self._idle.pop((adapter, ids[:-_ID_BYTES]), None)

    def forget(self, request: str) -> None:
        """A session is no more."""
        self._tokens -= self._held.pop(request, 0)

    def is_growing(self, adapter: str, ids: bytes) -> bool:
        """Whether a prompt is worth a session: it is one token longer than one that was seen lately."""
        if not self._most:
            return False
        is_growing = hash((adapter, ids[:-_ID_BYTES])) in self._recent
        self._recent[hash((adapter, ids))] = None
        self._recent.move_to_end(hash((adapter, ids)))
        if len(self._recent) > _RECENT:
            self._recent.popitem(last=False)
        return is_growing

    def keep(self, adapter: str, ids: bytes, request: str) -> list[str]:
        """Have a session wait; returns the requests to close instead."""
        closed = []
        if (other := self._idle.pop((adapter, ids), None)) is not None:
            closed.append(other)
            self.forget(other)
        self.forget(request)
        tokens = -(-len(ids) // _ID_BYTES // self._block) * self._block
        if tokens > self._most_tokens:
            return [*closed, request]  # All others would be closed, and then this one too.
        self._idle[(adapter, ids)] = request
        self._held[request] = tokens
        self._tokens += tokens
        while self._idle and (len(self._idle) > self._most or self._tokens > self._most_tokens):
            closed += self.close_oldest(1)
        return closed

    def close_adapter(self, adapter: str) -> list[str]:
        """Forget the sessions of an adapter that wait; returns their requests."""
        keys = [key for key in self._idle if key[0] == adapter]
        closed = [self._idle.pop(key) for key in keys]
        for request in closed:
            self.forget(request)
        return closed

    def close_oldest(self, number: int) -> list[str]:
        """Forget the sessions that have waited longest; returns their requests."""
        closed = []
        for _ in range(min(number, len(self._idle))):
            _, request = self._idle.popitem(last=False)
            self.forget(request)
            closed.append(request)
        return closed
