"""Captures rows and values at positions inside vLLM's steps.

Rows and values are captured for both of vLLM's model runners, V1 and V2. A logits processor captures rows. V1 reports
changes of its batch by index (`update_state`); V2 gives each request a slot (`add_request`). Both runners pass float32
logits of whole batches to the processor before a token is sampled, also of partly computed prompts.

Values at positions are computed from a step's hidden states, just before vLLM computes its own `prompt_logprobs`. These
hidden states, the input of the model's `compute_logits`, are also returned themselves.
`prompt_logprobs` provide less: the top-k or all tokens sorted, and no last position. With LoRA, `prompt_logprobs` are
wrong or fail, because the output head expects one adapter per prompt (`punica_wrapper.sampler_indices`), not per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.v1.sample.logits_processor import LogitsProcessor as LogitsProcessorV1
from vllm.v1.sample.logits_processor import MoveDirectionality
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as LogitsProcessorV2

from lmpool.errors import WorkerError
from lmpool.protocol.row import RowBlock
from lmpool.workers.backends.row_encoder import MAX_LOGITS, Piece, PositionAnswers, RowEncoder
from lmpool.workers.backends.vllm.head import HeadPart, find_head
from lmpool.workers.execution.contract import BackendJob

KEY = "lmpool"
"""The entry of `SamplingParams.extra_args` that holds a prompt's digest."""


def _check_shape(logits: Tensor, count: int, vocab_size: int, unit: str) -> None:
    if logits.shape != (count, vocab_size):
        raise WorkerError(f"vLLM gave logits of shape {tuple(logits.shape)} for {count} {unit} and V = {vocab_size}")


class Captured:
    """Stores captured rows until the backend takes them. If a prompt has several rows, the last row is kept."""

    def __init__(self, vocab_size: int, encoder: RowEncoder) -> None:
        self.vocab_size = vocab_size
        self.encoder = encoder
        self.device = "cpu"
        # Digest of a prompt -> (block that contains its row, index of the row), or the reason of its failure.
        self._captured: dict[bytes, tuple[RowBlock, int] | str] = {}

    def store(self, blocks: Iterable[RowBlock], failures: Mapping[bytes, str]) -> None:
        """Store encoded rows, and the reason of each failure by digest."""
        self._captured.update(failures)
        for block in blocks:
            self._captured.update((digest, (block, row)) for row, digest in enumerate(block.digests))

    def add(self, digests: list[bytes], logits: Tensor) -> None:
        """Encode and store the rows of prompts from logits (n, V), float32; the caller may reuse the logits' memory."""
        _check_shape(logits, len(digests), self.vocab_size, "prompts")
        self.device = str(logits.device)
        block, failures = self.encoder.encode(digests, logits)
        self.store([] if block is None else [block], failures)

    def drop(self, digest: bytes) -> None:
        """Discard a prompt's row."""
        self._captured.pop(digest, None)

    def take(self, digests: list[bytes]) -> tuple[list[RowBlock], dict[bytes, str]]:
        """Remove the results of finished prompts; returns blocks of rows, and digest -> reason of each failure."""
        failures: dict[bytes, str] = {}
        blocks: dict[int, tuple[RowBlock, list[int]]] = {}
        for digest in digests:
            match self._captured.pop(digest, None):
                case None:
                    raise WorkerError("vLLM has ended a prompt without giving its logits")
                case str() as reason:
                    failures[digest] = reason
                case block, row:
                    blocks.setdefault(id(block), (block, []))[1].append(row)
        parts = []
        for block, rows in blocks.values():
            if len(rows) < len(block.digests):  # Copy the rows only if other rows of the block are not taken.
                log_z, taken = None if block.log_z is None else block.log_z[rows], [block.digests[row] for row in rows]
                block = RowBlock(taken, block.numbers[rows], log_z, block.encoding)
            parts.append(block)
        return parts, failures


