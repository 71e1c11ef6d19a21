"""A process that stores or fetches rows with the pool's row cache, without its control plane.

`python -m benchmarks.clients.row_link` does the same work as `put` and `get` of `plain_redis.py`. The measured rate is
the rate that the pool would reach if its control plane cost no time.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import numpy as np
import uvloop

from benchmarks.harness.line_protocol import serve
from lmpool.broker.server import Server
from lmpool.protocol.keys import Keys
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.row import Encoding, RowBlock
from lmpool.rows.cache import RowCache
from lmpool.rows.segment import SegmentWriter
from lmpool.rows.shared_memory import SegmentReader

_BLOCK = 32  # Rows stored or fetched per call.
_KEYS = 256  # Distinct keys, which are overwritten in rotation.


class RowLinkUser:
    """Handlers that store and fetch rows."""

    def __init__(self, url: str, vocab_size: int) -> None:
        info = ModelInfo("row-link", "none", vocab_size, 1, "row-link", "float32", row_ttl_s=600)
        self._rows = RowCache(Server(url), Keys(), info, SegmentReader())
        self._segment = SegmentWriter(info, "row-link", None)
        logits = np.random.default_rng(0).standard_normal((_BLOCK, vocab_size), dtype=np.float32)
        # Use log-probabilities: readers reject rows that cannot be log-probabilities.
        self._numbers = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        self._got = 0

    async def put(self, rows: int) -> None:
        """Store rows in blocks, under rotating keys."""
        if self._segment.segment is None:
            await asyncio.to_thread(self._segment.make)
        for start in range(0, rows, _BLOCK):
            block = RowBlock(_digests(start), self._numbers, None, Encoding.F32)
            shared = self._segment.write(block, (), block.digests)
            if refused := await self._rows.put(block, overwrite=block.digests, shared=shared):
                raise RuntimeError(f"the server rejected rows: {refused}")

    async def get(self, rows: int) -> None:
        """Fetch the rows that `put` stores, in blocks of the same size."""
        self._got = 0
        for start in range(0, rows, _BLOCK):
            await self._rows.get_many(_digests(start), self._count)
        if self._got < rows:
            raise RuntimeError(f"{self._got} of {rows} rows arrived")

    def _count(self, digests: Sequence[bytes], rows: Sequence[object]) -> None:
        self._got += sum(isinstance(row, np.ndarray) for row in rows)


def _digests(start: int) -> list[bytes]:
    return [(index % _KEYS).to_bytes(16, "little") for index in range(start, start + _BLOCK)]


async def main() -> None:
    """Respond to requests on stdin until stdin ends."""
    user = RowLinkUser(sys.argv[1], int(sys.argv[2]))
    await serve({handler.__name__: handler for handler in (user.put, user.get)})


if __name__ == "__main__":
    uvloop.run(main())
