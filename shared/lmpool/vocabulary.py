"""Vocabularies: the byte string of every token id, read from a tokenizer, named by a digest and packed for the wire.

    offset  0     4 bytes  magic "LMPV"
            4     uint8    wire version
            5     uint8    zero
            6     uint16   zero
            8     uint32   V
           12     uint32   bytes of all tokens together
           16     V uint32 lengths of the byte strings
           16+4V  bytes    the byte strings, one after the other

All numbers are little-endian.
"""

from __future__ import annotations

import hashlib
import operator
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import InvalidVocabulary, ProtocolError, SettingsError
from lmpool.settings import check_choice, shown
from lmpool.token_bytes import read_tokens

MAX_TOKENS = 4_000_000
"""Most tokens of a vocabulary."""
MAX_BYTES = 32 * 1024 * 1024
"""Most bytes of all byte strings of a vocabulary together."""
MAX_TOKEN_BYTES = 64 * 1024
"""Most bytes of one token."""

_MAGIC = b"LMPV"
_WIRE_VERSION = 1
_HEADER = struct.Struct("<4sBBHII")
_LENGTHS = np.dtype("<u4")
_MOST_SHOWN = 120
_FALLBACKS = ("tokenizer", "latin1", "replace")


class Vocabulary:
    """The byte string of every token id: token i is what the model's entry i stands for.

    Byte strings may be empty and may occur more than once. A vocabulary does not change; two are equal when their
    digests are.
    """

    __slots__ = ("_data", "_digest", "_ends", "_lengths", "_tokens")

    def __init__(self, tokens: Iterable[bytes]) -> None:
        """Take the byte strings of the ids 0 to V-1.

        Raises:
            InvalidVocabulary: no tokens, something that is not `bytes`, more than `MAX_TOKENS` tokens, more than
                `MAX_BYTES` bytes in all, or a token of more than `MAX_TOKEN_BYTES` bytes.
        """
        listed = tokens if isinstance(tokens, (list, tuple)) else _gathered(tokens)
        _check_types(listed)
        lengths = np.fromiter(map(len, listed), np.int64, len(listed))
        if problem := _over_a_limit(lengths):
            raise InvalidVocabulary(problem)
        self._take(lengths.astype(_LENGTHS), b"".join(listed))

    def _take(self, lengths: NDArray[np.uint32], data: bytes) -> None:
        lengths.flags.writeable = False
        self._lengths = lengths
        self._data = data
        self._ends: NDArray[np.int64] = np.cumsum(lengths, dtype=np.int64)
        self._tokens: list[bytes] | None = None
        count = len(lengths).to_bytes(4, "little")
        named = hashlib.blake2b(count, digest_size=16)
        named.update(lengths.data)
        named.update(data)
        self._digest = named.hexdigest()

    @property
    def lengths(self) -> NDArray[np.uint32]:
        """Bytes of each token: read-only uint32 of shape (V,)."""
        return self._lengths

    @property
    def data(self) -> bytes:
        """All byte strings, one after the other."""
        return self._data

    @property
    def tokens(self) -> list[bytes]:
        """The byte string of each token. Made at the first use and then shared: change a copy."""
        if self._tokens is None:
            ends = self._ends.tolist()
            self._tokens = list(map(self._data.__getitem__, map(slice, [0, *ends[:-1]], ends)))
        return self._tokens

    @property
    def digest(self) -> str:
        """32 hex digits: the BLAKE2b-128 of V, the lengths (both as little-endian uint32) and the byte strings."""
        return self._digest

    @property
    def nbytes(self) -> int:
        """Bytes of the packed vocabulary."""
        return _HEADER.size + self._lengths.nbytes + len(self._data)

    def pack(self) -> bytes:
        """The vocabulary as bytes, in the layout at the top of this file."""
        header = _HEADER.pack(_MAGIC, _WIRE_VERSION, 0, 0, len(self), len(self._data))
        return b"".join((header, self._lengths.data, self._data))

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> Vocabulary:
        """Read a packed vocabulary; the result shares no memory with `data`.

        Raises:
            ProtocolError: the bytes are no vocabulary of this wire version, or one over the limits.
        """
        view = memoryview(data).cast("B")
        count, total = _read_header(view)
        split = _HEADER.size + count * _LENGTHS.itemsize
        lengths = np.frombuffer(view[_HEADER.size : split], _LENGTHS).copy()
        if problem := _over_a_limit(lengths):
            raise ProtocolError(problem)
        summed = int(lengths.sum(dtype=np.int64))
        if summed != total:
            raise ProtocolError(f"the tokens of the vocabulary have {summed} bytes together, its header says {total}")
        vocabulary = cls.__new__(cls)
        vocabulary._take(lengths, bytes(view[split:]))
        return vocabulary

    def __len__(self) -> int:
        """V."""
        return len(self._lengths)

    def __getitem__(self, token: SupportsIndex) -> bytes:
        """The byte string of one token.

        Raises:
            IndexError: no such token.
        """
        index = operator.index(token)
        if not -len(self) <= index < len(self):
            raise IndexError(f"token {shown(index, _MOST_SHOWN)}: this vocabulary's ids go from 0 to {len(self) - 1}")
        end = int(self._ends[index])
        return self._data[end - int(self._lengths[index]) : end]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.tokens)

    def __eq__(self, other: object) -> bool:
        return self._digest == other._digest if isinstance(other, Vocabulary) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._digest)

    def __repr__(self) -> str:
        return f"<Vocabulary of {len(self)} tokens, {len(self._data)} bytes, {self._digest}>"