class CaptureProcessor(LogitsProcessorV1, LogitsProcessorV2):  # type: ignore[misc]  # vllm has no types here
    """Passes logits from vLLM to `captured`. A subclass sets `captured`, because vLLM itself makes the instance."""

    captured: Captured
    wanted: set[bytes] | None = None
    """Digests of the only prompts whose rows to capture; None captures the rows of all prompts."""

    def __init__(self, config: Any, *more: Any) -> None:
        # vLLM's runner V1 passes two more arguments (device and is_pin_memory), V2 one (the state of its requests).
        self._requests: Any = more[0] if len(more) == 1 else None
        self._digests: dict[int, bytes] = {}

    def is_argmax_invariant(self) -> bool:
        """Return False although logits do not change: runner V1 skips invariant processors for greedy requests."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Update the batch; called by vLLM's runner V1: first requests were removed, then added, then moved."""
        if batch_update is None:
            return
        digests = self._digests
        for index in batch_update.removed:
            digests.pop(index, None)
        for index, params, _, _ in batch_update.added:
            self.add_request(index, params)
        for source, target, direction in batch_update.moved:
            moved, other = digests.pop(source, None), digests.pop(target, None)
            if moved is not None:
                digests[target] = moved
            if other is not None and direction == MoveDirectionality.SWAP:
                digests[source] = other

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Return whether to capture a request's row; called by runner V2 when the request gets the slot `req_idx`."""
        digest = (sampling_params.extra_args or {}).get(KEY)
        if digest is None:
            self._digests.pop(req_idx, None)
        else:
            self._digests[req_idx] = digest
        return digest is not None

    def apply(self, logits: Tensor, ctx: Any = None) -> Tensor:
        """Capture a step's logits, and return them unchanged."""
        if ctx is None:  # For runner V1, capture rows of incomplete prompts too; a later step replaces these rows.
            rows = sorted(index for index in self._digests if index < len(logits))
            digests = [self._digests[row] for row in rows]
        else:
            slots = ctx.idx_mapping_np
            complete = ctx.seq_lens_upper_bound_np >= self._requests.prefill_len.np[slots]
            rows = [row for row, slot in enumerate(slots.tolist()) if complete[row] and slot in self._digests]
            digests = [self._digests[int(slots[row])] for row in rows]
        if self.wanted is not None:
            kept = [(row, digest) for row, digest in zip(rows, digests, strict=True) if digest in self.wanted]
            rows, digests = [row for row, _ in kept], [digest for _, digest in kept]
        if rows:
            chosen = logits if rows == list(range(len(logits))) else logits[torch.tensor(rows, device=logits.device)]
            self.captured.add(digests, chosen)
        return logits


