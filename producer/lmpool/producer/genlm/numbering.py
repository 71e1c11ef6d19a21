"""genlm's items as byte strings, and genlm's numbers for the nodes of a trie.

The letters of an item are what iterating it yields. Letters 0 to 255 have themselves as codes; all others, such as the
end-of-sequence item that yields itself or the characters of a text, get codes from 256 on. A vocabulary of byte letters
alone is spelled as it is. Otherwise code c is the byte 0xFF c // 255 times and then the byte c % 255: no spelling is
the beginning of another, and of the byte letters only 0xFF becomes longer.

genlm gives every item a leaf of its own below the node of its last letter, keeps children in the order in which the
items brought them, and numbers all in postorder. So a node's number is where its subtree starts plus the size of
the subtree less one, and the children of a node are in the order of the first items below them. Both come from
the trie's arrays without walking it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import InvalidVocabulary
from lmpool.settings import shown
from lmpool.trie.trie import Trie

BASE = 255
"""Codes below it are one byte; it is also the byte that a longer spelling begins with."""

_N_BYTES = 256


class Token(bytes):
    """The byte string of a token together with its id.

    It is used like the byte string, but tokens are equal, hashed and ordered by their ids. It is equal to
    genlm-backend's `Token` of the same id, too, and to plain bytes of the same content.

    Attributes:
        token_id: the id.

    Raises:
        TypeError: the id is not an int, or the byte string not bytes.
    """

    token_id: int

    def __new__(cls, token_id: int, byte_string: bytes) -> Token:
        if not isinstance(token_id, int):
            raise TypeError(f"token_id must be an int, not {type(token_id).__name__}")
        if not isinstance(byte_string, bytes):
            raise TypeError(f"byte_string must be bytes, not {type(byte_string).__name__}")
        token = super().__new__(cls, byte_string)
        token.token_id = token_id
        return token

    @property
    def byte_string(self) -> bytes:
        """The byte string alone, as plain bytes."""
        return bytes(self)

    @staticmethod
    def as_bytes(x: bytes) -> bytes:
        """The plain bytes of a token; anything else as it is."""
        return x.byte_string if is_token(x) else x

    @staticmethod
    def is_plain_bytes(x: object) -> bool:
        """Whether `x` is bytes without an id."""
        return isinstance(x, bytes) and not is_token(x)

    def __repr__(self) -> str:
        return f"Token(token_id={self.token_id}, byte_string={bytes(self)!r})"

    def __hash__(self) -> int:
        return hash(self.token_id)

    def __eq__(self, other: object) -> bool:
        return self.token_id == other.token_id if is_token(other) else NotImplemented

    def __ne__(self, other: object) -> bool:
        return self.token_id != other.token_id if is_token(other) else NotImplemented

    def __lt__(self, other: object) -> bool:
        return self.token_id < other.token_id if is_token(other) else NotImplemented

    def __le__(self, other: object) -> bool:
        return self.token_id <= other.token_id if is_token(other) else NotImplemented

    def __gt__(self, other: object) -> bool:
        return self.token_id > other.token_id if is_token(other) else NotImplemented

    def __ge__(self, other: object) -> bool:
        return self.token_id >= other.token_id if is_token(other) else NotImplemented

    def __reduce__(self) -> tuple[type[Token], tuple[int, bytes]]:
        return type(self), (self.token_id, bytes(self))


def is_token(x: object) -> TypeGuard[Token]:
    """Whether `x` is a `Token`, or like one: genlm-backend has a class of its own, which is not imported for this."""
    return isinstance(x, Token) or (isinstance(x, bytes) and hasattr(x, "token_id") and hasattr(x, "byte_string"))


class Spelling(NamedTuple):
    """A vocabulary as byte strings.

    Attributes:
        words: the byte string of each item.
        keys: what names each item in `word2leaf`.
        letters: the letters that are no bytes; letter i has the code 256 + i.
        has_plain_bytes: whether an item is bytes without an id.
    """

    words: list[bytes]
    keys: list[Hashable]
    letters: list[Hashable]
    has_plain_bytes: bool


def spell(decode: Sequence[Any]) -> Spelling:
    """Spell every item of a vocabulary.

    Raises:
        InvalidVocabulary: an item is not iterable or not hashable.
    """
    words: list[bytes] = []
    keys: list[Hashable] = []
    others: dict[int, list[int]] = {}
    codes: dict[Hashable, int] = {byte: byte for byte in range(_N_BYTES)}
    has_plain_bytes = False
    for index, item in enumerate(decode):
        if is_token(item):
            word = item.byte_string
            keys.append((word, item.token_id))
        elif isinstance(item, bytes):
            has_plain_bytes = True
            word = bytes(item)
            keys.append(item)
        else:
            others[index] = _codes_of(item, index, codes)
            word = b""
            keys.append(item)
        words.append(word)
    letters = list(codes)[_N_BYTES:]
    if letters:
        words = [word.replace(b"\xff", b"\xff\x00") for word in words]
    for index, item_codes in others.items():
        words[index] = _spelled(item_codes) if letters else bytes(item_codes)
    return Spelling(words, keys, letters, has_plain_bytes)


def _codes_of(item: Any, index: int, codes: dict[Hashable, int]) -> list[int]:
    """The codes of an item's letters; letters that are new get the next ones."""
    try:
        hash(item)
        return [codes.setdefault(letter, len(codes)) for letter in item]
    except TypeError as error:
        raise InvalidVocabulary(
            f"item {index} of the vocabulary is {shown(item, 120)}: it must be a token, bytes or another hashable "
            f"iterable of hashable letters ({error})"
        ) from error


