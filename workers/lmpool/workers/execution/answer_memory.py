"""Limits the memory of large answers: prompts wait in the worker while the answers of other prompts fill it."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence

from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.row import width_of
from lmpool.workers.execution.in_flight import InFlightPrompt

MAX_ANSWER_BYTES = 256 * 2**20
"""Max bytes of large answers that are not published yet, computed or not; a single answer may be larger."""

# Max bytes of a small answer, which is not counted: a worker holds only a few batches of prompts.
_SMALL_ANSWER_BYTES = 64 * 2**10
# Bytes of a number in an answer (float32).
_NUMBER_BYTES = 4


class AnswerMemory:
    """Bounds the memory of large answers: prompts wait while other answers fill it. Used by the event loop.

    Rows need no bound: a worker holds a few batches of prompts, and all rows have one size. But an answer of values of
    positions, or of the head, may take 8 MiB. Prompts with small answers never wait.

    Args:
        info: the backend's info.
    """

    def __init__(self, info: ModelInfo) -> None:
        self._info = info
        # Prompts that wait for memory, in order of arrival.
        self._waiting: deque[InFlightPrompt] = deque()
        self._waiting_bulk: deque[InFlightPrompt] = deque()
        self._taken_bytes = 0

    def admit(self, prompts: Sequence[InFlightPrompt]) -> list[InFlightPrompt]:
        """Return the prompts that the backend may have now; the other prompts wait."""
        ready = []
        for prompt in prompts:
            if self._bytes_of(prompt) <= _SMALL_ANSWER_BYTES:
                ready.append(prompt)
                continue
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
            is_bias = prompt.head.part == "bias"
            numbers = info.vocab_size if is_bias else prompt.head.count * width_of(info.hidden, info.dtype)
        return _NUMBER_BYTES * numbers
