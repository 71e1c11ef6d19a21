"""The backend of SGLang passes on only results of the jobs that it holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from lmpool.protocol.row import Encoding, RowBlock
from lmpool.workers.backends.row_encoder import RowEncoder
from lmpool.workers.backends.sglang.backend import SglangBackend
from lmpool.workers.execution.contract import BackendJob, BackendStats

V = 8
DIGEST, OTHER = b"d" * 16, b"o" * 16


def test_an_aborted_continuation_gives_no_result_to_one_that_was_requested_again() -> None:
    """SGLang ends an aborted request that is in the running forward. The worker may submit the same object again."""
    backend = SglangBackend.__new__(SglangBackend)
    backend._held, backend._stats = {}, BackendStats()
    backend._encoder = RowEncoder(torch.float32, lossy=False)
    logits, batches, submitted = torch.randn(3, V), list[Any](), list[BackendJob]()
    backend._engine = cast(Any, SimpleNamespace(submit=submitted.extend, drop=lambda digests: None))
    backend._engine.results = lambda: [batches.pop(0)]  # type: ignore[method-assign]
    again = BackendJob(DIGEST, bytes(8))
    for jobs in [again], [again, BackendJob(OTHER, bytes(8))]:
        backend.abort([DIGEST])
        backend.submit(jobs)
    aborted, held, other = submitted
    again.ids += bytes(4)  # The worker adds a token that it has drawn.
    assert held.ids == bytes(8)
    found = {"failures": {aborted: "refused"}, "positions": {aborted: np.zeros(1, np.float32)}}
    for prompts, rows, more in ([aborted, other], logits[:2], found), ([held], logits[2:], {}):
        batch = {"prompts": prompts, "logits": rows, "computed": None, "tokens": 0, "reused": 0}
        batches.append(SimpleNamespace(**{"failures": {}, "positions": {}, **batch, **more}))
    for digest, row in (OTHER, logits[1]), (DIGEST, logits[2]):
        finished = backend.step()
        assert (finished.failures, finished.answers) == ({}, None)
        (block,) = finished.blocks
        assert block.digests == [digest]
        expected = torch.log_softmax(row, 0).numpy()[None]
        assert block.encode(0) == RowBlock([digest], expected, None, Encoding.F32).encode(0)
