"""Taking what is wanted of positions where SGLang computes the logits of prompts' tokens for logprobs of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from sglang.srt.layers.logits_processor import LogitsProcessor
from torch import Tensor

from lmpool.workers.backends.positions import Piece, PositionAnswers


def tells_positions(scheduler: Any) -> bool:
    """Whether the model that a scheduler runs computes logits where they can be taken."""
    return bool(_processors_of(scheduler))


class PositionTap:
    """Adds to answers what the forwards of a scheduler tell of positions. All of it happens in the scheduler's thread.

    Requests must want logprobs of their own tokens (`return_logprob`) from the first wanted position on: SGLang then
    reads its radix cache up to there, and computes the logits of what follows, some rows at a time.

    Args:
        scheduler: SGLang's.
        answers: of the requests whose positions are wanted.
    """

    def __init__(self, scheduler: Any, answers: PositionAnswers) -> None:
        self._answers = answers
        self._batch: Any = None
        self._run = scheduler.run_batch
        scheduler.run_batch = self._run_noted
        for processor in _processors_of(scheduler):
            processor.forward = partial(self._forward, processor.forward)
            # Memory of CUDA graphs has room for what SGLang does with the logits, not for what is done here.
            processor._can_borrow_logprob_memory = _never

    def _run_noted(self, batch: Any, *more: Any, **named: Any) -> Any:
        self._batch = batch
        try:
            return self._run(batch, *more, **named)
        finally:
            self._batch = None  # It holds memory.

    def _forward(self, forward: Callable[..., Any], **named: Any) -> Any:
        """In place of the processor's own: the same, but for a look at the logits."""
        compute, pieces, first = named["get_logits_fn"], self._wanted(named["token_to_seq_idx"]), 0

        def compute_and_take(states: Tensor, *more: Any, **options: Any) -> Tensor:
            nonlocal first
            logits: Tensor = compute(states, *more, **options)
            self._answers.add(pieces, first, logits)
            first += len(states)
            return logits

        return forward(**{**named, "get_logits_fn": compute_and_take})

    def _wanted(self, places: Sequence[int]) -> list[Piece]:
        """What is wanted of a forward's rows, the last ones of each prompt, of which is told whose they are."""
        batch, pieces, row = self._batch, list[Piece](), 0
        for place, rows in groupby(places):
            count, end = len(list(rows)), batch.prefix_lens[place] + batch.extend_lens[place]
            pieces += self._answers.wanted(batch.reqs[place].rid, range(end - count, end), row)
            row += count
        return pieces


def _processors_of(scheduler: Any) -> list[Any]:
    """What computes log-probabilities of prompts' tokens from logits."""
    modules = scheduler.tp_worker.model_runner.model.modules()
    return [module.input_logprob_processor for module in modules if isinstance(module, LogitsProcessor)]


def _never(*_: Any, **__: Any) -> bool:
    return False
