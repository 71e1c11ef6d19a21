"""Vocabularies: the byte string of every token id, named by a digest and packed for the wire.

    offset  0     4 bytes  magic "LMPV"
            4     uint8    wire version
            5     uint8    zero
            6     uint16   zero
            8     uint32   V
           12     uint32   bytes of all tokens together
           16     V uint32 lengths of the byte strings
           16+4V  bytes    the byte strings, one after the other

All numbers are little-endian.

The byte strings are read from the names that a tokenizer gives its tokens, without any library of tokenizers:

    GPT-2 (ByteLevel)          one character per byte, of GPT-2's alphabet
    SentencePiece (Metaspace)  "▁" is a space, "<0x0A>" the byte 0x0A, the rest UTF-8
    WordPiece                  "##ing" is "ing"; a piece that begins a word is its own text, without a space
    tiktoken, tekken           the bytes themselves

The bytes of special and added tokens are their text in UTF-8; in SentencePiece, "▁" in their text is a space too.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import InvalidVocabulary, ProtocolError
from lmpool.settings import check_choice, check_number, shown

MAX_TOKENS = 4_000_000
"""Max tokens of a vocabulary; published vocabularies have up to 262,144 tokens."""

MAX_BYTES = 32 * 1024 * 1024
"""Max bytes of all byte strings of a vocabulary together, so that no vocabulary can fill the memory."""

MAX_TOKEN_BYTES = 64 * 1024
"""Max bytes of one token, which bounds the depth of a vocabulary's trie."""

