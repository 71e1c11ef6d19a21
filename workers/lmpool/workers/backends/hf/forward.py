"""The forward of a model over a batch, and the pool of keys and values of recent prompts that it reuses.

The pool has one slot per token, so that a step computes only the new tokens of a prompt.
"""

from __future__ import annotations

import inspect
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

ROOT = 0
"""The slot of the empty prefix. It holds no token, so padding may point at it."""

Path: TypeAlias = "array[int]"
"""The slots of a prefix, first token first, as int64: copied much faster than a list of ints."""

# Stamp of a slot that must not be freed.
_NEVER = np.iinfo(np.int64).max
# Bits of a stamp for the depth of a token in its prompt.
_DEPTH_BITS = 32
# Host memory for the bookkeeping of one slot. It counts, because it is the larger part for tiny models.
_BOOKKEEPING_BYTES = 256
# Bytes copied at once into the pool, so that the buffer stays small and in the CPU's cache.
_COPY_BYTES = 1 << 23
# Bytes of a token id (uint32).
_ID_BYTES = 4
# Last tokens by which a recent prompt is looked up.
_KEY_TOKENS = 16
# Min tokens of a prompt to be remembered: a shorter one is looked up token by token in no time.
_MIN_RECENT_TOKENS = 64
# Max new tokens by which a prompt may extend a recent one and find it: clients append one or a few tokens at a time.
_MAX_APPENDED_TOKENS = 8
# Max tokens of all remembered prompts, with 12 bytes each.
_MAX_REMEMBERED_TOKENS = 1 << 20


def new_path() -> Path:
    """An empty path."""
    return array("q")


def new_tokens(length: int, held: int, kept: int = 1) -> int:
    """Tokens to compute for a prompt with a held prefix: at least the last `kept`, whose logits are requested."""
    return length - min(held, length - kept)