class PositionCapture(PositionAnswers):
    """Answers of positions queries, computed from the hidden states of the steps of a model runner in this process.

    Args:
        vocab_size: V.
        lora_id: function that returns vLLM's number of a job's adapter.
        is_output: whether the answers are used. A rank whose answers are not used computes the same logits as the other
            ranks, because the ranks compute them together, but no values.
    """

    def __init__(self, vocab_size: int, lora_id: Callable[[str], int], *, is_output: bool = True) -> None:
        super().__init__()
        self._vocab_size = vocab_size
        self._lora_id = lora_id
        self._is_output = is_output

    def attach(self, runner: Any) -> None:
        """Hook into a model runner, so that each step passes its hidden states to this object.

        Raises:
            AttributeError: this release of vLLM lacks the method to replace.
        """
        self._runner = runner
        modules = runner.get_model().modules()
        self._lora_head = next((module for module in modules if isinstance(module, LogitsProcessorWithLoRA)), None)
        worker = getattr(runner, "prompt_logprobs_worker", None)
        if worker is None:
            self._original = runner._get_prompt_logprobs_dict
            runner._get_prompt_logprobs_dict = self._after_step_of_v1
        else:
            self._original = worker.compute_prompt_logprobs
            worker.compute_prompt_logprobs = self._after_step_of_v2

    def find_head(self) -> HeadPart | str:
        """See `lmpool.workers.backends.vllm.head.find_head`; call `attach` first."""
        with self._one_adapter(""):
            return find_head(self._runner, self._runner.model.compute_logits)

    def open(self, request: str, job: BackendJob) -> None:
        """See `PositionAnswers.open`."""
        super().open(request, job)
        if not self._is_output:
            self._open[request].failure = "the output rank computes the values"

    def _after_step_of_v1(self, hidden: Tensor, scheduled: dict[str, int]) -> Any:
        runner, pieces = self._runner, list[Piece]()
        for name, count in scheduled.items() if self._open else ():
            at, place = runner.requests[name].num_computed_tokens, runner.input_batch.req_id_to_index[name]
            pieces += self.wanted(name, range(at, at + count), int(runner.query_start_loc.np[place]))
        self._add_all(hidden, pieces)
        return self._original(hidden, scheduled)

    def _after_step_of_v2(self, compute_logits: Any, hidden: Tensor, batch: Any, *more: Any) -> Any:
        pieces = list[Piece]()
        for place, name in enumerate(batch.req_ids if self._open else ()):
            at, count = int(batch.num_computed_prefill_tokens_np[place]), int(batch.num_scheduled_tokens[place])
            pieces += self.wanted(name, range(at, at + count), int(batch.query_start_loc_np[place]))
        self._add_all(hidden, pieces)
        return self._original(compute_logits, hidden, batch, *more)

    def _add_all(self, hidden: Tensor, wanted: Iterable[Piece]) -> None:
        """Add the values of a step's wanted positions to the answers: hidden states, or values computed from logits.

        Logits are computed for one adapter after another.
        """
        by_adapter: dict[str | None, list[Piece]] = {}  # The key None stands for all hidden states.
        for piece in wanted:
            adapter = None if self.wants_states(piece.request) else self._open[piece.request].job.adapter
            by_adapter.setdefault(adapter, []).append(piece)
        for adapter, found in by_adapter.items():
            pieces, rows = list[Piece](), list[int]()
            for piece in found:
                pieces.append(piece._replace(row=len(rows)))
                rows += range(piece.row, piece.row + len(piece.positions))
            taken = torch.tensor(rows, device=hidden.device)
            if adapter is None:
                self.add(pieces, 0, hidden[taken])
                continue
            with self._one_adapter(adapter):
                first = 0
                for part in torch.split(taken, max(1, MAX_LOGITS // self._vocab_size)):
                    self.add(pieces, first, self._logits(hidden[part]))
                    first += len(part)

    @contextmanager
    def _one_adapter(self, adapter: str) -> Iterator[None]:
        """In this context, `compute_logits` applies one adapter's part of the head, or none for the adapter ""."""
        if (layer := self._lora_head) is None:
            yield
            return
        slot = None
        if adapter:
            slot = self._runner.lora_manager._adapter_manager.lora_index_to_id.index(self._lora_id(adapter))
        original, layer.punica_wrapper = layer.punica_wrapper, _OneAdapter(slot)
        try:
            yield
        finally:
            layer.punica_wrapper = original

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._runner.model.compute_logits(hidden)
        _check_shape(logits, len(hidden), self._vocab_size, "positions")
        return logits


def compute_wanted_positions(scheduler: Any, positions: PositionAnswers) -> None:
    """Have vLLM's scheduler look up a prompt in the prefix cache only up to the first position whose value is missing.

    Raises:
        AttributeError: this release of vLLM lacks the method to replace.
    """
    manager = scheduler.kv_cache_manager
    find_cached = manager.get_computed_blocks

    def find_cached_before_wanted(request: Any) -> Any:
        first = positions.first_missing(request.request_id)
        # Include the first missing position: vLLM never takes the last token of a prompt from its cache.
        return find_cached(request if first is None else _Beginning(request, first + 1))

    manager.get_computed_blocks = find_cached_before_wanted


class _OneAdapter:
    """Applies one adapter to all rows, in place of vLLM's punica wrapper, which applies each prompt's adapter."""

    def __init__(self, slot: int | None) -> None:
        self._slot = slot

    def add_lora_logits(self, logits: Tensor, hidden: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
        """Add the adapter's part to logits (n, V or more). Shapes: `down` (slots, 1, r, d), `up` (slots, 1, V, r)."""
        # Skip adapters that do not change the output head: all their factors are zero.
        if self._slot is not None and bool(down[self._slot].any()):
            factors = down[self._slot, 0].float(), up[self._slot, 0].float()
            added = hidden.float() @ factors[0].T @ factors[1].T * scale
            logits[:, : added.shape[1]] += added.to(logits.dtype)
        return logits


class _Beginning:
    """Proxy of a request with a smaller `num_tokens`; all other attributes come from the request."""

    def __init__(self, request: Any, num_tokens: int) -> None:
        self._request = request
        self.num_tokens = num_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)
