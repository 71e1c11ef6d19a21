"""Kernels on what torch runs on.

Inner nodes are numbered in preorder, so the tokens below one stand side by side when they are sorted by their homes,
and its value is one over a range. A tree of pairs is built over the sorted weights (the sums of 2, 4, 8, ...
neighbours), and each range is put together from at most 2 * log2(V) of its blocks. That takes some twenty launches
however deep the trie is, where a sweep level by level takes one a level; nothing is subtracted, so a light node keeps
its digits; and nothing is added atomically: every number is the same in every run and in every batch. On torch's CPU
device that is strict for sums and maxima only: its vectorised exp and log differ from its scalar ones in the last bit
of a float64, and the shape decides which is used, so a float32 log-sum-exp may in rare cases round the other way.

So far this ran on torch's CPU device only, which is how the tests run it. Not on a GPU yet: there its speed is not
known, and that `torch.segment_reduce` adds up in one order there is what its source says, not what was tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmpool.errors import InvalidWeights, SettingsError
from lmpool.protocol.query import Op
from lmpool.trie.kernels import Compressed, check_op, check_out, make_plan
from lmpool.trie.trie import check_layout, check_shape, nan_found

FUNCTIONS = (
    "acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "log", "log10", "log2", "sin", "sqrt", "tan", "tanh",
    "trunc",
)  # fmt: skip
"""What torch leaves to MKL, as its `ATen/cpu/vml.h` says; others it computes itself."""

_MAX_BYTES = 1 << 29
"""Bytes of the pairs and blocks of the rows that go through together."""

_PAIRS: dict[Op, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "logsumexp": torch.logaddexp,
}


@cache
def settle() -> None:
    """Have MKL choose the kernels of its vector functions, while no other thread calls one.

    It chooses each with its first call. Where several of torch's threads make that call at once, one of them may
    compute its part with a kernel of low accuracy, and say nothing: errors of 1e-4 (pytorch/pytorch#188792; torch 2.13
    on two threads did so in 4 of 240 processes). A model whose table of cosines was made then has wrong rows, off by
    1e-3 from the middle of its positions on, as long as it is loaded. So this is called before a model is.

    Once is enough for a process, and costs some microseconds. One element is computed by the thread that calls.
    """
    for dtype in (torch.float32, torch.float64):
        element = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for name in FUNCTIONS:
            getattr(torch, name)(element)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Which blocks of the tree of pairs each inner node is put together from.

    Attributes:
        sizes: the blocks of each level of the tree, even numbers but for the last; level 0 are the sorted weights.
        index: the chosen blocks, node after node, as places in all levels one after another; int64 (K,).
        offsets: node i has index[offsets[i] : offsets[i + 1]]; int64 (M + 1,).
    """

    sizes: list[int]
    index: NDArray[np.int64]
    offsets: NDArray[np.int64]


