"""The producer's own cache of rows: least recently used out first, bounded by bytes."""

from __future__ import annotations

from collections import OrderedDict

from lmpool.rows.cache import Row


class RowLRU:
    """Digest -> read-only row.

    Args:
        limit: bytes that the rows may take together; 0 keeps nothing.
    """

    __slots__ = ("_limit", "_owner", "_rows", "_size")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._owner = ""
        self._rows: OrderedDict[bytes, Row] = OrderedDict()
        self._size = 0

    @property
    def size(self) -> int:
        """Bytes that the rows take now."""
        return self._size

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, digest: bytes) -> Row | None:
        """The row, or None; a row that is found is the last to go."""
        row = self._rows.get(digest)
        if row is not None:
            self._rows.move_to_end(digest)
        return row

    def put(self, digest: bytes, row: Row) -> None:
        """Keep a row, and drop the oldest ones as long as the limit asks for it."""
        size = row.nbytes
        if size > self._limit:
            return
        if digest in self._rows:
            self._size -= self._rows.pop(digest).nbytes
        self._rows[digest] = row
        self._size += size
        while self._size > self._limit:
            self._size -= self._rows.popitem(last=False)[1].nbytes

    def belong_to(self, fingerprint: str) -> None:
        """Keep rows of this model only; those of another are forgotten."""
        if fingerprint != self._owner:
            self._owner = fingerprint
            self.clear()

    def clear(self) -> None:
        """Forget all rows."""
        self._rows.clear()
        self._size = 0
