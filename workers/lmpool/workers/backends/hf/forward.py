"""Matches prompts' prefixes with cached keys and values (the KV pool), and runs the model's forward over a batch.

The pool has one slot per token, so that a step computes only the new tokens of a prompt.
"""

from __future__ import annotations

import inspect
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count, groupby
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from lmpool.workers.backends.hf.placement import input_device

ROOT = 0
"""The slot of the empty prefix. It holds the keys and values of no token, so padding tokens may use it."""

Path: TypeAlias = "array[int]"
"""The slots of a prefix, one per token in order: an int64 array that never changes, so that prompts can share it."""

Shapes: TypeAlias = tuple[tuple[int, int], ...]  # Shapes (heads, head size) of keys and values in turn.

Prompts: TypeAlias = Sequence[Sequence[int]]  # Token ids of each prompt.

# Stamp of empty slots and of slots in use: above all other stamps, so that these slots are not chosen for eviction.
_NEVER = np.iinfo(np.int64).max
_DEPTH_BITS = 32  # Number of low bits of a stamp, which hold the depth of the slot's token in its prompt.
# Host memory in bytes for the bookkeeping of one slot; in tiny models, a slot's keys and values take less memory.
_BOOKKEEPING_BYTES = 256
_COPY_BYTES = 1 << 23  # Max bytes copied into the pool at once, so that the buffer stays in the CPU's cache.
_ID_BYTES = 4  # Bytes of a token id (uint32).
_KEY_TOKENS = 16  # Number of last tokens of a recent prompt that are the key to look it up.
# Min tokens of a prompt that is remembered: a shorter prompt is matched token by token fast enough.
_MIN_RECENT_TOKENS = 64
# Max new tokens of a prompt that extends a remembered prompt: clients append one or a few tokens at a time.
_MAX_APPENDED_TOKENS = 8
_MAX_REMEMBERED_TOKENS = 1 << 20  # Max tokens of all remembered prompts together; each token takes 12 bytes.


def new_path() -> Path:
    """An empty path."""
    return array("q")


def _width(shapes: Shapes) -> int:
    return sum(heads * size for heads, size in shapes)


def new_tokens(length: int, held: int, kept: int = 1) -> int:
    """Number of tokens to compute for a prompt with `held` cached tokens; at least its last `kept` tokens."""
    return length - min(held, length - kept)


class Forward:
    """Runs a model in evaluation mode on right-aligned batches.

    A batch computes the last `new` tokens of each prompt, where `new` is the max number of uncached tokens of a prompt
    in the batch. Prompts with fewer uncached tokens compute cached tokens again. Padding after the cached tokens would
    be wrong, because sliding windows and position biases rely on adjacent tokens.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.device = input_device(model)
        self.takes = frozenset(inspect.signature(model.forward).parameters)

    def logits(self, prompts: Prompts, paths: list[Path] | None = None, pool: KVPool | None = None) -> Tensor:
        """The logits (n, V) of the token after each prompt; see `last_logits`."""
        return self.last_logits(prompts, [1] * len(prompts), paths or [], pool)[:, -1]

    def last_logits(
        self, prompts: Prompts, kept: Sequence[int], paths: list[Path], pool: KVPool | None = None, root: int = ROOT
    ) -> Tensor:
        """The logits (n, max(kept), V) after each prompt's last `kept` tokens, right-aligned, in the model's dtype.

        The pool provides the keys and values of the slots in `paths` (`PrefixSlots.match`), and stores the new keys and
        values. The list `paths` then has the longer paths.
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
            # Pass a mask only if prompts differ in length: without a mask, attention takes a faster path.
            positions = np.arange(total) - (total - np.array(lengths))[:, None]
            arguments["attention_mask"] = torch.tensor((positions >= 0).astype(np.int64), device=self.device)
            arguments["position_ids"] = torch.tensor(positions[:, total - new :].clip(0), device=self.device)
        output = self.model(**{name: value for name, value in arguments.items() if name in self.takes})
        if pool is not None:
            pool.store(prompts, paths, block, root)
        logits: Tensor = output.logits[:, -max_kept:]
        return logits


