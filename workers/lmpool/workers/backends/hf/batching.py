"""Chooses which waiting prompts run together in the next forward, and how many tokens of each prompt."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from lmpool.workers.backends.hf.forward import Path, new_tokens
from lmpool.workers.execution.yielding import PATIENCE_STEPS, QUIET_S

PREFILL = "prefill"
"""Kind of a chunk that returns no result, and only fills the KV pool for the next chunk of the same prompt."""

_ID_BYTES = 4  # Bytes of a token id (uint32).
_FREE_PADDING = 64  # Max padding tokens that every batch may have: this padding costs less time than a second forward.
# Min uncached tokens that prompts must share for one of them to run first, so that these tokens are computed once.
_MIN_SHARED = 32
_SHORTER_FACTOR = 4  # A prompt may run before an older prompt that has at least this many times as many tokens left.
# Number of full batches after which the limit on prompts per batch, halved when memory ran out, is doubled again.
_STEPS_TO_GROW = 32

MAX_BULK_STEP_S = 1.0
"""Max seconds of a bulk step while no interactive prompts arrive: a new interactive prompt may wait this long."""

MIN_BULK_TOKENS_CPU, MIN_BULK_TOKENS = 16, 256
"""Min limit on the tokens of a bulk step, on a CPU and on other devices: fewer tokens hardly take less time."""

# Factor by which the token limit of bulk steps grows after a bulk step that took less time than allowed.
_GROWTH = 1.25
_AVERAGED_STEPS = 8  # Number of interactive steps over which their duration is averaged if steps become longer.


@dataclass(slots=True)
class PromptChunk:
    """The tokens of a prompt that the next step computes; a short prompt has one chunk with all its tokens."""

    end: int  # Number of first tokens of the prompt up to the end of the chunk.
    path: Path  # Slots in the KV pool of the prompt's cached prefix.
    kept: int = 1  # Number of the chunk's last tokens whose logits are requested.
    kind: str = ""  # Kind of result. A batch has chunks of one kind; a `PREFILL` chunk runs alone.
    adapter: str = ""  # Adapter of the prompt, or "". A batch has prompts of one adapter.
    # Root of the path in the KV pool; None if the chunk does not use the pool. A batch has chunks of one root.
    root: int | None = None
    # Hash of the prefix that another prompt must have to share many tokens that the pool does not hold.
    shared: int | None = None
    later: int = 0  # Number of tokens of the prompt that are left for later steps.
    begun: bool = False  # Whether an earlier step has computed a chunk of the prompt.
    mark: int = 0  # State of `path`, from `PrefixSlots.mark`.
    max_new: int = 0  # Value of `BatchRules.chunk` for which this chunk was made; 0 after the chunk's step.
    # Number of tokens that the step must compute; `path` changes during the step, this number does not.
    new: int = field(init=False)

    def __post_init__(self) -> None:
        self.new = new_tokens(self.end, len(self.path), self.kept)

    @property
    def left(self) -> int:
        """Number of tokens that must still be computed before the prompt has a result."""
        return self.new + self.later


def shared_prefix(ids: bytes, end: int, held: int) -> int | None:
    """Hash of the `held` cached tokens and the next `_MIN_SHARED` tokens; None if fewer tokens follow before `end`."""
    size = held + _MIN_SHARED
    return hash(ids[: size * _ID_BYTES]) if end >= size else None


class BatchRules(NamedTuple):
    """Limits of a batch."""

    tokens: int  # Max tokens that a step computes, padding included.
    logits: int  # Max tokens whose logits a forward returns, padding included; no limit for hidden states.
    kv_tokens: int  # Max tokens whose keys and values a step uses, padding included.
    pads: bool  # Whether prompts of different lengths may run together.
    horizon: int  # Max tokens of a prompt that runs with others.
    chunk: int  # Max tokens of one prompt in a step, if the KV pool can keep them for the next step.
    shares: bool  # Whether one of the prompts that share an uncached prefix runs first, for the others to reuse it.


Chunks: TypeAlias = Mapping[bytes, PromptChunk]  # Digest of each prompt -> its next chunk.


def choose(waiting: Chunks, max_rows: int, rules: BatchRules, leader: bytes | None = None) -> dict[bytes, PromptChunk]:
    """The next batch of at most `max_rows` prompts: a leader, and the prompts that cost least padding next to it.

    The leader is by default the oldest prompt. The leader is first in the batch, and runs even if it exceeds the rules.
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
    # Sort by the padding that a prompt costs next to the leader. Of prompts with equal padding, the oldest is first.
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
            or (count * max(kept, chunk.kept) > rules.logits and first.kind != "states")
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


