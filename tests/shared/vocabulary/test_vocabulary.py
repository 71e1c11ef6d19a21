"""Vocabularies (byte strings of tokens): limits are checked early, digests are stable, damaged bytes are refused."""

from __future__ import annotations

import itertools
import struct
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from genlm.backend.tokenization import Token
from hypothesis import given
from hypothesis import strategies as st

from lmpool.errors import InvalidVocabulary, ProtocolError
from lmpool.vocabulary import MAX_BYTES, MAX_TOKEN_BYTES, MAX_TOKENS, Vocabulary

TOKENS = [b"the", b"", b" the", b"\xe4\xb8", b"the"]
vocabularies = st.lists(st.binary(max_size=6), min_size=1, max_size=12)


def peak_of(action: Callable[[], Any]) -> int:
    """The peak of allocated bytes while an action runs."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# Contents of a vocabulary


@given(vocabularies)
def test_a_vocabulary_returns_the_tokens_that_it_was_created_from(tokens: list[bytes]) -> None:
    vocabulary = Vocabulary(tokens)
    assert vocabulary.tokens == tokens
    assert list(vocabulary) == tokens
    assert len(vocabulary) == len(tokens)
    assert [vocabulary[i] for i in range(len(tokens))] == tokens
    assert [vocabulary[i - len(tokens)] for i in range(len(tokens))] == tokens
    assert vocabulary.lengths.tolist() == [len(token) for token in tokens]
    assert vocabulary.lengths.dtype == np.uint32
    assert vocabulary.data == b"".join(tokens)


@pytest.mark.parametrize(
    "make", [list, tuple, iter, lambda tokens: (t for t in tokens)], ids=lambda make: make.__name__
)
def test_any_iterable_of_byte_strings_is_accepted(make: Callable[[list[bytes]], Iterable[bytes]]) -> None:
    assert Vocabulary(make(TOKENS)) == Vocabulary(TOKENS)


def test_tokens_of_genlm_are_byte_strings() -> None:
    vocabulary = Vocabulary([Token(i, token) for i, token in enumerate(TOKENS)])
    assert vocabulary == Vocabulary(TOKENS)
    assert {type(token) for token in vocabulary.tokens} == {bytes}


@pytest.mark.parametrize("token", [5, -6, 10**30])
def test_an_unknown_token_is_an_index_error(token: int) -> None:
    with pytest.raises(IndexError, match=rf"token {token}\D.*from 0 to 4"):
        Vocabulary(TOKENS)[token]


def test_the_lengths_cannot_be_changed() -> None:
    for vocabulary in (Vocabulary(TOKENS), Vocabulary.unpack(Vocabulary(TOKENS).pack())):
        with pytest.raises(ValueError, match="read-only"):
            vocabulary.lengths[0] = 1


def test_a_later_change_of_the_list_changes_nothing() -> None:
    tokens = list(TOKENS)
    vocabulary = Vocabulary(tokens)
    tokens[0] = b"other"
    assert vocabulary.tokens == TOKENS


# The digest of a vocabulary


def test_the_digest_is_pinned() -> None:
    # The digest must not change, because clients and workers of other releases name vocabularies by it.
    assert Vocabulary(TOKENS).digest == "fc7210571a28f84dcc90f422d5c29a53"


def test_vocabularies_are_equal_by_digest() -> None:
    assert Vocabulary(TOKENS) == Vocabulary(TOKENS)
    assert hash(Vocabulary(TOKENS)) == hash(Vocabulary(TOKENS))
    assert Vocabulary(TOKENS) != TOKENS
    assert Vocabulary(TOKENS).digest in repr(Vocabulary(TOKENS))


@pytest.mark.parametrize(
    "other",
    [[b"the", b"", b" the", b"\xe4\xb8"], [b"th", b"e", b" the", b"\xe4\xb8", b"the"], [*TOKENS, b""], TOKENS[::-1]],
)
def test_other_tokens_have_another_digest(other: list[bytes]) -> None:
    assert Vocabulary(TOKENS) != Vocabulary(other)


# Invalid vocabularies


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ([], "0 tokens: from 1 to"),
        (iter([]), "0 tokens: from 1 to"),
        ("the", r"token 0 .* 'the'|token 0 .* 't' \(str\)"),
        (b"the", r"token 0 .* 116 \(int\)"),
        (["the", "cat"], r"token 0 .* 'the' \(str\).*decode_vocab"),
        ([b"the", None], r"token 1 .* None \(NoneType\)"),
        (iter([b"the", 7]), r"token 1 .* 7 \(int\)"),
        (itertools.repeat(7), r"token 0 .* 7 \(int\)"),
        ([b"a", bytearray(b"b")], r"token 1 .* \(bytearray\)"),
        (None, r"None \(NoneType\) is no vocabulary"),
        (7, r"7 \(int\) is no vocabulary"),
    ],
)
def test_values_other_than_lists_of_byte_strings_are_refused(tokens: Any, reason: str) -> None:
    with pytest.raises(InvalidVocabulary, match=reason):
        Vocabulary(tokens)


def test_a_vocabulary_of_1_gb_is_refused_before_it_is_copied() -> None:
    tokens = [b"x" * MAX_TOKEN_BYTES] * (2**30 // MAX_TOKEN_BYTES)

    def refused() -> None:
        with pytest.raises(InvalidVocabulary, match=f"{2**30} bytes.* at most {MAX_BYTES}"):
            Vocabulary(tokens)

    assert peak_of(refused) < 2**20


def test_tokens_that_never_end_are_refused_at_the_limit() -> None:
    with pytest.raises(InvalidVocabulary, match=f"{MAX_TOKENS + 1} tokens: from 1 to {MAX_TOKENS}"):
        Vocabulary(itertools.repeat(b"x" * MAX_TOKEN_BYTES))
    with pytest.raises(InvalidVocabulary, match=f"{MAX_TOKENS + 1} tokens: from 1 to {MAX_TOKENS}"):
        Vocabulary(itertools.repeat(b""))


def test_a_vocabulary_at_a_limit_is_accepted_and_one_above_it_refused() -> None:
    assert len(Vocabulary([b""] * MAX_TOKENS)) == MAX_TOKENS
    with pytest.raises(InvalidVocabulary, match=f"{MAX_TOKENS + 1} tokens: from 1 to {MAX_TOKENS}"):
        Vocabulary([b""] * (MAX_TOKENS + 1))
    longest = b"x" * MAX_TOKEN_BYTES
    full = [longest] * (MAX_BYTES // MAX_TOKEN_BYTES)
    assert len(Vocabulary(full).data) == MAX_BYTES
    with pytest.raises(InvalidVocabulary, match=f"{MAX_BYTES + 1} bytes.* at most {MAX_BYTES}"):
        Vocabulary([*full, b"x"])
    with pytest.raises(InvalidVocabulary, match=f"token 1 .* {MAX_TOKEN_BYTES + 1} bytes: at most {MAX_TOKEN_BYTES}"):
        Vocabulary([b"", longest + b"x"])


# Packed vocabularies


def test_the_layout_is_pinned() -> None:
    expected = "4c4d5056 01 00 0000 03000000 03000000 02000000 00000000 01000000 616263"
    assert Vocabulary([b"ab", b"", b"c"]).pack() == bytes.fromhex(expected)


@given(vocabularies)
def test_a_packed_vocabulary_is_read_back_exactly(tokens: list[bytes]) -> None:
    vocabulary = Vocabulary(tokens)
    packed = vocabulary.pack()
    assert len(packed) == vocabulary.nbytes
    for form in (packed, bytearray(packed), memoryview(packed)):
        again = Vocabulary.unpack(form)
        assert again == vocabulary
        assert again.tokens == tokens


def test_an_unpacked_vocabulary_keeps_nothing_of_the_buffer() -> None:
    buffer = bytearray(Vocabulary(TOKENS).pack())
    vocabulary = Vocabulary.unpack(buffer)
    buffer[:] = bytes(len(buffer))
    assert vocabulary.tokens == TOKENS
    assert vocabulary.pack() == Vocabulary(TOKENS).pack()


def header(
    *, magic: bytes = b"LMPV", version: int = 1, zero: int = 0, zeros: int = 0, count: int = 2, total: int = 3
) -> bytes:
    """The header of a packed vocabulary; by default of two tokens with three bytes in all."""
    return struct.pack("<4sBBHII", magic, version, zero, zeros, count, total)


BODY = struct.pack("<2I", 1, 2) + b"abb"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "0 bytes is shorter than its 16-byte header"),
        (header()[:15], "15 bytes is shorter"),
        (header(magic=b"LMPR") + BODY, "begins with b'LMPR'"),
        (header(version=2) + BODY, "version 2"),
        (header(zero=1) + BODY, "wire version 1"),
        (header(zeros=1) + BODY, "wire version 1"),
        (header(count=0, total=0), f"0 tokens: from 1 to {MAX_TOKENS}"),
        (header(count=3) + BODY, "takes 31 bytes, not 27"),
        (header(total=4) + BODY, "takes 28 bytes, not 27"),
        (header() + BODY[:-1], "takes 27 bytes, not 26"),
        (header() + BODY + b"\0", "takes 27 bytes, not 28"),
        (header() + struct.pack("<2I", 1, 1) + b"abb", "2 bytes together, its header says 3"),
        (header() + struct.pack("<2I", 1, 2**32 - 1) + b"abb", f"{2**32} bytes .* at most {MAX_BYTES}"),
        (header(count=MAX_TOKENS + 1), f"{MAX_TOKENS + 1} tokens"),
        (header(total=MAX_BYTES + 1), f"{MAX_BYTES + 1} bytes"),
        (
            header(count=1, total=MAX_TOKEN_BYTES + 1) + struct.pack("<I", MAX_TOKEN_BYTES + 1) + bytes(2**16 + 1),
            f"token 0 .* {MAX_TOKEN_BYTES + 1} bytes",
        ),
    ],
)
def test_damage_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        Vocabulary.unpack(data)


def test_the_sizes_in_a_header_allocate_no_memory() -> None:
    def refused() -> None:
        with pytest.raises(ProtocolError, match="not 27"):
            Vocabulary.unpack(header(count=MAX_TOKENS, total=MAX_BYTES) + BODY)

    assert peak_of(refused) < 2**20


@given(st.binary(max_size=80))
def test_random_bytes_are_no_vocabulary(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        Vocabulary.unpack(data)


def mutations(data: st.DataObject, packed: bytes) -> Iterator[bytes]:
    """Damaged copies of packed bytes: with one byte changed, truncated, and with bytes inserted."""
    at = data.draw(st.integers(0, len(packed) - 1))
    yield packed[:at] + bytes([packed[at] ^ data.draw(st.integers(1, 255))]) + packed[at + 1 :]
    yield packed[:at]
    yield packed[:at] + data.draw(st.binary(min_size=1, max_size=5)) + packed[at:]


@given(st.data(), vocabularies)
def test_changed_bytes_are_refused_or_another_vocabulary(data: st.DataObject, tokens: list[bytes]) -> None:
    for changed in mutations(data, Vocabulary(tokens).pack()):
        try:
            vocabulary = Vocabulary.unpack(changed)
        except ProtocolError:
            continue
        # An accepted vocabulary packs to the same bytes again, so the reader has ignored no byte.
        assert vocabulary.pack() == changed
        assert vocabulary == Vocabulary(vocabulary.tokens)
        assert vocabulary.digest != Vocabulary(tokens).digest
