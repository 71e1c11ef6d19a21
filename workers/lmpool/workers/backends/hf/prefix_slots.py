"""Which prefixes the KV pool holds: a trie of tokens, one slot a token, least recently used out first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np

ROOT = 0
"""The slot of the empty prefix. It holds no token, so padding may point at it."""

_NEVER = np.iinfo(np.int64).max
_DEPTH_BITS = 32


class PrefixSlots:
    """The bookkeeping of a pool of `capacity` slots, numbered from 1.

    Every slot carries a stamp: when its prefix was last used, less its depth. Whoever uses a prefix uses all
    that it begins with, so a prefix's stamp is always above those of its extensions, and the slots with the
    lowest stamps can be freed together without ever cutting a kept prefix off from the root.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        # (slot of the parent) << 32 | token -> slot: one flat dictionary is the whole trie.
        self._children: dict[int, int] = {}
        self._edges = [0]
        self._stamps = np.full(1, _NEVER, np.int64)
        self._free: list[int] = []
        self._clock = 0

    def __len__(self) -> int:
        """Slots in use."""
        return len(self._children)

    def match(self, ids: Sequence[int], root: int = ROOT) -> list[int]:
        """The slots of the longest held prefix of a prompt, first token first.

        Args:
            ids: the prompt.
            root: what its first token follows. Prompts with different roots share nothing; beside `ROOT` a root is a
                number above `capacity`, which no slot has.
        """
        return self._match_from(root, ids, 0)

    def begin(self, paths: Iterable[Sequence[int]]) -> None:
        """Start a step that uses these paths; nothing used in a step is freed before the next one."""
        self._clock += 1
        for path in paths:
            self._touch(path)

    def extend(self, ids: Sequence[int], path: list[int], root: int = ROOT) -> list[int]:
        """Give slots to the tokens of a prompt that have none, as far as there is room.

        Args:
            ids: the prompt.
            path: what `match` or an earlier `extend` of this step found of it; grows in place.
            root: as for `match`.

        Returns:
            the new slots; they are the last ones of `path` and belong to the tokens there.
        """
        path += self._match_from(path[-1] if path else root, ids, len(path))
        self._touch(path)
        missing = len(ids) - len(path)
        if missing > len(self._free):
            self._make_room(missing - len(self._free))
        fresh = [self._free.pop() for _ in range(min(missing, len(self._free)))]
        parent = path[-1] if path else root
        for slot, token in zip(fresh, ids[len(path) :], strict=False):
            edge = parent << 32 | token
            self._children[edge] = slot
            self._edges[slot] = edge
            parent = slot
        path += fresh
        self._touch(path)
        return fresh

    def _match_from(self, slot: int, ids: Sequence[int], start: int) -> list[int]:
        found = []
        for token in islice(ids, start, None):
            child = self._children.get(slot << 32 | token)
            if child is None:
                break
            found.append(child)
            slot = child
        return found

    def _touch(self, path: Sequence[int]) -> None:
        newest = self._clock << _DEPTH_BITS
        self._stamps[path] = np.arange(newest, newest - len(path), -1)

    def _make_room(self, count: int) -> None:
        unused = self.capacity + 1 - len(self._edges)
        if unused:
            # In steps of at least a half, so that arrays grow a few times only.
            added = min(unused, max(count, len(self._edges) // 2))
            first = len(self._edges)
            self._edges += [0] * added
            self._stamps = np.concatenate([self._stamps, np.full(added, _NEVER, np.int64)])
            self._free += range(first + added - 1, first - 1, -1)
            count -= added
        if count > 0:
            # More than are needed now: finding the oldest costs a pass over all.
            self._evict(max(count, self.capacity // 32))

    def _evict(self, count: int) -> None:
        evictable = int(np.count_nonzero(self._stamps <= (self._clock - 1) << _DEPTH_BITS))
        count = min(count, evictable)
        if count == 0:
            return
        oldest = np.argpartition(self._stamps, count - 1)[:count]
        self._stamps[oldest] = _NEVER
        for slot in oldest.tolist():
            del self._children[self._edges[slot]]
            self._free.append(slot)
