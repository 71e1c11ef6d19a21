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

Special and added tokens are their text in UTF-8; in SentencePiece "▁" is a space in them too.
"""

from __future__ import annotations

import hashlib
import json
import operator
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import InvalidVocabulary, ProtocolError, SettingsError
from lmpool.settings import check_choice, shown

MAX_TOKENS = 4_000_000
"""Max tokens of a vocabulary; published ones have up to 262,144."""

MAX_BYTES = 32 * 1024 * 1024
"""Max bytes of all byte strings of a vocabulary together, so that an untrusted one cannot fill the memory."""

MAX_TOKEN_BYTES = 64 * 1024
"""Max bytes of one token, which bounds the depth of its trie."""

_MAGIC = b"LMPV"
_WIRE_VERSION = 1  # Of the packed layout; another version is refused.
_HEADER = struct.Struct("<4sBBHII")
_LENGTHS = np.dtype("<u4")
_FALLBACKS = ("tokenizer", "latin1", "replace")
_MAX_SHOWN = 120  # Characters of a value in an error message.
_MAX_NESTED = 4  # Tokenizers inside of one another, such as vLLM's around mistral-common's.
# A tokenizer with one of these attributes is read; others are opened up.
_READABLE = ("backend_tokenizer", "decode_single_token_bytes", "id_to_byte_piece", "id_to_piece", "id_to_token")
_BYTE_PIECE = re.compile(rb"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁".encode()
# The other byte values never occur in UTF-8, and some vocabularies lack them.
_BYTES_OF_UTF8 = frozenset(range(256)) - {0xC0, 0xC1} - frozenset(range(0xF5, 256))


class TokenBytes(NamedTuple):
    """The tokens of a tokenizer.

    Attributes:
        tokens: the byte string of each id; b"" for an id without a token.
        pieces: the tokenizer's name of each token, or None; None for a tokenizer without names.
    """

    tokens: list[bytes]
    pieces: list[str | None] | None


class _Spelling(NamedTuple):
    """How names become bytes: those of ordinary tokens, and those of added tokens."""

    ordinary: Callable[[str], bytes]
    added: Callable[[str], bytes] = str.encode


def read_tokens(tokenizer: Any, most: int) -> TokenBytes:
    """Read the byte strings of at most `most` tokens of a tokenizer (see `decode_vocab`).

    Raises:
        InvalidVocabulary: they cannot be read, or the tokenizer has none or too many.
    """
    try:
        return _read(_innermost(tokenizer), most)
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        reason = str(error) if isinstance(error, InvalidVocabulary) else f"{type(error).__name__}: {error}"
        raise InvalidVocabulary(f"the vocabulary of {_name(tokenizer)} cannot be read: {reason}") from error


def _innermost(tokenizer: Any) -> Any:
    """The tokenizer inside of wrappers: mistral-common's, vLLM's, processors."""
    inner = tokenizer
    for _ in range(_MAX_NESTED):
        if any(getattr(inner, name, None) is not None for name in _READABLE):
            return inner
        inner = getattr(inner, "instruct_tokenizer", getattr(inner, "tokenizer", None))
    return tokenizer


def _read(tokenizer: Any, most: int) -> TokenBytes:
    if hasattr(tokenizer, "decode_single_token_bytes"):
        ids = _ids(tokenizer.n_vocab, most)
        return TokenBytes([_or_none(tokenizer.decode_single_token_bytes, i) or b"" for i in ids], None)
    if hasattr(tokenizer, "id_to_byte_piece"):
        ids = _ids(tokenizer.n_words, most)
        special = tokenizer.num_special_tokens
        texts = [tokenizer.id_to_piece(i).encode() for i in ids[:special]]
        return TokenBytes(texts + [tokenizer.id_to_byte_piece(i) for i in ids[special:]], None)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None or hasattr(tokenizer, "id_to_token"):
        return _read_fast(tokenizer, backend or tokenizer, most)
    if hasattr(tokenizer, "id_to_piece"):
        count = tokenizer.n_words if hasattr(tokenizer, "n_words") else tokenizer.get_piece_size()
        return _spelled([tokenizer.id_to_piece(i) for i in _ids(count, most)], {}, _SENTENCEPIECE)
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        return _read_slow(tokenizer, most)
    raise InvalidVocabulary(
        "it is no tokenizer of transformers, tokenizers, sentencepiece or mistral-common, and no tiktoken encoding"
    )


def _read_fast(tokenizer: Any, backend: Any, most: int) -> TokenBytes:
    """Read an object of the package `tokenizers`, by id: its vocabulary by name would merge duplicates."""
    ids = _ids(max(backend.get_vocab_size(), _end(backend.get_vocab())), most)
    pieces = [backend.id_to_token(i) for i in ids]
    added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
    spelling = _declared(backend) or _undeclared(tokenizer, pieces)
    return _spelled(pieces, added, spelling)


def _read_slow(tokenizer: Any, most: int) -> TokenBytes:
    ids = _ids(max(len(tokenizer), _end(tokenizer.get_vocab())), most)
    pieces = [_or_none(tokenizer.convert_ids_to_tokens, i) for i in ids]
    added = {i: text for text, i in tokenizer.get_added_vocab().items()}
    return _spelled(pieces, added, _undeclared(tokenizer, pieces))


def _spelled(pieces: list[str | None], added: Mapping[int, str], spelling: _Spelling) -> TokenBytes:
    tokens = []
    for i, piece in enumerate(pieces):
        try:
            if i in added:
                tokens.append(spelling.added(added[i]))
            else:
                tokens.append(b"" if piece is None else spelling.ordinary(piece))
        except (LookupError, TypeError, ValueError) as error:
            raise InvalidVocabulary(
                f"token {i}, {shown(piece, _MAX_SHOWN)}, has a character that stands for no byte"
            ) from error
    return TokenBytes(tokens, pieces)


def _declared(backend: Any) -> _Spelling | None:
    """The spelling by the backend's decoder; None without a decoder."""
    if backend.decoder is None:
        return None
    if type(backend.decoder).__name__ == "Decoder":
        raise InvalidVocabulary("its decoder is written in Python: the bytes of a token are unknown")
    # `backend.to_str()` would fail when any other part is written in Python.
    parts = {part["type"]: part for part in _parts(json.loads(backend.decoder.__getstate__()))}
    if "ByteFallback" in parts or "Metaspace" in parts:
        return _SENTENCEPIECE
    if "ByteLevel" in parts:
        return _byte_level(_BYTE_OF, getattr(backend.model, "end_of_word_suffix", None) or "")
    if "WordPiece" in parts:
        return _wordpiece(parts["WordPiece"]["prefix"])
    raise InvalidVocabulary(
        f"its decoder is {', '.join(sorted(parts))}: only ByteLevel, ByteFallback, Metaspace and WordPiece say which "
        "bytes a token is"
    )