def _spelled(codes: list[int]) -> bytes:
    return b"".join(b"\xff" * (code // BASE) + bytes((code % BASE,)) for code in codes)


def refuse_duplicates(keys: list[Hashable]) -> None:
    """Refuse a vocabulary in which two items have one key.

    Raises:
        InvalidVocabulary: with the key and both items.
    """
    if len(set(keys)) == len(keys):
        return
    seen: dict[Hashable, int] = {}
    for index, key in enumerate(keys):
        if seen.setdefault(key, index) != index:
            raise InvalidVocabulary(
                f"Duplicate word in vocabulary: {shown(key, 120)} is item {seen[key]} and item {index}; "
                f"give tokens of one byte string different ids"
            )


class Spans(NamedTuple):
    """The items below every node of a trie, as ranges of one list.

    Attributes:
        items: the items in the order of their nodes, int64 (V,).
        low, high: those below node n are items[low[n]:high[n]], never none; int64 (N,) each.
        end: one past the last node below n, int64 (N,).
    """

    items: NDArray[np.int64]
    low: NDArray[np.int64]
    high: NDArray[np.int64]
    end: NDArray[np.int64]


class Numbering(NamedTuple):
    """genlm's nodes, G of them, by their numbers.

    Attributes:
        node_map: the trie's node that a genlm node is, or -1 - i for the leaf of item i; int32 (G,).
        leaf: the leaf of each item, int32 (V,).
        parent: int32 (G,), -1 at the root, which is G - 1.
        letter: the code of the letter into a node, int64 (G,); of no meaning for the root and the leaves.
    """

    node_map: NDArray[np.int32]
    leaf: NDArray[np.int32]
    parent: NDArray[np.int32]
    letter: NDArray[np.int64]


class Renumbered(NamedTuple):
    """The arrays that kernels read of a trie, with a value for each of genlm's nodes in place of the trie's own.

    Attributes:
        home, inner_parent: the trie's.
        value_of: where the value of each node is in [M values of inner nodes | V weights], int32 (G,).
        n_tokens, n_inner, n_nodes: V, M and G.
    """

    home: NDArray[np.int32]
    inner_parent: NDArray[np.int32]
    value_of: NDArray[np.int32]
    n_tokens: int
    n_inner: int
    n_nodes: int


def spans_of(trie: Trie) -> Spans:
    """Find the items below every node."""
    nodes = np.arange(trie.n_nodes)
    last = nodes.copy()
    has_child = trie.child_start[1:] > trie.child_start[:-1]
    last[has_child] = trie.child[trie.child_start[1:][has_child] - 1]
    # The last child of the last child and so on is the last node of a subtree: each round doubles the steps taken.
    while not np.array_equal(further := last[last], last):
        last = further
    before = np.zeros(trie.n_nodes + 1, np.int64)
    np.cumsum(np.bincount(trie.leaf, minlength=trie.n_nodes), out=before[1:])
    end = last + 1
    return Spans(np.argsort(trie.leaf, kind="stable"), before[:-1], before[end], end)


def number(trie: Trie, *, escaped: bool) -> Numbering:
    """Number the nodes of a trie as genlm does.

    Args:
        trie: over the spelled words.
        escaped: whether 0xFF begins longer spellings; the nodes inside a letter are none of genlm's.
    """
    spans = spans_of(trie)
    whole = trie.label != BASE if escaped else np.ones(trie.n_nodes, np.bool_)
    parent = _whole_parents(trie, whole)
    count = np.zeros(trie.n_nodes + 1, np.int64)
    np.cumsum(whole, out=count[1:])
    size = count[spans.end] - count[:-1] + spans.high - spans.low
    kids = np.flatnonzero(whole)[1:]
    offset = _offsets(
        np.concatenate([parent[kids], trie.leaf]),
        np.concatenate([_first_items(spans)[kids], np.arange(trie.n_tokens)]),
        np.concatenate([size[kids], np.ones(trie.n_tokens, np.int64)]),
    )
    kid_offset, item_offset = offset[: kids.size], offset[kids.size :]
    # A subtree starts at the sum of the offsets above it: each counts from its node to the end of that subtree.
    steps = np.zeros(trie.n_nodes + 1, np.int64)
    steps[kids] = kid_offset
    steps -= np.bincount(spans.end[kids], kid_offset, trie.n_nodes + 1).astype(np.int64)
    start = np.cumsum(steps)[:-1]
    return _renamed(trie, whole, parent, start + size - 1, start[trie.leaf] + item_offset)


def _whole_parents(trie: Trie, whole: NDArray[np.bool_]) -> NDArray[np.int32]:
    """The nearest ancestor that ends a letter; -1 for the root."""
    parent = trie.parent.copy()
    while (inside := (parent >= 0) & ~whole[parent]).any():
        parent[inside] = trie.parent[parent[inside]]
    return parent


def _first_items(spans: Spans) -> NDArray[np.int64]:
    """The first item below every node."""
    bounds = np.column_stack([spans.low, spans.high]).ravel()
    firsts: NDArray[np.int64] = np.minimum.reduceat(np.append(spans.items, spans.items.size), bounds)
    return firsts[::2]


def _offsets(parent: NDArray[np.int32], rank: NDArray[np.int64], size: NDArray[np.int64]) -> NDArray[np.int64]:
    """The sizes of the siblings that come before, by rank."""
    order = np.argsort(parent.astype(np.int64) * (int(rank.max()) + 1) + rank)
    before = np.cumsum(size[order]) - size[order]
    eldest = np.diff(parent[order], prepend=-1) != 0
    offset = np.empty_like(before)
    offset[order] = before - np.maximum.accumulate(np.where(eldest, before, 0))
    return offset


def _renamed(
    trie: Trie, whole: NDArray[np.bool_], parent: NDArray[np.int32], node: NDArray[np.int64], leaf: NDArray[np.int64]
) -> Numbering:
    nodes = np.flatnonzero(whole)
    n_nodes = nodes.size + leaf.size
    node_map = np.empty(n_nodes, np.int32)
    node_map[node[nodes]] = nodes
    node_map[leaf] = -1 - np.arange(leaf.size)
    parents = np.full(n_nodes, -1, np.int32)
    parents[node[nodes[1:]]] = node[parent[nodes[1:]]]
    parents[leaf] = node[trie.leaf]
    letter = np.zeros(n_nodes, np.int64)
    depth = trie.depth[nodes[1:]] - trie.depth[parent[nodes[1:]]]
    letter[node[nodes[1:]]] = (depth - 1) * BASE + trie.label[nodes[1:]]
    return Numbering(node_map, leaf.astype(np.int32), parents, letter)


def renumbered(trie: Trie, node_map: NDArray[np.int32]) -> Renumbered:
    """The trie as kernels take it, for the nodes of a `Numbering.node_map`."""
    of_nodes = trie.value_of[np.maximum(node_map, 0)]
    value_of = np.where(node_map >= 0, of_nodes, np.int32(trie.n_inner - 1) - node_map)
    return Renumbered(trie.home, trie.inner_parent, value_of, trie.n_tokens, trie.n_inner, len(node_map))
