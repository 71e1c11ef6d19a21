"""Which of the waiting prompts run together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmpool.protocol.prompt import decode_ids
from lmpool.workers.backend.contract import BackendJob
from lmpool.workers.backends.hf.forward import new_tokens


@dataclass(slots=True)
class Waiting:
    """What is left to do for one job.

    A long prompt is computed a part at a time, so that others go between, and its tokens are scored so too, for the
    logits of all positions at once would take too much memory; the keys and values of one part serve the next.

    Attributes:
        ids: the prompt.
        next: position of the next token to score; 0 when the row is wanted.
        fresh: nothing that is kept of other prompts may be used.
        adapter: "name@revision", or "".
        reached: up to which token the KV pool has been filled by parts for which no logits are wanted.
        computed: tokens that these parts have computed.
        root: of a long fresh prompt in the KV pool, where nobody else finds it; None before its first part.
        scores: of the tokens that have been scored.
    """

    ids: list[int]
    next: int = 0
    fresh: bool = False
    adapter: str = ""
    reached: int = 0
    computed: int = 0
    root: int | None = None
    scores: list[NDArray[np.float32]] = field(default_factory=list)

    @classmethod
    def of(cls, job: BackendJob) -> Waiting:
        """What is to be done for a job."""
        return cls(decode_ids(job.ids).tolist(), job.score_from, job.fresh, job.adapter)

    @property
    def kind(self) -> str:
        """Jobs of one kind can run together."""
        return "score" if self.next else "fresh" if self.fresh else "row"

    def part(self, most: int, horizon: int) -> tuple[list[int], int]:
        """What to run next: token ids, and of how many of the last ones the logits are wanted.

        Args:
            most: so many at most.
            horizon: what is longer gives its prefixes other logits than they have alone, so a part does not cross it.
        """
        if not self.next:
            return self.ids, 1
        end = min(len(self.ids), self.next + most)
        if self.next <= horizon:
            end = min(end, horizon + 1)
        return self.ids[: end - 1], end - self.next

    def targets(self, kept: int) -> list[int]:
        """The tokens that the logits of a part predict."""
        return self.ids[self.next : self.next + kept]

    def add(self, scores: NDArray[np.float32]) -> NDArray[np.float32] | None:
        """Take the scores of a part; returns those of all tokens when these were the last."""
        self.scores.append(scores)
        self.next += len(scores)
        return np.concatenate(self.scores) if self.next == len(self.ids) else None


_FREE_PADDING = 64
"""Tokens of padding that cost less than the extra forward that would avoid them."""

_SHARED = 32
"""From so many uncached tokens in common on, computing them once is worth a forward of its own."""

_STEPS_TO_GROW = 32

_MUCH = 4
"""A prompt with fewer tokens by this factor may go before one that came earlier."""

PART = "part"
"""The kind of what only fills the KV pool, for the next part of the same prompt."""


class Candidate(NamedTuple):
    """A waiting prompt.

    Attributes:
        digest: its name.
        ids: its token ids.
        path: the KV pool's slots of its held prefix.
        kept: of how many of its last tokens the logits are wanted.
        kind: only prompts of one kind run together, and of the kind "part", for which no logits are wanted, one alone.
        adapter: only prompts of one adapter run together.
        root: where the path begins in the KV pool, None if that is not to be used; only prompts of one run together.
        later: tokens of the prompt that are left for further steps.
        begun: True if a step has computed a part of the prompt.
    """

    digest: bytes
    ids: list[int]
    path: list[int]
    kept: int = 1
    kind: str = ""
    adapter: str = ""
    root: int | None = None
    later: int = 0
    begun: bool = False

    @property
    def new(self) -> int:
        """Tokens that must be computed."""
        return new_tokens(len(self.ids), len(self.path), self.kept)

    @property
    def company(self) -> tuple[str, str, int | None]:
        """What prompts that run together have in common."""
        return self.kind, self.adapter, self.root

    @property
    def left(self) -> int:
        """Tokens that must be computed until the prompt is answered."""
        return self.new + self.later

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
        chunk: most tokens of one prompt computed in a step, where its keys and values can be kept for the next one.
        shares: True if a prefix that several prompts have in common is better computed once, before them.
    """

    tokens: int
    logits: int
    kv_tokens: int
    pads: bool
    horizon: int
    chunk: int
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
    if len(first.ids) > rules.horizon or first.kind == PART:
        return batch
    started = {first.unshared}
    new, longest, needed, kept = first.new, len(first.ids), first.new, first.kept
    alike = [one for one in waiting if one is not first and one.company == first.company]
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


def choose_shorter(
    batch: Sequence[Candidate], waiting: Sequence[Candidate], rows: int, rules: BatchRules
) -> list[Candidate]:
    """The batch that goes before one that takes long: the shortest prompt and those that go well with it.

    Whoever calls this for every second step at most lets no prompt starve: each of the others is led by the oldest.

    Args:
        batch: what `choose` returned.
        waiting: as for `choose`.
        rows: as for `choose`.
        rules: as for `choose`; the batch computes `rules.chunk` tokens at most.

    Returns:
        nothing if `batch` does not take long, or nothing that waits is much shorter. The rest of a prompt takes long
        however short it is: who waits for it has waited for the part before.
    """
    first = batch[0]
    if not first.begun and max(first.left, len(batch) * max(one.new for one in batch)) <= rules.chunk:
        return []
    shortest = min(waiting, key=lambda one: one.left)
    if _MUCH * shortest.left > first.left:
        return []
    return choose([shortest, *waiting], rows, rules._replace(tokens=min(rules.tokens, rules.chunk)))


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
