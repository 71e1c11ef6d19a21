"""The prefix tree over the byte strings of a vocabulary, as flat arrays; and checks of token weights.

Nodes are the distinct prefixes of the tokens, numbered in the order of their bytes. The tokens are added in sorted
order. Each token adds a node for every byte after the prefix that it shares with the token before it, so numbers,
depths and labels of nodes are running sums.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import InvalidWeights, UnknownNode
from lmpool.protocol.row import Values
from lmpool.settings import count_threads, shown
from lmpool.vocabulary import Vocabulary

# Max rows that the loops of the CPU kernels process side by side; wider blocks exceed the first-level cache.
WIDEST = 8
_MAX_SHOWN = 120  # Max characters of a value in an error message.
_WINDOW = 8  # Bytes of two tokens that are compared at once; most tokens differ within 8 bytes.
_BLOCK = 1 << 22  # Max bytes of all compared windows together, which bounds the memory.

Ints = NDArray[np.int64]
Nodes = NDArray[np.int32]


def _common_prefixes(data: NDArray[np.uint8], starts: Ints, lengths: Ints) -> Ints:
    """The length of the prefix that each token shares with the token before it, 0 at the first: int64 (V,).

    All pairs that are equal so far are compared at once, one window of bytes per round. The window grows as the number
    of pairs falls, so that a few long tokens cost as little as many short ones.
    """
    limit = np.zeros_like(lengths)
    np.minimum(lengths[:-1], lengths[1:], out=limit[1:])
    common = limit.copy()
    rows = np.flatnonzero(limit)
    at, width = 0, _WINDOW
    while rows.size:
        width = min(width, int(limit[rows].max()) - at)
        windows = np.lib.stride_tricks.sliding_window_view(data, width)
        differs = windows[starts[rows - 1] + at] != windows[starts[rows] + at]
        ended = differs.any(axis=1)
        decided = rows[ended]
        common[decided] = np.minimum(limit[decided], at + differs[ended].argmax(axis=1))
        at += width
        rows = rows[~ended & (limit[rows] > at)]
        width = min(2 * width, max(_WINDOW, _BLOCK // max(1, rows.size)))
    return common


def _stable_order(values: NDArray[Any]) -> Ints:
    """`argsort(kind="stable")` of numbers from 0 to 2**32 - 1. numpy sorts 16-bit numbers by radix, which is faster."""
    order = np.argsort((values & 0xFFFF).astype(np.uint16), kind="stable")
    high = (values >> 16).astype(np.uint16)
    return order[np.argsort(high[order], kind="stable")] if high.any() else order


def _compress(parent: Nodes, n_children: Nodes, leaf: Nodes) -> tuple[Nodes, Nodes, Nodes]:
    """Compress a trie: the node of each token (V,), each inner node's parent (M,) and where each node's value is (N,).

    A link is a node with one child and no token. A link has its child's value, and its child is the next node. So every
    node has the value of the first node from itself on that is no link. The links directly before a node are its chain.
    """
    n_tokens = np.bincount(leaf, minlength=parent.size)
    kept = (n_children != 1) | (n_tokens != 0)
    inner = (n_tokens + (n_children > 0) > 1) | (n_children > 1)
    kept[0] = inner[0] = True

    index = np.cumsum(inner, dtype=np.int32) - np.int32(1)
    token = np.zeros(parent.size, np.int32)
    token[leaf] = np.arange(leaf.size, dtype=np.int32)
    ends = np.flatnonzero(kept)
    end = np.cumsum(kept) - kept
    value = np.where(inner[ends], index[ends], token[ends] + index[-1] + 1).astype(np.int32)

    # The parent of a chain is an inner node: a link's only child is in the same chain.
    above = np.full(ends.size, -1, np.int32)
    above[1:] = index[parent[ends[:-1] + 1]]
    home = np.where(inner[leaf], index[leaf], above[end[leaf]])
    return home, above[inner[ends]], value[end]


class Compressed:
    """The part of a trie that kernels read. Nodes may be numbered in any way; the inner nodes are in preorder.

    Nodes of a chain without forks have equal values, so kernels compute the values of the M inner nodes only. An inner
    node is the root, a node with two or more children, a node with a token and a child, or a node with two or more
    tokens. Every other node has the value of one inner node or of one token. See `Trie` for the attributes.
    """

    def __init__(self, home: NDArray[np.int32], inner_parent: NDArray[np.int32], value_of: NDArray[np.int32]) -> None:
        self.home, self.inner_parent, self.value_of = home, inner_parent, value_of
        self.n_tokens, self.n_inner, self.n_nodes = home.size, inner_parent.size, value_of.size


class Trie(Compressed):
    """The trie of V tokens: N nodes, one for every distinct prefix of a token, including the empty prefix.

    Nodes are numbered in the order of their prefixes as byte strings, which is preorder with children by byte value.
    The root, b"", is node 0; a parent precedes its children; all nodes below a node follow it without a gap. The
    numbers depend only on the set of byte strings, so they are the same in every process.

    All arrays are read-only. Two tries are equal when their vocabularies are equal.

    Attributes:
        vocabulary: the byte strings, by token id. Equal byte strings share a node; an empty byte string is at the root.
        digest: digest of the vocabulary, 32 hex digits.
        parent: int32 (N,), the parent of each node, -1 for the root; always smaller than the node's number.
        label: uint8 (N,), the byte of the edge into the node, 0 at the root.
        depth: int32 (N,), the length of the node's prefix.
        leaf: int32 (V,), the node of each token.
        child_start: int32 (N + 1,); the children of n are `child[child_start[n] : child_start[n + 1]]`, by label.
        child: int32 (N - 1,), the children of all nodes; see `child_start`.
        home: int32 (V,), the inner node that a token's weight is added to: the token's node or the nearest above it.
        inner_parent: int32 (M,), the nearest inner node above each inner node, -1 for the root; smaller than the index.
        value_of: int32 (N,), the place of each node's value in the vector [M values of inner nodes | V weights].
        n_tokens, n_inner, n_nodes: V, M and N.
    """

    def __init__(self, vocabulary: Vocabulary | Iterable[bytes]) -> None:
        """Build the trie of byte strings by token id; raises `InvalidVocabulary` as `Vocabulary`."""
        self.vocabulary = vocabulary if isinstance(vocabulary, Vocabulary) else Vocabulary(vocabulary)
        self.digest, order = self.vocabulary.digest, self.vocabulary.order
        lengths = self.vocabulary.lengths.astype(np.int64)
        starts = (np.cumsum(lengths) - lengths)[order]
        lengths = lengths[order]
        # Pad after the last token, so that a window fits at every byte.
        data = np.frombuffer(self.vocabulary.data + bytes(int(lengths.max()) + 1), np.uint8)
        added = lengths - _common_prefixes(data, starts, lengths)
        last = np.cumsum(added)
        self.leaf = np.empty(len(order), np.int32)
        self.leaf[order] = last

        # Within a token the depth grows by one per node, from the length of the prefix shared with the previous token.
        depths = np.zeros(int(last[-1]) + 1, np.int64)
        depths[1:] = np.arange(1, depths.size) - np.repeat(last - lengths, added)
        self.label = np.zeros(depths.size, np.uint8)
        self.label[1:] = data[np.repeat(starts - 1, added) + depths[1:]]
        self.depth = depths.astype(np.int32)

        # The parent of a node is the last node before it whose depth is one less, most often the previous node.
        depth, count = self.depth, depths.size
        self.parent = parent = np.arange(-1, count - 1, dtype=np.int32)
        others = np.flatnonzero(depth[1:] <= depth[:-1]) + 1
        by_depth = _stable_order(depth)
        keys = depths[by_depth] * count + by_depth
        parent[others] = by_depth[np.searchsorted(keys, (depths[others] - 1) * count + others) - 1]
        self.child_start = np.zeros(parent.size + 1, np.int32)
        np.cumsum(np.bincount(parent[1:], minlength=parent.size), out=self.child_start[1:])
        self.child = (_stable_order(parent[1:]) + 1).astype(np.int32)
        super().__init__(*_compress(parent, np.diff(self.child_start), self.leaf))
        for array in self._arrays():
            array.flags.writeable = False
        # Python reads single numbers from a memoryview twice as fast as from an array.
        self._parents, self._labels = self.parent.data, self.label.data
        self._starts, self._children = self.child_start.data, self.child.data

    def _arrays(self) -> list[NDArray[Any]]:
        tree: list[NDArray[Any]] = [self.parent, self.label, self.depth, self.leaf, self.child_start, self.child]
        return [*tree, self.home, self.inner_parent, self.value_of]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays and the vocabulary."""
        return sum(array.nbytes for array in self._arrays()) + self.vocabulary.nbytes

    def node(self, prefix: bytes) -> int:
        """The node of a prefix; raises `UnknownNode` if no token begins with it."""
        if not isinstance(prefix, (bytes, bytearray, memoryview)):
            raise UnknownNode(f"the prefix {shown(prefix, _MAX_SHOWN)} ({type(prefix).__name__}) must be bytes")
        node = 0
        for at, byte in enumerate(bytes(prefix)):
            low, high = self._starts[node], self._starts[node + 1]
            place = bisect_left(self._children, byte, low, high, key=self._labels.__getitem__)
            if place == high or self._labels[self._children[place]] != byte:
                longest = f"{shown(bytes(prefix[:at]), _MAX_SHOWN)}, node {node}"
                wanted = shown(bytes(prefix), _MAX_SHOWN)
                raise UnknownNode(f"no token begins with {wanted}; tokens begin with at most {longest}")
            node = self._children[place]
        return node

    def children(self, node: int | np.integer[Any]) -> NDArray[np.int32]:
        """The children of a node by their label: int32, of shape (0,) to (256,); raises `UnknownNode`."""
        node = self.check_node(node)
        return self.child[self._starts[node] : self._starts[node + 1]]

    def prefix(self, node: int | np.integer[Any]) -> bytes:
        """The byte string from the root to a node; raises `UnknownNode`."""
        node = self.check_node(node)
        labels = bytearray()
        while node:
            labels.append(self._labels[node])
            node = self._parents[node]
        return bytes(reversed(labels))

    def check_node(self, node: Any) -> int:
        """A node as an int; raises `UnknownNode` for anything but an integer from 0 to N - 1."""
        if not isinstance(node, (int, np.integer)) or isinstance(node, bool):
            raise UnknownNode(f"node {shown(node, _MAX_SHOWN)} is of type {type(node).__name__}: nodes are integers")
        if not 0 <= node < self.n_nodes:
            wrong = shown(int(node), _MAX_SHOWN)
            raise UnknownNode(f"node {wrong} is out of range: nodes go from 0 to {self.n_nodes - 1}")
        return int(node)

    def check_nodes(self, nodes: Any) -> NDArray[np.int32]:
        """A sequence or 1-D array of integers as int32 (k,); raises `UnknownNode` for the first wrong node."""
        if not hasattr(nodes, "__array__"):  # Check without numpy, which converts bools to integers.
            if isinstance(nodes, (str, bytes, bytearray)) or not isinstance(nodes, Sequence):
                raise UnknownNode(f"the nodes {shown(nodes, _MAX_SHOWN)} must be a sequence of integers")
            # Check all nodes at once, which is several times as fast as node by node.
            if set(map(type, nodes)) == {int} and min(nodes) >= 0 and max(nodes) < self.n_nodes:
                return np.array(nodes, np.int32)
            return np.array([self.check_node(node) for node in nodes], np.int32)
        array = np.asarray(nodes)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise UnknownNode(f"the nodes are {array.dtype} of shape {array.shape}: they must be 1-D and integers")
        wrong = np.flatnonzero((array < 0) | (array >= self.n_nodes))
        if wrong.size:
            self.check_node(array[wrong[0]])
        return array.astype(np.int32)

    def expand(self, inner: Values, ws: Values, out: Values | None = None) -> Values:
        """The values of all nodes, float32 (N,) or (B, N), in new memory or in `out`.

        `inner` are the values of the inner nodes, (M,) or (B, M), and `ws` the weights of all tokens, (V,) or (B, V).
        Raises `ValueError` if the shapes do not fit.
        """
        self._check_shapes(inner, ws)
        shape = (*inner.shape[:-1], self.n_nodes)
        values = np.empty(shape, np.float32) if out is None else out
        if values.shape != shape or values.dtype != np.float32:
            raise ValueError(f"{values.dtype} of shape {values.shape} cannot take values of shape {shape} and float32")
        # Expand row by row: a row stays in the processor's cache, and a clipping `take` needs no second buffer.
        row = np.empty(self.n_inner + self.n_tokens, np.float32)
        for target, of_inner, of_tokens in zip(*map(np.atleast_2d, (values, inner, ws)), strict=True):
            row[: self.n_inner], row[self.n_inner :] = of_inner, of_tokens
            row.take(self._index, out=target, mode="clip")
        return values

    def pick(self, inner: Values, ws: Values, nodes: Any) -> Values:
        """The values of k nodes in their order, float32 (k,) or (B, k); see `expand` and `check_nodes`."""
        self._check_shapes(inner, ws)
        index = self.value_of[self.check_nodes(nodes)]
        of_inner, of_tokens = np.minimum(index, self.n_inner - 1), np.maximum(index - self.n_inner, 0)
        return np.where(index < self.n_inner, inner[..., of_inner], ws[..., of_tokens])

    @cached_property
    def _index(self) -> NDArray[np.intp]:
        """`value_of` in numpy's index type, so that numpy does not convert it at every call."""
        return self.value_of.astype(np.intp)

    def _check_shapes(self, inner: Values, ws: Values) -> None:
        if inner.shape[-1:] != (self.n_inner,) or ws.shape != (*inner.shape[:-1], self.n_tokens) or inner.ndim > 2:
            trie = f"a trie of {self.n_inner} inner nodes and {self.n_tokens} tokens"
            raise ValueError(f"inner values of shape {inner.shape} and weights of shape {ws.shape} do not fit {trie}")

    def __eq__(self, other: object) -> bool:
        return self.vocabulary == other.vocabulary if isinstance(other, Trie) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.vocabulary)

    def __repr__(self) -> str:
        return f"<Trie {self.digest[:8]}: {self.n_tokens} tokens, {self.n_nodes} nodes, {self.n_inner} inner>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Trie, (self.vocabulary,)


