"""Compress a model's `tokenizer.json`, and check that a hostile file cannot freeze a process or fill its memory.

Workers store the compressed file under `Keys.tokenizer`. The file is JSON, so reading it runs no code. But a hostile
tokenizer could freeze a process that encodes text, or fill its memory: the package `tokenizers` limits neither the time
of a regular expression nor the length of the text that a normalizer makes. The check accepts known components only,
patterns that cannot backtrack exponentially, and replacements that lengthen a text by a bounded factor. Workers run
the check before they publish a tokenizer, and clients before they use a tokenizer.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
import re
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from lmpool.errors import InvalidVocabulary, ProtocolError
from lmpool.settings import shown

MAX_TOKENIZER_BYTES = 96 * 1024 * 1024
"""Max bytes of a `tokenizer.json`; the file for a vocabulary of 262,144 tokens has 33 million bytes."""

MAX_PACKED_BYTES = 24 * 1024 * 1024
"""Max bytes of a compressed `tokenizer.json`."""

MAX_GROWTH = 32
"""Max factor by which a tokenizer may lengthen a text before splitting it; NFKC turns one character into up to 18."""

MAX_NORMALIZED_CHARACTERS = 32 * 1024 * 1024
"""Max characters of a text after normalization. A token of one character takes about 185 bytes in `tokenizers`."""

_MAX_COMPONENTS = 64  # Max components, such as normalizers or decoders, in one list; real tokenizers have up to 12.
_MAX_PATTERN_CHARACTERS = 2048  # Max characters of a regular expression; the longest known pattern has about 400.
_MAX_REPEATS = 3  # Max quantifiers without a fixed count in one alternative of a pattern; GPT-4o's pattern has 2.
_MAX_CHOICES = 12  # Max "?" and "|" in groups of one alternative: at most 4,096 ways to match; GPT-4o's pattern has 8.
_MAX_SPECIAL_TOKENS = 64  # Max ids that a template adds to one text.
_MAX_WORD_CHARACTERS = 1000  # Max characters of a word that WordPiece splits, in cubic time; BERT's limit is 100.
_MAX_CHARACTERS = 256  # Max characters of a string setting, such as the text that a `Prepend` puts before a prompt.

# For each part of a `tokenizer.json`: key of the list in a component `Sequence`, and component types that are accepted.
_PARTS = {
    "normalizer": ("normalizers", {
        "BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend",
        "Replace", "Strip", "StripAccents",
    }),
    "pre_tokenizer": ("pretokenizers", {
        "BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength", "Metaspace", "Punctuation",
        "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit",
    }),
    "post_processor": ("processors", {"BertProcessing", "ByteLevel", "RobertaProcessing", "TemplateProcessing"}),
    "decoder": ("decoders", {
        "BPEDecoder", "ByteFallback", "ByteLevel", "CTC", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece",
    }),
}  # fmt: skip

# The regex flag x is not accepted: comments in a pattern could hide groups and repetitions from this check.
_GROUP_OPENING = re.compile(r"\((?:\?(?::|=|!|<=|<!|>|[im]+:))?")
_QUANTIFIER = re.compile(r"[*+?]|\{(\d*)(,?)(\d*)\}")
# Characters accepted after a backslash: no back-references, no calls, and no "c" ("\c[" is one control character).
_ESCAPED = frozenset("pPsSdDwWhHbBAzZGnrtfvaexu0")
# A character class may contain POSIX classes and one level of nested classes, and must not begin with a bracket.
_IN_CLASS = r"\\.|[^\\\[\]]|\[:\^?[a-z]{4,6}:\]"
_CLASS = re.compile(rf"\[(?!\^?\])(?:{_IN_CLASS}|\[(?!\^?\]|:)(?:{_IN_CLASS})*\])*\]", re.DOTALL)


class PackedTokenizer(NamedTuple):
    """A compressed `tokenizer.json`."""

    data: bytes  # The `tokenizer.json` as a zlib stream.
    digest: str  # 32 hex digits, the BLAKE2b-128 of `data`.

    @classmethod
    def pack(cls, text: str) -> PackedTokenizer:
        """Compress a `tokenizer.json`; raises `InvalidVocabulary` if it is too large."""
        plain = text.encode()
        _check_size("its tokenizer.json", len(plain), MAX_TOKENIZER_BYTES, "bytes")
        data = zlib.compress(plain)
        _check_size("its compressed tokenizer.json", len(data), MAX_PACKED_BYTES, "bytes")
        return cls(data, digest_of(data))


def _check_size(name: str, size: int, limit: int, unit: str = "characters") -> None:
    if size > limit:
        raise InvalidVocabulary(f"{name} has {size} {unit}; the limit is {limit}")


def unpack_tokenizer(data: bytes, digest: str) -> str:
    """Decompress the `tokenizer.json` of this digest; raises `ProtocolError` if its digest or size is wrong."""
    if len(data) > MAX_PACKED_BYTES:
        raise ProtocolError(f"it has more than {MAX_PACKED_BYTES} bytes")
    if (named := digest_of(data)) != digest:
        raise ProtocolError(f"its digest is {named}")
    stream = zlib.decompressobj()
    try:
        plain = stream.decompress(data, MAX_TOKENIZER_BYTES)
        if not stream.eof:
            raise ProtocolError(f"it is cut off, or has more than {MAX_TOKENIZER_BYTES} bytes after decompression")
        return plain.decode()
    except (zlib.error, UnicodeDecodeError) as error:
        raise ProtocolError(f"it cannot be read: {error}") from error


def digest_of(data: bytes) -> str:
    """The digest of a compressed tokenizer: 32 hex digits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class _Model(msgspec.Struct, frozen=True):
    max_input_chars_per_word: int = 0  # Max characters of a word that WordPiece splits; other models have no limit.


