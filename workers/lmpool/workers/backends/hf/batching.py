"""Which of the waiting prompts run together in one forward, and how much of each."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmpool.workers.backends.hf.forward import new_tokens
from lmpool.workers.execution.yielding import PATIENCE_STEPS, QUIET_S

PREFILL = "prefill"
"""The kind of chunk that only fills the KV pool, for the next chunk of the same prompt."""

_ID_BYTES = 4

_FREE_PADDING = 64
"""Tokens of padding that cost less than the extra forward that would avoid them."""

_SHARED = 32
"""From so many uncached tokens in common on, computing them once is worth a forward of its own."""

_MUCH = 4
"""A prompt with fewer tokens by this factor may go before one that came earlier."""

_STEPS_TO_GROW = 32

MAX_BULK_STEP_S = 1.0
"""Seconds that a step of bulk prompts takes at most without interactive clients: the first one waits for that."""

MIN_BULK_TOKENS_CPU, MIN_BULK_TOKENS = 16, 256
"""Tokens of bulk prompts that a step computes at least, on a CPU and elsewhere: they take hardly longer than one."""

_GROWTH = 1.25
"""By how much the tokens of bulk steps grow that were too short."""

_LATEST_STEPS = 8
"""Steps of interactive prompts over which their length is averaged when they become longer."""


class Progress(NamedTuple):
    """How far a job has come that takes several steps.

    A long prompt is computed a chunk at a time, so that others go between, and what is wanted of its positions is taken
    so too, for the logits of all at once would take too much memory; the keys and values of one chunk serve the next.

    Attributes:
        reached: up to which token the KV pool has been filled by chunks for which no logits are wanted.
        computed: tokens that its chunks have computed, whatever is wanted of them.
        root: of a long fresh prompt in the KV pool, where nobody else finds it; None before its first chunk.
        parts: what is wanted of the positions that have been computed, an array a chunk: float32 (n,) or (n, width).
    """

    reached: int = 0
    computed: int = 0
    root: int | None = None
    parts: tuple[NDArray[np.float32], ...] = ()


class Chunk(NamedTuple):
    """What the next step computes of a prompt: all that is left of a short one.

    Attributes:
        end: tokens of the prompt up to where it goes.
        path: the KV pool's slots of the prompt's held prefix.
        kept: of how many of its last tokens the logits are wanted.
        kind: only chunks of one kind run together, and of `PREFILL`, for which no logits are wanted, one alone.
        adapter: only prompts of one adapter run together.
        root: where the path begins in the KV pool, None if that is not to be used; only prompts of one run together.
        shared: names what another prompt must begin with to share much that is not held (`shared_prefix`).
        later: tokens of the prompt that are left for further steps.
        begun: True if a step has computed a chunk of the prompt before.
    """

    end: int
    path: list[int]
    kept: int = 1
    kind: str = ""
    adapter: str = ""
    root: int | None = None
    shared: int | None = None
    later: int = 0
    begun: bool = False

    @property
    def new(self) -> int:
        """Tokens that must be computed."""
        return new_tokens(self.end, len(self.path), self.kept)

    @property
    def group(self) -> tuple[str, str, int | None]:
        """What prompts that run together have in common."""
        return self.kind, self.adapter, self.root

    @property
    def left(self) -> int:
        """Tokens that must be computed until the prompt is answered."""
        return self.new + self.later


def shared_prefix(ids: bytes, end: int, held: int) -> int | None:
    """The hash of a prompt's beginning up to where it has many tokens that are not held; None for short ones.

    Args:
        ids: the prompt's token ids as little-endian uint32 bytes.
        end: tokens up to which it is computed now.
        held: tokens among them whose keys and values are held.
    """
    size = held + _SHARED
    return hash(ids[: size * _ID_BYTES]) if end >= size else None


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

    def with_at_most(self, tokens: int) -> BatchRules:
        """The rules of batches that compute at most `tokens` tokens, of one prompt or several."""
        return self._replace(tokens=min(self.tokens, tokens), chunk=min(self.chunk, tokens))


def choose(
    waiting: Mapping[bytes, Chunk], rows: int, rules: BatchRules, leader: bytes | None = None
) -> dict[bytes, Chunk]:
    """The next batch: the oldest prompt, or another leader, and those that go well with it.

    Args:
        waiting: digest -> chunk, oldest first, at least one.
        rows: most prompts in the batch.
        rules: what the batch must keep to; the leader runs even if it alone breaks them.
        leader: the prompt that runs in any case; None for the oldest.

    Returns:
        digest -> chunk, the leader first.
    """
    if leader is None:
        leader = next(iter(waiting))
    first = waiting[leader]
    batch = {leader: first}
    if first.end > rules.horizon or first.kind == PREFILL:
        return batch
    started = {first.shared}
    new, longest, needed, kept = first.new, first.end, first.new, first.kept
    alike = [(digest, chunk) for digest, chunk in waiting.items() if chunk.group == first.group and digest != leader]
    # By how much padding they would cost; the older of two equal ones comes first.
    alike.sort(key=lambda item: (abs(item[1].new - first.new), abs(item[1].end - first.end)))
    for digest, chunk in alike:
        if len(batch) == rows:
            break
        if chunk.end > rules.horizon or (chunk.end != longest and not rules.pads):
            continue
        count = len(batch) + 1
        padded = count * max(new, chunk.new)
        if count * max(kept, chunk.kept) > rules.logits:
            continue
        if padded > rules.tokens or count * max(longest, chunk.end) > rules.kv_tokens:
            continue
        if padded - needed - chunk.new > max(_FREE_PADDING, needed // 4):
            continue
        if rules.shares and chunk.shared is not None:
            if chunk.shared in started:
                continue
            started.add(chunk.shared)
        batch[digest] = chunk
        new, longest, needed = max(new, chunk.new), max(longest, chunk.end), needed + chunk.new
        kept = max(kept, chunk.kept)
    return batch


def choose_shorter(
    batch: Mapping[bytes, Chunk], waiting: Mapping[bytes, Chunk], rows: int, rules: BatchRules
) -> dict[bytes, Chunk]:
    """The batch that goes before one that takes long: the shortest prompt and those that go well with it.

    Whoever calls this for every second step at most lets no prompt starve: each of the others is led by the oldest.

    Args:
        batch: what `choose` returned.
        waiting: as for `choose`.
        rows: as for `choose`.
        rules: as for `choose`; the batch computes `rules.chunk` tokens at most.

    Returns:
        nothing if `batch` does not take long, or nothing that waits is much shorter. The rest of a prompt takes long
        however short it is: who waits for it has waited for the chunk before.
    """
    first = next(iter(batch.values()))
    most_new = max(chunk.new for chunk in batch.values())
    if not first.begun and max(first.left, len(batch) * most_new) <= rules.chunk:
        return {}
    shortest = min(waiting, key=lambda digest: waiting[digest].left)
    if _MUCH * waiting[shortest].left > first.left:
        return {}
    return choose(waiting, rows, rules._replace(tokens=min(rules.tokens, rules.chunk)), leader=shortest)


class BulkLimit:
    """Tokens that a step computes of bulk prompts, so that an interactive prompt that arrives waits for a short step.

    Next to interactive clients, a step of bulk prompts takes about as long as one of theirs, and at most
    `MAX_BULK_STEP_S` where none has sent a prompt lately. Both limits are found by measuring steps.

    Args:
        chunk: tokens of a prompt that make a step worth its while.
        least: tokens of a step below which it would hardly take less time.
        most: most tokens of a step.
    """

    def __init__(self, chunk: int, least: int, most: int) -> None:
        self._least, self._most = least, most
        # Next to others it begins low: the first steps would take long where a chunk does.
        self._alone, self._beside = chunk, max(least, chunk // 8)
        self._interactive_s = MAX_BULK_STEP_S
        self._interactive_at = -math.inf
        self._steps = 0

    @property
    def tokens(self) -> int:
        """The limit now."""
        return self._beside if self._is_beside else self._alone

    @property
    def _is_beside(self) -> bool:
        return time.monotonic() - self._interactive_at <= QUIET_S

    def is_turn(self, *, others_wait: bool) -> bool:
        """Whether the next step is for bulk prompts that wait: if no others wait, and after some steps of others."""
        self._steps = self._steps + 1 if others_wait else 0
        if self._steps <= PATIENCE_STEPS and others_wait:
            return False
        self._steps = 0
        return True

    def interactive_step(self, seconds: float) -> None:
        """Note how long a step of interactive prompts took."""
        # Down at once, up slowly: a first step, which may take many times as long, must not set the pace.
        change = min(seconds, MAX_BULK_STEP_S) - self._interactive_s
        self._interactive_s += change if change < 0 else change / _LATEST_STEPS
        self._interactive_at = time.monotonic()

    def bulk_step(self, tokens: int, seconds: float) -> None:
        """Note how many tokens a step of bulk prompts computed, and how long that took."""
        if self._is_beside:
            self._beside = self._changed(self._beside, tokens, seconds / self._interactive_s)
        else:
            self._alone = self._changed(self._alone, tokens, seconds / MAX_BULK_STEP_S)

    def _changed(self, limit: int, tokens: int, excess: float) -> int:
        if excess > 1:
            return max(self._least, min(limit, int(tokens / min(excess, 2))))
        # A step that was short because little waits says nothing.
        return min(self._most, int(limit * _GROWTH)) if 2 * tokens >= limit else limit


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
