"""Holds prompts back: bulk prompts and continuations while rows are computed, large answers while memory is full."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import ProtocolError, WorkerError
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.picks import sample
from lmpool.protocol.query import Continuation, GenerateQuery, pack_continuation
from lmpool.protocol.row import Row, RowBlock, VectorBlock, check_row, width_of
from lmpool.workers.execution.contract import QUERY_ERRORS, Finished, failure_of
from lmpool.workers.execution.in_flight import DrawnTokens, InFlightPrompt

PATIENCE_STEPS = 16
"""Number of steps for which a bulk prompt waits before the backend gets the prompt next to interactive prompts."""

QUIET_S = 60.0
"""Seconds without an interactive prompt after which bulk clients count as alone; a person usually returns sooner."""

MAX_BULK_TOKENS = 2048
"""Max tokens of bulk prompts that the backend holds next to interactive clients; a single prompt may have more.

Engines compute prompts in order of submission, so an interactive prompt waits until these tokens are computed.
"""

# Bulk prompts that have waited for `PATIENCE_STEPS` get a step's slots divided by this number, at least one slot.
_LATE_SHARE = 8
_MAX_PARTS = 4  # Max parts into which a block of rows is split without a copy: each part is published separately.

MAX_ANSWER_BYTES = 256 * 2**20
"""Max bytes of large answers that are reserved or computed, but not published; a single answer may be larger."""

# Max bytes of a small answer, which is not counted: a worker holds only a few batches of prompts.
_SMALL_ANSWER_BYTES = 64 * 2**10
_NUMBER_BYTES = 4  # Bytes of a number in an answer (float32).


class YieldingPrompts:
    """Keeps prompts from the backend while rows can fill the backend's next step. Used by the backend's thread.

    Rows for interactive clients never wait here. Continuations of interactive clients are next: each step gets the
    oldest continuations, in the slots that rows leave free and in at least half of the batch. So the backend
    holds at most one batch of continuations, and a row waits for one such step. Bulk prompts are last. While no
    interactive client is active, the backend gets as many bulk prompts as it accepts, to pack its steps better.

    Args:
        batch: number of prompts in a full step.

    Attributes:
        continuations: the waiting continuations of interactive clients; the continuations that have begun are first.
        bulk: the waiting bulk prompts.
        interactive_at: monotonic time of the last interactive prompt.
    """

    def __init__(self, batch: int) -> None:
        self._batch, self._step, self.interactive_at = batch, 0, float("-inf")
        self.continuations: deque[InFlightPrompt] = deque()
        self.bulk: deque[InFlightPrompt] = deque()

    def keep(self, prompts: Sequence[InFlightPrompt]) -> list[InFlightPrompt]:
        """Keep the new prompts that yield to rows; return the other prompts, which the backend must get now."""
        rows, bulk_before = [], len(self.bulk)
        for prompt in prompts:
            if prompt.bulk:
                prompt.patient_until = self._step + PATIENCE_STEPS
                self.bulk.append(prompt)
            elif prompt.generate is None:
                rows.append(prompt)
            else:
                self.continuations.append(prompt)
        if len(self.bulk) - bulk_before < len(prompts):
            self.interactive_at = time.monotonic()
        return rows

    def keep_longer(self, prompts: Sequence[InFlightPrompt]) -> None:
        """Put continuations that have drawn a token in front of the other waiting prompts of their kind."""
        for prompt in reversed(prompts):
            if prompt.bulk:
                prompt.patient_until = self._step
                self.bulk.appendleft(prompt)
            else:
                self.interactive_at = time.monotonic()
                self.continuations.appendleft(prompt)

    def next(self, held: int, continuations: int, bulk_tokens: int, capacity: int) -> list[InFlightPrompt]:
        """The prompts that the backend must get before its next step.

        Args:
            held: number of prompts that the backend holds.
            continuations: number of continuations that the backend holds.
            bulk_tokens: number of tokens that the backend must still compute for the bulk prompts that it holds.
            capacity: number of prompts that the backend still accepts.
        """
        self._step += 1
        count = max(0, self._batch - held, max(1, self._batch // 2) - continuations)
        due = [self.continuations.popleft() for _ in range(min(count, len(self.continuations)))]
        if self.bulk:
            due += self._next_bulk(self._batch - held - len(due), bulk_tokens, capacity - len(due))
        return due

    def _next_bulk(self, free: int, tokens: int, capacity: int) -> list[InFlightPrompt]:
        is_alone = time.monotonic() - self.interactive_at > QUIET_S
        slots = max(free, capacity) if is_alone else free
        due: list[InFlightPrompt] = []
        for prompt in islice(self.bulk, max(slots, 1, self._batch // _LATE_SHARE)):
            if len(due) >= slots and prompt.patient_until > self._step:
                break
            size = count_new_tokens(prompt)
            # A prompt longer than the limit runs when the backend holds no other bulk prompt.
            if not is_alone and tokens and tokens + size > MAX_BULK_TOKENS:
                break
            tokens += size
            due.append(prompt)
        for _ in due:
            self.bulk.popleft()
        return due

    def promote(self, prompts: Collection[InFlightPrompt]) -> list[InFlightPrompt]:
        """Make bulk prompts interactive; return the prompts for rows, which the backend must get now."""
        self.interactive_at = time.monotonic()
        promoted = [prompt for prompt in self.bulk if prompt in prompts]
        self.bulk = deque(prompt for prompt in self.bulk if prompt not in prompts)
        self.continuations += [prompt for prompt in promoted if prompt.generate is not None]
        return [prompt for prompt in promoted if prompt.generate is None]

    def drop(self, prompts: Collection[InFlightPrompt]) -> None:
        """Drop prompts; ignore prompts that do not wait here."""
        self.continuations = deque(prompt for prompt in self.continuations if prompt not in prompts)
        self.bulk = deque(prompt for prompt in self.bulk if prompt not in prompts)


class AnswerMemory:
    """Bounds the memory of large answers: prompts wait while other answers fill it. Used by the event loop.

    Rows need no bound: a worker holds a few batches of prompts, and all rows have one size. But an answer of values of
    positions, or of the head, may take 8 MiB. Prompts with small answers never wait.

    Args:
        info: the backend's info.
    """

    def __init__(self, info: ModelInfo) -> None:
        self._info, self._taken_bytes = info, 0
        # Prompts that wait for memory, in order of arrival.
        self._waiting: deque[InFlightPrompt] = deque()
        self._waiting_bulk: deque[InFlightPrompt] = deque()

    def admit(self, prompts: Sequence[InFlightPrompt]) -> list[InFlightPrompt]:
        """Return the prompts that the backend may have now; the other prompts wait."""
        ready = []
        for prompt in prompts:
            if self._bytes_of(prompt) <= _SMALL_ANSWER_BYTES:
                ready.append(prompt)
            else:
                prompt.status = "waiting"
                (self._waiting_bulk if prompt.bulk else self._waiting).append(prompt)
        return ready + self._next()

    def free(self, prompts: Iterable[InFlightPrompt]) -> list[InFlightPrompt]:
        """Release the memory of answers that are published or dropped; return the prompts that may run now."""
        for prompt in prompts:
            if prompt.answer_bytes:
                self._taken_bytes -= prompt.answer_bytes
                prompt.answer_bytes = 0
        return self._next()

    def drop(self, prompts: Collection[InFlightPrompt]) -> list[InFlightPrompt]:
        """Drop prompts that no client waits for; return the prompts that may run now."""
        if any(prompt.status == "waiting" for prompt in prompts):
            self._waiting = deque(prompt for prompt in self._waiting if prompt not in prompts)
            self._waiting_bulk = deque(prompt for prompt in self._waiting_bulk if prompt not in prompts)
        return self.free(prompts)

    def promote(self, prompts: Collection[InFlightPrompt]) -> None:
        """Move bulk prompts that became interactive to the end of the waiting interactive prompts."""
        self._waiting += [prompt for prompt in self._waiting_bulk if prompt in prompts]
        self._waiting_bulk = deque(prompt for prompt in self._waiting_bulk if prompt not in prompts)

    def _next(self) -> list[InFlightPrompt]:
        """Admit waiting prompts whose answers fit now, bulk prompts last. A single answer of any size fits."""
        admitted: list[InFlightPrompt] = []
        while waiting := self._waiting or self._waiting_bulk:
            size = self._bytes_of(waiting[0])
            if self._taken_bytes and self._taken_bytes + size > MAX_ANSWER_BYTES:
                break
            prompt = waiting.popleft()
            prompt.answer_bytes, prompt.status = size, "pending"
            self._taken_bytes += size
            admitted.append(prompt)
        return admitted

    def _bytes_of(self, prompt: InFlightPrompt) -> int:
        """Bytes of a prompt's large answer; 0 for a row."""
        info, numbers = self._info, 0
        if prompt.positions is not None:
            numbers = len(prompt.span) * prompt.positions.width(info.vocab_size)
        elif prompt.generate is not None:
            numbers = 2 * prompt.generate.most
        elif prompt.head is not None:
            numbers = prompt.head.numbers(info.vocab_size, width_of(info.hidden, info.dtype))
        return _NUMBER_BYTES * numbers


