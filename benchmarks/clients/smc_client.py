"""A process that runs SMC with genlm-control, on a pool or on genlm-backend.

`python -m benchmarks.clients.smc_client MODEL` without `--redis` runs in the peers' environment, where it does not
import lmpool.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from typing import Any

import numpy as np
import torch
from genlm.control import AWRS, BoolFSA, PromptedLLM

from benchmarks.harness.line_protocol import serve

_BATCH = 64  # Prompts per forward of AsyncTransformer.
_TIMEOUT_S = 0.005  # Seconds for which AsyncTransformer collects prompts.
# Match any number of words and commas, so that no particle ends before the last step.
_PATTERN = r"( [a-z]+,?)+"


class SmcClient:
    """Runs SMC on an `AsyncLM` of genlm-backend or on a `PooledLM`, and returns timings."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._prompted = PromptedLLM(model)
        self._condition = BoolFSA.from_regex(_PATTERN).coerce(self._prompted, f=b"".join)

    async def smc(self, prompt: str, seed: int, particles: int, steps: int) -> dict[str, Any]:
        """Seconds of one run with initially empty caches, and the texts of its particles."""
        self._model.clear_cache()
        np.random.seed(seed)
        torch.manual_seed(seed)
        self._prompted.prompt_ids = self._model.tokenizer.encode(prompt)
        start = time.perf_counter()
        sampler = AWRS(self._prompted, self._condition, seed=seed)
        sequences = await sampler.smc(n_particles=particles, ess_threshold=0.5, max_tokens=steps)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "texts": [b"".join(map(_bytes, tokens)).hex() for tokens, _ in sequences]}


def _bytes(token: Any) -> bytes:
    return (
        bytes(token) if isinstance(token, bytes) else b""
    )  # The end-of-text token is an object of genlm without bytes.


def _load(model: str, redis: str | None) -> Any:
    if redis is not None:
        from lmpool.producer.genlm import PooledLM

        return PooledLM.from_name(model, redis=redis)
    from genlm.backend.llm.hf import AsyncTransformer

    torch.set_num_threads(os.cpu_count() or 1)
    options = {"torch_dtype": torch.float32, "device_map": "cpu"}
    return AsyncTransformer.from_name(model, hf_opts=options, batch_size=_BATCH, timeout=_TIMEOUT_S)


async def main() -> None:
    """Respond to requests on stdin until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--redis")
    given = parser.parse_args()
    client = SmcClient(_load(given.model, given.redis))
    await serve({"smc": client.smc})


if __name__ == "__main__":
    asyncio.run(main())
