"""The common part of all kernels: operations, the order in which they sweep a compressed trie, the memory it takes."""

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
"""Most rows that go through the loops of the CPU kernels side by side."""


class Compressed(Protocol):
    """What kernels read of a trie: `lmpool.trie.trie.Trie` has it, and says what it means.

    The nodes themselves may be numbered in any way; it is the inner nodes that must be in preorder.
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
        """Where each node's value is in [M values of inner nodes | V weights], int32 (N,)."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The tokens by the inner node that they are added to, and where every node finds its value.

    Attributes:
        n_tokens: V.
        n_inner: M.
        n_nodes: N.
        order: the token ids sorted by home, then by id; uint32 (V,).
        rank: where each token stands in `order`; uint32 (V,).
        start: the tokens of inner node i are order[start[i]:start[i + 1]]; uint32 (M + 1,).
        depth: how many inner nodes lie above each inner node; uint32 (M,).
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
    """Ancestors of each node, by doubling the step upwards: a chain of n nodes takes log2(n) rounds."""
    depth = (parent >= 0).astype(np.uint32)
    above = parent.copy()
    while (climbing := np.flatnonzero(above >= 0)).size:
        step = above[climbing]
        depth[climbing] += depth[step]
        above[climbing] = above[step]
    return depth


def check_op(op: str) -> None:
    """Refuse what is not one of `OPS`.

    Raises:
        SettingsError: with the choices.
    """
    check_choice("op", op, OPS)


def check_out(out: NDArray[np.float32], shape: tuple[int, int]) -> None:
    """Refuse an array that a result of `shape` cannot be written to.

    Raises:
        SettingsError: with its dtype and shape.
    """
    if not isinstance(out, np.ndarray) or out.dtype != np.float32 or out.shape != shape:
        raise SettingsError(
            f"out: {shown(getattr(out, 'dtype', out))} of shape {shown(getattr(out, 'shape', None))} "
            f"must be float32 of shape {shape}"
        )
    if not (out.flags.c_contiguous and out.flags.aligned and out.flags.writeable):
        raise SettingsError("out: the array must be C-contiguous, aligned and writeable")


def most_bytes(vocabulary: Vocabulary, device: str) -> int:
    """What `Kernels.nbytes` grows to at most.

    Args:
        vocabulary: of the trie.
        device: as `lmpool.trie.kernels.open_kernels` takes it.
    """
    tokens, nodes = len(vocabulary), len(vocabulary.data) + 1
    # Each inner node parts tokens from one another or from itself: there are no more of them than tokens.
    inner = tokens
    if device != "cpu":
        blocks = 2 * tokens.bit_length() * inner
        return 8 * (tokens + inner + 1 + nodes) + 16 * blocks
    plan = 4 * (2 * tokens + 3 * inner + 1 + nodes)
    places = min(int(vocabulary.lengths.max()), inner) + 2
    a_lane = 4 * tokens + (4 + 8) * (inner + tokens) + 8 * places
    return plan + count_threads() * WIDEST * a_lane