# Functions for continuations


def count_new_tokens(prompt: InFlightPrompt) -> int:
    """Tokens that the backend must compute: one for a continuation that has begun, else the whole prompt."""
    return 1 if prompt.drawn is not None and prompt.drawn.tokens else len(prompt.ids) // 4


def begin(prompt: InFlightPrompt, query: GenerateQuery) -> None:
    """Start a continuation of a prompt, unless it has begun."""
    if prompt.drawn is None:
        ends = frozenset(stop for stop in query.stops if len(stop) == 4)
        prompt.drawn = DrawnTokens(ends, tuple(stop for stop in query.stops if len(stop) > 4))


def advance(finished: Finished, continuations: Mapping[bytes, InFlightPrompt]) -> tuple[Finished, list[InFlightPrompt]]:
    """Draw the next token of continuations from the rows of a step.

    Args:
        finished: the results of the step.
        continuations: digest -> continuation, for the continuations that have a result in this step.

    Returns:
        the results of other prompts and of ended continuations; the continuations that need another token.
    """
    blocks: list[RowBlock] = []
    answers: dict[bytes, NDArray[np.float32]] = {}
    failures = dict(finished.failures)
    longer: list[InFlightPrompt] = []
    for block in finished.blocks:
        others = [index for index, digest in enumerate(block.digests) if digest not in continuations]
        if len(others) == len(block.digests):
            blocks.append(block)
            continue
        for index, digest in enumerate(block.digests):
            if (prompt := continuations.get(digest)) is None:
                continue
            try:
                if (answer := _draw(prompt, block.row(index))) is None:
                    longer.append(prompt)
                else:
                    answers[digest] = answer
            except QUERY_ERRORS as error:
                failures[digest] = failure_of(error)
        blocks += _select(block, others)
    if finished.answers is not None:
        answers.update(zip(finished.answers.digests, finished.answers.vectors, strict=True))
    vectors = VectorBlock(list(answers), list(answers.values())) if answers else None
    return Finished(blocks, failures, vectors), longer


