"""Which waiting prompts run together in one forward, and how many tokens of each."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from lmpool.workers.backends.hf.forward import Path, new_tokens
from lmpool.workers.execution.yielding import PATIENCE_STEPS, QUIET_S

PREFILL = "prefill"
"""Kind of a chunk that only fills the KV pool for the next chunk of the same prompt."""

# Bytes of a token id (uint32).
_ID_BYTES = 4
# Padding tokens that cost less than the extra forward that would avoid them.
_FREE_PADDING = 64
# Uncached tokens that prompts share from which on computing them once is worth a forward of its own.
_MIN_SHARED = 32
# A prompt may go before an older one that has this many times as many tokens left.
_SHORTER_FACTOR = 4
# Full steps after which a limit on prompts per batch, halved for lack of memory, is doubled again.
_STEPS_TO_GROW = 32

MAX_BULK_STEP_S = 1.0
"""Max seconds of a bulk step without interactive clients: the first interactive prompt waits for that."""

MIN_BULK_TOKENS_CPU, MIN_BULK_TOKENS = 16, 256
"""Min tokens of a bulk step, on a CPU and elsewhere: fewer tokens hardly take less time."""

# Factor by which the tokens of bulk steps grow while these are too short.
_GROWTH = 1.25
# Interactive steps over which their seconds are averaged when they become longer.
_AVERAGED_STEPS = 8


@dataclass(slots=True)
class PromptChunk:
    """The tokens of a prompt that the next step computes: all the rest of a short prompt.

    Attributes:
        end: token of the prompt at which the chunk ends.
        path: the KV pool's slots of the prompt's held prefix.
        kept: number of last tokens whose logits are requested.
        kind: only chunks of one kind run together, and `PREFILL` alone.
        adapter: only prompts of one adapter run together.
        root: where the path begins in the KV pool; None without the pool. Only prompts of one root run together.
        shared: hash of the prefix that another prompt must have to share many tokens that are not held.
        later: tokens of the prompt that are left for further steps.
        begun: a step has computed another chunk of the prompt before.
        mark: state of the path (`PrefixSlots.mark`).
        max_new: max tokens of a step for which the chunk was made; 0 after the step.
        new: tokens that must be computed. `path` grows during the step, `new` does not change.
    """

    end: int
    path: Path
    kept: int = 1
    kind: str = ""
    adapter: str = ""
    root: int | None = None
    shared: int | None = None
    later: int = 0
    begun: bool = False
    mark: int = 0
    max_new: int = 0
    new: int = field(init=False)

    def __post_init__(self) -> None:
        self.new = new_tokens(self.end, len(self.path), self.kept)

    @property
    def left(self) -> int:
        """Tokens that must be computed until the prompt has a result."""
        return self.new + self.later


def shared_prefix(ids: bytes, end: int, held: int) -> int | None:
    """Hash of a prompt's prefix up to `_MIN_SHARED` tokens after the held ones; None if it has fewer up to `end`."""
    size = held + _MIN_SHARED
    return hash(ids[: size * _ID_BYTES]) if end >= size else None


class BatchRules(NamedTuple):
    """Limits of a batch.

    Attributes:
        tokens: max tokens computed, padding included.
        logits: max tokens whose logits are requested, padding included.
        kv_tokens: max tokens whose keys and values are held at once, padding included.
        pads: prompts of different lengths may run together.
        horizon: longer prompts run alone.
        chunk: max tokens of one prompt in a step, if the KV pool can keep them for the next step.
        shares: a prefix that several prompts share is computed once, before them.
    """

    tokens: int
    logits: int
    kv_tokens: int
    pads: bool
    horizon: int
    chunk: int
    shares: bool