def _parts(node: Any) -> Iterator[dict[str, Any]]:
    """All parts of a decoder, with the nested ones."""
    if isinstance(node, dict):
        if isinstance(node.get("type"), str):
            yield node
        node = list(node.values())
    if isinstance(node, list):
        for inner in node:
            yield from _parts(inner)


def _undeclared(tokenizer: Any, pieces: list[str | None]) -> _Spelling:
    """The spelling of a tokenizer without a decoder."""
    if hasattr(tokenizer, "sp_model"):
        return _SENTENCEPIECE
    if byte_of := getattr(tokenizer, "byte_decoder", None):
        return _byte_level(byte_of)
    # Any English word is spelled in GPT-2's alphabet, but only byte-level vocabularies have all its letters as tokens.
    if not {_BYTE_OF.get(piece) for piece in pieces if piece} >= _BYTES_OF_UTF8:
        raise InvalidVocabulary(
            "it has no decoder, SentencePiece model or byte_decoder, and not every byte of GPT-2's alphabet is a token"
        )
    return _byte_level(_BYTE_OF)


def _sentencepiece(piece: str) -> bytes:
    named = _BYTE_PIECE.sub(lambda match: bytes([int(match[1], 16)]), piece.encode())
    return named.replace(_SPACE, b" ")


_SENTENCEPIECE = _Spelling(_sentencepiece, lambda text: text.encode().replace(_SPACE, b" "))


def _wordpiece(prefix: str) -> _Spelling:
    # A piece that consists of the prefix alone is a word.
    return _Spelling(lambda piece: (piece.removeprefix(prefix) or piece).encode())


def _byte_level(byte_of: Mapping[str, int], end_of_word: str = "") -> _Spelling:
    """`end_of_word` ends words in vocabularies like CLIP's; it stands for a space."""

    def ordinary(piece: str) -> bytes:
        if end_of_word and piece.endswith(end_of_word):
            return ordinary(piece.removesuffix(end_of_word)) + b" "
        return bytes(map(byte_of.__getitem__, piece))

    return _Spelling(ordinary)


