"""A process with lmpool's tries, without a pool: `python -m benchmarks.clients.trie_kernels INPUTS [DEVICE]`.

Unlike a worker, this process returns freed memory to the system, as genlm-backend's process does.
"""

from __future__ import annotations

import asyncio
import sys
import time

from benchmarks.harness.line_protocol import serve
from benchmarks.harness.tekken import Inputs, read_inputs
from lmpool.protocol.query import Op
from lmpool.trie.kernels import open_kernels
from lmpool.trie.trie import Trie


class Kernels:
    """Handlers that return timings; `trie_peer.py` has the same handlers."""

    def __init__(self, inputs: Inputs, device: str) -> None:
        self._inputs = inputs
        self._trie = Trie(inputs.tokens)
        self._kernels = open_kernels(self._trie, device)

    async def build(self, times: int) -> float:
        """Mean seconds to build the trie from a list of byte strings."""
        start = time.perf_counter()
        for _ in range(times):
            Trie(self._inputs.tokens)
        return (time.perf_counter() - start) / times

    async def compute(self, op: Op, batch: int, times: int) -> float:
        """Seconds for the values of all nodes of `times` batches; each result is discarded."""
        batches = self._inputs.batches(batch)
        start = time.perf_counter()
        for index in range(times):
            self._kernels.values(op, batches[index % len(batches)])
        return time.perf_counter() - start

    async def probe(self, op: Op, prefixes: list[str], row: int = 0) -> list[float]:
        """The values of the given prefixes (hexadecimal) for one row of weights."""
        (values,) = self._kernels.values(op, self._inputs.weights[row : row + 1])
        return [float(values[self._trie.node(bytes.fromhex(prefix))]) for prefix in prefixes]


async def main() -> None:
    """Respond to requests on stdin until stdin ends."""
    kernels = Kernels(read_inputs(sys.argv[1]), *sys.argv[2:3] or ["cpu"])
    await serve({handler.__name__: handler for handler in (kernels.build, kernels.compute, kernels.probe)})


if __name__ == "__main__":
    asyncio.run(main())
