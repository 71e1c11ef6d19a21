"""Tries with genlm-backend's methods and node numbers, computed by lmpool's kernels.

`TokenCharacterTrie` and `ParallelTokenCharacterTrie` compute values; `AsyncTokenCharacterTrie` batches requests.
"""

from __future__ import annotations

import asyncio
import sys
import warnings
from collections.abc import Hashable, Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lmpool.aio import join_task
from lmpool.errors import InvalidWeights, SettingsError
from lmpool.producer.genlm.numbering import N_BYTES, Token, number, spans_of, spell
from lmpool.settings import check_choice, shown
from lmpool.trie.kernels import open_kernels
from lmpool.trie.trie import Compressed, Trie, nan_found

_Op = Literal["sum", "max"]


class TokenCharacterTrie:
    """The sum or maximum of the weights below every prefix of a vocabulary, in float64.

    Nodes have genlm-backend's numbers: postorder, a leaf for every item below the node of its last letter, and children
    in the order of their first items. As in genlm-backend, a maximum is never below 0 except at the leaves, but
    `ParallelTokenCharacterTrie` returns maxima below 0. Unlike genlm-backend, NaN and wrong numbers of weights raise.

    The kernels sum weights of float32 and narrower types with a relative error below 1e-6. Other weights are added in
    float64, which takes longer.

    Attributes:
        decode: the vocabulary.
        structure: lmpool's trie over the spelled items, with its own node numbers.
        node_map: int32 (G,): for each of the G nodes the node of `structure`, or -1 - i for the leaf of item i.
        root: the number of the root, G - 1.

    Args:
        decode: the items: `Token` objects (of this package or of genlm-backend), plain bytes (deprecated), or any
            hashable iterables of hashable letters, such as end-of-sequence items. Item i has the weight `ws[i]`.

    Raises:
        InvalidVocabulary: no items, an item of another kind, two items with equal keys, or a limit of `Trie` exceeded.
        SettingsError: numba is not installed.
    """

    def __init__(self, decode: Sequence[Any]) -> None:
        self._build(decode, "cpu")

    def _build(self, decode: Sequence[Any], device: str) -> None:
        if any(map(Token.is_plain_bytes, decode)):
            text = "Passing plain bytes to TokenCharacterTrie is deprecated. Use Token objects, which have ids."
            warnings.warn(text, DeprecationWarning, stacklevel=3)
        words, self._keys, self._letters = spell(decode)
        self.decode = decode
        self.structure = trie = Trie(words)
        self._numbering = number(trie, escaped=bool(self._letters))
        self.node_map = self._numbering.node_map
        self.root = len(self.node_map) - 1
        of_leaves = np.int32(trie.n_inner - 1) - self.node_map
        self._value_of = np.where(self.node_map < 0, of_leaves, trie.value_of[np.maximum(self.node_map, 0)])
        self._kernels = open_kernels(Compressed(trie.home, trie.inner_parent, self._value_of), device)

    def weight_sum(self, ws: Any) -> NDArray[Any]:
        """The sum of the weights below every node.

        Args:
            ws: array, tensor (on any device) or list of V real numbers, one for each item.

        Returns:
            float64 (G,), by node number; float32 from `ParallelTokenCharacterTrie`.

        Raises:
            InvalidWeights: the number of weights is not V, or a weight is NaN or not a real number.
        """
        return self._batch("sum", [ws])[0]  # type: ignore[no-any-return]

    def weight_max(self, ws: Any) -> NDArray[Any]:
        """The greatest weight below every node; arguments, result and errors are as for `weight_sum`."""
        return self._batch("max", [ws])[0]  # type: ignore[no-any-return]

    def batch_weight_sum(self, ws: Any) -> NDArray[Any]:
        """`weight_sum` of B weight vectors, a list or an array of shape (B, V); returns shape (B, G)."""
        return self._batch("sum", ws)

    def batch_weight_max(self, ws: Any) -> NDArray[Any]:
        """`weight_max` of B weight vectors, a list or an array of shape (B, V); returns shape (B, G)."""
        return self._batch("max", ws)

    def check(self, ws: Any) -> NDArray[Any]:
        """Check one weight vector, and return it as an array of shape (V,).

        Raises:
            InvalidWeights: as for `weight_sum`.
        """
        vector = _host(ws)
        if vector.ndim != 1:
            raise InvalidWeights(f"the weights have shape {vector.shape}: one vector has shape ({len(self.decode)},)")
        self._check_rows(vector[None])
        return vector

    def _batch(self, op: _Op, batch: Any) -> NDArray[Any]:
        """Compute the values of all nodes for a 2-D array or tensor, or for an iterable of vectors."""
        if hasattr(batch, "ndim") and batch.ndim == 2:
            rows = _host(batch)
            self._check_rows(rows)
        elif isinstance(batch, Iterable):
            vectors = [self.check(vector) for vector in batch]
            rows = np.stack(vectors) if vectors else np.empty((0, len(self.decode)), np.float32)
        else:
            raise InvalidWeights(f"the weights are {shown(batch, 120)}: a batch is a list of vectors or a 2-D array")
        return self._compute(op, rows)

    def _check_rows(self, rows: NDArray[Any]) -> None:
        if rows.shape[1] != len(self.decode):
            items = f"a vocabulary of {len(self.decode)} items"
            raise InvalidWeights(f"{rows.shape[1]} weights for {items}: give one for each")
        if rows.dtype.kind not in "fiub":
            raise InvalidWeights(f"the weights' dtype is {rows.dtype}: they must be real numbers")
        # Check the minimum, which is NaN if any weight is NaN: computing the minimum needs no second array.
        if rows.size and np.isnan(rows.min()):
            raise nan_found(rows)

    def _compute(self, op: _Op, rows: NDArray[Any]) -> NDArray[Any]:
        values: NDArray[np.float64]
        if rows.dtype.kind == "f" and rows.dtype.itemsize <= 4:
            values = self._kernels.values(op, np.ascontiguousarray(rows, np.float32)).astype(np.float64)
        else:
            values = self._wide_values(op, rows.astype(np.float64, copy=False))
        if op == "max" and rows.size and rows.min() < 0:
            values[:, self.ordering] = np.maximum(values[:, self.ordering], 0)
        return values

    def _wide_values(self, op: _Op, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """The values of the nodes in float64, (B, G), computed by numpy."""
        ufunc = np.add if op == "sum" else np.maximum
        items, bounds, source = self._wide_plan
        results = np.empty((len(rows), source.size))
        for row, result in zip(rows, results, strict=True):
            # Append 0.0, because the last bound may be the number of items, which `reduceat` refuses. `reduceat` also
            # reduces the ranges that begin at upper bounds: drop the results of these ranges.
            inner = ufunc.reduceat(np.append(row[items], 0.0), bounds)[::2]
            # With mode="clip", `take` needs no second buffer; all indices are in range.
            np.concatenate([inner, row]).take(source, out=result, mode="clip")
        return results

    @cached_property
    def _wide_plan(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.intp]]:
        """For `_wide_values`: the items in the order of their nodes; bounds of each inner node's items; the index of
        each node's value in [values of inner nodes | values of items].
        """
        trie, spans = self.structure, spans_of(self.structure)
        nodes = np.empty(trie.n_inner, np.int64)
        # Nodes that share an inner node's value have the same items below them.
        sharing = np.flatnonzero(trie.value_of < trie.n_inner)
        nodes[trie.value_of[sharing]] = sharing
        bounds = np.column_stack([spans.low[nodes], spans.high[nodes]]).ravel()
        return spans.items, bounds, self._value_of.astype(np.intp)

    @cached_property
    def children(self) -> list[dict[Any, int]]:
        """The children of every node by letter; the leaf of item i has the key (None, i)."""
        children: list[dict[Any, int]] = [{} for _ in range(len(self.node_map))]
        above = zip(self._numbering.parent[:-1].tolist(), self._letters_of_nodes, strict=False)
        for node, (parent, letter) in enumerate(above):
            children[parent][letter] = node
        return children

    @cached_property
    def jump(self) -> list[NDArray[np.int32]]:
        """The numbers of the children of every node, int32, ascending."""
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
        """Pairs of an item's index and its leaf, int32 (V, 2)."""
        leaf = self._numbering.leaf
        return np.column_stack([np.arange(leaf.size, dtype=np.int32), leaf])

    @cached_property
    def ordering(self) -> NDArray[np.int64]:
        """All nodes except the leaves, children before parents; int64 (G - V,)."""
        return np.flatnonzero(self.node_map >= 0)

    @cached_property
    def node2prefix(self) -> dict[int, list[Any]]:
        """The letters on the path to every node; a leaf shares its parent's list."""
        letters, parents = self._letters_of_nodes, self._numbering.parent.tolist()
        is_leaf = (self.node_map < 0).tolist()
        prefixes: dict[int, list[Any]] = {self.root: []}
        for node in range(self.root - 1, -1, -1):
            above = prefixes[parents[node]]
            prefixes[node] = above if is_leaf[node] else [*above, letters[node]]
        return prefixes

    @cached_property
    def _letters_of_nodes(self) -> list[Any]:
        """The letter that leads to every node; (None, i) for the leaf of item i."""
        alphabet: list[Hashable] = [*range(N_BYTES), *self._letters]
        letters: list[Any] = [alphabet[code] for code in self._numbering.letter.tolist()]
        for item, leaf in enumerate(self._numbering.leaf.tolist()):
            letters[leaf] = (None, item)
        return letters

    def visualize(self, ws: Any = None) -> Any:
        """Draw the trie, as a `graphviz.Digraph`.

        Args:
            ws: the weight of every node, (G,), which is drawn as text and colour; None to draw no weights.

        Raises:
            InvalidWeights: the number of weights is not G.
            SettingsError: genlm-backend or graphviz is not installed.
        """
        weights = None if ws is None else np.asarray(ws)
        if weights is not None and weights.shape != self.node_map.shape:
            raise InvalidWeights(f"weights of shape {weights.shape} for {len(self.node_map)} nodes: give one for each")
        try:
            from genlm.backend.trie import TokenCharacterTrie as Drawn

            return Drawn.visualize(self, weights)
        except ImportError as error:
            raise SettingsError("drawing needs genlm-backend and graphviz: pip install 'lmpool[genlm]'") from error


