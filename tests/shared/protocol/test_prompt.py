"""Prompts: all accepted kinds give the same bytes; each bad input raises an exception that names value and limit."""

from __future__ import annotations

import array
import hashlib
import itertools
import mmap
from collections import UserList, deque
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import BatchEncoding

from lmpool.errors import EmptyPrompt, InvalidPrompt, NotTokenIds, PromptTooLong, TokenOutOfRange
from lmpool.protocol.job import DIGEST_SIZE, Prompt, check_encoded, decode_ids, digest_of, encode_prompt

IDS = (3, 0, 127, 3, 64)
IDS_BYTES = bytes.fromhex("03000000 00000000 7f000000 03000000 40000000")
V = 128
MOST = 6

INTEGER_DTYPES = [f"{order}{kind}" for order in "<>" for kind in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")]
TORCH_DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


class Token(IntEnum):
    """Token ids as the members of an enumeration."""

    A = 3
    B = 0
    C = 127
    D = 64


def encode(ids: Any, *, vocab_size: int = V, max_tokens: int = MOST, adapter: str = "") -> Prompt:
    return encode_prompt(ids, vocab_size=vocab_size, max_tokens=max_tokens, adapter=adapter)


ACCEPTED: dict[str, Any] = {
    "list": list(IDS),
    "tuple": IDS,
    "list of numpy scalars": [np.int64(i) for i in IDS],
    "tuple of numpy scalars": tuple(np.uint8(i) for i in IDS),
    "list of ints and numpy scalars": [3, np.int16(0), 127, np.uint64(3), 64],
    "list of enumeration members": [Token.A, Token.B, Token.C, Token.A, Token.D],
    "array of the standard library": array.array("q", IDS),
    "list of arrays of no dimension": [np.array(token) for token in IDS],
    "list of tensors": [torch.tensor(token) for token in IDS],
    "deque": deque(IDS),
    "list-like object": UserList(IDS),
    "every second element of an array": np.repeat(np.array(IDS), 2)[::2],
    "reversed array": np.array(IDS[::-1])[::-1],
    "column of a matrix": np.array([IDS, IDS], np.int32).T[:, 1],
    "read-only array": np.frombuffer(IDS_BYTES, "<u4"),
    "every second element of a tensor": torch.tensor(IDS).repeat_interleave(2)[::2],
    **{f"numpy {dtype}": np.array(IDS, dtype) for dtype in INTEGER_DTYPES},
    **{str(dtype): torch.tensor(IDS, dtype=dtype) for dtype in TORCH_DTYPES},
}


@pytest.mark.parametrize("ids", ACCEPTED.values(), ids=ACCEPTED)
def test_every_accepted_kind_gives_the_same_bytes_and_digest(ids: Any) -> None:
    assert encode(ids) == Prompt(IDS_BYTES, hashlib.blake2b(IDS_BYTES, digest_size=16).digest())


def test_a_range_is_a_prompt() -> None:
    assert encode(range(3)) == encode([0, 1, 2])


def test_encoding_does_not_keep_the_callers_memory() -> None:
    ids = np.array(IDS, "<u4")
    prompt = encode(ids)
    ids[:] = 0
    assert prompt.ids == IDS_BYTES


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_ids_are_little_endian_uint32_and_read_back(ids: list[int]) -> None:
    prompt = encode(ids, vocab_size=2**32, max_tokens=50)
    assert prompt.ids == b"".join(i.to_bytes(4, "little") for i in ids)
    assert decode_ids(prompt.ids).tolist() == ids
    assert encode(np.array(ids, np.uint64), vocab_size=2**32, max_tokens=50) == prompt
    check_encoded(prompt.ids, vocab_size=2**32, max_tokens=50)


def test_digest_is_16_bytes_of_blake2b() -> None:
    # Digests must not change, because processes of different releases must compute the same digest of a prompt.
    assert DIGEST_SIZE == 16
    assert encode([0]).digest.hex() == "11d2df4e979aa105cf552e9544ebd2b5"


def test_digest_is_keyed_by_the_adapter() -> None:
    plain, adapted, other = (encode(IDS, adapter=name) for name in ("", "one", "other"))
    assert adapted.ids == plain.ids
    assert adapted.digest == hashlib.blake2b(IDS_BYTES, digest_size=16, key=b"one").digest()
    assert len({plain.digest, adapted.digest, other.digest}) == 3
    assert adapted.digest == digest_of(IDS_BYTES, "one")


def test_long_adapter_names_give_different_digests() -> None:
    # Names around 64 bytes, because a BLAKE2b key has at most 64 bytes.
    names = ["é" * 32, "a" * 64, "a" * 65, "a" * 66, "a" * 500 + "b", "a" * 500 + "c"]
    digests = {digest_of(IDS_BYTES, name) for name in names}
    assert len(digests) == len(names)


def test_limits_are_inclusive_of_the_last_id_and_the_last_token() -> None:
    assert encode([V - 1] * MOST).ids == (V - 1).to_bytes(4, "little") * MOST


EMPTY: dict[str, Any] = {
    "list": [],
    "tuple": (),
    "range": range(0),
    "integer array": np.array([], np.int64),
    "array without a dtype": np.array([]),
    "integer tensor": torch.tensor([], dtype=torch.int64),
    "tensor without a dtype": torch.tensor([]),
    "standard array": array.array("q"),
}


@pytest.mark.parametrize("ids", EMPTY.values(), ids=EMPTY)
def test_an_empty_prompt_is_refused_in_every_form(ids: Any) -> None:
    with pytest.raises(EmptyPrompt, match="empty.*at least 1"):
        encode(ids)


KINDS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "numpy": lambda ids: np.array(ids, np.int64),
    "numpy scalars": lambda ids: [np.int64(i) for i in ids],
    "torch": lambda ids: torch.tensor(ids, dtype=torch.int64),
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@kinds
@pytest.mark.parametrize("bad", [-1, -(2**31), -(2**63), V, V + 1, 2**31, 2**32, 2**32 + 3, 2**63 - 1])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_id_out_of_range_is_named_with_the_range(kind: Callable[[list[int]], Any], bad: int, place: int) -> None:
    ids = [5, 5]
    ids.insert(place, bad)
    with pytest.raises(TokenOutOfRange) as caught:
        encode(kind(ids))
    assert f"token id {bad} " in str(caught.value)
    assert f"from 0 to {V - 1}" in str(caught.value)


@pytest.mark.parametrize("bad", [2**64, -(2**64), 10**100])
def test_an_id_beyond_64_bits_is_out_of_range_too(bad: int) -> None:
    with pytest.raises(TokenOutOfRange, match=f"token id {bad} .* {V - 1}"):
        encode([1, bad])


def test_the_largest_uint64_is_out_of_range() -> None:
    with pytest.raises(TokenOutOfRange, match=str(2**64 - 1)):
        encode(np.array([2**64 - 1], np.uint64))


def test_an_id_of_thousands_of_digits_is_out_of_range() -> None:
    # Python refuses to print integers of over 4300 digits, so the error must not contain the id.
    with pytest.raises(InvalidPrompt):
        encode([10**5000])


def test_an_id_over_uint32_is_refused_even_when_it_wraps_into_the_vocabulary() -> None:
    with pytest.raises(TokenOutOfRange):
        encode(np.array([2**32 + 1], np.int64))
    with pytest.raises(TokenOutOfRange):
        encode([2**32 + 1])


@kinds
@pytest.mark.parametrize("count", [MOST + 1, 1000])
def test_a_prompt_that_is_too_long_is_refused_with_both_lengths(kind: Callable[[list[int]], Any], count: int) -> None:
    with pytest.raises(PromptTooLong) as caught:
        encode(kind([1] * count))
    assert f"{count} tokens" in str(caught.value)
    assert f"at most {MOST}" in str(caught.value)


class Odd:
    """An object that numpy cannot convert to an array."""

    def __array__(self, *_: object, **__: object) -> Any:
        raise ValueError("not an array of mine")

    def __repr__(self) -> str:
        return "Odd()"


NOT_IDS: dict[str, tuple[Any, str]] = {
    "float in a list": ([1, 2.5], "2.5"),
    "whole float in a list": ([1.0], "1.0"),
    "nan in a list": ([float("nan")], "nan"),
    "numpy float in a list": ([1, np.float32(2)], "2.0"),
    "float array": (np.array([1.0, 2.0]), "float64"),
    "half tensor": (torch.tensor([1.0], dtype=torch.float16), "float16"),
    "complex array": (np.array([1j]), "complex128"),
    "bool in a list": ([1, True], "True"),
    "only bools": ([False, True], "False"),
    "bool in a tuple": ((0, False), "False"),
    "numpy bool in a list": ([1, np.bool_(True)], "True"),
    "bool array": (np.array([True, False]), "bool"),
    "bool tensor": (torch.tensor([True]), "bool"),
    "str": ("hello", "hello"),
    "str of digits": ("123", "123"),
    "empty str": ("", "''"),
    "bytes": (b"\x01\x00\x00\x00", "\\x01"),
    "bytearray": (bytearray(b"abc"), "abc"),
    "memoryview of bytes": (memoryview(b"\x01\x02"), "memoryview"),
    "memoryview of integers": (memoryview(array.array("I", IDS)), "memoryview"),
    "map of bytes in memory": (mmap.mmap(-1, 4), "mmap"),
    "numpy str": (np.str_("hello"), "hello"),
    "list of str": (["1", "2"], "'1'"),
    "list of bytes": ([b"1"], "b'1'"),
    "array of str": (np.array(["1", "2"]), "<U1"),
    "nested list": ([[1, 2], [3, 4]], "[1, 2]"),
    "nested list of one": ([[1]], "[1]"),
    "nested tuple": (((1, 2), (3,)), "(1, 2)"),
    "ragged list": ([1, [2]], "[2]"),
    "list of arrays": ([np.array([1, 2])], "array([1, 2])"),
    "list of float tensors": ([torch.tensor(1.5), torch.tensor(2.0)], "tensor(1.5000)"),
    "list of bool tensors": ([torch.tensor(True)], "tensor(True)"),
    "2-D array": (np.array([[1, 2]]), "(1, 2)"),
    "2-D array without elements": (np.zeros((0, 3), np.int64), "(0, 3)"),
    "2-D tensor": (torch.tensor([[1], [2]]), "(2, 1)"),
    "3-D array": (np.zeros((1, 1, 1), np.int64), "(1, 1, 1)"),
    "0-d array": (np.array(5), "5"),
    "0-d tensor": (torch.tensor(5), "tensor(5)"),
    "what a tokenizer gives": (BatchEncoding({"input_ids": [1, 2]}), 'pass its ["input_ids"]'),
    "what it gives for several texts": (BatchEncoding({"input_ids": [[1], [2, 3]]}), 'pass its ["input_ids"][0]'),
    "what it gives as tensors": (BatchEncoding({"input_ids": torch.tensor([[1]])}), 'pass its ["input_ids"][0]'),
    "what the library tokenizers gives": (Tokenizer(models.BPE({"a": 0}, [])).encode("a"), "pass its .ids"),
    "text that can be encoded": ("Hello", "`await producer.encode(text)` (SyncProducer: no await) or tokenizer."),
    "list of texts": (["Hello"], "`await producer.encode(text)` (SyncProducer: no await) or tokenizer.encode(text)"),
    "rows of a tensor": (torch.tensor([[1, 2]]), "such as ids[0]"),
    "rows of a list": ([[1, 2]], "such as ids[0]"),
    "int": (5, "the prompt is 5 (int): it must be a sequence of token ids; where several"),
    "numpy int": (np.int64(5), "one alone is [ids]"),
    "float": (1.5, "1.5"),
    "bool": (True, "True"),
    "None": (None, "None"),
    "None in a list": ([None], "None"),
    "dict": ({1: 2}, "{1: 2}"),
    "set": ({7}, "{7}"),
    "frozenset": (frozenset({7}), "frozenset({7})"),
    "generator": ((i for i in IDS), "generator"),
    "iterator": (iter(IDS), "tuple_iterator"),
    "map": (map(int, "12"), "map"),
    "object": (Odd(), "Odd()"),
    "array of objects": (np.array([1, 2], object), "object"),
    "array of dates": (np.array(["2020-01-01"], "datetime64[D]"), "datetime64"),
    "array of durations": (np.array([1], "timedelta64[s]"), "timedelta64"),
    "array of records": (np.zeros(2, [("a", "i4")]), "'a'"),
    "tensor that requires grad": (torch.ones(2, requires_grad=True), "grad"),
    "int then str": ([1, "2", 3], "element 1"),
    "int then None then float": ([1, None, 2.0], "element 1"),
    "sparse tensor": (torch.tensor([1, 0]).to_sparse(), "tensor"),
}


@pytest.mark.parametrize(("ids", "shown"), NOT_IDS.values(), ids=NOT_IDS)
def test_other_values_than_flat_sequences_of_integers_are_refused_and_shown(ids: Any, shown: str) -> None:
    with pytest.raises(NotTokenIds) as caught:
        encode(ids)
    assert shown in str(caught.value)


@pytest.mark.parametrize("kind", [list, tuple, deque, UserList])
def test_a_bool_among_integers_is_refused_in_every_kind_of_sequence(kind: Callable[[list[Any]], Any]) -> None:
    # numpy would convert True to the integer 1.
    with pytest.raises(NotTokenIds, match="True"):
        encode(kind([True, 2]))


def test_a_sequence_is_refused_for_its_length_before_it_is_read() -> None:
    with pytest.raises(PromptTooLong, match=str(10**12)):
        encode(range(10**12))
    with pytest.raises(NotTokenIds, match="range"):
        encode(range(10**30))  # len() fails for this range.


def test_a_huge_bad_prompt_gives_a_short_message() -> None:
    for ids in ("x" * 100_000, ["y" * 100_000], [[1] * 10_000], np.zeros((300, 300), np.int64)):
        with pytest.raises(NotTokenIds) as caught:
            encode(ids)
        assert len(str(caught.value)) < 300


def test_the_exceptions_are_also_the_builtin_ones() -> None:
    for bad, kind in (
        *(([], ValueError), ([-1], ValueError), ([-1], IndexError), ([1] * 99, ValueError), ("a", TypeError)),
    ):
        with pytest.raises(kind) as caught:
            encode(bad)
        assert isinstance(caught.value, InvalidPrompt)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(st.integers(), inner, max_size=2)
        ),
        max_leaves=8,
    )
)
def test_anything_is_either_a_prompt_or_an_invalid_prompt(ids: Any) -> None:
    good = (
        isinstance(ids, (list, tuple))
        and 1 <= len(ids) <= MOST
        and all(type(value) is int and 0 <= value < V for value in ids)
    )
    if good:
        assert decode_ids(encode(ids).ids).tolist() == list(ids)
    else:
        with pytest.raises(InvalidPrompt):
            encode(ids)


