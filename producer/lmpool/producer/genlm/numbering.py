"""Convert genlm-backend's vocabulary items to byte strings, and compute genlm-backend's node numbers for a trie.

Iterating an item yields its letters, such as bytes. A letter from 0 to 255 is its own code. All other letters, such as
an end-of-sequence item that yields itself or the characters of a text, get codes from 256 on. If all letters are bytes,
the codes are the byte string. Otherwise code c is spelled as c // 255 bytes 0xFF followed by the byte c % 255: no
spelling is a prefix of another spelling, and 0xFF is the only byte whose spelling is longer than one byte.

genlm-backend gives every item a leaf below the node of its last letter, orders children by their first items, and
numbers all nodes in postorder. A node's number is therefore the number at which its subtree starts plus the size of the
subtree minus one. Both summands are computed from the trie's arrays without walking the trie.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import InvalidVocabulary
from lmpool.settings import shown
from lmpool.trie.trie import Trie

BASE = 255
"""Number of codes that are spelled as one byte; the byte 255 begins a longer spelling."""

N_BYTES = 256  # Number of different bytes.


def _by_id(compare: Callable[[int, int], bool]) -> Any:
    """Return a method that compares two tokens by their ids."""

    def method(self: Token, other: object) -> bool:
        return compare(self.token_id, other.token_id) if is_token(other) else NotImplemented

    return method


class Token(bytes):
    """The byte string of a token, with the token's id.

    Tokens are compared and hashed by their ids, also with genlm-backend's `Token`. A token is equal to plain bytes of
    the same content.

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
        """The plain bytes of a token; any other value unchanged."""
        return x.byte_string if is_token(x) else x

    @staticmethod
    def is_plain_bytes(x: object) -> bool:
        """Whether `x` is bytes without an id."""
        return isinstance(x, bytes) and not is_token(x)

    def __repr__(self) -> str:
        return f"Token(token_id={self.token_id}, byte_string={bytes(self)!r})"

    def __hash__(self) -> int:
        return hash(self.token_id)

    __eq__, __ne__ = _by_id(operator.eq), _by_id(operator.ne)
    __lt__, __le__ = _by_id(operator.lt), _by_id(operator.le)
    __gt__, __ge__ = _by_id(operator.gt), _by_id(operator.ge)

    def __reduce__(self) -> tuple[type[Token], tuple[int, bytes]]:
        return type(self), (self.token_id, bytes(self))


def is_token(x: object) -> TypeGuard[Token]:
    """Whether `x` is a `Token` of this package or of genlm-backend (which need not be installed)."""
    return isinstance(x, Token) or (isinstance(x, bytes) and hasattr(x, "token_id") and hasattr(x, "byte_string"))