class ParallelTokenCharacterTrie(TokenCharacterTrie):
    """A `TokenCharacterTrie` that computes in float32, on all cores or on a CUDA device; maxima may be below 0.

    The relative error of sums is below 1e-6. genlm-backend's class adds in float32, and its error grows with the
    vocabulary: 3e-6 of the root's sum for 5,000 tokens, more than 1e-4 for 131,072 (`trie-error-par` in
    docs/benchmarks/tries.md).

    Args:
        decode: see `TokenCharacterTrie`.
        device: "cpu" or "cuda"; None for "cuda" if torch is imported and finds a CUDA device, else "cpu".

    Attributes:
        device: the device of the kernels.

    Raises:
        InvalidVocabulary: see `TokenCharacterTrie`.
        SettingsError: an unknown device, or numba or torch is not installed.
    """

    def __init__(self, decode: Sequence[Any], device: str | None = None) -> None:
        if device is not None:
            check_choice("device", device, ("cpu", "cuda"))
        torch = sys.modules.get("torch")
        self.device = device or ("cuda" if torch is not None and torch.cuda.is_available() else "cpu")
        self._build(decode, self.device)

    def _compute(self, op: _Op, rows: NDArray[Any]) -> NDArray[Any]:
        # Weights beyond the range of float32 become infinite, as they do in a torch tensor.
        with np.errstate(over="ignore"):
            rows = np.ascontiguousarray(rows, np.float32)
        return self._kernels.values(op, rows)