def _gathered(tokens: Iterable[bytes]) -> list[bytes]:
    """The tokens of an iterable that is no list, up to the first that is over a limit or not `bytes`."""
    if not isinstance(tokens, Iterable):
        raise InvalidVocabulary(f"{_described(tokens)} is no vocabulary: pass the byte strings of the tokens")
    gathered: list[bytes] = []
    total = 0
    for token in tokens:
        gathered.append(token)
        total += len(token) if isinstance(token, bytes) else MAX_BYTES + 1
        if total > MAX_BYTES or len(gathered) > MAX_TOKENS:
            break
    return gathered


def _check_types(tokens: Sequence[Any]) -> None:
    if not tokens:
        raise InvalidVocabulary("the vocabulary is empty: it needs at least 1 token")
    if not all(issubclass(kind, bytes) for kind in set(map(type, tokens))):
        index, token = next((i, token) for i, token in enumerate(tokens) if not isinstance(token, bytes))
        raise InvalidVocabulary(
            f"token {index} of the vocabulary is {_described(token)}: tokens are bytes; decode_vocab reads those of a "
            "tokenizer"
        )


def _over_a_limit(lengths: NDArray[Any]) -> str:
    """What is wrong with the lengths of V >= 1 tokens; "" when nothing is."""
    if len(lengths) > MAX_TOKENS:
        return f"the vocabulary has {len(lengths)} tokens or more: at most {MAX_TOKENS} are taken"
    total = int(lengths.sum(dtype=np.int64))
    if total > MAX_BYTES:
        return f"the tokens of the vocabulary have {total} bytes or more together: at most {MAX_BYTES} are taken"
    longest = int(lengths.argmax())
    if lengths[longest] > MAX_TOKEN_BYTES:
        return f"token {longest} of the vocabulary has {lengths[longest]} bytes: at most {MAX_TOKEN_BYTES} are taken"
    return ""