_MAGIC = b"LMPV"
_WIRE_VERSION = 1  # Version of the packed layout; a vocabulary of another version is refused.
_HEADER = struct.Struct("<4sBBHII")
_LENGTHS = np.dtype("<u4")
_FALLBACKS = ("tokenizer", "latin1", "replace")
_MAX_SHOWN = 120  # Max characters of a value in an error message.
_MAX_NESTED = 4  # Max nested tokenizers, such as mistral-common's inside of vLLM's.
# A tokenizer with one of these attributes is read directly; a tokenizer without them must wrap one that has them.
_READABLE = ("backend_tokenizer", "decode_single_token_bytes", "id_to_byte_piece", "id_to_piece", "id_to_token")
_BYTE_PIECE = re.compile(rb"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁".encode()
# Byte values that occur in UTF-8. Some vocabularies lack the other byte values.
_BYTES_OF_UTF8 = frozenset(range(256)) - {0xC0, 0xC1} - frozenset(range(0xF5, 256))


_Spelling = Callable[[str], bytes]
"""Converts the name of an ordinary token to bytes."""


def _innermost(tokenizer: Any) -> Any:
    """Return the tokenizer inside of wrappers, such as mistral-common's, vLLM's, or a processor."""
    inner = tokenizer
    for _ in range(_MAX_NESTED):
        if any(getattr(inner, name, None) is not None for name in _READABLE):
            return inner
        inner = getattr(inner, "instruct_tokenizer", getattr(inner, "tokenizer", None))
    return tokenizer


def _read(tokenizer: Any) -> tuple[list[bytes], list[str | None] | None]:
    """Read a tokenizer's tokens by their ids, because a dictionary by their names would merge duplicates.

    Returns the byte string of each id, b"" for an id without a token; and the tokens' names, if the tokenizer has any.
    """
    if hasattr(tokenizer, "decode_single_token_bytes"):
        return [_or_none(tokenizer.decode_single_token_bytes, i) or b"" for i in _ids(tokenizer.n_vocab)], None
    if hasattr(tokenizer, "id_to_byte_piece"):
        ids, special = _ids(tokenizer.n_words), tokenizer.num_special_tokens
        texts = [tokenizer.id_to_piece(i).encode() for i in ids[:special]]
        return texts + [tokenizer.id_to_byte_piece(i) for i in ids[special:]], None
    backend = getattr(tokenizer, "backend_tokenizer", None) or tokenizer
    added: dict[int, str] = {}
    spelling: _Spelling | None = None
    if hasattr(backend, "id_to_token"):  # The backend is an object of the package `tokenizers`.
        count, name = max([backend.get_vocab_size() - 1, *backend.get_vocab().values()]) + 1, backend.id_to_token
        added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
        spelling = _declared(backend)
    elif hasattr(tokenizer, "id_to_piece"):
        count = tokenizer.n_words if hasattr(tokenizer, "n_words") else tokenizer.get_piece_size()
        name, spelling = tokenizer.id_to_piece, _sentencepiece
    elif hasattr(tokenizer, "convert_ids_to_tokens"):
        count, name = max([len(tokenizer) - 1, *tokenizer.get_vocab().values()]) + 1, tokenizer.convert_ids_to_tokens
        added = {i: text for text, i in tokenizer.get_added_vocab().items()}
    else:
        libraries = "transformers, tokenizers, sentencepiece, mistral-common or tiktoken"
        raise InvalidVocabulary(f"it is no tokenizer of {libraries}")
    pieces = [_or_none(name, i) for i in _ids(count)]
    spelling = spelling or _undeclared(tokenizer, pieces)
    tokens = []
    for i, piece in enumerate(pieces):
        try:
            token = added[i].encode() if i in added else b"" if piece is None else spelling(piece)
        except (LookupError, TypeError, ValueError) as error:
            reason = f"token {i}, {shown(piece, _MAX_SHOWN)}, has a character that stands for no byte"
            raise InvalidVocabulary(reason) from error
        tokens.append(token.replace(_SPACE, b" ") if spelling is _sentencepiece else token)
    return tokens, pieces


def _declared(backend: Any) -> _Spelling | None:
    """The spelling that the backend's decoder declares; None without a decoder."""
    if backend.decoder is None:
        return None
    if type(backend.decoder).__name__ == "Decoder":
        raise InvalidVocabulary("its decoder is written in Python: the bytes of a token are unknown")
    # `backend.to_str()` would fail if any other part of the backend is written in Python.
    parts = {part["type"]: part for part in _parts(json.loads(backend.decoder.__getstate__()))}
    if "ByteFallback" in parts or "Metaspace" in parts:
        return _sentencepiece
    if "ByteLevel" in parts:
        return _byte_level(_BYTE_OF, getattr(backend.model, "end_of_word_suffix", None) or "")
    if "WordPiece" in parts:
        prefix = parts["WordPiece"]["prefix"]
        return lambda piece: (piece.removeprefix(prefix) or piece).encode()  # Keep a piece that is the prefix alone.
    known = "only ByteLevel, ByteFallback, Metaspace and WordPiece can be read"
    raise InvalidVocabulary(f"its decoder is {', '.join(sorted(parts))}: {known}")


def _parts(node: Any) -> Iterator[dict[str, Any]]:
    """Yield all parts of a decoder, including nested parts."""
    if isinstance(node, dict) and isinstance(node.get("type"), str):
        yield node
    for inner in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _parts(inner)


def _undeclared(tokenizer: Any, pieces: list[str | None]) -> _Spelling:
    """The spelling of a tokenizer that has no decoder."""
    if hasattr(tokenizer, "sp_model"):
        return _sentencepiece
    if byte_of := getattr(tokenizer, "byte_decoder", None):
        return _byte_level(byte_of)
    # Any English word is spelled in GPT-2's alphabet, but only byte-level vocabularies have all its letters as tokens.
    if not {_BYTE_OF.get(piece) for piece in pieces if piece} >= _BYTES_OF_UTF8:
        missing = "not every byte of GPT-2's alphabet is a token"
        raise InvalidVocabulary(f"it has no decoder and no byte_decoder, and {missing}")
    return _byte_level(_BYTE_OF)


def _sentencepiece(piece: str) -> bytes:
    named = _BYTE_PIECE.sub(lambda match: bytes([int(match[1], 16)]), piece.encode())
    return named.replace(_SPACE, b" ")


def _byte_level(byte_of: Mapping[str, int], end_of_word: str = "") -> _Spelling:
    """The spelling of a byte-level vocabulary; `end_of_word` (as in CLIP's) stands for a space after a word."""

    def ordinary(piece: str) -> bytes:
        word = piece.removesuffix(end_of_word)
        return bytes(map(byte_of.__getitem__, word)) + b" " * (word != piece)

    return ordinary


_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
# GPT-2's alphabet: printable characters of Latin-1 stand for themselves; U+0100 and up stand for the other bytes in
# order. Some byte-level vocabularies also have tokens of plain whitespace.
_BYTE_OF = (
    {chr(byte): byte for byte in _PRINTABLE}
    | {chr(256 + i): byte for i, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))}
    | {" ": 0x20, "\n": 0x0A, "\r": 0x0D, "\t": 0x09, "▁": 0x20}
)


def _ids(count: int) -> range:
    if not 1 <= count <= MAX_TOKENS:
        raise InvalidVocabulary(f"it has {count} tokens: from 1 to {MAX_TOKENS} are allowed")
    return range(count)


def _or_none(name: Callable[[int], Any], token: int) -> Any:
    """The name of an id; None for a gap in the ids."""
    try:
        return name(token)
    except LookupError:
        return None


