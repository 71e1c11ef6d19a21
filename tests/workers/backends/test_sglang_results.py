"""The backend of SGLang passes on only results of the jobs that it holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from lmpool.protocol.row import Encoding, RowBlock
from lmpool.workers.backends.row_encoder import RowEncoder
from lmpool.workers.backends.sglang.backend import SglangBackend
from lmpool.workers.execution.contract import BackendJob, BackendStats

V = 8
DIGEST, OTHER = b"d" * 16, b"o" * 16


def test_an_aborted_continuation_gives_no_row_to_one_that_was_requested_again() -> None:
    """SGLang ends an aborted request that is in the running forward. Here the aborted one had drawn two tokens."""
    backend = SglangBackend.__new__(SglangBackend)
    backend._held, backend._stats = {}, BackendStats()
    backend._encoder = RowEncoder(torch.float32, lossy=False)
    logits, batches = torch.randn(3, V), list[Any]()
    backend._engine = cast(Any, SimpleNamespace(submit=lambda jobs: None, drop=lambda digests: None))
    backend._engine.results = lambda: [batches.pop(0)]  # type: ignore[method-assign]
    backend.submit([BackendJob(DIGEST, bytes(12))])
    backend.abort([DIGEST])
    backend.submit([BackendJob(DIGEST, bytes(4)), BackendJob(OTHER, bytes(8))])
    for prompts, rows in ([(DIGEST, 3), (OTHER, 2)], logits[:2]), ([(DIGEST, 1)], logits[2:]):
        batches.append(
            SimpleNamespace(prompts=prompts, logits=rows, computed=None, tokens=0, reused=0, failures={}, positions={})
        )
    for digest, row in (OTHER, logits[1]), (DIGEST, logits[2]):
        (block,) = backend.step().blocks
        assert block.digests == [digest]
        expected = torch.log_softmax(row, 0).numpy()[None]
        assert block.encode(0) == RowBlock([digest], expected, None, Encoding.F32).encode(0)