def _read_header(view: memoryview) -> tuple[int, int]:
    """V and the bytes of all tokens, both within the limits and right for the size of `view`."""
    if len(view) < _HEADER.size:
        raise ProtocolError(f"a vocabulary of {len(view)} bytes is shorter than its {_HEADER.size}-byte header")
    magic, version, zero, zeros, count, total = _HEADER.unpack_from(view)
    if (magic, version, zero, zeros) != (_MAGIC, _WIRE_VERSION, 0, 0):
        raise ProtocolError(
            f"not a vocabulary of wire version {_WIRE_VERSION}: it begins with {magic!r}, version {version}"
        )
    if not 1 <= count <= MAX_TOKENS or total > MAX_BYTES:
        raise ProtocolError(
            f"a vocabulary of {count} tokens and {total} bytes: from 1 to {MAX_TOKENS} tokens and at most {MAX_BYTES} "
            "bytes are taken"
        )
    size = _HEADER.size + count * _LENGTHS.itemsize + total
    if len(view) != size:
        raise ProtocolError(f"a vocabulary of {count} tokens and {total} bytes takes {size} bytes, not {len(view)}")
    return count, total


class DecodedVocab(NamedTuple):
    """The vocabulary of a tokenizer.

    Attributes:
        tokens: the byte string of each id; what tries are built from.
        texts: the same for people to read; not every token is text, and two tokens may have one text.
    """

    tokens: list[bytes]
    texts: list[str]


def decode_vocab(
    tokenizer: Any, byte2str_fallback: str = "tokenizer", *, vocab_size: int | None = None
) -> DecodedVocab:
    """The byte string and the text of every token id of a tokenizer.

    Args:
        tokenizer: one of transformers (fast, slow, or its wrapper of mistral-common) or tokenizers, a tiktoken
            encoding, a SentencePiece processor, one of mistral-common, or an object that has one of these as its
            `tokenizer`. Byte-level BPE, SentencePiece with or without byte fallback, and WordPiece are read.
        byte2str_fallback: the text of a token that is no UTF-8: "tokenizer" (what the tokenizer calls it; as
            "replace" where it has no names, as in tiktoken), "latin1", or "replace" (U+FFFD for what is not UTF-8).
        vocab_size: V of the model, where it differs from the tokenizer's. Ids that only the model has get b"", so
            that their weight goes to the root of a trie; ids that only the tokenizer has are cut off.

    Returns:
        tokens and texts by id, both of length `vocab_size`; without it, up to the tokenizer's highest id. Equal byte
        strings of several ids all stay. Special and added tokens are their text. An id below the highest that the
        tokenizer does not have gets b"". In WordPiece "##ing" is b"ing" and a piece that begins a word is its text,
        without the space that a decoder would put before it.

    Raises:
        InvalidVocabulary: the tokenizer's byte strings cannot be read, or it has more than `MAX_TOKENS` tokens.
        SettingsError: an unknown fallback, or a `vocab_size` that is not a whole number from 1 to `MAX_TOKENS`.
    """
    check_choice("byte2str_fallback", byte2str_fallback, _FALLBACKS)
    if vocab_size is not None and (type(vocab_size) is not int or not 1 <= vocab_size <= MAX_TOKENS):
        raise SettingsError(
            f"vocab_size: {shown(vocab_size, _MOST_SHOWN)} must be a whole number from 1 to {MAX_TOKENS}"
        )
    tokens, pieces = read_tokens(tokenizer, MAX_TOKENS)
    named = pieces if byte2str_fallback == "tokenizer" and pieces is not None else [None] * len(tokens)
    texts = [_text(token, piece, byte2str_fallback) for token, piece in zip(tokens, named, strict=True)]
    missing = 0 if vocab_size is None else max(0, vocab_size - len(tokens))
    return DecodedVocab((tokens + [b""] * missing)[:vocab_size], (texts + [""] * missing)[:vocab_size])


def _text(token: bytes, piece: str | None, fallback: str) -> str:
    try:
        return token.decode()
    except UnicodeDecodeError:
        if piece is not None:
            return piece
        return token.decode("latin-1") if fallback == "latin1" else token.decode(errors="replace")


def _described(value: object) -> str:
    return f"{shown(value, _MOST_SHOWN)} ({type(value).__name__})"
