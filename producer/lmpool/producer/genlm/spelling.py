"""Items of any kind spelled as byte strings, so that one trie over bytes holds them all.

The letters of an item are what iterating it yields. Letters 0 to 255 have themselves as codes; all others, such as the
end-of-sequence item that yields itself or the characters of a text, get codes from 256 on. A vocabulary of byte letters
alone is spelled as it is. Otherwise code c is the byte 0xFF c // 255 times and then the byte c % 255: no spelling is
the beginning of another, and of the byte letters only 0xFF becomes longer.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from lmpool.errors import InvalidVocabulary
from lmpool.producer.genlm.token import is_token
from lmpool.settings import shown

BASE = 255
"""Codes below it are one byte; it is also the byte that a longer spelling begins with."""

_N_BYTES = 256


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
