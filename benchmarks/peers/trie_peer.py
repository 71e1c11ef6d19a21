"""A process with one of genlm-backend's tries: `python -m benchmarks.peers.trie_peer INPUTS KIND [DEVICE]`.

The program runs in the environment of the compared projects (peers), so it does not import lmpool. The benchmark starts
one process per kind of trie; an idle process uses no processor time.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

import torch
from genlm.backend.tokenization import Token
from genlm.backend.trie import ParallelTokenCharacterTrie, TokenCharacterTrie

from benchmarks.harness.line_protocol import serve
from benchmarks.harness.tekken import Inputs, read_inputs


class Peer:
    """Handlers that return timings; `kind` is "sequential" or "parallel", and only a parallel trie uses `device`."""

    def __init__(self, inputs: Inputs, kind: str, device: str) -> None:
        self._inputs = inputs
        self._kind = kind
        self._device = device
        self._tokens = [Token(token_id=index, byte_string=token) for index, token in enumerate(inputs.tokens)]
        self._trie: Any = None

    async def build(self, times: int) -> float:
        """Mean seconds to build the trie from a list of tokens; keep the last trie."""
        start = time.perf_counter()
        for _ in range(times):
            if self._kind == "parallel":
                self._trie = ParallelTokenCharacterTrie(self._tokens, device=self._device)
            else:
                self._trie = TokenCharacterTrie(self._tokens)
        return (time.perf_counter() - start) / times

    async def compute(self, op: str, batch: int, times: int) -> float:
        """Return the same figure as `Kernels.compute` in `trie_kernels.py`."""
        batches = [self._given(rows) for rows in self._inputs.batches(batch)]
        start = time.perf_counter()
        for index in range(times):
            self._values(op, batches[index % len(batches)])
        return time.perf_counter() - start

    async def probe(self, op: str, prefixes: list[str], row: int = 0) -> list[float]:
        """Return the same values as `Kernels.probe` in `trie_kernels.py`."""
        values = self._values(op, self._given(self._inputs.weights[row : row + 1]))[0]
        return [float(values[self._node(bytes.fromhex(prefix))]) for prefix in prefixes]

    def _values(self, op: str, weights: Any) -> Any:
        return (self._trie.batch_weight_sum if op == "sum" else self._trie.batch_weight_max)(weights)

    def _given(self, rows: Any) -> Any:
        """Rows in the type that the trie accepts without conversion."""
        return torch.from_numpy(rows).to(self._device) if self._kind == "parallel" else rows

    def _node(self, prefix: bytes) -> int:
        node: int = self._trie.root
        for byte in prefix:
            node = self._trie.children[node][byte]
        return node


async def main() -> None:
    """Respond to requests on stdin until stdin ends."""
    peer = Peer(read_inputs(sys.argv[1]), sys.argv[2], *sys.argv[3:4] or ["cpu"])
    await serve({handler.__name__: handler for handler in (peer.build, peer.compute, peer.probe)})


if __name__ == "__main__":
    torch.set_num_threads(os.cpu_count() or 1)
    asyncio.run(main())