class _AddedToken(msgspec.Struct):
    id: int
    special: bool = False


class _File(msgspec.Struct):
    """The parts of a `tokenizer.json` that do more than look tokens up."""

    added_tokens: list[_AddedToken] = []
    model: _Model = _Model()
    normalizer: Any = None
    pre_tokenizer: Any = None
    post_processor: Any = None
    decoder: Any = None


def _read(text: str) -> _File:
    try:
        return msgspec.json.decode(text, type=_File)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidVocabulary(f"its tokenizer.json cannot be read: {error}") from error


def special_tokens(text: str) -> list[int]:
    """The ids of the special tokens of a `tokenizer.json`; raises `InvalidVocabulary` if the file cannot be read."""
    return [token.id for token in _read(text).added_tokens if token.special]


def check_tokenizer(text: str) -> float:
    """Check the content of a `tokenizer.json`; returns the max factor by which the tokenizer lengthens a text.

    Raises `InvalidVocabulary` if the file is not JSON, or a component is unknown or slow, or lengthens texts too much.
    """
    file = _read(text)
    _check_size("a word that its model splits", file.model.max_input_chars_per_word, _MAX_WORD_CHARACTERS)
    growth = dict.fromkeys(_PARTS, 1.0)
    try:
        for part in _PARTS:
            for component in _components(part, getattr(file, part)):
                growth[part] *= _check_component(part, component)
                if (factor := growth[part]) > MAX_GROWTH:
                    found = f"its {part} can lengthen a text {factor:.3g} times; the limit is {MAX_GROWTH}"
                    raise InvalidVocabulary(found)
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidVocabulary(f"its tokenizer.json has a component without the fields it needs: {error}") from error
    return growth["normalizer"]


def _components(part: str, whole: Any) -> Iterator[dict[str, Any]]:
    """The components of one part, in order, with nested lists flattened."""
    waiting = [] if whole is None else [whole]
    for _ in range(_MAX_COMPONENTS):
        if not waiting:
            return
        component = waiting.pop()
        if component["type"] == "Sequence":
            waiting.extend(reversed(component[_PARTS[part][0]]))
        else:
            yield component
    if waiting:
        raise InvalidVocabulary(f"its {part} has more than {_MAX_COMPONENTS} components")