def choose(
    waiting: Mapping[bytes, PromptChunk], max_rows: int, rules: BatchRules, leader: bytes | None = None
) -> dict[bytes, PromptChunk]:
    """The next batch, of at most `max_rows` prompts: the oldest, or another leader, and the ones that fit best with it.

    The leader comes first, and runs even if it alone exceeds the rules.
    """
    leader = next(iter(waiting)) if leader is None else leader
    first = waiting[leader]
    batch = {leader: first}
    if first.end > rules.horizon or first.kind == PREFILL:
        return batch
    started = {first.shared}
    new, longest, needed, kept = first.new, first.end, first.new, first.kept
    key = first.kind, first.adapter, first.root
    alike = [item for item in waiting.items() if (item[1].kind, item[1].adapter, item[1].root) == key]
    # By the padding that they cost; of two equal ones the older first.
    alike.sort(key=lambda item: (abs(item[1].new - first.new), abs(item[1].end - first.end)))
    for digest, chunk in alike:
        count = len(batch) + 1
        if count > max_rows:
            break
        padded = count * max(new, chunk.new)
        if (
            chunk is first
            or chunk.end > rules.horizon
            or (chunk.end != longest and not rules.pads)
            or count * max(kept, chunk.kept) > rules.logits
            or padded > rules.tokens
            or count * max(longest, chunk.end) > rules.kv_tokens
            or padded - needed - chunk.new > max(_FREE_PADDING, needed // 4)
            or (rules.shares and chunk.shared is not None and chunk.shared in started)
        ):
            continue
        started.add(chunk.shared)
        batch[digest] = chunk
        new, longest, needed = max(new, chunk.new), max(longest, chunk.end), needed + chunk.new
        kept = max(kept, chunk.kept)
    return batch


def choose_shorter(
    batch: Mapping[bytes, PromptChunk], waiting: Mapping[bytes, PromptChunk], max_rows: int, rules: BatchRules
) -> dict[bytes, PromptChunk]:
    """The batch that goes before `batch`, a long one: the shortest prompt and the prompts that fit best with it.

    It computes at most `rules.chunk` tokens. It is empty if `batch` is short, or no waiting prompt is much shorter. The
    rest of a long prompt counts as long: its client has waited for the chunks before.

    Call it for every second step at most: then no prompt starves, because the oldest prompt leads the other steps.
    """
    first = next(iter(batch.values()))
    max_new = max(chunk.new for chunk in batch.values())
    if not first.begun and max(first.left, len(batch) * max_new) <= rules.chunk:
        return {}
    shortest = min(waiting, key=lambda digest: waiting[digest].left)
    if _SHORTER_FACTOR * waiting[shortest].left > first.left:
        return {}
    return choose(waiting, max_rows, rules._replace(tokens=min(rules.tokens, rules.chunk)), leader=shortest)


class BulkLimit:
    """Limits the tokens of bulk steps, so that an interactive prompt that arrives waits for a short step.

    Next to interactive clients, a bulk step takes about as long as an interactive one; without them at most
    `MAX_BULK_STEP_S`. Both limits are found by measuring steps; `chunk` is the first one.
    """

    def __init__(self, chunk: int, least: int, most: int) -> None:
        self._least, self._most = least, most
        # The limit next to others starts low: the first steps would be long where a chunk is.
        self._alone, self._shared = chunk, max(least, chunk // 8)
        self._interactive_s = MAX_BULK_STEP_S
        self._interactive_at = -math.inf
        self._steps = 0

    @property
    def tokens(self) -> int:
        """The limit now."""
        return self._alone if self._is_alone else self._shared

    @property
    def _is_alone(self) -> bool:
        return time.monotonic() - self._interactive_at > QUIET_S

    def is_turn(self, *, others_wait: bool) -> bool:
        """Whether the next step is for bulk prompts: if no others wait, and after some steps of others."""
        is_turn = not others_wait or self._steps == PATIENCE_STEPS
        self._steps = 0 if is_turn else self._steps + 1
        return is_turn

    def interactive_step(self, seconds: float) -> None:
        """Record an interactive step."""
        # Down at once, up slowly: a first step may take many times as long.
        change = min(seconds, MAX_BULK_STEP_S) - self._interactive_s
        self._interactive_s += change if change < 0 else change / _AVERAGED_STEPS
        self._interactive_at = time.monotonic()

    def bulk_step(self, tokens: int, seconds: float) -> None:
        """Record a bulk step."""
        if self._is_alone:
            self._alone = self._changed(self._alone, tokens, seconds / MAX_BULK_STEP_S)
        else:
            self._shared = self._changed(self._shared, tokens, seconds / self._interactive_s)

    def _changed(self, limit: int, tokens: int, excess: float) -> int:
        if excess > 1:
            return max(self._least, min(limit, int(tokens / min(excess, 2))))
        # A step that was short because few tokens waited says nothing.
        return min(self._most, int(limit * _GROWTH)) if 2 * tokens >= limit else limit


class BatchLimit:
    """Limits the prompts in a batch: halved when memory runs out, and doubled again after many full steps.

    Attributes:
        rows: the limit now.
    """

    def __init__(self, most: int) -> None:
        self.rows = self._most = most
        self._full_steps = 0

    def too_large(self, rows: int) -> None:
        """Record a batch that did not fit."""
        self.rows, self._full_steps = max(1, rows // 2), 0

    def fitted(self, rows: int) -> None:
        """Record a batch that fit."""
        if self.rows < self._most and rows >= self.rows:
            self._full_steps += 1
            if self._full_steps == _STEPS_TO_GROW:
                self.rows, self._full_steps = min(self._most, self.rows * 2), 0
