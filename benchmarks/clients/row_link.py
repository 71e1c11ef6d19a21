"""A process that stores or fetches rows through the pool's own row cache alone.

`python -m benchmarks.clients.row_link`: the same work as `plain_redis.py`'s `put` and `get`, what the pool could reach
if control cost nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import uvloop

from benchmarks.harness.line_protocol import serve
from lmpool.broker.server import Server
from lmpool.protocol.keys import Keys
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.row import Encoding, RowBlock
from lmpool.rows.cache import RedisRows, RowSpace
from lmpool.rows.shared_memory import SegmentReader
from lmpool.workers.metrics.counters import Counters
from lmpool.workers.queue.segment import SegmentWriter

_BLOCK = 32
_KEYS = 256


class RowLinkUser:
    """Answers the benchmark's requests.

    Args:
        url: of the server.
        vocab_size: V.
    """

    def __init__(self, url: str, vocab_size: int) -> None:
        info = ModelInfo("row-link", "none", vocab_size, 1, "row-link", "float32", row_ttl_s=600)
        self._rows = RedisRows(Server(url), RowSpace.of(Keys(), info, SegmentReader()))
        self._segment = SegmentWriter(info, "row-link", None, Counters())
        logits = np.random.default_rng(0).standard_normal((_BLOCK, vocab_size), dtype=np.float32)
        # Log-probabilities, for others are refused when they are fetched.
        self._numbers = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        self._got = 0

    async def put(self, rows: int) -> None:
        """Store rows, over and over under the same keys, in blocks."""
        if self._segment.segment is None:
            await self._segment.make()
        for start in range(0, rows, _BLOCK):
            block = RowBlock(_digests(start), self._numbers, None, Encoding.F32)
            shared = self._segment.write(block, (), block.digests)
            if refused := await self._rows.put(block, overwrite=block.digests, shared=shared):
                raise RuntimeError(f"the server refused rows: {refused}")

    async def get(self, rows: int) -> None:
        """Fetch rows that `put` stores, as many at a time."""
        self._got = 0
        for start in range(0, rows, _BLOCK):
            await self._rows.get_many(_digests(start), self._count)
        if self._got < rows:
            raise RuntimeError(f"{self._got} of {rows} rows came")

    def _count(self, digests: Sequence[bytes], rows: Sequence[object]) -> None:
        self._got += sum(isinstance(row, np.ndarray) for row in rows)


def _digests(start: int) -> list[bytes]:
    return [(index % _KEYS).to_bytes(16, "little") for index in range(start, start + _BLOCK)]


async def main() -> None:
    """Serve until stdin ends."""
    user = RowLinkUser(sys.argv[1], int(sys.argv[2]))
    await serve({handler.__name__: handler for handler in (user.put, user.get)})


if __name__ == "__main__":
    uvloop.run(main())
