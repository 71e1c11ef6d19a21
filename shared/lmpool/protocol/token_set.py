"""Token sets, such as the tokens that a program allows next, and their encoding in queries: in full or by digest."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import ProtocolError
from lmpool.protocol.job import DIGEST_SIZE

_IDS, _BITS, _NAME = b"i", b"b", b"n"  # First byte of an encoded token set: token ids, one bit per token, or a name.
_ID_BYTES = 4  # Bytes of a token id, a uint32.


@dataclass(frozen=True, eq=False)
class TokenSet:
    """A set of tokens of a vocabulary, such as the tokens that a program allows next.

    Attributes:
        ids: int64 token ids, each once, in ascending order; at least one.
        vocab_size: V, the number of tokens of the vocabulary.
        is_named: whether queries carry only the name of the set, which the pool stores; for sets that many queries use.
    """

    ids: NDArray[np.int64]
    vocab_size: int
    is_named: bool = False

    @cached_property
    def bits(self) -> bytes:
        """A bit for each of the V tokens, the lowest bit of the first byte for token 0."""
        mask = np.zeros(self.vocab_size, bool)
        mask[self.ids] = True
        return np.packbits(mask, bitorder="little").tobytes()

    @cached_property
    def name(self) -> bytes:
        """The name of the set: its digest."""
        data = self.vocab_size.to_bytes(_ID_BYTES, "little") + self.bits
        return hashlib.blake2b(data, digest_size=DIGEST_SIZE).digest()

    @cached_property
    def packed(self) -> bytes:
        """The encoded set in a query. Equal sets have equal bytes, so that queries with equal sets share results."""
        if self.is_named:
            return self.packed_name(self.name)
        ids = _ID_BYTES * len(self.ids)
        return _IDS + self.ids.astype("<u4").tobytes() if ids <= len(self.bits) else _BITS + self.bits

    @staticmethod
    def packed_name(name: bytes) -> bytes:
        """The encoded name of a set in a query."""
        return _NAME + name


def name_in(packed: bytes) -> bytes | None:
    """The name of the set in a query, or None if the query contains the set itself."""
    return packed[1:] if packed[:1] == _NAME else None


def unpack_tokens(packed: bytes, vocab_size: int) -> TokenSet:
    """Decode `TokenSet.packed` of a set without a name; raises `ProtocolError` for any other bytes."""
    if packed[:1] == _BITS:
        return tokens_of_bits(packed[1:], vocab_size)
    ids = np.frombuffer(packed[1 : 1 + (len(packed) - 1) // _ID_BYTES * _ID_BYTES], "<u4").astype(np.int64)
    is_whole = packed[:1] == _IDS and len(packed) == 1 + _ID_BYTES * len(ids) and len(ids) > 0
    if not is_whole or ids[-1] >= vocab_size or not (ids[1:] > ids[:-1]).all():
        raise ProtocolError(f"{len(packed)} bytes are no set of tokens of a vocabulary of {vocab_size}")
    return TokenSet(ids, vocab_size)


def tokens_of_bits(bits: bytes, vocab_size: int, name: bytes | None = None) -> TokenSet:
    """Decode a set from `TokenSet.bits`, and check its name if the set was stored under a name.

    Raises `ProtocolError` if the set is empty, belongs to another vocabulary, or has another name.
    """
    if len(bits) != -(-vocab_size // 8):
        raise ProtocolError(f"a set of tokens has {len(bits)} bytes of bits, for a vocabulary of {vocab_size}")
    ids = np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little"))
    if not len(ids) or ids[-1] >= vocab_size:
        raise ProtocolError(f"a set of tokens of a vocabulary of {vocab_size} is empty, or has others")
    tokens = TokenSet(ids, vocab_size)
    if name is not None and tokens.name != name:
        raise ProtocolError(f"the set of tokens stored under {name.hex()} is another")
    return tokens
