"""Stands for the `lmpool` command: its synthetic backend writes down what it begins to compute.

    python -m tests.faults.chaos.worker worker syn --backend synthetic ...

Each process appends the digests of a step to a file of its own in the folder that `LMPOOL_CHAOS_TRACE` names, before
the step: what was written is there however the process ends, and what a killed worker had begun is counted too.

Values of tries are computed as their definition says. To load the compiled kernels takes as long as all the rest of a
worker's start, and workers start all the time here.
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
    """The synthetic backend with a trace."""

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
    """`lmpool.trie.kernels.Kernels`, node by node; computes no more than `inner`.

    Args:
        trie: the trie.
        device: as other kernels take it; there is only one.
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