class AsyncTokenCharacterTrie:
    """Batches concurrent requests to a trie: one batch for sums, and one batch for maxima.

    Unusable weights fail only their own request. When a batch fails, all requests of this batch fail.
    Batches are computed in the event loop's thread. An instance works in one event loop after another without `start`
    or `cleanup`, because it holds no task between requests.

    Attributes:
        trie: the trie.
    """

    def __init__(self, trie: TokenCharacterTrie) -> None:
        self.trie = trie
        # Operation -> the vectors that wait for the next event-loop tick, and the task that computes these vectors.
        self._open: dict[_Op, tuple[list[NDArray[Any]], asyncio.Task[NDArray[Any]]]] = {}

    @classmethod
    def from_vocab(cls, vocab: Sequence[Any], backend: str = "parallel", **kwargs: Any) -> AsyncTokenCharacterTrie:
        """Make the trie of a vocabulary.

        Args:
            vocab: the items, see `TokenCharacterTrie`.
            backend: "parallel" for `ParallelTokenCharacterTrie`, "sequential" for `TokenCharacterTrie`.
            kwargs: more arguments of the chosen class.

        Raises:
            SettingsError: an unknown backend.
            InvalidVocabulary: as `TokenCharacterTrie`.
        """
        check_choice("backend", backend, ("sequential", "parallel"))
        kind = TokenCharacterTrie if backend == "sequential" else ParallelTokenCharacterTrie
        return cls(kind(vocab, **kwargs))

    async def weight_sum(self, ws: Any) -> NDArray[Any]:
        """The sum of the weights below every node; see `TokenCharacterTrie.weight_sum`."""
        return await self._request("sum", ws)

    async def weight_max(self, ws: Any) -> NDArray[Any]:
        """The greatest weight below every node; see `TokenCharacterTrie.weight_max`."""
        return await self._request("max", ws)

    def start(self) -> None:
        """Do nothing: programs for genlm-backend call this method, but here a batch starts with its first request."""

    async def cleanup(self) -> None:
        """Wait for the pending batches of this event loop."""
        loop = asyncio.get_running_loop()
        if waiting := [task for _, task in self._open.values() if task.get_loop() is loop]:
            await asyncio.wait(waiting)

    def shutdown(self) -> None:
        """Cancel pending requests; later requests work again."""
        batches, self._open = list(self._open.values()), {}
        for _, task in batches:
            if not task.get_loop().is_closed():
                task.cancel()

    async def _request(self, op: _Op, ws: Any) -> NDArray[Any]:
        vector = self.trie.check(ws)
        loop = asyncio.get_running_loop()
        vectors, task = self._open.get(op, ([], None))
        # Begin a new batch if the open batch belongs to an event loop that ended early: it will never be computed.
        if task is None or task.get_loop() is not loop or task.done():
            vectors = []
            task = loop.create_task(self._compute(op, vectors))
            self._open[op] = vectors, task
        index = len(vectors)
        vectors.append(vector)
        result: NDArray[Any] = (await join_task(task))[index]
        return result

    async def _compute(self, op: _Op, vectors: list[NDArray[Any]]) -> NDArray[Any]:
        """Close the open batch of an operation, and compute it."""
        if self._open.get(op, ([], None))[0] is vectors:
            del self._open[op]
        return self.trie.batch_weight_sum(vectors) if op == "sum" else self.trie.batch_weight_max(vectors)


def _host(weights: Any) -> NDArray[Any]:
    """Weights as a numpy array. Tensors are recognised by their methods, because torch may not be installed."""
    if hasattr(weights, "detach") and hasattr(weights, "cpu"):
        weights = weights.detach().cpu()
        if "bfloat16" in str(weights.dtype):
            weights = weights.float()
        return np.asarray(weights.numpy())
    try:
        return np.asarray(weights)
    except (TypeError, ValueError) as error:
        raise InvalidWeights(f"the weights are {shown(weights, 120)}: {error}") from error
