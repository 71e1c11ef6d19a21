"""A client of vLLM's own server that wants whole rows: `python -m benchmarks.peers.vllm_http_peer URL V`."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import aiohttp
import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.lines import serve

Ids = list[int]

_AT_ONCE = 16


class Peer:
    """Answers the benchmark's requests with timings.

    Args:
        session: for HTTP.
        url: of the completions.
        vocab_size: V.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, vocab_size: int) -> None:
        self._session = session
        self._url = url
        self._vocab_size = vocab_size
        self._free = asyncio.Semaphore(_AT_ONCE)

    async def together(self, prompts: list[Ids]) -> dict[str, Any]:
        """As `Client.together` in `clients/producer.py`."""
        start = time.perf_counter()
        rows = await asyncio.gather(*[self._row(ids) for ids in prompts])
        return {"seconds": time.perf_counter() - start, "probe": [float(value) for value in rows[-1][:8]]}

    async def _row(self, ids: Ids) -> NDArray[np.float32]:
        asked = {"model": "smollm2", "prompt": ids, "max_tokens": 1, "temperature": 0.0, "logprobs": self._vocab_size}
        async with self._free, self._session.post(self._url, json=asked) as answer:
            text = await answer.text()
            if answer.status != 200:
                raise RuntimeError(f"the server answers {answer.status}: {text[:500]}")
        (top,) = json.loads(text)["choices"][0]["logprobs"]["top_logprobs"]
        row = np.full(self._vocab_size, np.nan, np.float32)
        for token, value in top.items():
            row[int(token.removeprefix("token_id:"))] = value
        if np.isnan(row).any():
            raise RuntimeError(f"{int(np.isnan(row).sum())} of {self._vocab_size} entries are missing")
        return row


async def main() -> None:
    """Serve until stdin ends."""
    url, vocab_size = sys.argv[1:]
    timeout = aiohttp.ClientTimeout(total=900)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        peer = Peer(session, url, int(vocab_size))
        await serve({"together": peer.together})


if __name__ == "__main__":
    asyncio.run(main())
