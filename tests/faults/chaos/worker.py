"""The `lmpool` command for chaos runs: its synthetic backend logs the prompts that it begins to compute.

    python -m tests.faults.chaos.worker worker syn --backend synthetic ...

Before a step, each process appends the digests of the step's prompts to its own file in the folder
`LMPOOL_CHAOS_TRACE`. So the file also contains the prompts that a killed worker had begun to compute.

The worker computes values of tries in Python, because loading the compiled kernels would double the duration of a
worker's start, and a chaos run starts workers all the time.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lmpool import cli
from lmpool.protocol.query import Op
from lmpool.trie.trie import Compressed
from lmpool.workers import trie as trie_worker
from lmpool.workers.backends import synthetic
from lmpool.workers.execution.contract import Finished

TRACE_VARIABLE = "LMPOOL_CHAOS_TRACE"
_FUNCTIONS: dict[Op, tuple[np.ufunc, float]] = {
    "sum": (np.add, 0.0),
    "max": (np.maximum, -np.inf),
    "logsumexp": (np.logaddexp, -np.inf),
}


class TracedBackend(synthetic.SyntheticBackend):
    """The synthetic backend; it writes the digests of the prompts that it computes to a trace file."""

    def __init__(self, settings: synthetic.SyntheticSettings) -> None:
        super().__init__(settings)
        path = Path(os.environ[TRACE_VARIABLE]) / f"{os.getpid()}.trace"
        self._trace = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def step(self) -> Finished:
        """See `Backend.step`."""
        os.write(self._trace, b"".join(islice(self._jobs, self._settings.max_batch)))
        return super().step()

    def close(self) -> None:
        """See `Backend.close`."""
        os.close(self._trace)
        super().close()


class PlainKernels:
    """Replacement of `lmpool.trie.kernels.Kernels` that visits the trie node by node; computes only `inner`.

    Args:
        trie: the trie.
        device: ignored; other kernels have this parameter.
    """

    def __init__(self, trie: Compressed, device: str = "cpu") -> None:
        self._trie = trie

    def inner(self, op: Op, weights: NDArray[np.float32]) -> NDArray[np.float32]:
        """See `Kernels.inner`."""
        function, nothing = _FUNCTIONS[op]
        values = np.full((len(weights), self._trie.n_inner), nothing)
        for row, given in zip(values, weights, strict=True):
            function.at(row, self._trie.home, given)
            for node in range(self._trie.n_inner - 1, 0, -1):
                above = self._trie.inner_parent[node]
                row[above] = function(row[above], row[node])
        return values.astype(np.float32)


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)
    synthetic.SyntheticBackend = TracedBackend  # type: ignore[misc]
    vars(trie_worker)["open_kernels"] = PlainKernels
    cli.main()