def _draw(prompt: InFlightPrompt, row: Row) -> NDArray[np.float32] | None:
    """Draw a token and append it to the prompt; return the whole continuation, encoded, if the token is its last."""
    query, drawn = prompt.generate, prompt.drawn
    assert query is not None
    assert drawn is not None
    try:
        check_row(row)
    except ProtocolError as error:
        raise WorkerError(f"the backend has returned something that is not a row: {error}") from error
    token = sample(row, query.draw(len(drawn.tokens)))
    encoded = token.to_bytes(4, "little")
    drawn.tokens.append(token)
    drawn.logprobs.append(row[token])
    prompt.ids += encoded
    # Compare stop sequences only with drawn tokens: the prompt itself may end with the start of a stop sequence.
    is_last = len(drawn.tokens) == query.most or encoded in drawn.ends
    if not is_last and not prompt.ids[-4 * len(drawn.tokens) :].endswith(drawn.stops):
        return None
    made = Continuation(np.array(drawn.tokens, np.int64), np.array(drawn.logprobs, np.float32))
    return pack_continuation(made, query.most)


def _select(block: RowBlock, rows: list[int]) -> list[RowBlock]:
    """Select rows of a block, in ascending order: without a copy if the rows form few ranges, else as one copy."""
    parts = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1) if rows else []
    if len(parts) > _MAX_PARTS:
        return [block.select(rows)]
    return [block.select(range(part[0], part[-1] + 1)) for part in parts]
