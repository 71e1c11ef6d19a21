"""Taking what is wanted of positions from the hidden states of a step, where vLLM takes logprobs of prompts itself.

What vLLM itself tells of a prompt's positions (`prompt_logprobs`) is less: the likeliest tokens only, or all of them
sorted, without the last position. With LoRA switched on it is wrong besides, or ends the engine: the head knows of an
adapter for each prompt of the batch (`punica_wrapper.sampler_indices`), and is then given their tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.lora.layers import LogitsProcessorWithLoRA

from lmpool.errors import WorkerError
from lmpool.workers.backends.positions import Piece, PositionAnswers
from lmpool.workers.execution.contract import BackendJob

_HELD_LOGITS = 1 << 25
"""Logits that are computed at once (128 MiB in float32)."""


class _Computed(NamedTuple):
    """What a step has computed of a prompt: the positions, and which of its hidden states is that of the first one."""

    request: str
    positions: range
    row: int


class PositionCapture:
    """Answers for positions, taken from the steps of an engine core in this process.

    Args:
        core: vLLM's engine core.
        vocab_size: V.

    Attributes:
        answers: of the requests that were opened.

    Raises:
        AttributeError: this release of vLLM keeps hidden states, or looks for prefixes, elsewhere; all is as it was.
    """

    def __init__(self, core: Any, vocab_size: int) -> None:
        self.answers = PositionAnswers()
        self._vocab_size = vocab_size
        self._lora_ids: dict[str, int] = {}  # Request -> vLLM's number of its adapter, or 0.
        self._runner = runner = core.model_executor.driver_worker.worker.model_runner
        modules = runner.get_model().modules()
        self._head = next((module for module in modules if isinstance(module, LogitsProcessorWithLoRA)), None)
        worker, manager = getattr(runner, "prompt_logprobs_worker", None), core.scheduler.kv_cache_manager
        self._cached = manager.get_computed_blocks
        if worker is None:
            self._then = runner._get_prompt_logprobs_dict
            runner._get_prompt_logprobs_dict = self._after_step_of_v1
        else:
            self._then = worker.compute_prompt_logprobs
            worker.compute_prompt_logprobs = self._after_step_of_v2
        manager.get_computed_blocks = self._cached_before_what_is_wanted

    def open(self, request: str, job: BackendJob, lora_id: int) -> None:
        """A request answers a job that wants something of positions; the adapter is vLLM's number of it, or 0."""
        self.answers.open(request, job)
        self._lora_ids[request] = lora_id

    def drop(self, request: str) -> None:
        """A request has ended or was taken back."""
        self.answers.drop(request)
        self._lora_ids.pop(request, None)

    def take(self, request: str) -> NDArray[np.float32] | str:
        """See `PositionAnswers.take`."""
        del self._lora_ids[request]
        return self.answers.take(request)

    def _cached_before_what_is_wanted(self, request: Any) -> Any:
        """What the prefix cache has of a prompt, up to the first position that must be computed."""
        first = self.answers.first_missing(request.request_id)
        # The last token of a prompt is always computed.
        return self._cached(request if first is None else _Beginning(request, first + 1))

    def _after_step_of_v1(self, hidden: Tensor, scheduled: dict[str, int]) -> Any:
        if self._lora_ids:
            self._take(hidden, self._computed_by_v1(scheduled))
        return self._then(hidden, scheduled)

    def _computed_by_v1(self, scheduled: dict[str, int]) -> Iterator[_Computed]:
        runner = self._runner
        for name, count in scheduled.items():
            if name in self.answers:
                at, place = runner.requests[name].num_computed_tokens, runner.input_batch.req_id_to_index[name]
                yield _Computed(name, range(at, at + count), int(runner.query_start_loc.np[place]))

    def _after_step_of_v2(self, compute_logits: Any, hidden: Tensor, batch: Any, *more: Any) -> Any:
        if self._lora_ids:
            self._take(hidden, self._computed_by_v2(batch))
        return self._then(compute_logits, hidden, batch, *more)

    def _computed_by_v2(self, batch: Any) -> Iterator[_Computed]:
        for place, name in enumerate(batch.req_ids):
            if name in self.answers:
                at, count = int(batch.num_computed_prefill_tokens_np[place]), int(batch.num_scheduled_tokens[place])
                yield _Computed(name, range(at, at + count), int(batch.query_start_loc_np[place]))

    def _take(self, hidden: Tensor, computed: Iterable[_Computed]) -> None:
        """Compute the logits of all wanted positions of a step, those of each adapter together, and take from them."""
        by_adapter: dict[int, list[Piece]] = {}
        for name, positions, row in computed:
            by_adapter.setdefault(self._lora_ids[name], []).extend(self.answers.wanted(name, positions, row))
        for lora_id, found in by_adapter.items():
            pieces: list[Piece] = []
            rows: list[int] = []
            for piece in found:
                pieces.append(piece._replace(row=len(rows)))
                rows += range(piece.row, piece.row + len(piece.positions))
            places = torch.tensor(rows, device=hidden.device)
            with self._one_adapter(lora_id):
                first = 0
                for some in torch.split(places, max(1, _HELD_LOGITS // self._vocab_size)) if rows else ():
                    self.answers.add(pieces, first, self._logits(hidden[some]))
                    first += len(some)

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._runner.model.compute_logits(hidden)
        if logits.shape != (len(hidden), self._vocab_size):
            raise WorkerError(
                f"vLLM has given logits of shape {tuple(logits.shape)} for {len(hidden)} positions and "
                f"V = {self._vocab_size}"
            )
        return logits

    @contextmanager
    def _one_adapter(self, lora_id: int) -> Iterator[None]:
        """Have the head apply one adapter to all it is given."""
        if self._head is None:
            yield
            return
        slots = self._runner.lora_manager._adapter_manager.lora_index_to_id
        whole = self._head.punica_wrapper
        self._head.punica_wrapper = _OneAdapter(slots.index(lora_id) if lora_id else None)
        try:
            yield
        finally:
            self._head.punica_wrapper = whole


class _OneAdapter:
    """In place of what applies to each row of a batch the adapter of its prompt."""

    def __init__(self, slot: int | None) -> None:
        self._slot = slot

    def add_lora_logits(self, logits: Tensor, hidden: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
        """Add to logits (n, V or more) what an adapter adds: down (slots, 1, r, d), up (slots, 1, V, r)."""
        # Of adapters that leave the head alone all is zero.
        if self._slot is not None and bool(down[self._slot].any()):
            factors = down[self._slot, 0].float(), up[self._slot, 0].float()
            added = hidden.float() @ factors[0].T @ factors[1].T * scale
            logits[:, : added.shape[1]] += added.to(logits.dtype)
        return logits


class _Beginning:
    """A request as if it were shorter; all else is the request's."""

    def __init__(self, request: Any, num_tokens: int) -> None:
        self._request = request
        self.num_tokens = num_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)
