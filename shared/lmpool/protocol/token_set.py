"""Sets of tokens: what a program allows to come next in a text; in full, or by a name that is made of what it is."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import ProtocolError
from lmpool.protocol.prompt import DIGEST_SIZE

_IDS, _BITS, _NAME = b"i", b"b", b"n"
_ID_BYTES = 4


@dataclass(frozen=True, eq=False)
class TokenSet:
    """Some tokens of a vocabulary.

    Attributes:
        ids: int64, each once, in ascending order; at least one.
        vocab_size: V.
        is_named: queries carry its name, and the pool is told what it is: for sets that are asked about often.
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
        """The digest of what it is."""
        return _name_of(self.bits, self.vocab_size)

    @cached_property
    def packed(self) -> bytes:
        """It as queries carry it: always the same bytes for the same tokens, so that answers are found again."""
        if self.is_named:
            return self.packed_name(self.name)
        ids = _ID_BYTES * len(self.ids)
        return _IDS + self.ids.astype("<u4").tobytes() if ids <= len(self.bits) else _BITS + self.bits

    @staticmethod
    def packed_name(name: bytes) -> bytes:
        """A set that has a name, as queries carry it."""
        return _NAME + name


def name_in(packed: bytes) -> bytes | None:
    """The name that a query carries in place of a set, if it does."""
    return packed[1:] if packed[:1] == _NAME else None


def unpack_tokens(packed: bytes, vocab_size: int) -> TokenSet:
    """Read what `TokenSet.packed` made of a set that has no name.

    Raises:
        ProtocolError: it is no set of tokens of this vocabulary.
    """
    if packed[:1] == _BITS:
        return tokens_of_bits(packed[1:], vocab_size)
    ids = np.frombuffer(packed[1 : 1 + (len(packed) - 1) // _ID_BYTES * _ID_BYTES], "<u4").astype(np.int64)
    is_whole = packed[:1] == _IDS and len(packed) == 1 + _ID_BYTES * len(ids) and len(ids) > 0
    if not is_whole or ids[-1] >= vocab_size or not (ids[1:] > ids[:-1]).all():
        raise ProtocolError(f"{len(packed)} bytes are no set of tokens of a vocabulary of {vocab_size}")
    return TokenSet(ids, vocab_size)


def tokens_of_bits(bits: bytes, vocab_size: int, name: bytes | None = None) -> TokenSet:
    """A set from its bits (`TokenSet.bits`).

    Args:
        bits: the bits.
        vocab_size: V.
        name: what it must be, if it was found under a name.

    Raises:
        ProtocolError: it is empty, of another vocabulary, or another set.
    """
    if name is not None and _name_of(bits, vocab_size) != name:
        raise ProtocolError(f"what is named {name.hex()} is another set of tokens")
    if len(bits) != -(-vocab_size // 8):
        raise ProtocolError(f"a set of tokens has {len(bits)} bytes of bits, for a vocabulary of {vocab_size}")
    ids = np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little"))
    if not len(ids) or ids[-1] >= vocab_size:
        raise ProtocolError(f"a set of tokens of a vocabulary of {vocab_size} is empty, or has others")
    return TokenSet(ids, vocab_size)


def _name_of(bits: bytes, vocab_size: int) -> bytes:
    return hashlib.blake2b(vocab_size.to_bytes(_ID_BYTES, "little") + bits, digest_size=DIGEST_SIZE).digest()
