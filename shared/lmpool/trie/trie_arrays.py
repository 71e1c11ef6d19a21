"""The arrays of a trie, built from the sorted byte strings without a loop over nodes.

Nodes are the distinct prefixes of the tokens, numbered in the order of their bytes. The sorted tokens enter one after
the other: each adds a node for every byte behind what it has in common with the one before it, so numbers, depths and
labels are running sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmpool.vocabulary import Vocabulary

_WINDOW = 8
_BLOCK = 1 << 22

Ints = NDArray[np.int64]


class TrieArrays(NamedTuple):
    """A trie of N nodes over V tokens, M of them inner; `lmpool.trie.trie.Trie` says what each array holds."""

    parent: NDArray[np.int32]
    label: NDArray[np.uint8]
    depth: NDArray[np.int32]
    leaf: NDArray[np.int32]
    child_start: NDArray[np.int32]
    child: NDArray[np.int32]
    home: NDArray[np.int32]
    inner_parent: NDArray[np.int32]
    value_of: NDArray[np.int32]


def build_arrays(vocabulary: Vocabulary) -> TrieArrays:
    """The arrays of the trie over a vocabulary."""
    tokens = vocabulary.tokens
    order = np.array(sorted(range(len(tokens)), key=tokens.__getitem__), np.int64)
    lengths = vocabulary.lengths.astype(np.int64)
    starts = (np.cumsum(lengths) - lengths)[order]
    lengths = lengths[order]
    # Room for a window at every byte.
    data = np.frombuffer(vocabulary.data + bytes(int(lengths.max()) + 1), np.uint8)
    added = lengths - _common_prefixes(data, starts, lengths)
    last = np.cumsum(added)
    leaf = np.empty(len(tokens), np.int32)
    leaf[order] = last

    # A node's depth grows by one within its token, from what the token shares with the one before it.
    depths = np.zeros(int(last[-1]) + 1, np.int64)
    depths[1:] = np.arange(1, depths.size) - np.repeat(last - lengths, added)
    label = np.zeros(depths.size, np.uint8)
    label[1:] = data[np.repeat(starts - 1, added) + depths[1:]]
    depth = depths.astype(np.int32)

    parent = _parents(depth)
    child_start, child = _children(parent)
    home, inner_parent, value_of = _plan(parent, np.diff(child_start), leaf)
    return TrieArrays(parent, label, depth, leaf, child_start, child, home, inner_parent, value_of)


def _common_prefixes(data: NDArray[np.uint8], starts: Ints, lengths: Ints) -> Ints:
    """The length of what each token has in common with the one before it, 0 at the first: int64 (V,).

    All pairs that are equal so far are compared at once, a window of bytes at a time. The window grows as pairs drop
    out, so that a few long tokens cost as little as many short ones.
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
        found = rows[ended]
        common[found] = np.minimum(limit[found], at + differs[ended].argmax(axis=1))
        at += width
        rows = rows[~ended]
        rows = rows[limit[rows] > at]
        width = min(2 * width, max(_WINDOW, _BLOCK // max(1, rows.size)))
    return common


def _parents(depth: NDArray[np.int32]) -> NDArray[np.int32]:
    """Every node's parent: the last node before it that is one less deep, most often the one right before it."""
    count = depth.size
    parent = np.arange(-1, count - 1, dtype=np.int32)
    others = np.flatnonzero(depth[1:] <= depth[:-1]) + 1
    by_depth = _stable_order(depth)
    keys = depth[by_depth] * np.int64(count) + by_depth
    parent[others] = by_depth[np.searchsorted(keys, (depth[others] - 1) * np.int64(count) + others) - 1]
    return parent


def _stable_order(values: NDArray[Any]) -> Ints:
    """`argsort(kind="stable")` of numbers from 0 to 2**32 - 1, 16 bits at a time: numpy sorts those by radix."""
    order = np.argsort((values & 0xFFFF).astype(np.uint16), kind="stable")
    high = (values >> 16).astype(np.uint16)
    if not high.any():
        return order
    return order[np.argsort(high[order], kind="stable")]


def _children(parent: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """`child_start` (N + 1,) and `child` (N - 1,), int32: the children of all nodes, one node after the other."""
    child_start = np.zeros(parent.size + 1, np.int32)
    np.cumsum(np.bincount(parent[1:], minlength=parent.size), out=child_start[1:])
    return child_start, (_stable_order(parent[1:]) + 1).astype(np.int32)


def _plan(
    parent: NDArray[np.int32], n_children: NDArray[np.int32], leaf: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """`home` (V,), `inner_parent` (M,) and `value_of` (N,): nodes with the value of another, or of one token, left out.

    What has one child and no token has its child's value, and its child is the next node. So every node has the value
    of the first node from itself on that is not such a link, and the links right before a node are its chain.
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

    # Above the chain of a kept node is an inner one, as a link's only child is in the same chain.
    above = np.full(ends.size, -1, np.int32)
    above[1:] = index[parent[ends[:-1] + 1]]
    home = np.where(inner[leaf], index[leaf], above[end[leaf]])
    return home, above[inner[ends]], value[end]