def choose_shorter(batch: Chunks, waiting: Chunks, max_rows: int, rules: BatchRules) -> dict[bytes, PromptChunk]:
    """A batch to run before the long batch `batch`: the shortest prompt and the prompts that fit best with it.

    The new batch computes at most `rules.chunk` tokens. It is empty if `batch` is short, or if no waiting prompt is
    much shorter. A prompt that has begun counts as long, even if few of its tokens are left.

    Call this function for at most every second step, so that no prompt starves: the oldest prompt leads other steps.
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
    """Limits the tokens of bulk steps, so that an interactive prompt never waits long for a bulk step to end.

    While interactive prompts arrive, a bulk step may take about as long as an interactive step, else at most
    `MAX_BULK_STEP_S`. The token limits begin with `chunk`, and adapt to the measured times of steps.
    """

    def __init__(self, chunk: int, least: int, most: int) -> None:
        self._least, self._most = least, most
        # Start with a low limit next to interactive prompts: on a slow device, first bulk steps could take too long.
        self._alone, self._shared = chunk, max(least, chunk // 8)
        self._interactive_s = MAX_BULK_STEP_S
        self._interactive_at = -math.inf
        self._steps = 0

    @property
    def tokens(self) -> int:
        """Max tokens of a bulk step now."""
        return self._alone if self._is_alone else self._shared

    @property
    def _is_alone(self) -> bool:
        return time.monotonic() - self._interactive_at > QUIET_S

    def is_turn(self, *, others_wait: bool) -> bool:
        """Whether the next step is for bulk prompts: no interactive prompt waits, or some interactive steps passed."""
        is_turn = not others_wait or self._steps == PATIENCE_STEPS
        self._steps = 0 if is_turn else self._steps + 1
        return is_turn

    def interactive_step(self, seconds: float) -> None:
        """Record the duration of an interactive step."""
        # Lower the average at once and raise it slowly, because the first step may take many times as long as others.
        change = min(seconds, MAX_BULK_STEP_S) - self._interactive_s
        self._interactive_s += change if change < 0 else change / _AVERAGED_STEPS
        self._interactive_at = time.monotonic()

    def bulk_step(self, tokens: int, seconds: float) -> None:
        """Record the tokens and the duration of a bulk step, and change the limit."""
        if self._is_alone:
            self._alone = self._changed(self._alone, tokens, seconds / MAX_BULK_STEP_S)
        else:
            self._shared = self._changed(self._shared, tokens, seconds / self._interactive_s)

    def _changed(self, limit: int, tokens: int, excess: float) -> int:
        if excess > 1:
            return max(self._least, min(limit, int(tokens / min(excess, 2))))
        # Do not raise the limit after a step that was short only because few tokens waited.
        return min(self._most, int(limit * _GROWTH)) if 2 * tokens >= limit else limit


class BatchLimit:
    """Limit on the prompts in a batch: halved when memory runs out, and doubled again after many full steps.

    Attributes:
        rows: max prompts in a batch now.
    """

    def __init__(self, most: int) -> None:
        self.rows = self._most = most
        self._full_steps = 0

    def too_large(self, rows: int) -> None:
        """Record a batch that did not fit into memory."""
        self.rows, self._full_steps = max(1, rows // 2), 0

    def fitted(self, rows: int) -> None:
        """Record a batch that fit into memory."""
        if self.rows < self._most and rows >= self.rows:
            self._full_steps += 1
            if self._full_steps == _STEPS_TO_GROW:
                self.rows, self._full_steps = min(self._most, self.rows * 2), 0
