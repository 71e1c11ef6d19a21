"""Trie kernels on any device of torch, such as a GPU.

Inner nodes are numbered in preorder. So once the tokens are sorted by their home (the inner node that their weight is
added to), the tokens below a node are neighbours, and the node's value is the sum over a range. A tree of pairs is
built over the sorted weights (the sums of 2, 4, 8, ... neighbours), and each range is composed of at most 2 * log2(V)
blocks of the tree. This takes about twenty kernel launches, however deep the trie is. No number is subtracted, so small
values keep their precision. No number is added atomically, so every result has the same bits in every run and every
batch. On torch's CPU device only sums and maxima have equal bits: torch chooses vectorised or scalar exponentials by
the shape, and these differ in the last bit of a float64, so a float32 log-sum-exp may rarely be rounded differently.

Tests run these kernels on torch's CPU device only; their speed on a GPU is unknown. According to the source of
`torch.segment_reduce`, it adds in a fixed order on GPUs; no test checks this.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmpool.errors import SettingsError
from lmpool.protocol.query import OPS, Op
from lmpool.settings import check_choice
from lmpool.trie.trie import Compressed, Ints, check_weights, make_plan

# The functions that torch delegates to MKL, as listed in torch's `ATen/cpu/vml.h`.
FUNCTIONS = "acos asin atan cos erf erfc erfinv exp log log10 log2 sin sqrt tan tanh trunc"
_MAX_BYTES = 1 << 29  # Max bytes of pairs and blocks that are computed at once, which bounds the device memory.
_PAIRS: dict[Op, Any] = {"sum": torch.add, "max": torch.maximum, "logsumexp": torch.logaddexp}


@cache
def settle() -> None:
    """Have MKL choose the kernels of its vector functions while no other thread calls one.

    MKL chooses each kernel at the first call. When several threads of torch make that call at once, one of them may
    silently use a kernel of low accuracy, with errors of 1e-4 (pytorch/pytorch#188792; torch 2.13 on two threads did so
    in 4 of 240 processes). A model whose table of cosines was computed that way returns wrong rows, off by 1e-3, until
    it is loaded again. Call this before loading a model; once per process is enough, and takes microseconds.
    """
    for dtype in (torch.float32, torch.float64):
        element = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for name in FUNCTIONS.split():
            getattr(torch, name)(element)


class TorchKernels:
    """Kernels of one trie on a device of torch: see `lmpool.trie.kernels.Kernels`."""

    def __init__(self, trie: Compressed, device: str) -> None:
        """Copy the trie to a device of torch, such as "cuda:1"; raises `SettingsError` for an unknown device."""
        settle()
        try:
            self._device = torch.empty(0, device=device).device
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise SettingsError(f"device: torch cannot use {device!r}: {error}") from error
        self._n_tokens = trie.n_tokens
        plan = make_plan(trie)
        start = plan.start.astype(np.int64)
        last = list(range(trie.n_inner))  # The last inner node at or below each inner node.
        for node, parent in zip(range(trie.n_inner - 1, 0, -1), trie.inner_parent[:0:-1].tolist(), strict=True):
            last[parent] = max(last[parent], last[node])
        self._sizes, index, offsets = _choose_blocks(start[:-1], start[np.array(last) + 1], trie.n_tokens)
        owner = np.repeat(np.arange(trie.n_inner), np.diff(offsets))
        arrays = (plan.order, index, offsets, owner, trie.value_of)
        tensors = [torch.from_numpy(array.astype(np.int64)).to(self._device) for array in arrays]
        self._order, self._index, self._offsets, self._owner, self._value_of = tensors

    def inner(self, op: Op, weights: NDArray[np.float32]) -> NDArray[np.float32]:
        """Values of the inner nodes, float32 (B, M): see `Kernels.inner`."""
        return self._compute(op, weights)[0].cpu().numpy()

    def values(self, op: Op, weights: NDArray[np.float32]) -> NDArray[np.float32]:
        """Values of all nodes, float32 (B, N): see `Kernels.values`."""
        return torch.cat(self._compute(op, weights), dim=1).index_select(1, self._value_of).cpu().numpy()

    def _compute(self, op: Op, weights: NDArray[np.float32]) -> tuple[Tensor, Tensor]:
        """The values of the inner nodes, (B, M), and the weights, (B, V), on the device."""
        check_choice("op", op, OPS)
        checked = check_weights(weights, self._n_tokens, batch=True)
        # Copy read-only arrays: torch has no read-only tensors.
        sent = torch.from_numpy(checked if checked.flags.writeable else checked.copy()).to(self._device)
        inner = torch.empty((len(sent), len(self._offsets) - 1), dtype=torch.float32, device=self._device)
        rows = max(1, _MAX_BYTES // (8 * (sum(self._sizes) + len(self._index))))
        for begin in range(0, len(sent), rows):
            inner[begin : begin + rows] = self._reduce(op, sent[begin : begin + rows]).T
        return inner, sent

    def _reduce(self, op: Op, weights: Tensor) -> Tensor:
        """The inner values of some rows, (M, B), with rows as the last axis, so that memory is read in order."""
        exact = torch.float32 if op == "max" else torch.float64
        nothing = 0.0 if op == "sum" else -torch.inf
        tree = torch.full((sum(self._sizes), len(weights)), nothing, dtype=exact, device=self._device)
        tree[: self._n_tokens] = weights.T.index_select(0, self._order)
        pair, here = _PAIRS[op], 0
        for size in self._sizes[:-1]:
            above = here + size
            tree[above : above + size // 2] = pair(tree[here:above:2], tree[here + 1 : above : 2])
            here = above
        blocks = tree.index_select(0, self._index)
        reduce = partial(torch.segment_reduce, offsets=self._offsets, axis=0)
        if op != "logsumexp":
            return reduce(blocks, op)
        largest = reduce(blocks, "max")
        # Shift by finite maxima only: a difference of infinities would be NaN.
        shift = torch.where(torch.isfinite(largest), largest, 0.0)
        masses = torch.exp(blocks - shift.index_select(0, self._owner))
        return shift + torch.log(reduce(masses, "sum"))


def _choose_blocks(first: Ints, end: Ints, width: int) -> tuple[list[int], Ints, Ints]:
    """Cover each range by the largest blocks of the tree of pairs that fit, from both ends inwards.

    Returns the number of blocks of each level (even below the last level; level 0 has the sorted weights); the chosen
    blocks of all nodes in order, as indices into the concatenated levels (K,); and each node's first place (M + 1,).
    """
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
    return sizes, index, offsets