def spell(decode: Sequence[Any]) -> tuple[list[bytes], list[Hashable], list[Hashable]]:
    """Spell every item of a vocabulary.

    Returns:
        the byte string of each item; the key of each item in `word2leaf`; the letters that are not bytes, where letter
        i has the code 256 + i.

    Raises:
        InvalidVocabulary: an item is not iterable or hashable, or two items have the same key.
    """
    words: list[bytes] = []
    keys: dict[Hashable, int] = {}
    others: dict[int, list[int]] = {}
    codes: dict[Hashable, int] = {byte: byte for byte in range(N_BYTES)}
    for index, item in enumerate(decode):
        key, word = item, b""
        if is_token(item):
            word = item.byte_string
            key = word, item.token_id
        elif isinstance(item, bytes):
            word = bytes(item)
        else:
            try:
                hash(item)
                # New letters get the next free codes.
                others[index] = [codes.setdefault(letter, len(codes)) for letter in item]
            except TypeError as error:
                raise InvalidVocabulary(
                    f"item {index} of the vocabulary is {shown(item, 120)}: it must be a token, bytes or another "
                    f"hashable iterable of hashable letters ({error})"
                ) from error
        if (first := keys.setdefault(key, index)) != index:
            where = f"item {first} and item {index}; give tokens of one byte string different ids"
            raise InvalidVocabulary(f"Duplicate word in vocabulary: {shown(key, 120)} is {where}")
        words.append(word)
    letters = list(codes)[N_BYTES:]
    if letters:
        words = [word.replace(b"\xff", b"\xff\x00") for word in words]
    for index, item_codes in others.items():
        spelled = (b"\xff" * (code // BASE) + bytes((code % BASE,)) for code in item_codes)
        words[index] = b"".join(spelled) if letters else bytes(item_codes)
    return words, list(keys), letters


class Spans(NamedTuple):
    """The items below every node of a trie, as ranges of one list.

    Attributes:
        items: the items in the order of their nodes, int64 (V,).
        low, high: items[low[n] : high[n]] are below node n; int64 (N,) each. Every node has at least one item.
        end: end[n] is one more than the last node below node n; int64 (N,).
    """

    items: NDArray[np.int64]
    low: NDArray[np.int64]
    high: NDArray[np.int64]
    end: NDArray[np.int64]


class Numbering(NamedTuple):
    """The G nodes of genlm-backend's trie, in the order of their numbers.

    Attributes:
        node_map: the trie's node of each genlm node, or -1 - i for the leaf of item i; int32 (G,).
        leaf: the leaf of each item, int32 (V,).
        parent: the parent of each node, int32 (G,); -1 for the root, which is node G - 1.
        letter: the code of the letter that leads to a node, int64 (G,); undefined for the root and the leaves.
    """

    node_map: NDArray[np.int32]
    leaf: NDArray[np.int32]
    parent: NDArray[np.int32]
    letter: NDArray[np.int64]


def spans_of(trie: Trie) -> Spans:
    """Find the items below every node."""
    nodes = np.arange(trie.n_nodes)
    last = nodes.copy()
    has_child = trie.child_start[1:] > trie.child_start[:-1]
    last[has_child] = trie.child[trie.child_start[1:][has_child] - 1]
    # Follow the last children down to the last node of each subtree; each round doubles the steps per round.
    while not np.array_equal(further := last[last], last):
        last = further
    before = np.zeros(trie.n_nodes + 1, np.int64)
    np.cumsum(np.bincount(trie.leaf, minlength=trie.n_nodes), out=before[1:])
    end = last + 1
    return Spans(np.argsort(trie.leaf, kind="stable"), before[:-1], before[end], end)


def number(trie: Trie, *, escaped: bool) -> Numbering:
    """Number the nodes of a trie over spelled words.

    Args:
        trie: the trie.
        escaped: whether 0xFF begins longer spellings. Nodes inside the spelling of a letter get no number.
    """
    spans = spans_of(trie)
    whole = trie.label != BASE if escaped else np.ones(trie.n_nodes, np.bool_)
    # For each node, find the nearest ancestor that ends a letter; -1 for the root.
    parent = trie.parent.copy()
    while (inside := (parent >= 0) & ~whole[parent]).any():
        parent[inside] = trie.parent[parent[inside]]
    count = np.zeros(trie.n_nodes + 1, np.int64)
    np.cumsum(whole, out=count[1:])
    size = count[spans.end] - count[:-1] + spans.high - spans.low
    kids = np.flatnonzero(whole)[1:]
    # Find the first item below every node.
    bounds = np.column_stack([spans.low, spans.high]).ravel()
    firsts = np.minimum.reduceat(np.append(spans.items, spans.items.size), bounds)[::2]
    offset = _offsets(
        np.concatenate([parent[kids], trie.leaf]),
        np.concatenate([firsts[kids], np.arange(trie.n_tokens)]),
        np.concatenate([size[kids], np.ones(trie.n_tokens, np.int64)]),
    )
    kid_offset = offset[: kids.size]
    # A subtree's first number is the sum of the offsets on the path to the subtree. An offset shifts a whole subtree.
    steps = np.zeros(trie.n_nodes + 1, np.int64)
    steps[kids] = kid_offset
    steps -= np.bincount(spans.end[kids], kid_offset, trie.n_nodes + 1).astype(np.int64)
    start = np.cumsum(steps)[:-1]
    node, leaf = start + size - 1, start[trie.leaf] + offset[kids.size :]
    nodes = np.flatnonzero(whole)
    n_nodes = nodes.size + leaf.size
    node_map = np.empty(n_nodes, np.int32)
    node_map[node[nodes]] = nodes
    node_map[leaf] = -1 - np.arange(leaf.size)
    parents = np.full(n_nodes, -1, np.int32)
    parents[node[kids]] = node[parent[kids]]
    parents[leaf] = node[trie.leaf]
    letter = np.zeros(n_nodes, np.int64)
    letter[node[kids]] = (trie.depth[kids] - trie.depth[parent[kids]] - 1) * BASE + trie.label[kids]
    return Numbering(node_map, leaf.astype(np.int32), parents, letter)


def _offsets(parent: NDArray[np.int32], rank: NDArray[np.int64], size: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each node the total size of the siblings that have a lower rank than the node."""
    order = np.argsort(parent.astype(np.int64) * (int(rank.max()) + 1) + rank)
    before = np.cumsum(size[order]) - size[order]
    eldest = np.diff(parent[order], prepend=-1) != 0
    offset = np.empty_like(before)
    offset[order] = before - np.maximum.accumulate(np.where(eldest, before, 0))
    return offset
