"""A process with lmpool's own tries, without a pool: `python -m benchmarks.clients.trie_kernels INPUTS [DEVICE]`.

As in a program of a user: it does not keep freed memory as workers do, for neither does the peer.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

from benchmarks.harness.line_protocol import serve
from benchmarks.harness.tekken import Inputs, read_inputs
from lmpool.protocol.query import Op
from lmpool.trie.kernels import open_kernels
from lmpool.trie.trie import Trie


class Kernels:
    """Answers the benchmark's requests with timings; `trie_peer.py` answers the same ones.

    Args:
        inputs: the vocabulary and weights.
        device: where kernels run.
    """

    def __init__(self, inputs: Inputs, device: str) -> None:
        self._inputs = inputs
        self._device = device
        self._trie = Trie(inputs.tokens)
        self._kernels = open_kernels(self._trie, device)

    async def build(self, times: int) -> float:
        """Mean seconds for making the trie from a list of byte strings."""
        start = time.perf_counter()
        for _ in range(times):
            Trie(self._inputs.tokens)
        return (time.perf_counter() - start) / times

    async def compute(self, op: Op, batch: int, times: int) -> float:
        """Seconds for the values of all nodes for this many batches; each result is dropped."""
        batches = self._inputs.batches(batch)
        if self._device != "cpu":
            return self._compute_there(op, batches, times)
        start = time.perf_counter()
        for index in range(times):
            self._kernels.values(op, batches[index % len(batches)])
        return time.perf_counter() - start

    def _compute_there(self, op: Op, batches: list[Any], times: int) -> float:
        """As `compute`, for weights that are on the device already; the values are fetched."""
        import torch

        kernels: Any = self._kernels
        sent = [torch.from_numpy(batch).to(self._device) for batch in batches]
        start = time.perf_counter()
        for index in range(times):
            kernels.values_on_device(op, sent[index % len(sent)]).cpu().numpy()
        return time.perf_counter() - start

    async def probe(self, op: Op, prefixes: list[str], row: int = 0) -> list[float]:
        """The values of some prefixes (hexadecimal) for a row of weights."""
        (values,) = self._kernels.values(op, self._inputs.weights[row : row + 1])
        return [float(values[self._trie.node(bytes.fromhex(prefix))]) for prefix in prefixes]


async def main() -> None:
    """Serve until stdin ends."""
    kernels = Kernels(read_inputs(sys.argv[1]), *sys.argv[2:3] or ["cpu"])
    await serve({handler.__name__: handler for handler in (kernels.build, kernels.compute, kernels.probe)})


if __name__ == "__main__":
    asyncio.run(main())
