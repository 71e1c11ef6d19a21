"""Kernels: the sum, maximum or log-sum-exp of the weights below every node of a trie.

A kernel sweeps the compressed trie (see `lmpool.trie.trie`). The kernels of `lmpool.trie.cpu` are compiled by numba;
those of `lmpool.trie.torch_device` run on any device of torch. Each file is imported when its kernels are opened, so a
client without numba and torch can still hold a trie.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import SettingsError
from lmpool.protocol.query import Op
from lmpool.trie.trie import Compressed


class Kernels(Protocol):
    """Values of the nodes of one trie; thread-safe.

    The result of a row depends on that row alone: it has the same bits in every batch and every run. With torch on a
    CPU this holds only for sums and maxima; its exponentials may differ in the last bit of a float64. A sum over both
    infinities is NaN, as in floating point.

    Both methods raise `InvalidWeights` for a wrong shape or dtype and for NaN, `SettingsError` for an unknown `op`.
    """

    def inner(self, op: Op, weights: NDArray[np.float32]) -> NDArray[np.float32]:
        """Values of the inner nodes for weights of shape (B, V): float32 (B, M), owned by the caller."""

    def values(self, op: Op, weights: NDArray[np.float32]) -> NDArray[np.float32]:
        """Values of all nodes, float32 (B, N): like `trie.expand` of `inner`, but faster."""


def kernel_device(device: str) -> str:
    """The device of the kernels for a model on `device`: "cpu" unless CUDA, as other devices may have no float64."""
    return device if device.partition(":")[0] == "cuda" else "cpu"


def open_kernels(trie: Compressed, device: str = "cpu") -> Kernels:
    """Create the kernels of a trie: by numba for "cpu", by torch for a device of torch, such as "cuda" or "cuda:1".

    Raises `SettingsError` if numba or torch is not installed, or torch has no such device.
    """
    try:
        if device == "cpu":
            from lmpool.trie.cpu import CpuKernels

            return CpuKernels(trie)
        from lmpool.trie.torch_device import TorchKernels

        return TorchKernels(trie, device)
    except ModuleNotFoundError as error:
        if error.name not in ("numba", "torch"):
            raise
        extra = f"lmpool[{'trie' if error.name == 'numba' else 'hf'}]"
        raise SettingsError(f"a trie's kernels need {error.name}: install it with pip install '{extra}'") from error
