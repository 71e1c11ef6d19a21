"""A process with genlm-backend's `AsyncTransformer`: `python -m benchmarks.peers.genlm_peer MODEL`.

The program runs in the environment of the compared projects (peers), so it does not import lmpool.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

import torch
from genlm.backend.llm.hf import AsyncTransformer
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.harness.line_protocol import serve

Ids = list[int]

_BATCH = 64  # Prompts per forward of AsyncTransformer.
_TIMEOUT_S = 0.005  # Seconds for which AsyncTransformer collects prompts.


class Peer:
    """Handlers of the benchmark's requests, which return timings and start with empty caches."""

    def __init__(self, model: str) -> None:
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(model)
        self._lm = AsyncTransformer(loaded, tokenizer, batch_size=_BATCH, timeout=_TIMEOUT_S)

    async def together(self, prompts: list[Ids]) -> dict[str, Any]:
        """Seconds to compute the rows of prompts all at once, and the first entries of the last row."""
        self._lm.clear_cache()
        start = time.perf_counter()
        rows = await asyncio.gather(*[self._lm.next_token_logprobs(ids) for ids in prompts])
        return {"seconds": time.perf_counter() - start, "probe": _probe(rows[-1])}

    async def extend(self, shared: Ids, tokens: list[Ids], cache_kv: bool) -> dict[str, Any]:
        """Like `Bursts.extend` in `compare_client.py`; `cache_kv` caches the shared prompt before the clock starts."""
        self._lm.clear_cache()
        if cache_kv:
            self._lm.cache_kv(shared)
        start = time.perf_counter()
        for length in range(len(tokens[0])):
            rows = await asyncio.gather(*[self._lm.next_token_logprobs(shared + suffix[:length]) for suffix in tokens])
        return {"seconds": time.perf_counter() - start, "probe": _probe(rows[-1])}


def _probe(row: torch.Tensor) -> list[float]:
    return [float(value) for value in row[:8]]


async def main() -> None:
    """Respond to requests on stdin until stdin ends."""
    peer = Peer(sys.argv[1])
    await serve({handler.__name__: handler for handler in (peer.together, peer.extend)})


if __name__ == "__main__":
    torch.set_num_threads(os.cpu_count() or 1)
    asyncio.run(main())