def check_weights(weights: Any, n_tokens: int, *, batch: bool, may_have_nan: bool = False) -> Values:
    """Check the weights of all tokens: float32 of shape (V,), or (B, V) when `batch`, from numpy or torch on the CPU.

    Returns the same numbers, C-contiguous and aligned, copied only if necessary. Raises `InvalidWeights` for any
    other value, and for NaN unless `may_have_nan`: kernels check the numbers themselves.
    """
    if not hasattr(weights, "__array__"):
        advice = "pass a float32 array, for a list numpy.asarray(weights, numpy.float32)"
        raise InvalidWeights(f"the weights are {shown(weights, _MAX_SHOWN)} ({type(weights).__name__}): {advice}")
    try:
        values = np.asarray(weights)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidWeights(f"the weights, a {type(weights).__name__}, cannot be read as an array: {error}") from error
    if values.dtype != np.float32:
        raise InvalidWeights(f"the weights have dtype {values.dtype}: convert with numpy.asarray(w, numpy.float32)")
    if values.ndim != 1 + batch:
        wanted = f"a batch has shape (B, {n_tokens})" if batch else f"one vector has shape ({n_tokens},)"
        raise InvalidWeights(f"the weights have shape {values.shape}: {wanted}")
    if values.shape[-1] != n_tokens:
        raise InvalidWeights(f"{values.shape[-1]} weights for {n_tokens} tokens")
    # The minimum is NaN when any number is, and takes a fifth of the time of `isnan`.
    if not may_have_nan and values.size and np.isnan(values.min()):
        raise nan_found(values)
    return np.require(values, requirements=("C", "A"))