class Vocabulary:
    """The byte string of every token id. Entry i of a model's rows belongs to token i.

    Byte strings may be empty and may occur more than once. A vocabulary is immutable; two vocabularies are equal when
    their digests are equal.

    Attributes:
        lengths: number of bytes of each token: read-only uint32 of shape (V,).
        data: all byte strings, one after the other.
        nbytes: number of bytes of the packed vocabulary.
        digest: 32 hex digits: the BLAKE2b-128 of V, the lengths (both as little-endian uint32) and the byte strings.
    """

    def __init__(self, tokens: Iterable[bytes]) -> None:
        """Create a vocabulary from the byte strings of the ids 0 to V-1.

        Raises:
            InvalidVocabulary: no tokens, a token that is not `bytes`, more than `MAX_TOKENS` tokens, more than
                `MAX_BYTES` bytes in all, or a token of more than `MAX_TOKEN_BYTES` bytes.
        """
        if not isinstance(tokens, Iterable):
            raise InvalidVocabulary(f"{_described(tokens)} is no vocabulary: pass the byte strings of the tokens")
        listed = tokens if isinstance(tokens, (list, tuple)) else list(islice(tokens, MAX_TOKENS + 1))
        if not all(issubclass(kind, bytes) for kind in set(map(type, listed))):
            index, token = next((i, token) for i, token in enumerate(listed) if not isinstance(token, bytes))
            raise InvalidVocabulary(f"token {index} is {_described(token)}, not bytes: see decode_vocab for tokenizers")
        lengths = np.fromiter(map(len, listed), np.int64, len(listed))
        _check_limits(lengths, InvalidVocabulary)
        self._take(lengths.astype(_LENGTHS), b"".join(listed))

    def _take(self, lengths: NDArray[np.uint32], data: bytes) -> None:
        lengths.flags.writeable = False
        self.lengths, self.data = lengths, data
        self.nbytes = _HEADER.size + lengths.nbytes + len(data)
        named = hashlib.blake2b(len(lengths).to_bytes(4, "little"), digest_size=16)
        named.update(lengths.data)
        named.update(data)
        self.digest = named.hexdigest()

    @cached_property
    def tokens(self) -> list[bytes]:
        """The byte string of each token, as a shared list that must not be changed."""
        ends = np.cumsum(self.lengths, dtype=np.int64).tolist()
        return list(map(self.data.__getitem__, map(slice, [0, *ends[:-1]], ends)))

    @cached_property
    def order(self) -> NDArray[np.int64]:
        """The token ids in the order of their byte strings, and of equal byte strings by id: read-only int64 (V,)."""
        order = np.array(sorted(range(len(self)), key=self.tokens.__getitem__), np.int64)
        order.flags.writeable = False
        return order

    def pack(self) -> bytes:
        """The vocabulary as bytes, in the layout that the docstring of this module describes."""
        header = _HEADER.pack(_MAGIC, _WIRE_VERSION, 0, 0, len(self), len(self.data))
        return b"".join((header, self.lengths.data, self.data))

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> Vocabulary:
        """Read a packed vocabulary; the result shares no memory with `data`.

        Raises:
            ProtocolError: the bytes are not a vocabulary of this wire version, or exceed a limit.
        """
        view = memoryview(data).cast("B")
        if len(view) < _HEADER.size:
            raise ProtocolError(f"a vocabulary of {len(view)} bytes is shorter than its {_HEADER.size}-byte header")
        magic, version, zero, zeros, count, total = _HEADER.unpack_from(view)
        if (magic, version, zero, zeros) != (_MAGIC, _WIRE_VERSION, 0, 0):
            found = f"it begins with {magic!r}, version {version}"
            raise ProtocolError(f"not a vocabulary of wire version {_WIRE_VERSION}: {found}")
        split = _HEADER.size + count * _LENGTHS.itemsize
        if len(view) != split + total:
            size = split + total
            raise ProtocolError(f"a vocabulary of {count} tokens and {total} bytes takes {size} bytes, not {len(view)}")
        lengths = np.frombuffer(view[_HEADER.size : split], _LENGTHS).copy()
        _check_limits(lengths, ProtocolError)
        if (summed := int(lengths.sum(dtype=np.int64))) != total:
            raise ProtocolError(f"the tokens of the vocabulary have {summed} bytes together, its header says {total}")
        vocabulary = cls.__new__(cls)
        vocabulary._take(lengths, bytes(view[split:]))
        return vocabulary

    def __len__(self) -> int:
        """The number of tokens, V."""
        return len(self.lengths)

    def __getitem__(self, token: SupportsIndex) -> bytes:
        """The byte string of one token.

        Raises:
            IndexError: the vocabulary has no such token.
        """
        try:
            return self.tokens[token]
        except IndexError:
            text = f"token {shown(token, _MAX_SHOWN)}: this vocabulary's ids go from 0 to {len(self) - 1}"
            raise IndexError(text) from None

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.tokens)

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, Vocabulary) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"<Vocabulary of {len(self)} tokens, {len(self.data)} bytes, {self.digest}>"


