"""A client of vLLM's own server, or of a gateway: `python -m benchmarks.peers.vllm_http_peer URL V`.

The client requests whole rows, or the top-k tokens at every position of a text.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import aiohttp
import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.line_protocol import serve

Ids = list[int]

_CONCURRENCY = 16  # Requests in flight.


class Peer:
    """Handlers of the benchmark's requests, which return timings."""

    def __init__(self, session: aiohttp.ClientSession, url: str, vocab_size: int) -> None:
        self._session = session
        self._url = url
        self._vocab_size = vocab_size
        self._free = asyncio.Semaphore(_CONCURRENCY)

    async def together(self, prompts: list[Ids]) -> dict[str, Any]:
        """Seconds to request the rows of prompts all at once, and the first entries of the last row."""
        start = time.perf_counter()
        rows = await asyncio.gather(*[self._row(ids) for ids in prompts])
        return {"seconds": time.perf_counter() - start, "probe": [float(value) for value in rows[-1][:8]]}

    async def top_tokens(self, texts: list[Ids], top: int) -> dict[str, Any]:
        """Seconds for the top-k tokens at every position of texts, and the values at the last position."""
        start = time.perf_counter()
        found = await asyncio.gather(*[self._top_tokens(ids, top) for ids in texts])
        values, _ = found[-1]
        return {"seconds": time.perf_counter() - start, "probe": [float(value) for value in values[-1][:8]]}

    async def _row(self, ids: Ids) -> NDArray[np.float32]:
        (top,) = (await self._request(ids, logprobs=self._vocab_size))["logprobs"]["top_logprobs"]
        row = np.full(self._vocab_size, np.nan, np.float32)
        for token, value in _values(top):
            row[token] = value
        if np.isnan(row).any():
            raise RuntimeError(f"{int(np.isnan(row).sum())} of {self._vocab_size} entries are missing")
        return row

    async def _top_tokens(self, ids: Ids, top: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """The top-k tokens at every position, (n, top), from the response's prompt and from the generated token."""
        choice = await self._request(ids, prompt_logprobs=top, logprobs=top)
        values, tokens = np.empty((len(ids), top), np.float32), np.empty((len(ids), top), np.int64)
        # Skip entries whose rank exceeds `top`: vLLM also returns the prompt's own token, whatever its rank.
        for at, entries in enumerate(choice["prompt_logprobs"][1:]):
            for token, entry in entries.items():
                if entry["rank"] <= top:
                    values[at, entry["rank"] - 1], tokens[at, entry["rank"] - 1] = entry["logprob"], int(token)
        (last,) = choice["logprobs"]["top_logprobs"]
        for rank, (token, value) in enumerate(sorted(_values(last), key=lambda found: -found[1])[:top]):
            values[-1, rank], tokens[-1, rank] = value, token
        return values, tokens

    async def _request(self, ids: Ids, **wanted: int) -> dict[str, Any]:
        """The server's response for one token after a prompt."""
        request = {"model": "smollm2", "prompt": ids, "max_tokens": 1, "temperature": 0.0, **wanted}
        request["return_tokens_as_token_ids"] = True
        async with self._free, self._session.post(self._url, json=request) as response:
            text = await response.text()
            if response.status != 200:
                raise RuntimeError(f"the server responded with {response.status}: {text[:500]}")
        choice: dict[str, Any] = json.loads(text)["choices"][0]
        return choice


def _values(top: dict[str, float]) -> list[tuple[int, float]]:
    """Token ids and their log-probabilities."""
    return [(int(token.removeprefix("token_id:")), value) for token, value in top.items()]


async def main() -> None:
    """Respond to requests on stdin until stdin ends."""
    url, vocab_size = sys.argv[1:]
    timeout = aiohttp.ClientTimeout(total=900)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        peer = Peer(session, url, int(vocab_size))
        await serve({"together": peer.together, "top_tokens": peer.top_tokens})


if __name__ == "__main__":
    asyncio.run(main())
