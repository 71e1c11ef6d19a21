"""A trie as bytes: a 64-byte header, then flat little-endian arrays, each at a multiple of 8 bytes.

    offset  0  4 bytes   magic "LMPT"
            4  uint32    format version
            8  uint32    V, tokens
           12  uint32    N, nodes
           16  uint32    M, inner nodes
           20  uint32    zero
           24  uint64    bytes of the packed vocabulary
           32  16 bytes  digest of the vocabulary
           48  16 bytes  BLAKE2b-128 of all other bytes, in their order

The arrays are those of `lmpool.trie_arrays.TrieArrays` in their order, the packed vocabulary is last. They are used in
place. The checksum finds accidents; a file made to do harm can carry a right one, so the arrays are also compared with
what depths, labels and leaves say. Whatever loads is a trie, and no index in it leads out of an array.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import ProtocolError
from lmpool.trie_arrays import TrieArrays, derive_arrays
from lmpool.vocab import Vocabulary

FORMAT_VERSION = 1
MAGIC = b"LMPT"
HEADER_SIZE = 64
_HEADER = struct.Struct("<4sIIIIIQ16s16s")
_CHECKSUM = slice(48, 64)


def encode_trie(vocabulary: Vocabulary, arrays: TrieArrays) -> bytes:
    """A vocabulary and the arrays of its trie as bytes."""
    packed = vocabulary.pack()
    sizes = (len(vocabulary), arrays.parent.size, arrays.inner_parent.size)
    parts = [bytes(HEADER_SIZE)]
    for array, (dtype, _) in zip(arrays._asdict().values(), _layout(*sizes), strict=True):
        data = array.astype(dtype, copy=False).tobytes()
        parts += [data, bytes(-len(data) % 8)]
    encoded = bytearray(b"".join([*parts, packed]))
    digest = bytes.fromhex(vocabulary.digest)
    _HEADER.pack_into(encoded, 0, MAGIC, FORMAT_VERSION, *sizes, 0, len(packed), digest, bytes(16))
    encoded[_CHECKSUM] = _checksum(memoryview(encoded))
    return bytes(encoded)


def decode_trie(data: memoryview) -> tuple[Vocabulary, TrieArrays]:
    """The vocabulary and the arrays, which are read-only views of `data`.

    Args:
        data: uint8 of shape (size,), read-only, at an address that is a multiple of 8.

    Raises:
        ProtocolError: the bytes are not a trie of this format version.
    """
    if len(data) < HEADER_SIZE:
        raise ProtocolError(f"a trie of {len(data)} bytes is shorter than its {HEADER_SIZE}-byte header")
    magic, version, n_tokens, n_nodes, n_inner, zero, packed_size, digest, checksum = _HEADER.unpack_from(data)
    if magic != MAGIC or version != FORMAT_VERSION:
        raise ProtocolError(
            f"not a trie of format version {FORMAT_VERSION}: it begins with {magic!r}, version {version}"
        )
    layout = _layout(n_tokens, n_nodes, n_inner)
    size = HEADER_SIZE + sum(_padded(dtype.itemsize * count) for dtype, count in layout) + packed_size
    if zero or n_nodes < 1 or size != len(data):
        raise ProtocolError(
            f"a trie of {n_tokens} tokens, {n_nodes} nodes and {n_inner} inner nodes cannot have {len(data)} bytes"
        )
    if _checksum(data) != checksum:
        raise ProtocolError("the trie's checksum is wrong: its bytes were damaged; build and save it again")
    arrays, end = [], HEADER_SIZE
    for dtype, count in layout:
        array: NDArray[Any] = np.frombuffer(data, dtype, count, end)
        arrays.append(array.astype(dtype.newbyteorder("="), copy=False))
        end += _padded(array.nbytes)
    vocabulary = Vocabulary.unpack(data[end:])
    if bytes.fromhex(vocabulary.digest) != digest or len(vocabulary) != n_tokens:
        raise ProtocolError(
            f"the trie is of the {n_tokens} tokens of vocabulary {digest.hex()}, "
            f"but carries the {len(vocabulary)} of {vocabulary.digest}"
        )
    decoded = TrieArrays(*arrays)
    _check_arrays(decoded, vocabulary)
    return vocabulary, decoded


def _layout(n_tokens: int, n_nodes: int, n_inner: int) -> list[tuple[np.dtype[Any], int]]:
    """Dtype and length of each array."""
    int32, uint8 = np.dtype("<i4"), np.dtype("u1")
    return [
        (int32, n_nodes),  # parent
        (uint8, n_nodes),  # label
        (int32, n_nodes),  # depth
        (int32, n_tokens),  # leaf
        (int32, n_nodes + 1),  # child_start
        (int32, n_nodes - 1),  # child
        (int32, n_tokens),  # home
        (int32, n_inner),  # inner_parent
        (int32, n_nodes),  # value_of
    ]


def _padded(size: int) -> int:
    return size + -size % 8


def _checksum(data: memoryview) -> bytes:
    hashed = hashlib.blake2b(data[: _CHECKSUM.start], digest_size=16)
    hashed.update(data[_CHECKSUM.stop :])
    return hashed.digest()


def _check_arrays(arrays: TrieArrays, vocabulary: Vocabulary) -> None:
    """Refuse arrays that are not those of a trie.

    Raises:
        ProtocolError: with what is wrong first.
    """
    depth, label, leaf = arrays.depth, arrays.label, arrays.leaf
    if depth[0] or (depth[1:] < 1).any() or (np.diff(depth) > 1).any():
        raise ProtocolError("the trie's depths are not those of nodes in preorder")
    if leaf.min() < 0 or leaf.max() >= depth.size:
        raise ProtocolError(
            f"the trie's leaves are {leaf.min()} to {leaf.max()}: its nodes go from 0 to {depth.size - 1}"
        )
    if (depth[leaf] != vocabulary.lengths).any():
        raise ProtocolError("the trie's leaves are not as deep as the tokens are long")
    derived = derive_arrays(depth, label, leaf)._asdict()
    for name, found in arrays._asdict().items():
        if not np.array_equal(found, derived[name]):
            raise ProtocolError(f"the trie's array {name!r} does not belong to its depths, labels and leaves")
    child, parent = arrays.child, arrays.parent
    siblings = parent[child[1:]] == parent[child[:-1]]
    if (siblings & (label[child[1:]] <= label[child[:-1]])).any():
        raise ProtocolError("the trie has children that do not follow each other by byte value")
    if label[0] or (np.bincount(leaf, minlength=depth.size)[np.diff(arrays.child_start) == 0] == 0).any():
        raise ProtocolError("the trie has nodes without a token below them, or a root with a label")
