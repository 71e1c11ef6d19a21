"""Sums and maxima in float64, for weights that float32 cannot hold: slower than the kernels, which are float32."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lmpool.producer.genlm.numbering import spans_of
from lmpool.trie.trie import Trie


class WideValues:
    """The values of all nodes of a trie, in float64, by numpy.

    Args:
        trie: the trie.
        source: where the value of each wanted node is in [M values of inner nodes | V weights], integers (G,).
    """

    def __init__(self, trie: Trie, source: NDArray[np.int32]) -> None:
        spans = spans_of(trie)
        nodes = np.empty(trie.n_inner, np.int64)
        # The nodes that share the value of an inner node have the same items below them.
        sharing = np.flatnonzero(trie.value_of < trie.n_inner)
        nodes[trie.value_of[sharing]] = sharing
        self._items = spans.items
        # reduceat takes every bound as a beginning, too: what lies between two nodes is dropped afterwards.
        self._bounds = np.column_stack([spans.low[nodes], spans.high[nodes]]).ravel()
        self._source = source.astype(np.intp)

    def values(self, op: Literal["sum", "max"], rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """The values of the wanted nodes, float64 (B, G), from weights of shape (B, V)."""
        ufunc = np.add if op == "sum" else np.maximum
        found = np.empty((len(rows), self._source.size))
        for row, result in zip(rows, found, strict=True):
            # One number more than there are items, as the last bound may be their count.
            ordered = np.append(row[self._items], 0.0)
            inner = ufunc.reduceat(ordered, self._bounds)[::2]
            # A clipping take needs no second buffer; all indices are in range.
            np.concatenate([inner, row]).take(self._source, out=result, mode="clip")
        return found