def wire(*ids: int) -> bytes:
    return b"".join(i.to_bytes(4, "little") for i in ids)


def test_ids_from_the_wire_within_the_limits_pass() -> None:
    for count, high in itertools.product((1, MOST), (0, V - 1)):
        check_encoded(wire(*[high] * count), vocab_size=V, max_tokens=MOST)


@pytest.mark.parametrize(
    ("data", "kind", "shown"),
    [
        (b"", EmptyPrompt, "at least 1"),
        (b"\x01", NotTokenIds, "1 bytes"),
        (wire(1) + b"\x00\x00\x00", NotTokenIds, "7 bytes"),
        (wire(*[1] * (MOST + 1)), PromptTooLong, f"{MOST + 1} tokens.*at most {MOST}"),
        (wire(1, V, 2), TokenOutOfRange, f"{V} .* 0 to {V - 1}"),
        (wire(2**32 - 1), TokenOutOfRange, f"{2**32 - 1} .* 0 to {V - 1}"),
    ],
)
def test_ids_from_the_wire_are_checked_again(data: bytes, kind: type[InvalidPrompt], shown: str) -> None:
    with pytest.raises(kind, match=shown):
        check_encoded(data, vocab_size=V, max_tokens=MOST)


def test_ids_read_from_the_wire_are_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        decode_ids(wire(1))[0] = 2