def _check_component(part: str, component: dict[str, Any]) -> float:
    """Check one component, and return the max factor by which it lengthens a text."""
    kind = component["type"]
    if kind not in _PARTS[part][1]:
        raise InvalidVocabulary(f"its {part} is of the kind {shown(kind)}, which lmpool does not accept")
    for name, value in component.items():
        if name != "precompiled_charsmap" and isinstance(value, str):
            _check_size(f"{name} of its {kind}", len(value), _MAX_CHARACTERS)
    if kind == "Precompiled":
        # The data: length of SentencePiece's trie in four bytes, the trie, and replacements, each ended by a 0 byte.
        try:
            data = base64.b64decode(component["precompiled_charsmap"], validate=True)
        except (binascii.Error, ValueError, TypeError) as error:
            raise InvalidVocabulary(f"the precompiled_charsmap of its normalizer is not base64: {error}") from error
        replacements = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
        return float(max([1, *(len(replacement.decode(errors="replace")) for replacement in replacements)]))
    if kind == "TemplateProcessing":
        added = component["special_tokens"]
        for name in ("single", "pair"):
            pieces = [piece for whole in component[name] for piece in whole.items()]
            texts = [value["id"] for kind, value in pieces if kind == "Sequence"]
            tokens = sum(len(added[value["id"]]["ids"]) for kind, value in pieces if kind != "Sequence")
            if len(set(texts)) != len(texts) or tokens > _MAX_SPECIAL_TOKENS:
                limit = f"adds {tokens} tokens of at most {_MAX_SPECIAL_TOKENS}"
                raise InvalidVocabulary(f"its template {name!r} repeats the text, or {limit}")
    if kind not in {"Split", "Replace"}:
        return 1.0
    if len(component["pattern"]) != 1:
        raise InvalidVocabulary(f"the pattern of its {part} is {shown(component['pattern'])}, not one pattern")
    ((form, pattern),) = component["pattern"].items()
    if not isinstance(pattern, str) or not pattern:
        raise InvalidVocabulary(f"the pattern of its {part} is {shown(pattern)}, not text")
    if form == "Regex":
        if part == "decoder":
            raise InvalidVocabulary("its decoder has a regular expression; lmpool accepts plain text there")
        check_regex(pattern)
    # A match of a regular expression may have a single character, and each match is replaced by the whole content.
    shortest = len(pattern) if form == "String" else 1
    return 1.0 if kind == "Split" else max(1.0, math.ceil(len(component["content"]) / shortest))


def check_regex(pattern: str) -> None:
    """Refuse a regular expression whose time can grow exponentially with the text, or with the pattern.

    A group may be repeated only if it always matches the same number of characters, so no repetition is ambiguous. The
    choices in one alternative are limited. Back-references, calls and conditions are refused too. The patterns of all
    known tokenizers pass. Raises `InvalidVocabulary`.
    """
    _check_size("a pattern", len(pattern), _MAX_PATTERN_CHARACTERS)
    for escaped in re.findall(r"\\(.?)", pattern, re.DOTALL):
        if escaped.isascii() and escaped.isalnum() and escaped not in _ESCAPED:
            raise _refused(pattern, f"has \\{escaped}, a back-reference, a call, or an unknown escape")
    at, repeats, choices, previous = 0, 0, 0, ""
    # Whether the whole pattern (first) and each open group have matched a fixed number of characters so far.
    fixed = [True]
    while at < len(pattern):
        character = pattern[at]
        if quantifier := _QUANTIFIER.match(pattern, at):
            at, sign = quantifier.end(), quantifier[0]
            # "?" or "+" makes the previous quantifier lazy or possessive; but "+" after "{1,3}" is one more repetition.
            if (previous == "quantifier" and sign in ("?", "+")) or (previous == "interval" and sign == "?"):
                previous = "modifier"
                continue
            if previous in ("quantifier", "interval", "modifier") or (previous == "group" and sign != "?"):
                raise _refused(pattern, "repeats a repetition")
            is_exact = bool(quantifier[1]) and not quantifier[2]
            choices += sign == "?"
            repeats += sign != "?" and not is_exact
            if repeats > _MAX_REPEATS:
                raise _refused(pattern, f"has more than {_MAX_REPEATS} repetitions in a row")
            fixed[-1] = fixed[-1] and is_exact and previous == "character"
            previous = "interval" if sign[0] == "{" else "quantifier"
        elif character == "\\":
            at, previous = at + 2, "character"
        elif character == "[":
            if not (found := _CLASS.match(pattern, at)):
                raise _refused(pattern, "has a character class without an end, or of an unknown form")
            at, previous = found.end(), "character"
        elif opening := _GROUP_OPENING.match(pattern, at):
            at, previous = opening.end(), ""
            if pattern[at : at + 1] in ("?", "*"):
                raise _refused(pattern, "has a group of an unknown kind")
            fixed[-1] = False
            fixed.append(True)
        elif character == ")" and len(fixed) > 1:
            at, previous = at + 1, "character" if fixed.pop() else "group"
        else:
            if character == "|" and len(fixed) == 1:
                repeats = choices = 0
            elif character == "|":
                choices, fixed[-1] = choices + 1, False
            at, previous = at + 1, "character"
        if choices > _MAX_CHOICES:
            raise _refused(pattern, f"has more than {_MAX_CHOICES} choices in a row")


def _refused(pattern: str, why: str) -> InvalidVocabulary:
    return InvalidVocabulary(f"the pattern {shown(pattern)} {why}: it could take very long, so lmpool refuses it")