class Forward:
    """Runs a model in evaluation mode on right-aligned batches.

    A batch computes the last `new` tokens of each prompt, where `new` is the max number of tokens that a prompt of the
    batch lacks. A prompt that lacks fewer recomputes some, and is not padded in the middle: sliding windows and
    position biases rely on adjacent tokens.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.device = model.device
        self.takes = frozenset(inspect.signature(model.forward).parameters)

    def logits(
        self, prompts: Sequence[Sequence[int]], paths: Sequence[Path] = (), pool: KVPool | None = None
    ) -> Tensor:
        """The logits (n, V) of the token after each prompt; see `last_logits`."""
        return self.last_logits(prompts, [1] * len(prompts), paths, pool)[:, -1]

    def last_logits(
        self,
        prompts: Sequence[Sequence[int]],
        kept: Sequence[int],
        paths: Sequence[Path] = (),
        pool: KVPool | None = None,
        root: int = ROOT,
    ) -> Tensor:
        """The logits (n, max(kept), V) after each prompt's last `kept` tokens, right-aligned, in the model's dtype.

        A pool provides the keys and values of the paths (`PrefixSlots.match`) from `root` on, and keeps the new ones.
        """
        lengths, max_kept = [len(ids) for ids in prompts], max(kept)
        total = new = max(lengths)
        arguments: dict[str, Any] = {"use_cache": pool is not None, "logits_to_keep": max_kept}
        if pool is not None:
            wants = zip(lengths, paths, kept, strict=True)
            new = max(max_kept, *(new_tokens(length, len(path), wanted) for length, path, wanted in wants))
            block = pool.gather(lengths, paths, new)
            arguments["past_key_values"] = block.cache
        ids = np.zeros((len(prompts), total), np.int64)
        for row, prompt in zip(ids, prompts, strict=True):
            row[total - len(prompt) :] = prompt
        arguments["input_ids"] = torch.tensor(ids[:, total - new :], device=self.device)
        if min(lengths) < total:
            # Without a mask attention takes its fast path.
            positions = np.arange(total) - (total - np.array(lengths))[:, None]
            arguments["attention_mask"] = torch.tensor((positions >= 0).astype(np.int64), device=self.device)
            arguments["position_ids"] = torch.tensor(positions[:, total - new :].clip(0), device=self.device)
        output = self.model(**{name: value for name, value in arguments.items() if name in self.takes})
        if pool is not None:
            pool.store(prompts, paths, block, root)
        logits: Tensor = output.logits[:, -max_kept:]
        return logits


class KVPool:
    """A pool for the keys and values of prefixes, of at most `capacity` tokens (`KVLayout.capacity`).

    No step frees the slots of the paths in `held`: their prompts are interrupted by steps of others.
    """

    def __init__(self, layout: KVLayout, capacity: int, device: torch.device) -> None:
        self.layout = layout
        self.capacity = capacity
        self.slots = PrefixSlots(capacity)
        # On a CPU the pages of an empty tensor cost nothing until they are written.
        self._storage = torch.empty(capacity + 1, layout.width, dtype=layout.dtype, device=device)
        # Padding reads the root's slot. Numbers that are not finite would spread even if they are masked.
        self._storage[ROOT].zero_()
        self._roots = count(capacity + 1)
        self.held: list[Path] = []
        self.release()

    def release(self) -> None:
        """Free the memory that is only kept for reuse."""
        self._scratch = self._storage[:0]
        # The slots that the scratch begins with a copy of, after a step of one prompt.
        self._gathered = new_path()

    def new_root(self) -> int:
        """A new root for prompts that must not share keys and values with others; see `PrefixSlots.match`."""
        return next(self._roots)

    def gather(self, lengths: Sequence[int], paths: Sequence[Path], new: int) -> KVBlock:
        """Begin a step: collect the keys and values of all tokens but the last `new` of each prompt, padding included.

        Each path has at least `length - new` slots. The block is valid until the next call.
        """
        self.slots.begin([*self.held, *paths])
        total = max(lengths)
        past = total - new
        size, width = len(lengths) * total, self.layout.width
        gathered, self._gathered = self._gathered, new_path()
        if size > len(self._scratch):
            # Kept between steps: page faults of new memory cost more than the copy. Growing prompts need more.
            more = max(size, min(2 * len(self._scratch), self.capacity))
            self._scratch, gathered = self._storage.new_empty(more, width), new_path()
        if len(lengths) == 1:
            # The next step of a prompt finds the tokens of its last step in place.
            known = min(len(gathered), past)
            start = known if paths[0][:known] == gathered[:known] else 0
            index = np.array(paths[0][start:past])
        else:
            start, index = 0, np.full((len(lengths), total if past else 0), ROOT)
            for row, (length, path) in enumerate(zip(lengths, paths, strict=True)):
                if length > new:
                    index[row, total - length : past] = path[: length - new]
        if index.size:
            slots = torch.from_numpy(index.ravel()).to(self._storage.device)
            torch.index_select(self._storage, 0, slots, out=self._scratch[start : start + index.size])
        tokens = self._scratch[:size].view(len(lengths), total, width)
        parts = torch.split(tokens, [heads * size for heads, size in self.layout.shapes], dim=-1)
        views = [
            part.view(*part.shape[:2], *shape).transpose(1, 2)
            for part, shape in zip(parts, self.layout.shapes, strict=True)
        ]
        cache = DynamicCache()
        cache.layers = [_BlockLayer(keys, values, past) for keys, values in zip(views[::2], views[1::2], strict=True)]
        return KVBlock(tokens, past, cache)

    def store(self, prompts: Sequence[Sequence[int]], paths: Sequence[Path], block: KVBlock, root: int = ROOT) -> None:
        """End a step: keep the tokens of a gathered block that the pool does not hold; the paths grow in place."""
        targets: list[int] = []
        sources: list[int] = []
        total = block.tokens.shape[1]
        # A held token that was computed again keeps its first result in its slot.
        alike = block.past if len(paths[0]) > block.past else total
        try:
            for row, (ids, path) in enumerate(zip(prompts, paths, strict=True)):
                fresh = self.slots.extend(ids, path, root)
                end = row * total + total - len(ids) + len(path)
                sources += range(end - len(fresh), end)
                targets += fresh
            tokens, step = block.tokens.flatten(0, 1), max(1, _COPY_BYTES // self.layout.slot_bytes)
            for start in range(0, len(targets), step):
                part = slice(start, start + step)
                source, target = torch.tensor([sources[part], targets[part]], device=tokens.device)
                self._storage.index_copy_(0, target, tokens.index_select(0, source))
            self._gathered = paths[0][:alike] if len(prompts) == 1 else new_path()
        except BaseException:
            # The table names slots that were not written: forget everything rather than reuse them.
            self.slots.clear()
            self.held = []
            raise


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Keys and values of one token in a model's cache.

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
        """Slots that fit into `max_bytes`, without the slot of the root."""
        return max(0, max_bytes // self.slot_bytes - 1)


class KVBlock(NamedTuple):
    """The keys and values of one batch: the past is gathered, the forward adds the new tokens.

    Attributes:
        tokens: tensor of shape (n, length, width); a prompt's tokens are right-aligned.
        past: number of gathered positions of each prompt.
        cache: the same memory as the cache that a model's forward takes.
    """

    tokens: Tensor
    past: int
    cache: DynamicCache


class _BlockLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # transformers' cache is partly untyped
    """One layer's view of a block, which takes new keys and values in place.

    The layer of transformers copies the whole past to append to it.
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


