"""The byte string of every token of a tokenizer, as it spells them itself; needs none of the libraries of tokenizers.

    GPT-2 (ByteLevel)          one character per byte, of GPT-2's alphabet
    SentencePiece (Metaspace)  "▁" is a space, "<0x0A>" the byte 0x0A, the rest UTF-8
    WordPiece                  "##ing" is "ing"; a piece that begins a word is its own text, without a space
    tiktoken, tekken           the bytes themselves

Special and added tokens are their text in UTF-8; in SentencePiece "▁" is a space in them too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from lmpool.errors import InvalidVocabulary
from lmpool.settings import shown

_MOST_SHOWN = 120
_DEEPEST = 4
# What the innermost of nested tokenizers has; one that has only tokenizers inside is opened up.
_READABLE = ("backend_tokenizer", "decode_single_token_bytes", "id_to_byte_piece", "id_to_piece", "id_to_token")
_BYTE_PIECE = re.compile(rb"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁".encode()
# The other byte values occur nowhere in UTF-8, and some vocabularies leave them out.
_BYTES_OF_UTF8 = frozenset(range(256)) - {0xC0, 0xC1} - frozenset(range(0xF5, 256))


class TokenBytes(NamedTuple):
    """What a tokenizer's tokens are.

    Attributes:
        tokens: the byte string of each id; b"" where the tokenizer has no token of that id.
        pieces: what the tokenizer calls each, None where it has none; None for all when it has no names for them.
    """

    tokens: list[bytes]
    pieces: list[str | None] | None


class _Spelling(NamedTuple):
    """How the bytes of ordinary pieces and of added tokens are had from their texts."""

    ordinary: Callable[[str], bytes]
    added: Callable[[str], bytes] = str.encode


def read_tokens(tokenizer: Any, most: int) -> TokenBytes:
    """Read the byte strings of a tokenizer's tokens.

    Args:
        tokenizer: see `lmpool.vocabulary.decode_vocab`.
        most: tokens that are taken at most.

    Raises:
        InvalidVocabulary: they cannot be read, or there are none or too many; with the tokenizer's name.
    """
    try:
        return _read(_innermost(tokenizer), most)
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        reason = str(error) if isinstance(error, InvalidVocabulary) else f"{type(error).__name__}: {error}"
        raise InvalidVocabulary(f"the vocabulary of {_name(tokenizer)} cannot be read: {reason}") from error


def _innermost(tokenizer: Any) -> Any:
    """The tokenizer that knows the bytes, where others are wrapped around it: mistral-common's, vLLM's, processors."""
    inner = tokenizer
    for _ in range(_DEEPEST):
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
        "it is no tokenizer of transformers or tokenizers, no tiktoken encoding, and none of sentencepiece or "
        "mistral-common"
    )


def _read_fast(tokenizer: Any, backend: Any, most: int) -> TokenBytes:
    """`backend` is what the package `tokenizers` makes: one entry a token, so that duplicates stay apart."""
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
                f"token {i}, {shown(piece, _MOST_SHOWN)}, has a character that stands for no byte"
            ) from error
    return TokenBytes(tokens, pieces)


def _declared(backend: Any) -> _Spelling | None:
    """The spelling that the backend's decoder undoes; None when it has no decoder."""
    if backend.decoder is None:
        return None
    if type(backend.decoder).__name__ == "Decoder":
        raise InvalidVocabulary("its decoder is written in Python: nothing says which bytes a token is")
    # Not from `backend.to_str()`, which fails when any other part is written in Python.
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
    """Every part of a decoder, nested ones too."""
    if isinstance(node, dict):
        if isinstance(node.get("type"), str):
            yield node
        node = list(node.values())
    if isinstance(node, list):
        for inner in node:
            yield from _parts(inner)


def _undeclared(tokenizer: Any, pieces: list[str | None]) -> _Spelling:
    """The spelling of a tokenizer that has no decoder to look at."""
    if hasattr(tokenizer, "sp_model"):
        return _SENTENCEPIECE
    if own := getattr(tokenizer, "byte_decoder", None):
        return _byte_level(own)
    # Any English word is spelled in GPT-2's alphabet; only byte-level vocabularies have all its letters as tokens.
    if not {_BYTE_OF.get(piece) for piece in pieces if piece} >= _BYTES_OF_UTF8:
        raise InvalidVocabulary(
            "it has no decoder, SentencePiece model or byte_decoder, and not every byte of GPT-2's alphabet is a token"
        )
    return _byte_level(_BYTE_OF)


def _sentencepiece(piece: str) -> bytes:
    named = _BYTE_PIECE.sub(lambda found: bytes([int(found[1], 16)]), piece.encode())
    return named.replace(_SPACE, b" ")


_SENTENCEPIECE = _Spelling(_sentencepiece, lambda text: text.encode().replace(_SPACE, b" "))


def _wordpiece(prefix: str) -> _Spelling:
    # A piece that is nothing but the prefix is a word of its own.
    return _Spelling(lambda piece: (piece.removeprefix(prefix) or piece).encode())


def _byte_level(byte_of: Mapping[str, int], end_of_word: str = "") -> _Spelling:
    """`end_of_word` closes words in vocabularies like CLIP's; their decoder makes a space of it."""

    def ordinary(piece: str) -> bytes:
        if end_of_word and piece.endswith(end_of_word):
            return ordinary(piece.removesuffix(end_of_word)) + b" "
        return bytes(map(byte_of.__getitem__, piece))

    return _Spelling(ordinary)


def _gpt2_alphabet() -> dict[str, int]:
    """Character -> byte: printable Latin-1 stands for itself, the other bytes for U+0100 and up, in their order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    alphabet = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    # Some byte-level vocabularies have tokens of plain whitespace too.
    return alphabet | {" ": 0x20, "\n": 0x0A, "\r": 0x0D, "\t": 0x09, "▁": 0x20}


_BYTE_OF = _gpt2_alphabet()


def _name(tokenizer: Any) -> str:
    named = getattr(tokenizer, "name_or_path", None) or getattr(tokenizer, "name", None)
    kind = type(tokenizer).__name__
    return f"{shown(named, _MOST_SHOWN)} ({kind})" if isinstance(named, str) else kind


def _end(vocab: Mapping[str, int]) -> int:
    """One more than the highest id."""
    return max(vocab.values(), default=-1) + 1


def _ids(count: int, most: int) -> range:
    if not 1 <= count <= most:
        raise InvalidVocabulary(f"it has {count} tokens: from 1 to {most} are taken")
    return range(count)


def _or_none(name: Callable[[int], Any], token: int) -> Any:
    """What the id is called; None where the ids have a gap."""
    try:
        return name(token)
    except LookupError:
        return None
