"""Encoded rows: the exact layout, exact round trips, and refusal of every kind of damage."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from lmpool.errors import ProtocolError
from lmpool.protocol.row import (
    HEADER_SIZE,
    Encoding,
    RowBlock,
    decode_row,
    decode_rows,
    encoded_size,
    narrow_to_bf16,
    widen_bf16,
)

D = b"0123456789abcdef"
encodings = pytest.mark.parametrize("encoding", list(Encoding), ids=lambda encoding: encoding.name)
float32s = st.floats(width=32, allow_nan=False)
finite = st.floats(-(2.0**100), 2.0**100, width=32)


def block_of(encoding: Encoding, numbers: NDArray[Any], log_z: float = 0.0) -> RowBlock:
    """A block of one row."""
    log_zs = None if encoding is Encoding.F32 else np.array([log_z], np.float32)
    return RowBlock([D], np.asarray(numbers, encoding.dtype)[None], log_zs, encoding)


def received(data: bytes) -> NDArray[np.uint8]:
    """Bytes in the form that the connection for rows returns: an array that owns writeable memory."""
    return np.frombuffer(data, np.uint8).copy()


def sample(encoding: Encoding, vocab_size: int = 5) -> bytes:
    """The bytes of an encoded row with the numbers 0, 1, 2, …"""
    numbers = np.arange(vocab_size).astype(encoding.dtype)
    return block_of(encoding, numbers, 1.5).encode(0)


# The layout of a row


@pytest.mark.parametrize(
    ("encoding", "numbers", "log_z", "expected"),
    [
        (Encoding.F32, np.array([-0.5, -2.0], "<f4"), 0.0, "4c4d5052 01 01 0000 02000000 00000000 000000bf 000000c0"),
        (Encoding.BF16, np.array([0x3F80, 0xC000], "<u2"), 2.5, "4c4d5052 01 02 0000 02000000 00002040 803f 00c0"),
        (Encoding.F16, np.array([1.0, -2.0], "<f2"), 2.5, "4c4d5052 01 03 0000 02000000 00002040 003c 00c0"),
    ],
)
def test_the_layout_of_a_row_is_pinned_to_the_byte(
    encoding: Encoding, numbers: NDArray[Any], log_z: float, expected: str
) -> None:
    block = block_of(encoding, numbers, log_z)
    assert block.encode(0).hex() == expected.replace(" ", "")
    assert block.encoded()[0][0] == block.encode(0)[:HEADER_SIZE]
    assert HEADER_SIZE == 16


@encodings
@pytest.mark.parametrize("vocab_size", [1, 2, 3, 1000])
def test_the_size_of_a_row_is_known_before_it_is_made(encoding: Encoding, vocab_size: int) -> None:
    width = {Encoding.F32: 4, Encoding.BF16: 2, Encoding.F16: 2}[encoding]
    assert encoded_size(vocab_size, encoding) == 16 + width * vocab_size == len(sample(encoding, vocab_size))


@encodings
def test_one_entry_is_read_in_place_from_its_own_bytes(encoding: Encoding) -> None:
    """Each entry can be decoded from the row's header and the entry's own bytes, which GETRANGE returns."""
    data = sample(encoding, 7)
    row = decode_row(received(data), 7)
    *_, log_z = struct.unpack("<4sBBHIf", data[:16])
    width = encoding.dtype.itemsize
    for i in range(7):
        raw = data[16 + width * i : 16 + width * (i + 1)]
        value = {
            Encoding.F32: lambda b: struct.unpack("<f", b)[0],
            Encoding.BF16: lambda b: struct.unpack("<f", b"\x00\x00" + b)[0],
            Encoding.F16: lambda b: struct.unpack("<e", b)[0],
        }[encoding](raw)
        assert row[i] == np.float32(value) - np.float32(log_z)


# Round trips of rows


@given(hnp.arrays(np.float32, st.integers(1, 40), elements=float32s))
def test_f32_rows_survive_bit_for_bit(logprobs: NDArray[np.float32]) -> None:
    row = decode_row(received(block_of(Encoding.F32, logprobs).encode(0)), len(logprobs))
    assert row.dtype == np.float32
    assert row.tobytes() == logprobs.tobytes()


@given(hnp.arrays(np.uint16, st.integers(1, 40)), finite)
def test_bf16_rows_give_exactly_the_logits_minus_log_z(bits: NDArray[np.uint16], log_z: float) -> None:
    row = decode_row(received(block_of(Encoding.BF16, bits, log_z).encode(0)), len(bits))
    with np.errstate(all="ignore"):
        logits = np.frombuffer(b"".join(b"\x00\x00" + int(b).to_bytes(2, "little") for b in bits), "<f4")
        np.testing.assert_array_equal(row, logits - np.float32(log_z))
    assert row.dtype == np.float32


@given(hnp.arrays(np.float16, st.integers(1, 40), elements=st.floats(width=16, allow_nan=False)), finite)
def test_f16_rows_give_exactly_the_numbers_minus_log_z(numbers: NDArray[np.float16], log_z: float) -> None:
    row = decode_row(received(block_of(Encoding.F16, numbers, log_z).encode(0)), len(numbers))
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(row, numbers.astype(np.float32) - np.float32(log_z))


@given(hnp.arrays(np.uint16, hnp.array_shapes(max_dims=2)))
def test_bfloat16_values_pass_through_float32_bit_for_bit(bits: NDArray[np.uint16]) -> None:
    wide = widen_bf16(bits)
    assert wide.shape == bits.shape
    assert wide.dtype == np.float32
    np.testing.assert_array_equal(narrow_to_bf16(wide), bits)
    np.testing.assert_array_equal(narrow_to_bf16(wide.T), bits.T)


def test_bfloat16_is_the_upper_half_of_float32() -> None:
    values = np.array([1.0, -2.0, 0.0, np.inf, -np.inf, 3.140625], np.float32)
    assert [f"{bits:04x}" for bits in narrow_to_bf16(values)] == ["3f80", "c000", "0000", "7f80", "ff80", "4049"]
    np.testing.assert_array_equal(widen_bf16(narrow_to_bf16(values)), values)


def test_minus_infinity_stays_minus_infinity_in_every_encoding() -> None:
    for encoding, number in ((Encoding.F32, -np.inf), (Encoding.BF16, 0xFF80), (Encoding.F16, -np.inf)):
        row = decode_row(received(block_of(encoding, np.array([number]), 3.0).encode(0)), 1)
        assert row.tolist() == [-np.inf]


@encodings
def test_every_row_of_a_block_has_its_own_numbers_and_log_z(encoding: Encoding) -> None:
    numbers = np.arange(12).reshape(3, 4).astype(encoding.dtype)
    log_z = None if encoding is Encoding.F32 else np.array([1, 2, 3], np.float32)
    block = RowBlock([bytes([i]) * 16 for i in range(3)], numbers, log_z, encoding)
    for i in range(3):
        alone = block_of(encoding, numbers[i], 0.0 if log_z is None else float(log_z[i]))
        assert block.encode(i) == alone.encode(0)


# Decoded rows cannot be changed


@encodings
def test_a_decoded_row_is_read_only(encoding: Encoding) -> None:
    row = decode_row(received(sample(encoding)), 5)
    with pytest.raises(ValueError, match="read-only"):
        row[0] = 1.0


@encodings
def test_a_decoded_row_cannot_be_made_writeable(encoding: Encoding) -> None:
    # Decoded rows are read-only, because all callers with the same prompt get the same array.
    row = decode_row(received(sample(encoding)), 5)
    with pytest.raises(ValueError, match="WRITEABLE"):
        row.flags.writeable = True


def test_an_f32_row_is_used_in_place() -> None:
    data = received(sample(Encoding.F32))
    row = decode_row(data, 5)
    assert np.shares_memory(row, data)
    assert not data.flags.writeable


def test_rows_of_two_bytes_are_widened_into_memory_of_their_own() -> None:
    for encoding in (Encoding.BF16, Encoding.F16):
        data = received(sample(encoding))
        assert not np.shares_memory(decode_row(data, 5), data)


# Many small rows that are decoded at once


@encodings
def test_rows_decoded_together_equal_rows_decoded_one_by_one(encoding: Encoding) -> None:
    numbers = np.array([[0.0 - at, -3.0, -4.0, -5.0, -6.0] for at in range(6)], np.float32) / np.float32(4)
    stored = narrow_to_bf16(numbers) if encoding is Encoding.BF16 else numbers.astype(encoding.dtype)
    entries = [block_of(encoding, row).encode(0) for row in stored]
    rows = decode_rows(entries, 5)
    assert rows is not None
    for row, data in zip(rows, entries, strict=True):
        assert row.tobytes() == decode_row(received(data), 5).tobytes()
        with pytest.raises(ValueError, match="WRITEABLE"):
            row.flags.writeable = True
    assert not any(np.shares_memory(rows[0], other) for other in rows[1:]), "one that is kept keeps no others"


@encodings
@pytest.mark.parametrize("at", [0, 3, 5])
def test_rows_of_a_chunk_with_an_invalid_row_are_decoded_one_by_one(encoding: Encoding, at: int) -> None:
    sound = block_of(encoding, np.zeros(5)).encode(0)
    wide = {Encoding.F32: "<f4", Encoding.BF16: "<u2", Encoding.F16: "<f2"}[encoding]
    nan, low = (0x7FC0, 0xC2C8) if encoding is Encoding.BF16 else (np.nan, -100.0)
    damaged: list[object] = [
        None,
        b"",
        sound[:-1],
        sound + b"x",
        b"x" + sound[1:],
        with_header(encoding, size=6),
        with_header(encoding, log_z=np.inf),
        block_of(encoding, np.array([nan, 0, 0, 0, 0], wide)).encode(0),
        block_of(encoding, np.array([low] * 5, wide)).encode(0),
        decode_row(received(sound), 5),
    ]
    assert decode_rows([sound] * 6, 5) is not None
    for entry in damaged:
        entries: list[object] = [sound] * 6
        entries[at] = entry
        assert decode_rows(entries, 5) is None


# Damaged rows


def with_header(
    encoding: Encoding,
    *,
    magic: bytes = b"LMPR",
    version: int = 1,
    code: int | None = None,
    size: int = 5,
    log_z: float = 0.0,
) -> bytes:
    """The bytes of a row of five entries, with some fields of the header replaced."""
    header = struct.pack("<4sBBHIf", magic, version, encoding if code is None else code, 0, size, log_z)
    return header + sample(encoding)[16:]


@encodings
@pytest.mark.parametrize("magic", [b"LMPQ", b"lmpr", b"\0\0\0\0", b"\x93NUM"])
def test_another_magic_is_refused(encoding: Encoding, magic: bytes) -> None:
    with pytest.raises(ProtocolError, match="wire version 1"):
        decode_row(received(with_header(encoding, magic=magic)), 5)


@encodings
@pytest.mark.parametrize("version", [0, 2, 255])
def test_another_wire_version_is_refused(encoding: Encoding, version: int) -> None:
    with pytest.raises(ProtocolError, match=f"version {version}"):
        decode_row(received(with_header(encoding, version=version)), 5)


@encodings
@pytest.mark.parametrize("code", [0, 4, 255])
def test_an_unknown_encoding_is_refused(encoding: Encoding, code: int) -> None:
    with pytest.raises(ProtocolError, match=f"encoding {code}"):
        decode_row(received(with_header(encoding, code=code)), 5)


@encodings
@pytest.mark.parametrize("size", [0, 4, 6, 2**32 - 1])
def test_another_vocabulary_size_is_refused(encoding: Encoding, size: int) -> None:
    with pytest.raises(ProtocolError, match=f"V = {size}.* 5"):
        decode_row(received(with_header(encoding, size=size)), 5)


def test_an_encoding_of_another_width_is_refused() -> None:
    for encoding, code in ((Encoding.F32, 2), (Encoding.F32, 3), (Encoding.BF16, 1), (Encoding.F16, 1)):
        with pytest.raises(ProtocolError, match="cannot have"):
            decode_row(received(with_header(encoding, code=code)), 5)


@encodings
@pytest.mark.parametrize("log_z", [np.nan, np.inf, -np.inf])
def test_a_log_z_that_is_not_finite_is_refused(encoding: Encoding, log_z: float) -> None:
    with pytest.raises(ProtocolError, match="logZ"):
        decode_row(received(with_header(encoding, log_z=log_z)), 5)


@encodings
def test_a_row_cut_or_lengthened_anywhere_is_refused(encoding: Encoding) -> None:
    data = sample(encoding)
    for size in range(len(data)):
        with pytest.raises(ProtocolError):
            decode_row(received(data[:size]), 5)
    for more in (b"\0", b"\0\0", data):
        with pytest.raises(ProtocolError):
            decode_row(received(data + more), 5)


@given(st.binary(max_size=60), st.integers(1, 12))
def test_random_bytes_are_no_row(data: bytes, vocab_size: int) -> None:
    with pytest.raises(ProtocolError):
        decode_row(received(data), vocab_size)


@given(st.data(), st.sampled_from(Encoding))
def test_a_changed_header_is_refused_or_changes_log_z_alone(data: st.DataObject, encoding: Encoding) -> None:
    good = sample(encoding)
    at = data.draw(st.sampled_from([0, 1, 2, 3, 4, 5, 8, 9, 10, 11]))
    bad = bytearray(good)
    bad[at] ^= data.draw(st.integers(1, 255))
    # Byte 5 is the encoding, and BF16 and F16 have the same width, so a swap of these two gives a valid row.
    if at == 5 and {encoding, bad[5]} == {Encoding.BF16, Encoding.F16}:
        assert decode_row(received(bytes(bad)), 5).shape == (5,)
    else:
        with pytest.raises(ProtocolError):
            decode_row(received(bytes(bad)), 5)


# Blocks of rows


@encodings
def test_selected_rows_equal_those_of_the_block(encoding: Encoding) -> None:
    log_z = None if encoding is Encoding.F32 else np.arange(4, dtype=np.float32)
    digests = [bytes([number]) * 16 for number in range(4)]
    block = RowBlock(digests, np.arange(12).reshape(4, 3).astype(encoding.dtype), log_z, encoding)
    some = block.select([2, 0])
    assert some.digests == [digests[2], digests[0]]
    assert [some.encode(0), some.encode(1)] == [block.encode(2), block.encode(0)]


def test_a_block_refuses_numbers_of_another_dtype() -> None:
    for encoding in Encoding:
        for dtype in (np.float64, np.int32, np.float32, np.uint16, np.float16, ">f4", ">u2", ">f2"):
            if np.dtype(dtype) != encoding.dtype:
                log_z = None if encoding is Encoding.F32 else np.zeros(1, np.float32)
                with pytest.raises(ValueError, match=r"shape \(1, 3\)"):
                    RowBlock([D], np.zeros((1, 3), dtype), log_z, encoding)


@pytest.mark.parametrize("shape", [(3,), (1, 1, 3), ()])
def test_a_block_refuses_numbers_that_are_not_2_d(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="shape"):
        RowBlock([D], np.zeros(shape, np.float32), None, Encoding.F32)


@pytest.mark.parametrize("digests", [[], [D, D], [D] * 3])
def test_a_block_that_came_back_another_length_than_it_went_in_is_refused(digests: list[bytes]) -> None:
    with pytest.raises(ValueError, match=f"{len(digests)} digests for 1 rows"):
        RowBlock(digests, np.zeros((1, 3), np.float32), None, Encoding.F32)


def test_a_block_has_log_z_exactly_when_its_encoding_needs_one() -> None:
    with pytest.raises(ValueError, match="log_z"):
        RowBlock([D], np.zeros((1, 3), np.float32), np.zeros(1, np.float32), Encoding.F32)
    for encoding in (Encoding.BF16, Encoding.F16):
        with pytest.raises(ValueError, match="log_z"):
            RowBlock([D], np.zeros((1, 3), encoding.dtype), None, encoding)


@pytest.mark.parametrize("shape", [(0,), (1,), (3,), (2, 1), ()])
def test_a_block_refuses_a_log_z_that_is_not_one_per_row(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="log_z"):
        RowBlock([D, D], np.zeros((2, 3), np.uint16), np.zeros(shape, np.float32), Encoding.BF16)


def test_a_block_refuses_numbers_that_are_not_contiguous() -> None:
    for numbers in (np.zeros((3, 2), np.float32).T, np.zeros((2, 6), np.float32)[:, ::2]):
        with pytest.raises(ValueError, match="contiguous"):
            RowBlock([D, D], numbers, None, Encoding.F32)


def test_a_block_of_no_rows_is_a_block() -> None:
    assert RowBlock([], np.zeros((0, 3), np.float32), None, Encoding.F32).digests == []