class PrefixSlots:
    """The table of a pool of `capacity` slots, numbered from 1.

    Every slot has a stamp: the time when its prefix was last used, minus its depth. A step that uses a prefix uses all
    shorter prefixes of it. So a prefix's stamp is always above those of its extensions, and the slots with the lowest
    stamps can be freed together without cutting a kept prefix off from the root.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        # (slot of the parent) << 32 | token -> slot: one flat dictionary is the whole tree.
        self._children: dict[int, int] = {}
        # Of each slot, as far as slots were used: its key in `_children`, and how often it was freed.
        self._edges, self._freed = [0], [0]
        # zeros takes no memory until it is written.
        self._stamps = np.zeros(capacity + 1, np.int64)
        self._stamps[ROOT] = _NEVER
        self._free: list[int] = []
        self._clock = 0
        # (root, last tokens) -> the ids of a prompt, its path and its mark; the most recent last.
        self._recent: OrderedDict[tuple[int, bytes], tuple[bytes, Path, int]] = OrderedDict()
        self._recent_tokens = 0

    def __len__(self) -> int:
        """Slots in use."""
        return len(self._children)

    def clear(self) -> None:
        """Free all slots."""
        # More often than any slot before: no earlier mark is valid for any path.
        self._freed = [max(self._freed) + 1] * len(self._freed)
        self._stamps[: len(self._edges)] = _NEVER
        self._free = list(range(len(self._edges) - 1, ROOT, -1))
        self._children.clear()

    def match(self, ids: Sequence[int], root: int = ROOT, known: Path | None = None) -> Path:
        """The slots of the longest held prefix of a prompt, first token first; `known` are the first slots, if known.

        Prompts with different roots share nothing. A root other than `ROOT` is a number above `capacity`, which no slot
        has.
        """
        path = new_path() if known is None else known[: len(ids)]
        if len(path) < len(ids):
            self._match_rest(path, ids, root)
        return path

    def remember(self, ids: bytes, path: Path, root: int = ROOT) -> None:
        """Remember the slots of a prompt for `recall`, if all its tokens are held. Do not change `path` afterwards."""
        tokens = len(ids) // _ID_BYTES
        if tokens < _MIN_RECENT_TOKENS or len(path) != tokens:
            return
        key = root, ids[-_KEY_TOKENS * _ID_BYTES :]
        if (older := self._recent.pop(key, None)) is not None:
            self._recent_tokens -= len(older[1])
        self._recent[key] = ids, path, self.mark(path)
        self._recent_tokens += tokens
        while self._recent_tokens > _MAX_REMEMBERED_TOKENS:
            self._recent_tokens -= len(self._recent.popitem(last=False)[1][1])

    def recall(self, ids: bytes, root: int = ROOT) -> Path | None:
        """The slots of a recent prompt that `ids` extends by at most a few tokens; none if there is no such prompt.

        It saves looking up each token of a long prompt that grows.
        """
        shortest = max(len(ids) - _MAX_APPENDED_TOKENS * _ID_BYTES, _MIN_RECENT_TOKENS * _ID_BYTES)
        for end in range(len(ids), shortest - 1, -_ID_BYTES):
            recent = self._recent.get((root, ids[end - _KEY_TOKENS * _ID_BYTES : end]))
            if recent is not None and ids.startswith(recent[0]) and self.holds(recent[1], recent[2]):
                return recent[1]
        return None

    def is_longest(self, ids: Sequence[int], path: Path, root: int = ROOT) -> bool:
        """Whether no longer prefix of a prompt is held than the path."""
        return len(path) >= len(ids) or (path[-1] if path else root) << 32 | ids[len(path)] not in self._children

    def mark(self, path: Path) -> int:
        """The state of a path now, for `holds`: how often its last slot was freed."""
        return self._freed[path[-1]] if path else 0

    def holds(self, path: Path, mark: int) -> bool:
        """Whether all slots of a path are still those of the time when it was marked. It must not have grown since.

        Checking the last slot is enough: a slot is never freed before those behind it.
        """
        return not path or mark == self._freed[path[-1]]

    def begin(self, paths: Iterable[Path]) -> None:
        """Begin a step that uses these paths. Slots that a step uses are not freed before the next step."""
        self._clock += 1
        for path in paths:
            self._stamp(path)

    def extend(self, ids: Sequence[int], path: Path, root: int = ROOT) -> list[int]:
        """Give slots to the tokens of a prompt that have none, as many as are free: returns them.

        `path` is the result of `match` or of an earlier `extend` in this step, and grows in place.
        """
        stamped = len(path)  # By `begin`.
        self._match_rest(path, ids, root)
        self._stamp(path, stamped)
        stamped = len(path)
        missing = len(ids) - stamped
        if missing > len(self._free):
            first = len(self._edges)
            added = min(missing - len(self._free), self.capacity + 1 - first)
            self._edges += [0] * added
            self._freed += [0] * added
            self._stamps[first : first + added] = _NEVER
            self._free += range(first + added - 1, first - 1, -1)
            if missing > len(self._free):
                # More than are needed now: finding the oldest costs a pass over all.
                self._evict(max(missing - len(self._free), self.capacity // 32))
        fresh = [self._free.pop() for _ in range(min(missing, len(self._free)))]
        parent = path[-1] if path else root
        for slot, token in zip(fresh, ids[stamped:], strict=False):
            edge = parent << 32 | token
            self._children[edge] = slot
            self._edges[slot] = edge
            parent = slot
        path.extend(fresh)
        self._stamp(path, stamped)
        return fresh

    def _match_rest(self, path: Path, ids: Sequence[int], root: int) -> None:
        """Append to a path the held slots of the tokens after it."""
        slot = path[-1] if path else root
        for token in ids[len(path) :]:
            child = self._children.get(slot << 32 | token)
            if child is None:
                break
            path.append(child)
            slot = child

    def _stamp(self, path: Path, start: int = 0) -> None:
        """Stamp the slots of a path from `start` on."""
        newest = self._clock << _DEPTH_BITS
        if start < len(path):
            self._stamps[np.array(path[start:] if start else path)] = np.arange(newest - start, newest - len(path), -1)

    def _evict(self, count: int) -> None:
        stamps = self._stamps[: len(self._edges)]
        count = min(count, int(np.count_nonzero(stamps <= (self._clock - 1) << _DEPTH_BITS)))
        if count == 0:
            return
        oldest: NDArray[np.int64] = np.argpartition(stamps, count - 1)[:count]
        stamps[oldest] = _NEVER
        for slot in oldest.tolist():
            del self._children[self._edges[slot]]
            self._freed[slot] += 1
            self._free.append(slot)