class KVPool:
    """Stores the keys and values of prefixes of recent prompts, at most `capacity` tokens (`KVLayout.capacity`).

    A slot has memory on each device that computes layers: each device stores the keys and values of its own layers.
    No step frees the slots of the paths in `held`: partly computed prompts wait for their turn with these paths.
    """

    def __init__(self, layout: KVLayout, capacity: int) -> None:
        self.layout = layout
        self.capacity = capacity
        self.slots = PrefixSlots(capacity)
        self._groups = layout.groups()
        # One storage per group of layers. On a CPU, `torch.empty` takes no memory until pages are written.
        self._storages = [
            torch.empty(capacity + 1, _width(shapes), dtype=layout.dtype, device=device)
            for device, shapes in self._groups
        ]
        for storage in self._storages:
            # Set the root's slot to zero: padding reads it, and NaN or infinity would reach other tokens despite the
            # mask.
            storage[ROOT].zero_()
        self._roots = count(capacity + 1)
        self.held: list[Path] = []
        self.release()

    def release(self) -> None:
        """Free the scratch memory, which the pool keeps only to save allocations."""
        self._scratches = [storage[:0] for storage in self._storages]
        # The slots whose copies are at the beginning of the scratch memory, after a step of a single prompt.
        self._gathered = new_path()

    def clear(self) -> None:
        """Discard all keys and values, for example because the model's weights have changed."""
        self.slots.clear()
        self.held = []
        self.release()  # The scratch memory has copies of keys and values.

    def new_root(self) -> int:
        """A new root for prompts that must not share keys and values with other prompts; see `PrefixSlots.match`."""
        return next(self._roots)

    def gather(self, lengths: Sequence[int], paths: Sequence[Path], new: int) -> KVBlock:
        """Begin a step: copy the cached keys and values of all tokens except the last `new` of each prompt to a block.

        Each path must have at least `length - new` slots. The block is valid until the next call of this method.
        """
        self.slots.begin([*self.held, *paths])
        total = max(lengths)
        past = total - new
        size, held = len(lengths) * total, len(self._scratches[0])
        gathered, self._gathered = self._gathered, new_path()
        if size > held:
            # Keep the memory between steps: page faults of new memory cost more than the copy. Double the size.
            more = max(size, min(2 * held, self.capacity))
            self._scratches = [storage.new_empty(more, storage.shape[1]) for storage in self._storages]
            gathered = new_path()
        if len(lengths) == 1:
            # Skip the slots that the scratch memory still holds from the last step of the same prompt.
            known = min(len(gathered), past)
            start = known if paths[0][:known] == gathered[:known] else 0
            index = np.array(paths[0][start:past])
        else:
            start, index = 0, np.full((len(lengths), total if past else 0), ROOT)
            for row, (length, path) in enumerate(zip(lengths, paths, strict=True)):
                if length > new:
                    index[row, total - length : past] = path[: length - new]
        cache, tokens = DynamicCache(), []
        for (_, shapes), storage, scratch in zip(self._groups, self._storages, self._scratches, strict=True):
            if index.size:
                slots = torch.from_numpy(index.ravel()).to(storage.device)
                torch.index_select(storage, 0, slots, out=scratch[start : start + index.size])
            tokens.append(scratch[:size].view(len(lengths), total, -1))
            parts = torch.split(tokens[-1], [heads * size for heads, size in shapes], dim=-1)
            views = [
                part.view(*part.shape[:2], *shape).transpose(1, 2) for part, shape in zip(parts, shapes, strict=True)
            ]
            cache.layers += [_BlockLayer(*pair, past) for pair in zip(views[::2], views[1::2], strict=True)]
        return KVBlock(tokens, past, cache)

    def store(self, prompts: Prompts, paths: list[Path], block: KVBlock, root: int = ROOT) -> None:
        """End a step: store the new keys and values of a block in free slots, and put longer paths into `paths`."""
        targets: list[int] = []
        sources: list[int] = []
        total = block.tokens[0].shape[1]
        # A cached token that was computed again keeps its earlier keys and values in its slot.
        alike = block.past if len(paths[0]) > block.past else total
        try:
            for row, ids in enumerate(prompts):
                path, fresh = self.slots.extend(ids, paths[row], root)
                paths[row] = path
                end = row * total + total - len(ids) + len(path)
                sources += range(end - len(fresh), end)
                targets += fresh
            step = max(1, _COPY_BYTES // self.layout.slot_bytes)
            for storage, tokens in zip(self._storages, block.tokens, strict=True):
                for start in range(0, len(targets), step):
                    part = slice(start, start + step)
                    source, target = torch.tensor([sources[part], targets[part]], device=storage.device)
                    storage.index_copy_(0, target, tokens.flatten(0, 1).index_select(0, source))
            self._gathered = paths[0][:alike] if len(prompts) == 1 else new_path()
        except BaseException:
            # Clear the pool, because its table refers to slots that were not written: no prompt may reuse these slots.
            self.slots.clear()
            self.held = []
            raise


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shapes, dtype and devices of one token's keys and values in a model's cache."""

    # Shapes (heads, head size) of the first layer's keys, the first layer's values, the second layer's keys, ...
    shapes: Shapes
    dtype: torch.dtype  # Dtype of all keys and values.
    devices: tuple[torch.device, ...]  # Device that computes the first layer, the second layer, ...

    @property
    def width(self) -> int:
        """Count of numbers that the keys and values of one token have in all layers."""
        return _width(self.shapes)

    def groups(self) -> list[tuple[torch.device, Shapes]]:
        """Device and shapes of each group of consecutive layers that one device computes."""
        layers = zip(self.devices, self.shapes[::2], self.shapes[1::2], strict=True)
        return [
            (device, tuple(shape for layer in group for shape in layer[1:]))
            for device, group in groupby(layers, lambda layer: layer[0])
        ]

    @property
    def slot_bytes(self) -> int:
        """Bytes of memory of one slot, bookkeeping included."""
        return self.width * self.dtype.itemsize + _BOOKKEEPING_BYTES

    def capacity(self, max_bytes: int) -> int:
        """Number of slots that fit into `max_bytes`, not counting the slot of the root."""
        return max(0, max_bytes // self.slot_bytes - 1)


class KVBlock(NamedTuple):
    """The keys and values of one batch: `KVPool.gather` copies cached tokens to it, and the forward adds new tokens."""

    tokens: list[Tensor]  # For each group of layers, (n, length, width); a prompt's tokens are right-aligned.
    past: int  # Number of positions of each prompt that were copied from the pool, padding included.
    cache: DynamicCache  # View of the same memory in the form that the model's forward accepts.


class _BlockLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # transformers' cache is partly untyped
    """One layer's view of a block, to which new keys and values are written in place.

    `DynamicCache` of transformers would copy all earlier keys and values to append new ones.
    """

    def __init__(self, keys: Tensor, values: Tensor, past: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers' cache is partly untyped
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
    """Table of the slots of a pool: finds the slots of a prompt's prefix. Slots have numbers from 1 to `capacity`.

    Every slot has a stamp: the step in which its prefix was last used, minus its depth. A step that uses a prefix also
    uses all its shorter prefixes. So the stamp of a prefix is above the stamps of its extensions. The slots with the
    lowest stamps can be freed together without cutting off a kept prefix from the root.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        # The tree of all prefixes as one flat dictionary: (slot of the parent) << 32 | token -> slot.
        self._children: dict[int, int] = {}
        # For each slot that was ever used: its key in `_children`, and the number of times that the slot was freed.
        self._edges, self._freed = [0], [0]
        # `np.zeros` takes no memory until pages are written.
        self._stamps = np.zeros(capacity + 1, np.int64)
        self._stamps[ROOT] = _NEVER
        self._free: list[int] = []
        self._clock = 0
        # (slot of the root, last tokens) of each recent prompt -> its ids, the slots of its tokens, and the value of
        # `_freed` of its last slot; the most recent prompt last.
        self._recent: OrderedDict[tuple[int, bytes], tuple[bytes, Path, int]] = OrderedDict()
        self._recent_tokens = 0

    def __len__(self) -> int:
        """Number of slots in use."""
        return len(self._children)

    def clear(self) -> None:
        """Free all slots."""
        # Raise all counts above every earlier count, so that no earlier mark is valid for any path.
        self._freed = [max(self._freed) + 1] * len(self._freed)
        self._stamps[: len(self._edges)] = _NEVER
        self._free = list(range(len(self._edges) - 1, ROOT, -1))
        self._children.clear()

    def match(self, ids: Sequence[int], root: int = ROOT, known: Path | None = None) -> Path:
        """The slots of the longest cached prefix of a prompt; the caller may pass the first of these slots as `known`.

        Prompts with different roots share no slots. Roots other than `ROOT` are numbers above `capacity`, which no slot
        has.
        """
        path = new_path() if known is None else known
        if len(path) > len(ids):
            return path[: len(ids)]
        found, slot = new_path(), path[-1] if path else root
        for token in ids[len(path) :]:
            child = self._children.get(slot << 32 | token)
            if child is None:
                break
            found.append(child)
            slot = child
        return path + found if found else path

    def remember(self, ids: bytes, path: Path, root: int = ROOT) -> None:
        """Remember a prompt's slots for `recall`, if all its tokens are cached."""
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
        """The slots of a remembered prompt that `ids` repeats or extends by a few tokens; None if no prompt is found.

        For a long prompt that grows, this method saves the look-up of each token.
        """
        shortest = max(len(ids) - _MAX_APPENDED_TOKENS * _ID_BYTES, _MIN_RECENT_TOKENS * _ID_BYTES)
        for end in range(len(ids), shortest - 1, -_ID_BYTES):
            recent = self._recent.get((root, ids[end - _KEY_TOKENS * _ID_BYTES : end]))
            if recent is not None and ids.startswith(recent[0]) and self.holds(recent[1], recent[2]):
                return recent[1]
        return None

    def is_longest(self, ids: Sequence[int], path: Path, root: int = ROOT) -> bool:
        """Whether a path holds the longest cached prefix of a prompt."""
        return len(path) >= len(ids) or (path[-1] if path else root) << 32 | ids[len(path)] not in self._children

    def mark(self, path: Path) -> int:
        """The state of a path now, to pass to `holds` later: the number of times that its last slot was freed."""
        return self._freed[path[-1]] if path else 0

    def holds(self, path: Path, mark: int) -> bool:
        """Whether no slot of a path was freed since `mark` returned this mark.

        Checking the last slot is enough, because later slots of a path are freed no later than earlier slots.
        """
        return not path or mark == self._freed[path[-1]]

    def begin(self, paths: Iterable[Path]) -> None:
        """Begin a step that uses these paths. The slots of the paths are not freed before the next step begins."""
        self._clock += 1
        for path in paths:
            self._stamp(path)

    def extend(self, ids: Sequence[int], path: Path, root: int = ROOT) -> tuple[Path, Path]:
        """Assign free slots to the uncached tokens of a prompt, as far as slots suffice.

        `path` is the result of `match` in this step. Returns the longer path, and the slots that were assigned.
        """
        stamped = len(path)  # `begin` has stamped the slots of the path so far.
        path = self.match(ids, root, path)
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
                # Evict more slots than are needed now, because finding the oldest slots costs a pass over all slots.
                self._evict(max(missing - len(self._free), self.capacity // 32))
        fresh = array("q", [self._free.pop() for _ in range(min(missing, len(self._free)))])
        parent = path[-1] if path else root
        for slot, token in zip(fresh, ids[stamped:], strict=False):
            edge = parent << 32 | token
            self._children[edge] = slot
            self._edges[slot] = edge
            parent = slot
        if fresh:
            path = path + fresh
            self._stamp(path, stamped)
        return path, fresh

    def _stamp(self, path: Path, start: int = 0) -> None:
        """Set the stamps of a path's slots from index `start` on to the current step."""
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
