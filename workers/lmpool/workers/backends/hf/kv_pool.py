"""Keys and values of recent prompts: one slot a token, so that a prompt pays for its new tokens only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

ROOT = 0
"""The slot of the empty prefix. It holds no token, so padding may point at it."""

_NEVER = np.iinfo(np.int64).max
_DEPTH_BITS = 32

_BOOKKEEPING_BYTES = 256
"""Host memory that the trie needs for one slot: it counts, because for tiny models it is the larger part."""

_COPY_BYTES = 1 << 23


class KVPool:
    """A byte-limited pool of the keys and values of prompts' prefixes.

    Args:
        layout: what one token leaves.
        capacity: tokens that the pool holds (`KVLayout.capacity`), at least 1.
        device: where the model is.

    Attributes:
        held: paths whose slots no step may free, of prompts that steps of others interrupt.
    """

    def __init__(self, layout: KVLayout, capacity: int, device: torch.device) -> None:
        self.layout = layout
        self.slots = PrefixSlots(capacity)
        # On a CPU the pages of an empty tensor cost nothing until they are written.
        self._storage = torch.empty(capacity + 1, layout.width, dtype=layout.dtype, device=device)
        # Padding is read from the root's slot: masked or not, what is not finite would spread.
        self._storage[ROOT].zero_()
        self._scratch = self._storage[:0]
        # The slots of which the scratch begins with a copy, after a step of one prompt.
        self._gathered: list[int] = []
        self._roots = count(capacity + 1)
        self.held: list[list[int]] = []

    def new_root(self) -> int:
        """A root for prompts that must not share keys and values with others, for `PrefixSlots.match`; never twice."""
        return next(self._roots)

    @property
    def capacity(self) -> int:
        """Tokens that the pool can hold."""
        return self.slots.capacity

    @property
    def nbytes(self) -> int:
        """Memory that the pool may come to use, bookkeeping included."""
        return len(self._storage) * self.layout.slot_bytes

    def gather(self, lengths: Sequence[int], paths: Sequence[list[int]], new: int) -> KVBlock:
        """Start a step: collect what the pool holds of each prompt but for its last `new` tokens.

        Args:
            lengths: tokens of each prompt.
            paths: the slots of each prompt's held prefix; at least `lengths[i] - new` of them.
            new: tokens that the forward computes for each prompt, padding included.

        Returns:
            a block of shape (n, max(lengths), width). It is valid until the next call.
        """
        self.slots.begin([*self.held, *paths])
        total = max(lengths)
        past = total - new
        size = len(lengths) * total
        gathered, self._gathered = self._gathered, []
        if size > len(self._scratch):
            # Kept between steps: the page faults of fresh memory cost more than the copy. Prompts that grow ask for
            # more each time.
            more = max(size, min(2 * len(self._scratch), self.capacity))
            self._scratch, gathered = self._storage.new_empty(more, self.layout.width), []
        flat = self._scratch[:size]
        if len(lengths) == 1:
            # The next step of a prompt that grows, or is computed in parts, finds what the last one left in place.
            known = min(len(gathered), past)
            start = known if paths[0][:known] == gathered[:known] else 0
            if past > start:
                self._gather(np.array(paths[0][start:past]), flat[start:past])
        elif past:
            index = np.full((len(lengths), total), ROOT)
            for row, (length, path) in enumerate(zip(lengths, paths, strict=True)):
                if length > new:
                    index[row, total - length : past] = path[: length - new]
            self._gather(index.ravel(), flat)
        return KVBlock(flat.view(len(lengths), total, self.layout.width), past, self.layout)

    def store(
        self, prompts: Sequence[Sequence[int]], paths: Sequence[list[int]], block: KVBlock, root: int = ROOT
    ) -> None:
        """End a step: keep the tokens of the block that the pool does not hold, as far as there is room.

        Args:
            prompts: the ids of each prompt.
            paths: as passed to `gather`; they grow in place.
            block: what `gather` returned, after the forward.
            root: that the paths begin at.
        """
        targets: list[int] = []
        sources: list[int] = []
        total = block.tokens.shape[1]
        # Of what was held and is computed again the slots have the first result.
        alike = block.past if len(paths[0]) > block.past else total
        copied = False
        try:
            for row, (ids, path) in enumerate(zip(prompts, paths, strict=True)):
                fresh = self.slots.extend(ids, path, root)
                end = row * total + total - len(ids) + len(path)
                sources += range(end - len(fresh), end)
                targets += fresh
            self._copy(block.tokens.flatten(0, 1), sources, targets)
            copied = True
            self._gathered = paths[0][:alike] if len(prompts) == 1 else []
        finally:
            if not copied:
                # The trie names slots that were not written: forget everything rather than reuse those.
                self.slots, self.held = PrefixSlots(self.capacity), []

    def _gather(self, slots: NDArray[np.int64], into: Tensor) -> None:
        torch.index_select(self._storage, 0, torch.from_numpy(slots).to(into.device), out=into)

    def _copy(self, tokens: Tensor, sources: list[int], targets: list[int]) -> None:
        # Piece by piece, so that the memory in between stays small and warm.
        step = max(1, _COPY_BYTES // self.layout.slot_bytes)
        for start in range(0, len(targets), step):
            source, target = torch.tensor(
                [sources[start : start + step], targets[start : start + step]], device=tokens.device
            )
            self._storage.index_copy_(0, target, tokens.index_select(0, source))

    def release(self) -> None:
        """Give back the memory that is only kept to be reused."""
        self._scratch, self._gathered = self._storage[:0], []


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What one token leaves in a model's cache.

    Attributes:
        shapes: (heads, head size) of the first layer's keys, its values, the second layer's keys, ...
        dtype: of all of them.
    """

    shapes: tuple[tuple[int, int], ...]
    dtype: torch.dtype

    @property
    def width(self) -> int:
        """Numbers of one token."""
        return sum(heads * size for heads, size in self.shapes)

    @property
    def slot_bytes(self) -> int:
        """Memory of one slot, bookkeeping included."""
        return self.width * self.dtype.itemsize + _BOOKKEEPING_BYTES

    def capacity(self, max_bytes: int) -> int:
        """Slots that fit into so many bytes, beside the one that stays empty."""
        return max(0, max_bytes // self.slot_bytes - 1)


class KVBlock:
    """The keys and values of one batch, token by token, the past gathered and the new yet to come.

    Attributes:
        tokens: tensor of shape (n, length, width); a prompt's tokens are right-aligned.
        past: how many of a prompt's positions are gathered.
        cache: the same memory as the cache that a model's forward takes.
    """

    def __init__(self, tokens: Tensor, past: int, layout: KVLayout) -> None:
        self.tokens = tokens
        self.past = past
        parts = torch.split(tokens, [heads * size for heads, size in layout.shapes], dim=-1)
        views = [
            part.view(*part.shape[:2], *shape).transpose(1, 2) for part, shape in zip(parts, layout.shapes, strict=True)
        ]
        self.cache = DynamicCache()
        self.cache.layers = [
            _BlockLayer(keys, values, past) for keys, values in zip(views[::2], views[1::2], strict=True)
        ]


class _BlockLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # transformers' cache is partly untyped
    """One layer's view of a block. New keys and values are written where the pool takes them from.

    The stock layer would copy the whole past to append to it.
    """

    def __init__(self, keys: Tensor, values: Tensor, past: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.dtype, self.device = keys.dtype, keys.device
        self.keys, self.values = keys, values
        self.is_initialized = True
        self._block = keys, values
        self._filled = past

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        keys, values = self._block
        start, end = self._filled, self._filled + key_states.shape[-2]
        self._filled = end
        keys[:, :, start:end] = key_states
        values[:, :, start:end] = value_states
        return keys[:, :, :end], values[:, :, :end]

    def get_seq_length(self) -> int:
        return self._filled


class Mark(NamedTuple):
    """A path at some time: its slots, and how often the last one had been freed."""

    length: int
    freed: int


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
        # How often each slot has been freed.
        self._freed = [0]
        self._free: list[int] = []
        self._clock = 0

    def __len__(self) -> int:
        """Slots in use."""
        return len(self._children)

    def match(self, ids: Sequence[int], root: int = ROOT, known: Sequence[int] = ()) -> list[int]:
        """The slots of the longest held prefix of a prompt, first token first.

        Args:
            ids: the prompt.
            root: what its first token follows. Prompts with different roots share nothing; beside `ROOT` a root is a
                number above `capacity`, which no slot has.
            known: slots of a prefix that is still held; only the tokens after it are looked up.
        """
        path = [*known[: len(ids)]]
        return path + self._match_from(path[-1] if path else root, ids, len(path))

    def is_longest(self, ids: Sequence[int], path: Sequence[int], root: int = ROOT) -> bool:
        """Whether no longer prefix of a prompt is held than a path that is; arguments as for `match`."""
        return len(path) >= len(ids) or (path[-1] if path else root) << 32 | ids[len(path)] not in self._children

    def mark(self, path: Sequence[int]) -> Mark:
        """What tells later whether the pool still holds a path (`holds`)."""
        return Mark(len(path), self._freed[path[-1]] if path else 0)

    def holds(self, path: Sequence[int], mark: Mark) -> bool:
        """Whether all slots of a path are those that they were when it was marked.

        The last slot tells: a slot is never freed before those behind it.
        """
        return not path or (mark.length == len(path) and mark.freed == self._freed[path[-1]])

    def begin(self, paths: Iterable[Sequence[int]]) -> None:
        """Start a step that uses these paths; nothing used in a step is freed before the next one."""
        self._clock += 1
        for path in paths:
            self._stamp(path)

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
        self._stamp(path)
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
        self._stamp(path)
        return fresh

    def _match_from(self, slot: int, ids: Sequence[int], start: int) -> list[int]:
        path = []
        for token in islice(ids, start, None):
            child = self._children.get(slot << 32 | token)
            if child is None:
                break
            path.append(child)
            slot = child
        return path

    def _stamp(self, path: Sequence[int]) -> None:
        newest = self._clock << _DEPTH_BITS
        self._stamps[path] = np.arange(newest, newest - len(path), -1)

    def _make_room(self, count: int) -> None:
        unused = self.capacity + 1 - len(self._edges)
        if unused:
            # In steps of at least a half, so that arrays grow a few times only.
            added = min(unused, max(count, len(self._edges) // 2))
            first = len(self._edges)
            self._edges += [0] * added
            self._freed += [0] * added
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
            self._freed[slot] += 1
            self._free.append(slot)
