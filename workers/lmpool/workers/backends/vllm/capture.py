"""Taking rows at the sampler: a logits processor of vLLM that is valid for both of its model runners.

The runner of before (V1) tells of changes of its batch by index (`update_state`), the new one (V2) gives each
request a slot (`add_request`). Both hand over float32 logits of whole batches, before anything is sampled, and
both do so for prompts too of which a part only has been computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor as LogitsProcessorV1
from vllm.v1.sample.logits_processor import MoveDirectionality
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as LogitsProcessorV2

from lmpool.errors import WorkerError
from lmpool.protocol.row import NewRows, RowBlock
from lmpool.workers.backends.row_encoder import RowEncoder

KEY = "lmpool"
"""The entry of `SamplingParams.extra_args` that carries a prompt's digest."""


class _CapturedRow(NamedTuple):
    """A row in the block with which it was captured."""

    block: RowBlock
    row: int


class Captured:
    """The rows that were captured, until they are taken; of several for one prompt the last counts.

    Args:
        vocab_size: V.
        encoder: makes blocks of logits.

    Attributes:
        device: where the last logits were.
    """

    def __init__(self, vocab_size: int, encoder: RowEncoder) -> None:
        self._vocab_size = vocab_size
        self._encoder = encoder
        self.device = "cpu"
        self._rows: dict[bytes, _CapturedRow] = {}
        self._failures: dict[bytes, str] = {}

    def write_to(self, new_rows: NewRows) -> None:
        """See `WritesInPlace.write_to`."""
        self._encoder.new_rows = new_rows

    def add(self, digests: list[bytes], logits: Tensor) -> None:
        """Keep a batch.

        Args:
            digests: the prompt of each row.
            logits: float32 tensor of shape (n, V); it may change afterwards.

        Raises:
            WorkerError: it has another shape.
        """
        if logits.shape != (len(digests), self._vocab_size):
            raise WorkerError(
                f"vLLM has given logits of shape {tuple(logits.shape)} for {len(digests)} prompts and "
                f"V = {self._vocab_size}"
            )
        self.device = str(logits.device)
        encoded = self._encoder.encode(digests, logits)
        for digest in digests:
            self._failures.pop(digest, None)
        self._failures.update(encoded.failures)
        if encoded.block is not None:
            for row, digest in enumerate(encoded.block.digests):
                self._rows[digest] = _CapturedRow(encoded.block, row)

    def drop(self, digest: bytes) -> None:
        """Forget a prompt's row."""
        self._rows.pop(digest, None)
        self._failures.pop(digest, None)

    def take(self, digests: list[bytes]) -> tuple[list[RowBlock], dict[bytes, str]]:
        """The rows of some prompts, in the blocks in which they were captured, and failures.

        Raises:
            WorkerError: one of them has no row.
        """
        failures = {digest: self._failures.pop(digest) for digest in digests if digest in self._failures}
        blocks: dict[int, tuple[RowBlock, list[int]]] = {}
        for digest in digests:
            if digest in failures:
                self._rows.pop(digest, None)
                continue
            captured = self._rows.pop(digest, None)
            if captured is None:
                raise WorkerError("vLLM has ended a prompt without giving its logits")
            blocks.setdefault(id(captured.block), (captured.block, []))[1].append(captured.row)
        return [_part(block, rows) for block, rows in blocks.values()], failures


def _part(block: RowBlock, rows: list[int]) -> RowBlock:
    """Some rows of a block; all of them are the block itself, without a copy."""
    if len(rows) == len(block.digests):
        return block
    log_z = None if block.log_z is None else block.log_z[rows]
    return RowBlock([block.digests[row] for row in rows], block.numbers[rows], log_z, block.encoding)


class CaptureProcessor(LogitsProcessorV1, LogitsProcessorV2):  # type: ignore[misc]  # vllm has no types here
    """Hands logits to `captured`, which a subclass sets: vLLM makes the instance itself, of a class it is given."""

    captured: Captured

    def __init__(self, config: Any, *more: Any) -> None:
        # V1 gives device and is_pin_memory, V2 the state of its requests.
        self._requests = more[0] if len(more) == 1 else None
        self._digests: dict[int, bytes] = {}

    def is_argmax_invariant(self) -> bool:
        """False, although it changes nothing: V1 leaves out those that say True for greedy requests."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """V1: requests have left the batch, joined it or moved in it, in this order."""
        if batch_update is None:
            return
        digests = self._digests
        for index in batch_update.removed:
            digests.pop(index, None)
        for index, params, _, _ in batch_update.added:
            self._set(index, params)
        for source, target, direction in batch_update.moved:
            moved, other = digests.pop(source, None), digests.pop(target, None)
            if moved is not None:
                digests[target] = moved
            if other is not None and direction == MoveDirectionality.SWAP:
                digests[source] = other

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """V2: a request has this slot now."""
        self._set(req_idx, sampling_params)
        return req_idx in self._digests

    def apply(self, logits: Tensor, ctx: Any = None) -> Tensor:
        """Capture a step's logits and return them as they are."""
        rows, digests = self._asked_v1(len(logits)) if ctx is None else self._asked_v2(ctx)
        if rows:
            chosen = logits if rows == list(range(len(logits))) else logits[torch.tensor(rows, device=logits.device)]
            self.captured.add(digests, chosen)
        return logits

    def _set(self, index: int, params: Any) -> None:
        digest = (params.extra_args or {}).get(KEY)
        if digest is None:
            self._digests.pop(index, None)
        else:
            self._digests[index] = digest

    def _asked_v1(self, size: int) -> tuple[list[int], list[bytes]]:
        # Prompts that are not complete are among them: their rows are replaced by those of a later step.
        rows = sorted(index for index in self._digests if index < size)
        return rows, [self._digests[row] for row in rows]

    def _asked_v2(self, ctx: Any) -> tuple[list[int], list[bytes]]:
        assert self._requests is not None
        slots = ctx.idx_mapping_np
        complete = ctx.seq_lens_upper_bound_np >= self._requests.prefill_len.np[slots]
        rows = [row for row, slot in enumerate(slots.tolist()) if complete[row] and slot in self._digests]
        return rows, [self._digests[int(slots[row])] for row in rows]