class TorchKernels:
    """Kernels of one trie on a device of torch: see `lmpool.trie.kernels.Kernels`."""

    def __init__(self, trie: Compressed, device: str) -> None:
        """Put the trie on the device.

        Args:
            trie: the trie.
            device: as torch names it: "cuda", "cuda:1", "cpu".

        Raises:
            SettingsError: torch has no such device.
        """
        settle()
        try:
            self._device = torch.empty(0, device=device).device
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise SettingsError(f"device: torch cannot use {device!r}: {error}") from error
        self._n_tokens = trie.n_tokens
        plan = make_plan(trie)
        start = plan.start.astype(np.int64)
        blocks = _choose_blocks(start[:-1], start[_last_below(trie.inner_parent) + 1], trie.n_tokens)
        self._sizes = blocks.sizes
        self._order, self._index, self._offsets = map(
            self._put, (plan.order.astype(np.int64), blocks.index, blocks.offsets)
        )
        counts = np.diff(blocks.offsets)
        self._owner = self._put(np.repeat(np.arange(trie.n_inner), counts))
        self._value_of = self._put(trie.value_of.astype(np.int64))

    def _put(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.array(array)).to(self._device)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(x.nbytes for x in (self._order, self._index, self._offsets, self._owner, self._value_of))

    def inner(self, op: Op, weights: NDArray[np.float32]) -> NDArray[np.float32]:
        """Values of the inner nodes, float32 (B, M): see `Kernels.inner`."""
        return _fetched(self.inner_on_device(op, self._sent(weights)))

    def values(
        self, op: Op, weights: NDArray[np.float32], out: NDArray[np.float32] | None = None
    ) -> NDArray[np.float32]:
        """Values of all nodes, float32 (B, N): see `Kernels.values`."""
        sent = self._sent(weights)
        if out is None:
            return _fetched(self.values_on_device(op, sent))
        check_out(out, (len(sent), len(self._value_of)))
        torch.from_numpy(out).copy_(self.values_on_device(op, sent))
        return out

    def inner_on_device(self, op: Op, weights: Tensor) -> Tensor:
        """Values of the inner nodes for weights that are on the device already.

        Args:
            op: what to take over the tokens below a node.
            weights: float32 (B, V) on the device of these kernels.

        Returns:
            float32 (B, M) on the device.

        Raises:
            InvalidWeights: another shape, dtype or device, or NaN.
            SettingsError: an unknown `op`.
        """
        check_op(op)
        self._check(weights)
        out = torch.empty((len(weights), len(self._offsets) - 1), dtype=torch.float32, device=self._device)
        rows = max(1, _MAX_BYTES // (8 * (sum(self._sizes) + len(self._index))))
        for begin in range(0, len(weights), rows):
            out[begin : begin + rows] = self._reduce(op, weights[begin : begin + rows]).T
        return out

    def values_on_device(self, op: Op, weights: Tensor) -> Tensor:
        """Values of all nodes, float32 (B, N) on the device: otherwise as `inner_on_device`."""
        inner = self.inner_on_device(op, weights)
        return torch.cat((inner, weights), dim=1).index_select(1, self._value_of)

    def _sent(self, weights: NDArray[np.float32]) -> Tensor:
        values = check_layout(weights, self._n_tokens, batch=True)
        # Read-only arrays must be copied: torch has no tensors of that kind.
        return torch.from_numpy(values if values.flags.writeable else values.copy()).to(self._device)

    def _check(self, weights: Tensor) -> None:
        if weights.dtype != torch.float32 or weights.device != self._device:
            raise InvalidWeights(
                f"the weights are {weights.dtype} on {weights.device}: pass torch.float32 on {self._device}"
            )
        check_shape(tuple(weights.shape), self._n_tokens, batch=True)
        if bool(torch.isnan(weights).any()):
            raise nan_found(_fetched(weights))

    def _reduce(self, op: Op, weights: Tensor) -> Tensor:
        """The inner values of some rows, (M, B): rows are side by side, for neighbours in memory to be read at once."""
        exact = torch.float32 if op == "max" else torch.float64
        nothing = 0.0 if op == "sum" else -torch.inf
        tree = torch.full((sum(self._sizes), len(weights)), nothing, dtype=exact, device=self._device)
        tree[: self._n_tokens] = weights.T.index_select(0, self._order)
        pair = _PAIRS[op]
        here = 0
        for size in self._sizes[:-1]:
            above = here + size
            tree[above : above + size // 2] = pair(tree[here:above:2], tree[here + 1 : above : 2])
            here = above
        blocks = tree.index_select(0, self._index)
        if op == "logsumexp":
            return self._log_sum(blocks)
        return self._segments(blocks, op)

    def _log_sum(self, blocks: Tensor) -> Tensor:
        largest = self._segments(blocks, "max")
        # A difference of infinities is no number.
        shift = torch.where(torch.isfinite(largest), largest, 0.0)
        masses = torch.exp(blocks - shift.index_select(0, self._owner))
        return shift + torch.log(self._segments(masses, "sum"))

    def _segments(self, blocks: Tensor, reduce: str) -> Tensor:
        return torch.segment_reduce(blocks, reduce, offsets=self._offsets, axis=0)


def _fetched(tensor: Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = tensor.cpu().numpy()
    return array


def _last_below(inner_parent: NDArray[np.int32]) -> NDArray[np.int64]:
    """The last inner node at or below each inner node."""
    last = list(range(len(inner_parent)))
    for node, parent in zip(range(len(last) - 1, 0, -1), inner_parent[:0:-1].tolist(), strict=True):
        last[parent] = max(last[parent], last[node])
    return np.array(last)


def _choose_blocks(first: NDArray[np.int64], end: NDArray[np.int64], width: int) -> _Blocks:
    """Cover each range by the largest blocks of the tree that fit, from its ends inwards."""
    sizes: list[int] = []
    owners, places = [], []
    nodes, base = np.arange(len(first)), 0
    while nodes.size:
        left, right = first & 1 == 1, end & 1 == 1
        owners += [nodes[left], nodes[right]]
        places += [base + first[left], base + end[right] - 1]
        first, end = (first + 1) >> 1, end >> 1
        open_ = first < end
        nodes, first, end = nodes[open_], first[open_], end[open_]
        sizes.append(width if not nodes.size else width + width % 2)
        base += sizes[-1]
        width = sizes[-1] // 2
    owner = np.concatenate(owners)
    index = np.concatenate(places)[np.argsort(owner, kind="stable")]
    offsets = np.zeros(owner.max() + 2, np.int64)
    np.cumsum(np.bincount(owner), out=offsets[1:])
    return _Blocks(sizes, index, offsets)