def _gpt2_alphabet() -> dict[str, int]:
    """Character -> byte: printable Latin-1 stands for itself; U+0100 and up stand for the other bytes in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    alphabet = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    # Some byte-level vocabularies also have tokens of plain whitespace.
    return alphabet | {" ": 0x20, "\n": 0x0A, "\r": 0x0D, "\t": 0x09, "▁": 0x20}


_BYTE_OF = _gpt2_alphabet()


def _name(tokenizer: Any) -> str:
    named = getattr(tokenizer, "name_or_path", None) or getattr(tokenizer, "name", None)
    kind = type(tokenizer).__name__
    return f"{shown(named, _MAX_SHOWN)} ({kind})" if isinstance(named, str) else kind


def _end(vocab: Mapping[str, int]) -> int:
    """One more than the highest id."""
    return max(vocab.values(), default=-1) + 1


def _ids(count: int, most: int) -> range:
    if not 1 <= count <= most:
        raise InvalidVocabulary(f"it has {count} tokens: from 1 to {most} are allowed")
    return range(count)


def _or_none(name: Callable[[int], Any], token: int) -> Any:
    """The name of an id; None for a gap in the ids."""
    try:
        return name(token)
    except LookupError:
        return None


class Vocabulary:
    """The byte string of every token id. Entry i of a model's rows belongs to token i.

    Byte strings may be empty and may occur more than once. A vocabulary is immutable; two are equal when their digests
    are.
    """

    __slots__ = ("_data", "_digest", "_ends", "_lengths", "_tokens")

    def __init__(self, tokens: Iterable[bytes]) -> None:
        """Create a vocabulary from the byte strings of the ids 0 to V-1.

        Raises:
            InvalidVocabulary: no tokens, a token that is not `bytes`, more than `MAX_TOKENS` tokens, more than
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
        """The byte string of each token; a shared list that must not be changed."""
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
            ProtocolError: the bytes are no vocabulary of this wire version, or exceed a limit.
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
            raise IndexError(f"token {shown(index, _MAX_SHOWN)}: this vocabulary's ids go from 0 to {len(self) - 1}")
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
    """The tokens of an iterable, up to the first that exceeds a limit or is not `bytes`."""
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
    """The limit that the lengths of V >= 1 tokens exceed; "" for none."""
    if len(lengths) > MAX_TOKENS:
        return f"the vocabulary has {len(lengths)} tokens or more: at most {MAX_TOKENS} are allowed"
    total = int(lengths.sum(dtype=np.int64))
    if total > MAX_BYTES:
        return f"the tokens of the vocabulary have {total} bytes or more together: at most {MAX_BYTES} are allowed"
    longest = int(lengths.argmax())
    if lengths[longest] > MAX_TOKEN_BYTES:
        return f"token {longest} of the vocabulary has {lengths[longest]} bytes: at most {MAX_TOKEN_BYTES} are allowed"
    return ""


def _read_header(view: memoryview) -> tuple[int, int]:
    """V and the bytes of all tokens, checked against the limits and the size of `view`."""
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
            "bytes are allowed"
        )
    size = _HEADER.size + count * _LENGTHS.itemsize + total
    if len(view) != size:
        raise ProtocolError(f"a vocabulary of {count} tokens and {total} bytes takes {size} bytes, not {len(view)}")
    return count, total


class DecodedVocab(NamedTuple):
    """The vocabulary of a tokenizer.

    Attributes:
        tokens: the byte string of each id; tries are built from them.
        texts: readable texts; not every token is text, and two tokens may have the same text.
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
            `tokenizer`. Byte-level BPE, SentencePiece with or without byte fallback, and WordPiece are supported.
        byte2str_fallback: the text of a token that is not UTF-8: "tokenizer" (the tokenizer's name for it; like
            "replace" for a tokenizer without names, such as tiktoken), "latin1", or "replace" (U+FFFD for each byte).
        vocab_size: V of the model, if it differs from the tokenizer's. Ids that only the model has get b"", so their
            weight is added to the root of a trie; ids that only the tokenizer has are removed.

    Returns:
        tokens and texts by id, both of length `vocab_size`; without it, up to the tokenizer's highest id. Several ids
        may have equal byte strings. Special and added tokens are their text. A gap in the ids gets b"". In WordPiece
        "##ing" is b"ing", and a piece at the beginning of a word has no space before it.

    Raises:
        InvalidVocabulary: the tokenizer's byte strings cannot be read, or it has more than `MAX_TOKENS` tokens.
        SettingsError: an unknown fallback, or a `vocab_size` that is not a whole number from 1 to `MAX_TOKENS`.
    """
    check_choice("byte2str_fallback", byte2str_fallback, _FALLBACKS)
    if vocab_size is not None and (type(vocab_size) is not int or not 1 <= vocab_size <= MAX_TOKENS):
        raise SettingsError(
            f"vocab_size: {shown(vocab_size, _MAX_SHOWN)} must be a whole number from 1 to {MAX_TOKENS}"
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
    return f"{shown(value, _MAX_SHOWN)} ({type(value).__name__})"
