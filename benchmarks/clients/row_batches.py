"""A process that requests rows in batches, from a producer or from a gateway: `python -m …clients.row_batches URL`.

URL is that of the Redis server, for a `Producer` in this process, or that of a gateway (`http://…`). A gateway's client
sends the ids as a .npy file and reads the .npy file of rows into an array, with one connection for each request in
flight.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import secrets
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import uvloop
from numpy.typing import NDArray

from benchmarks.harness.line_protocol import serve
from lmpool.producer import Producer

Batch = NDArray[np.int64]
Rows = NDArray[np.float32]
Fetch = Callable[[Batch], Awaitable[Rows]]

_MODEL = "rows"  # The name of the model.
_PROMPT_TOKENS = 32  # Tokens per random prompt.
_TIMEOUT_S = 120  # Max seconds of a request.


class Client:
    """Handlers of the benchmark's requests, which return seconds.

    Args:
        fetch: requests the rows of a batch of prompts.
        vocab_size: vocabulary size of the model.
    """

    def __init__(self, fetch: Fetch, vocab_size: int) -> None:
        self._fetch = fetch
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(secrets.randbits(64))
        self._batches: list[Batch] = []

    async def new(self, batches: int, size: int, concurrency: int) -> float:
        """Seconds to request `batches` batches of `size` new prompts, with `concurrency` batches in flight."""
        shape = (size, _PROMPT_TOKENS)
        self._batches = [self._random.integers(0, self._vocab_size, shape) for _ in range(batches)]
        return await self._stream(self._batches, concurrency)

    async def again(self, times: int, concurrency: int) -> float:
        """Seconds to request the batches of the last `new` again, `times` times."""
        return await self._stream(self._batches * times, concurrency)

    async def rows(self, prompts: list[list[int]]) -> list[list[float]]:
        """The first entries of the rows of prompts, which the benchmark compares between two sides."""
        found: list[list[float]] = (await self._fetch(np.array(prompts)))[:, :8].tolist()
        return found

    async def _stream(self, batches: list[Batch], concurrency: int) -> float:
        waiting = iter(batches)

        async def consume() -> None:
            for batch in waiting:
                shape = (await self._fetch(batch)).shape
                if shape != (len(batch), self._vocab_size):
                    raise RuntimeError(f"the rows of {len(batch)} prompts have the shape {shape}")

        start = time.perf_counter()
        await asyncio.gather(*[consume() for _ in range(concurrency)])
        return time.perf_counter() - start


class Connections:
    """Requests rows from a gateway. The connections stay open; each is used by one request at a time."""

    def __init__(self, url: str) -> None:
        self._host = urlsplit(url).netloc
        self._idle: list[http.client.HTTPConnection] = []

    async def fetch(self, batch: Batch) -> Rows:
        """The rows of a batch."""
        connection = self._idle.pop() if self._idle else http.client.HTTPConnection(self._host, timeout=_TIMEOUT_S)
        rows = await asyncio.to_thread(_post, connection, batch)
        self._idle.append(connection)
        return rows


def _post(connection: http.client.HTTPConnection, batch: Batch) -> Rows:
    body = io.BytesIO()
    np.save(body, batch)
    connection.request("POST", f"/v1/rows?model={_MODEL}", body.getvalue())
    response = connection.getresponse()
    if response.status != http.client.OK:
        raise RuntimeError(f"the gateway responded with {response.status}: {response.read()[:500]!r}")
    # Read into an array that exists, as `numpy.load` cannot do from a socket.
    data = np.empty(int(response.headers["Content-Length"]), np.uint8)
    view = data.data
    while view:
        if not (count := response.readinto(view)):
            raise RuntimeError(f"the gateway closed the connection; {len(view):,} bytes are missing")
        view = view[count:]
    response.close()
    begin = 10 + int.from_bytes(data[8:10].tobytes(), "little")  # The head of a .npy file of version 1.
    return data[begin:].view(np.float32).reshape(len(batch), -1)


async def main() -> None:
    """Respond to requests on stdin until stdin ends."""
    url, vocab_size = sys.argv[1], int(sys.argv[2])

    def handlers(fetch: Fetch) -> dict[str, Any]:
        client = Client(fetch, vocab_size)
        return {"new": client.new, "again": client.again, "rows": client.rows}

    if url.startswith("http"):
        await serve(handlers(Connections(url).fetch))
        return
    # Without its own cache, like the gateway: all rows come from the pool.
    async with Producer(_MODEL, redis=url, timeout=_TIMEOUT_S, cache_bytes=0) as producer:
        await serve(handlers(producer.batch_logprobs))


if __name__ == "__main__":
    uvloop.run(main())
