"""Kernels: the sum, maximum or log-sum-exp of the weights below every node of a trie.

A kernel sweeps the compressed trie (see `lmpool.trie.trie`). `cpu` is compiled by numba, `torch_device` runs on what
torch runs on; each is imported when it is first asked for, so a client without them can still hold a trie.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import SettingsError
from lmpool.protocol.query import Op
from lmpool.trie.kernels.plan import Compressed

__all__ = ["Compressed", "Kernels", "open_kernels"]


class Kernels(Protocol):
    """Values of the nodes of one trie; safe to call from several threads.

    A row's result depends on that row alone: it has the same bits in every batch and in every run (with torch on a CPU
    sums and maxima do; its vectorised and scalar exponentials differ in the last bit of a double). A sum over both
    infinities is NaN, as everywhere in floating point.
    """

    def inner(self, op: Op, weights: NDArray[np.float32]) -> NDArray[np.float32]:
        """Values of the inner nodes.

        Args:
            op: what to take over the tokens below a node.
            weights: float32 of shape (B, V).

        Returns:
            float32 of shape (B, M), which belongs to the caller.

        Raises:
            InvalidWeights: another shape or dtype, or NaN.
            SettingsError: an unknown `op`.
        """
        ...

    def values(
        self, op: Op, weights: NDArray[np.float32], out: NDArray[np.float32] | None = None
    ) -> NDArray[np.float32]:
        """Values of all nodes: what `trie.expand` makes of `inner`, faster.

        Args:
            op: what to take over the tokens below a node.
            weights: float32 of shape (B, V).
            out: where to put the result, C-contiguous float32 of shape (B, N). Its content is undefined after an
                error. New memory costs about a third of the time.

        Returns:
            float32 of shape (B, N): `out`, or an array that belongs to the caller.

        Raises:
            InvalidWeights: another shape or dtype, or NaN.
            SettingsError: an unknown `op`, or an `out` that does not fit.
        """
        ...

    @property
    def nbytes(self) -> int:
        """Bytes held for the plan and for buffers that are kept between calls."""
        ...


def open_kernels(trie: Compressed, device: str = "cpu") -> Kernels:
    """Make the kernels of a trie.

    Args:
        trie: the trie.
        device: "cpu" for numba; any device of torch, such as "cuda" or "cuda:1", for torch.

    Raises:
        SettingsError: numba or torch is not installed, or torch has no such device.
    """
    if device == "cpu":
        try:
            from lmpool.trie.kernels.cpu import CpuKernels
        except ModuleNotFoundError as error:
            raise _missing(error, "numba") from error
        return CpuKernels(trie)
    try:
        from lmpool.trie.kernels.torch_device import TorchKernels
    except ModuleNotFoundError as error:
        raise _missing(error, "torch") from error
    return TorchKernels(trie, device)


def _missing(error: ModuleNotFoundError, library: str) -> Exception:
    if error.name != library:
        return error
    extra = {"numba": "trie", "torch": "hf"}[library]
    return SettingsError(f"a trie's kernels need {library}: install it with pip install 'lmpool[{extra}]'")