def nan_found(values: Values) -> InvalidWeights:
    """The error for weights of shape (V,) or (B, V) with NaN; its text names the first NaN."""
    place = np.unravel_index(int(np.argmax(np.isnan(values))), values.shape)
    where = f"weight {place[-1]}" if values.ndim == 1 else f"weight {place[1]} of row {place[0]}"
    return InvalidWeights(f"{where} is NaN: every weight must be a number, or an infinity")


class Plan(NamedTuple):
    """The order in which kernels sweep a trie: tokens sorted by the inner node that their weight is added to."""

    n_tokens: int
    n_inner: int
    order: NDArray[np.uint32]  # The token ids sorted by home, then by id; uint32 (V,).
    start: NDArray[np.uint32]  # The tokens of inner node i are order[start[i] : start[i + 1]]; uint32 (M + 1,).
    depth: NDArray[np.uint32]  # The number of inner nodes above each inner node; uint32 (M,).
    source: NDArray[np.uint32]  # Each node's place in [M inner values | V weights in `order`]; uint32 (N,).
    identity: NDArray[np.uint32]  # `source` for the inner nodes only, which is 0..M-1; uint32 (M,).


def make_plan(trie: Compressed) -> Plan:
    """Lay out the sweep of a trie."""
    order = np.argsort(trie.home, kind="stable").astype(np.uint32)
    rank = np.empty(trie.n_tokens, np.uint32)
    rank[order] = np.arange(trie.n_tokens, dtype=np.uint32)
    start = np.zeros(trie.n_inner + 1, np.uint32)
    np.cumsum(np.bincount(trie.home, minlength=trie.n_inner), out=start[1:])
    source = trie.value_of.astype(np.uint32)
    single = source >= trie.n_inner
    source[single] = rank[source[single] - trie.n_inner] + np.uint32(trie.n_inner)
    # Each round doubles the step upwards, so the depths of a chain of n nodes take log2(n) rounds.
    depth, above = (trie.inner_parent >= 0).astype(np.uint32), trie.inner_parent.copy()
    while (climbing := np.flatnonzero(above >= 0)).size:
        step = above[climbing]
        depth[climbing] += depth[step]
        above[climbing] = above[step]
    identity = np.arange(trie.n_inner, dtype=np.uint32)
    return Plan(trie.n_tokens, trie.n_inner, order, start, depth, source, identity)


def max_kernel_bytes(vocabulary: Vocabulary, device: str) -> int:
    """The upper limit of the memory of kernels on a device, in bytes, for the trie over a vocabulary."""
    tokens, nodes = len(vocabulary), len(vocabulary.data) + 1
    inner = tokens  # Each inner node separates tokens from one another, so at most V inner nodes exist.
    if device != "cpu":
        blocks = 2 * tokens.bit_length() * inner
        return 8 * (tokens + inner + 1 + nodes) + 16 * blocks
    plan = 4 * (tokens + 3 * inner + 1 + nodes)
    places = min(int(vocabulary.lengths.max()), inner) + 2
    a_lane = 4 * tokens + (4 + 8) * (inner + tokens) + 8 * places
    return plan + count_threads() * WIDEST * a_lane