def _check_limits(lengths: NDArray[Any], error: type[Exception]) -> None:
    """Raise `error` if the lengths of tokens exceed a limit."""
    if not 1 <= len(lengths) <= MAX_TOKENS:
        raise error(f"the vocabulary has {len(lengths)} tokens: from 1 to {MAX_TOKENS} are allowed")
    if (total := int(lengths.sum(dtype=np.int64))) > MAX_BYTES:
        raise error(f"the tokens of the vocabulary have {total} bytes together: at most {MAX_BYTES} are allowed")
    if (most := int(lengths.max())) > MAX_TOKEN_BYTES:
        text = f"token {int(lengths.argmax())} of the vocabulary has {most} bytes"
        raise error(f"{text}: at most {MAX_TOKEN_BYTES} are allowed")


class DecodedVocab(NamedTuple):
    """The vocabulary of a tokenizer.

    Attributes:
        tokens: the byte string of each id; tries are built from these byte strings.
        texts: a readable text for each id; not every token is text, and two tokens may have the same text.
    """

    tokens: list[bytes]
    texts: list[str]


def decode_vocab(
    tokenizer: Any, byte2str_fallback: str = "tokenizer", *, vocab_size: int | None = None
) -> DecodedVocab:
    """The byte string and the text of every token id of a tokenizer.

    Args:
        tokenizer: a tokenizer of transformers (fast, slow, or its wrapper of mistral-common), tokenizers or
            mistral-common, a tiktoken encoding, a SentencePiece processor, or an object whose attribute `tokenizer` is
            one of these. Byte-level BPE, SentencePiece with or without byte fallback, and WordPiece are supported.
        byte2str_fallback: the text of a token that is not UTF-8: "tokenizer" (the tokenizer's name for it; like
            "replace" for a tokenizer without names, such as tiktoken), "latin1", or "replace" (U+FFFD for each byte).
        vocab_size: V of the model, if it differs from the tokenizer's V. Ids that only the model has get b"", so their
            weight is added to the root of a trie; ids that only the tokenizer has are removed.

    Returns:
        tokens and texts by id, as many as `vocab_size`; without `vocab_size`, up to the tokenizer's highest id. Several
        ids may have equal byte strings. The bytes of a special or added token are its text. A gap in the ids gets b"".
        In WordPiece "##ing" is b"ing", and a piece at the beginning of a word has no space before it.

    Raises:
        InvalidVocabulary: the tokenizer's byte strings cannot be read, or it has more than `MAX_TOKENS` tokens.
        SettingsError: an unknown fallback, or a `vocab_size` that is not a whole number from 1 to `MAX_TOKENS`.
    """
    check_choice("byte2str_fallback", byte2str_fallback, _FALLBACKS)
    if vocab_size is not None:
        check_number("vocab_size", vocab_size, 1, MAX_TOKENS)
    try:
        tokens, pieces = _read(_innermost(tokenizer))
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        reason = str(error) if isinstance(error, InvalidVocabulary) else f"{type(error).__name__}: {error}"
        named = getattr(tokenizer, "name_or_path", None) or getattr(tokenizer, "name", None)
        kind = type(tokenizer).__name__
        name = f"{shown(named, _MAX_SHOWN)} ({kind})" if isinstance(named, str) else kind
        raise InvalidVocabulary(f"the vocabulary of {name} cannot be read: {reason}") from error
    named = pieces if byte2str_fallback == "tokenizer" and pieces is not None else [None] * len(tokens)
    texts = []
    for token, piece in zip(tokens, named, strict=True):
        try:
            texts.append(token.decode())
        except UnicodeDecodeError:
            shown_as = token.decode("latin-1") if byte2str_fallback == "latin1" else token.decode(errors="replace")
            texts.append(shown_as if piece is None else piece)
    missing = 0 if vocab_size is None else max(0, vocab_size - len(tokens))
    return DecodedVocab((tokens + [b""] * missing)[:vocab_size], (texts + [""] * missing)[:vocab_size])


def _described(value: object) -> str:
    return f"{shown(value, _MAX_SHOWN)} ({type(value).__name__})"
