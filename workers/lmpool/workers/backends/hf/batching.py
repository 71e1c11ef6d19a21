"""Which of the waiting prompts run together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lmpool.workers.backends.hf.forward import new_tokens

_FREE_PADDING = 64
"""Tokens of padding that cost less than the extra forward that would avoid them."""

_SHARED = 32
"""From so many uncached tokens in common on, computing them once is worth a forward of its own."""

_STEPS_TO_GROW = 32


class Candidate(NamedTuple):
    """A waiting prompt.

    Attributes:
        digest: its name.
        ids: its token ids.
        path: the KV pool's slots of its held prefix.
        kept: of how many of its last tokens the logits are wanted.
        kind: only prompts of one kind run together.
        adapter: only prompts of one adapter run together.
    """

    digest: bytes
    ids: list[int]
    path: list[int]
    kept: int = 1
    kind: str = ""
    adapter: str = ""

    @property
    def new(self) -> int:
        """Tokens that must be computed."""
        return new_tokens(len(self.ids), len(self.path), self.kept)

    @property
    def unshared(self) -> tuple[int, ...] | None:
        """What another prompt must begin with to share much that is not held; None for short ones."""
        end = len(self.path) + _SHARED
        return tuple(self.ids[:end]) if len(self.ids) >= end else None


class BatchRules(NamedTuple):
    """What a batch must keep to.

    Attributes:
        tokens: most tokens computed, padding included.
        logits: most tokens whose logits are wanted, padding included.
        kv_tokens: most tokens whose keys and values are held at once, padding included.
        pads: False if prompts of different length must not run together.
        horizon: prompts longer than this run alone.
        shares: True if a prefix that several prompts have in common is better computed once, before them.
    """

    tokens: int
    logits: int
    kv_tokens: int
    pads: bool
    horizon: int
    shares: bool


def choose(waiting: Sequence[Candidate], rows: int, rules: BatchRules) -> list[Candidate]:
    """The next batch: the oldest prompt and those that go well with it.

    Args:
        waiting: oldest first, at least one.
        rows: most prompts in the batch.
        rules: what the batch must keep to; the oldest prompt runs even if it alone breaks them.
    """
    first = waiting[0]
    batch = [first]
    if len(first.ids) > rules.horizon:
        return batch
    started = {first.unshared}
    new, longest, needed, kept = first.new, len(first.ids), first.new, first.kept
    alike = [one for one in waiting[1:] if (one.kind, one.adapter) == (first.kind, first.adapter)]
    for other in _by_likeness(first, alike):
        if len(batch) == rows:
            break
        if len(other.ids) > rules.horizon or (len(other.ids) != longest and not rules.pads):
            continue
        count = len(batch) + 1
        padded = count * max(new, other.new)
        if count * max(kept, other.kept) > rules.logits:
            continue
        if padded > rules.tokens or count * max(longest, len(other.ids)) > rules.kv_tokens:
            continue
        if padded - needed - other.new > max(_FREE_PADDING, needed // 4):
            continue
        if rules.shares and (prefix := other.unshared) is not None:
            if prefix in started:
                continue
            started.add(prefix)
        batch.append(other)
        new, longest, needed = max(new, other.new), max(longest, len(other.ids)), needed + other.new
        kept = max(kept, other.kept)
    return batch


def _by_likeness(first: Candidate, others: Sequence[Candidate]) -> list[Candidate]:
    """Ordered by how much padding they would cost; the older of two equal ones comes first."""
    new, length = first.new, len(first.ids)
    return sorted(others, key=lambda other: (abs(other.new - new), abs(len(other.ids) - length)))


class BatchLimit:
    """Prompts that run together: halved when memory runs out, and slowly given back.

    Attributes:
        rows: the limit now.
    """

    def __init__(self, most: int) -> None:
        self.rows = most
        self._most = most
        self._full_steps = 0

    def too_large(self, rows: int) -> None:
        """So many did not fit."""
        self.rows = max(1, rows // 2)
        self._full_steps = 0

    def fitted(self, rows: int) -> None:
        """So many did fit."""
        if rows < self.rows or self.rows == self._most:
            return
        self._full_steps += 1
        if self._full_steps == _STEPS_TO_GROW:
            self.rows = min(self._most, self.rows * 2)
            self._full_steps = 0
