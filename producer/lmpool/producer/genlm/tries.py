"""Tries that are used and numbered like genlm-backend's, and computed by lmpool's kernels."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Hashable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lmpool.producer.genlm.numbering import number, renumbered
from lmpool.producer.genlm.picture import draw
from lmpool.producer.genlm.spelling import refuse_duplicates, spell
from lmpool.producer.genlm.weights import as_rows, as_vector
from lmpool.producer.genlm.wide import WideValues
from lmpool.settings import check_choice
from lmpool.trie.kernels import open_kernels
from lmpool.trie.trie import Trie

_Op = Literal["sum", "max"]
_N_BYTES = 256


class TokenCharacterTrie:
    """The sum or maximum of the weights below every prefix of a vocabulary, in float64.

    Nodes have the numbers that genlm-backend gives them: postorder, a leaf for every item below the node of its
    last letter, children in the order in which the items brought them. As there, a maximum is never below 0 except at
    the leaves; `ParallelTokenCharacterTrie` knows no such bound. Unlike there, NaN and vectors of another length
    than the vocabulary are refused.

    Float32 and narrower weights go through the kernels, whose relative error is below 1e-6; others are added up
    in float64 and take longer.

    Attributes:
        decode: the vocabulary, as it was given.
        structure: lmpool's trie over the spelled items, with numbers of its own.
        node_map: int32 (G,), for each of the G nodes here the node of `structure`, or -1 - i for the leaf of item i.
        root: the number of the root, G - 1.

    Args:
        decode: the items: `Token` objects (ours or genlm-backend's), plain bytes (deprecated), or any hashable
            iterables of hashable letters, such as end-of-sequence items. Item i has the weight `ws[i]`.

    Raises:
        InvalidVocabulary: no items, an item of another kind, two items with one key, or more than the limits of `Trie`.
        SettingsError: numba is not installed.
    """

    decode: Sequence[Any]
    structure: Trie
    node_map: NDArray[np.int32]
    root: int

    def __init__(self, decode: Sequence[Any]) -> None:
        self._build(decode, "cpu")

    def _build(self, decode: Sequence[Any], device: str) -> None:
        spelling = spell(decode)
        if spelling.has_plain_bytes:
            warnings.warn(
                "Passing plain bytes to TokenCharacterTrie is deprecated. Use Token objects, which have ids.",
                DeprecationWarning,
                stacklevel=3,
            )
        refuse_duplicates(spelling.keys)
        self.decode = decode
        self.structure = Trie(spelling.words)
        self._keys = spelling.keys
        self._letters = spelling.letters
        self._numbering = number(self.structure, escaped=bool(spelling.letters))
        self.node_map = self._numbering.node_map
        self.root = len(self.node_map) - 1
        self._renumbered = renumbered(self.structure, self.node_map)
        self._kernels = open_kernels(self._renumbered, device)

    def weight_sum(self, ws: Any) -> NDArray[Any]:
        """The sum of the weights below every node.

        Args:
            ws: array, tensor (of any device) or list of V real numbers, one for each item.

        Returns:
            float64 (G,), by node number; float32 from `ParallelTokenCharacterTrie`.

        Raises:
            InvalidWeights: another number of weights, something that is no real number, or NaN.
        """
        row: NDArray[Any] = self._compute("sum", as_vector(ws, len(self.decode))[None])[0]
        return row

    def weight_max(self, ws: Any) -> NDArray[Any]:
        """The greatest weight below every node; arguments, result and errors as `weight_sum`."""
        row: NDArray[Any] = self._compute("max", as_vector(ws, len(self.decode))[None])[0]
        return row

    def batch_weight_sum(self, ws: Any) -> NDArray[Any]:
        """`weight_sum` of several vectors: a list of them or one of shape (B, V) -> (B, G)."""
        return self._compute("sum", as_rows(ws, len(self.decode)))

    def batch_weight_max(self, ws: Any) -> NDArray[Any]:
        """`weight_max` of several vectors: a list of them or one of shape (B, V) -> (B, G)."""
        return self._compute("max", as_rows(ws, len(self.decode)))

    def check(self, ws: Any) -> NDArray[Any]:
        """One weight vector as an array of shape (V,), before it joins a batch.

        Raises:
            InvalidWeights: as `weight_sum`.
        """
        return as_vector(ws, len(self.decode))

    def _compute(self, op: _Op, rows: NDArray[Any]) -> NDArray[Any]:
        found: NDArray[np.float64]
        if rows.dtype.kind == "f" and rows.dtype.itemsize <= 4:
            found = self._kernels.values(op, np.ascontiguousarray(rows, np.float32)).astype(np.float64)
        else:
            found = self._wide.values(op, rows.astype(np.float64, copy=False))
        if op == "max" and rows.size and rows.min() < 0:
            found[:, self.ordering] = np.maximum(found[:, self.ordering], 0)
        return found

    @cached_property
    def _wide(self) -> WideValues:
        return WideValues(self.structure, self._renumbered.value_of)

    @cached_property
    def children(self) -> list[dict[Any, int]]:
        """For every node its children by letter; the leaf of item i stands under (None, i)."""
        children: list[dict[Any, int]] = [{} for _ in range(len(self.node_map))]
        above = zip(self._numbering.parent[:-1].tolist(), self._letters_of_nodes, strict=False)
        for node, (parent, letter) in enumerate(above):
            children[parent][letter] = node
        return children

    @cached_property
    def jump(self) -> list[NDArray[np.int32]]:
        """For every node the numbers of its children, int32, ascending."""
        parent = self._numbering.parent[:-1]
        bounds = np.zeros(len(self.node_map) + 1, np.int64)
        np.cumsum(np.bincount(parent, minlength=len(self.node_map)), out=bounds[1:])
        kids = np.argsort(parent, kind="stable").astype(np.int32)
        return [kids[a:b] for a, b in pairwise(bounds.tolist())]

    @cached_property
    def word2leaf(self) -> dict[Any, int]:
        """The leaf of every item: (byte string, id) -> leaf for tokens, else item -> leaf."""
        return dict(zip(self._keys, self._numbering.leaf.tolist(), strict=True))

    @cached_property
    def leaf2word(self) -> dict[int, Any]:
        """The item of every leaf, as a key of `word2leaf`."""
        return dict(zip(self._numbering.leaf.tolist(), self._keys, strict=True))

    @cached_property
    def idx_to_leaf(self) -> NDArray[np.int32]:
        """Rows of item and leaf, int32 (V, 2)."""
        leaf = self._numbering.leaf
        return np.column_stack([np.arange(leaf.size, dtype=np.int32), leaf])

    @cached_property
    def ordering(self) -> NDArray[np.int64]:
        """All nodes but the leaves, children before parents; int64 (G - V,)."""
        return np.flatnonzero(self.node_map >= 0)

    @cached_property
    def node2prefix(self) -> dict[int, list[Any]]:
        """The letters on the way to every node; a leaf shares its parent's list."""
        letters, parents = self._letters_of_nodes, self._numbering.parent.tolist()
        is_leaf = (self.node_map < 0).tolist()
        prefixes: dict[int, list[Any]] = {self.root: []}
        for node in range(self.root - 1, -1, -1):
            above = prefixes[parents[node]]
            prefixes[node] = above if is_leaf[node] else [*above, letters[node]]
        return prefixes

    @cached_property
    def _letters_of_nodes(self) -> list[Any]:
        """The letter into every node; for the leaf of item i it is (None, i)."""
        alphabet: list[Hashable] = [*range(_N_BYTES), *self._letters]
        letters: list[Any] = [alphabet[code] for code in self._numbering.letter.tolist()]
        for item, leaf in enumerate(self._numbering.leaf.tolist()):
            letters[leaf] = (None, item)
        return letters

    def visualize(self, ws: Any = None) -> Any:
        """Draw the trie, as a `graphviz.Digraph`.

        Args:
            ws: the weight of every node, (G,), shown and coloured; or None.

        Raises:
            InvalidWeights: another number of weights.
            SettingsError: graphviz is not installed.
        """
        return draw(self.children, self.node2prefix, self.leaf2word, ws)


class ParallelTokenCharacterTrie(TokenCharacterTrie):
    """As `TokenCharacterTrie`, in float32 and with maxima below 0; on all cores, or on a CUDA device.

    Sums keep the kernels' error below 1e-6. genlm-backend's class adds in float32 and loses more, the more tokens there
    are: 3e-6 of the root's sum for 5,000, over 1e-4 for 131,072. So far the two may differ; `make bench` measures it
    (`trie-error-par` in docs/benchmarks-tries.md).

    Args:
        decode: as there.
        device: "cpu", "cuda", or None for CUDA where torch is loaded and has a device.

    Attributes:
        device: where it computes.

    Raises:
        InvalidVocabulary: as there.
        SettingsError: another device, or numba or torch is not installed.
    """

    device: str

    def __init__(self, decode: Sequence[Any], device: str | None = None) -> None:
        if device is not None:
            check_choice("device", device, ("cpu", "cuda"))
        self.device = device or _default_device()
        self._build(decode, self.device)

    def _compute(self, op: _Op, rows: NDArray[Any]) -> NDArray[Any]:
        # What float32 cannot hold becomes infinite, as it does in a tensor.
        with np.errstate(over="ignore"):
            rows = np.ascontiguousarray(rows, np.float32)
        return self._kernels.values(op, rows)


def _default_device() -> str:
    torch = sys.modules.get("torch")
    return "cuda" if torch is not None and torch.cuda.is_available() else "cpu"
