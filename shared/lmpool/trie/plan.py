"""The order in which kernels sweep a trie, and the checks that all kernels share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import SettingsError
from lmpool.protocol.query import OPS
from lmpool.settings import check_choice, count_threads, shown
from lmpool.vocabulary import Vocabulary

WIDEST = 8
"""Max rows that the loops of the CPU kernels process side by side; wider blocks leave the first-level cache."""


class Compressed(Protocol):
    """The part of a trie that kernels read; see `lmpool.trie.trie.Trie` for the attributes.

    Nodes may be numbered in any way; only the inner nodes must be in preorder.
    """

    @property
    def n_tokens(self) -> int:
        """V."""

    @property
    def n_inner(self) -> int:
        """M."""

    @property
    def n_nodes(self) -> int:
        """N."""

    @property
    def home(self) -> NDArray[np.int32]:
        """The inner node that each token's weight is added to, int32 (V,)."""

    @property
    def inner_parent(self) -> NDArray[np.int32]:
        """The nearest inner node above each inner node, int32 (M,); -1 at 0."""

    @property
    def value_of(self) -> NDArray[np.int32]:
        """The place of each node's value in [M values of inner nodes | V weights], int32 (N,)."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The tokens by the inner node that they are added to, and the place of every node's value.

    Attributes:
        n_tokens, n_inner, n_nodes: V, M and N.
        order: the token ids sorted by home, then by id; uint32 (V,).
        rank: the place of each token in `order`; uint32 (V,).
        start: the tokens of inner node i are order[start[i] : start[i + 1]]; uint32 (M + 1,).
        depth: the number of inner nodes above each inner node; uint32 (M,).
        source: each node's place in [M inner values | V weights in `order`]; uint32 (N,).
        identity: 0..M-1, the source of the inner nodes themselves; uint32 (M,).
    """

    n_tokens: int
    n_inner: int
    n_nodes: int
    order: NDArray[np.uint32]
    rank: NDArray[np.uint32]
    start: NDArray[np.uint32]
    depth: NDArray[np.uint32]
    source: NDArray[np.uint32]
    identity: NDArray[np.uint32]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = (self.order, self.rank, self.start, self.depth, self.source, self.identity)
        return sum(array.nbytes for array in arrays)


def make_plan(trie: Compressed) -> Plan:
    """Lay out the sweep of a trie."""
    order = np.argsort(trie.home, kind="stable")
    rank = np.empty(trie.n_tokens, np.uint32)
    rank[order] = np.arange(trie.n_tokens, dtype=np.uint32)
    start = np.zeros(trie.n_inner + 1, np.uint32)
    np.cumsum(np.bincount(trie.home, minlength=trie.n_inner), out=start[1:])
    source = trie.value_of.astype(np.uint32)
    single = source >= trie.n_inner
    source[single] = rank[source[single] - trie.n_inner] + np.uint32(trie.n_inner)
    return Plan(
        n_tokens=trie.n_tokens,
        n_inner=trie.n_inner,
        n_nodes=trie.n_nodes,
        order=order.astype(np.uint32),
        rank=rank,
        start=start,
        depth=_depths(trie.inner_parent),
        source=source,
        identity=np.arange(trie.n_inner, dtype=np.uint32),
    )


def _depths(parent: NDArray[np.int32]) -> NDArray[np.uint32]:
    """The number of ancestors of each node. The step upwards doubles, so a chain of n nodes takes log2(n) rounds."""
    depth = (parent >= 0).astype(np.uint32)
    above = parent.copy()
    while (climbing := np.flatnonzero(above >= 0)).size:
        step = above[climbing]
        depth[climbing] += depth[step]
        above[climbing] = above[step]
    return depth


def check_op(op: str) -> None:
    """Raise `SettingsError` for an operation other than `OPS`."""
    check_choice("op", op, OPS)


def check_out(out: NDArray[np.float32], shape: tuple[int, int]) -> None:
    """Raise `SettingsError` for an array that a result of `shape` cannot be written to."""
    if not isinstance(out, np.ndarray) or out.dtype != np.float32 or out.shape != shape:
        raise SettingsError(
            f"out: {shown(getattr(out, 'dtype', out))} of shape {shown(getattr(out, 'shape', None))} "
            f"must be float32 of shape {shape}"
        )
    if not (out.flags.c_contiguous and out.flags.aligned and out.flags.writeable):
        raise SettingsError("out: the array must be C-contiguous, aligned and writeable")


def max_kernel_bytes(vocabulary: Vocabulary, device: str) -> int:
    """The upper limit of `Kernels.nbytes` for the trie over a vocabulary on a device."""
    tokens, nodes = len(vocabulary), len(vocabulary.data) + 1
    inner = tokens  # Each inner node separates tokens from one another, so there are no more of them than tokens.
    if device != "cpu":
        blocks = 2 * tokens.bit_length() * inner
        return 8 * (tokens + inner + 1 + nodes) + 16 * blocks
    plan = 4 * (2 * tokens + 3 * inner + 1 + nodes)
    places = min(int(vocabulary.lengths.max()), inner) + 2
    a_lane = 4 * tokens + (4 + 8) * (inner + tokens) + 8 * places
    return plan + count_threads() * WIDEST * a_lane
