"""Helpers for tests of tries: vocabularies of many shapes, and a trie of nested dicts as reference."""

from __future__ import annotations

import base64
import json
from collections import deque
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import mistral_common
import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from lmpool.trie.trie import Trie

ARRAYS = ["parent", "label", "depth", "leaf", "child_start", "child", "home", "inner_parent", "value_of"]
EXAMPLE = [b"b", b"ab", b"a", b"", b"abcd", b"ab", b"ace"]

few_letters = st.binary(max_size=6).map(lambda raw: bytes(97 + byte % 3 for byte in raw))
chains = st.tuples(st.binary(min_size=1, max_size=40), st.sets(st.integers(0, 40), min_size=1)).map(
    lambda drawn: [drawn[0][:size] for size in drawn[1]]
)
fans = st.tuples(st.binary(max_size=3), st.sets(st.integers(0, 255), min_size=1)).map(
    lambda drawn: [drawn[0] + bytes([byte]) for byte in drawn[1]]
)
duplicates = st.lists(few_letters, min_size=1, max_size=3).flatmap(
    lambda words: st.lists(st.sampled_from(words), min_size=1, max_size=12)
)
vocabularies = st.one_of(
    st.lists(few_letters, min_size=1, max_size=30),
    st.lists(st.binary(max_size=20), min_size=1, max_size=20),
    st.lists(st.one_of(chains, fans, duplicates), min_size=1, max_size=3).map(
        lambda lists: list(chain.from_iterable(lists))
    ),
).flatmap(st.permutations)


def bytes_held(thing: object, seen: set[int] | None = None) -> int:
    """Total bytes of the arrays and tensors that an object holds, at any depth; each array counts once."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    if hasattr(thing, "nbytes"):
        return int(thing.nbytes)
    parts = (
        thing if isinstance(thing, (tuple, list, deque)) else vars(thing).values() if hasattr(thing, "__dict__") else ()
    )
    return sum(bytes_held(part, seen) for part in parts)


class Reference(NamedTuple):
    """A reference trie as lists, with one entry per node in each list."""

    prefixes: list[bytes]
    parents: list[int]
    children: list[list[int]]
    tokens: list[set[int]]
    below: list[frozenset[int]]

    def is_inner(self, node: int) -> bool:
        tokens, children = len(self.tokens[node]), len(self.children[node])
        return node == 0 or children >= 2 or (tokens >= 1 and children >= 1) or tokens >= 2

    def inner_above(self, node: int) -> int:
        node = self.parents[node]
        while node > 0 and not self.is_inner(node):
            node = self.parents[node]
        return node


def reference(tokens: list[bytes]) -> Reference:
    """Build the reference trie: insert the tokens into nested dicts, then walk the dicts in the order of the bytes."""
    root: dict[Any, Any] = {}
    for index, token in enumerate(tokens):
        place = root
        for byte in token:
            place = place.setdefault(byte, {})
        place.setdefault("tokens", set()).add(index)
    result = Reference([], [], [], [], [])
    waiting: list[tuple[dict[Any, Any], bytes, int]] = [(root, b"", -1)]
    while waiting:
        place, prefix, parent = waiting.pop()
        node = len(result.prefixes)
        if node:
            result.children[parent].append(node)
        result.prefixes.append(prefix)
        result.parents.append(parent)
        result.children.append([])
        result.tokens.append(place.pop("tokens", set()))
        waiting += [(place[byte], prefix + bytes([byte]), node) for byte in sorted(place, reverse=True)]
    below = [set(ids) for ids in result.tokens]
    for node in range(len(below) - 1, 0, -1):
        below[result.parents[node]] |= below[node]
    result.below.extend(map(frozenset, below))
    return result


def arrays_of(trie: Trie) -> dict[str, NDArray[Any]]:
    """Name of each array of a trie -> the array."""
    return {name: getattr(trie, name) for name in ARRAYS}


def assert_same(trie: Trie, other: Trie) -> None:
    """Check that two tries are equal in every array."""
    assert trie == other
    assert trie.vocabulary.tokens == other.vocabulary.tokens
    for name, array in arrays_of(trie).items():
        assert getattr(other, name).dtype == array.dtype, name
        assert np.array_equal(getattr(other, name), array), name


def sums(trie: Trie, ws: NDArray[np.float32]) -> NDArray[np.float32]:
    """The sums of weights below each inner node, by one backward sweep over the trie's arrays."""
    inner = np.zeros(trie.n_inner)
    np.add.at(inner, trie.home, ws)
    for node in range(trie.n_inner - 1, 0, -1):
        inner[trie.inner_parent[node]] += inner[node]
    return inner.astype(np.float32)


@cache
def tekken() -> list[bytes]:
    """The tokens of Mistral's tokenizer Tekken, as bytes."""
    path = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
    return [base64.b64decode(entry["token_bytes"]) for entry in json.loads(path.read_text())["vocab"][:131072]]
