"""Rows on the wire: a 16-byte header, then V raw little-endian numbers.

    offset  0  4 bytes  magic "LMPR"
            4  uint8    wire version
            5  uint8    encoding
            6  uint16   zero
            8  uint32   V
           12  float32  logZ

The value of entry i is `number[i] - logZ`. Encodings:

    F32    float32 log-probabilities, logZ = 0
    BF16   bfloat16 logits and their logZ: exact when the engine's logits are bfloat16
    F16    float16 numbers and their logZ: exact when the engine's logits are float16, else lossy

Which one a backend's rows have is chosen in `workers/lmpool/workers/backends/row_encoder.py`.

The numbers have a fixed width, so an entry can be read in place with GETRANGE.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import ProtocolError

ROW_VERSION = 1
"""Version of the layout of rows; caches have them for longer than a release lives."""

MAGIC = b"LMPR"
HEADER_SIZE = 16
_HEADER = struct.Struct("<4sBBHIf")
_LOG_Z_AT = 12
_MIN_BATCH = 4
# Of an encoded row or answer that goes along with the notification: fetching it would cost more than carrying it.
_MAX_SMALL = 2048
# How far above 0 rounding may take a log-probability: logZ is a float32, and so is what it is subtracted from.
_MAX_LOGPROB = 1.0


class Encoding(IntEnum):
    """How the numbers of a row are stored."""

    F32 = 1
    BF16 = 2
    F16 = 3

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numpy dtype of the stored numbers (bfloat16 as its uint16 bits)."""
        return _DTYPES[self]


_DTYPES: dict[int, np.dtype[Any]] = {
    Encoding.F32: np.dtype("<f4"),
    Encoding.BF16: np.dtype("<u2"),
    Encoding.F16: np.dtype("<f2"),
}

_F32, _BF16 = Encoding.F32, Encoding.BF16
# By number; to look a member up in the class costs ten times as much.
_ENCODINGS = {int(encoding): encoding for encoding in Encoding}


def encoded_size(vocab_size: int, encoding: Encoding) -> int:
    """Bytes of one encoded row."""
    return HEADER_SIZE + vocab_size * encoding.dtype.itemsize


Row = NDArray[np.float32]
"""A row, float32 log-probabilities of shape (V,); several of them, of shape (n, V)."""

Values = NDArray[np.float32]
"""Weights of tokens or values of trie nodes, of any shape."""

Encoded = tuple[bytes, memoryview]
"""An encoded row: header and numbers."""


NewRows = Callable[[int, int, Encoding], NDArray[Any] | None]
"""Gives memory for n rows of V numbers in an encoding: an array (n, V) that holds anything, for which whoever writes
there next saves a copy; or None."""


def no_new_rows(_: int, __: int, ___: Encoding) -> None:
    """`NewRows` that never has any."""


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Rows as a backend hands them on: one block of numbers, one digest a row.

    Attributes:
        digests: the prompt of each row.
        numbers: array of shape (n, V) in the encoding's dtype; each row is contiguous.
        log_z: float32 array of shape (n,), or None for F32.
        encoding: how `numbers` are stored.
    """

    digests: list[bytes]
    numbers: NDArray[Any]
    log_z: NDArray[np.float32] | None
    encoding: Encoding

    def __post_init__(self) -> None:
        if self.numbers.dtype != self.encoding.dtype or self.numbers.ndim != 2:
            raise ValueError(f"{self.numbers.dtype} numbers of shape {self.numbers.shape} are not {self.encoding!r}")
        if len(self.digests) != len(self.numbers):
            raise ValueError(f"{len(self.digests)} digests for {len(self.numbers)} rows")
        if (self.log_z is None) != (self.encoding is Encoding.F32):
            raise ValueError(f"log_z must be None for F32 and only for F32, not {self.log_z!r}")
        if self.log_z is not None and self.log_z.shape != (len(self.numbers),):
            raise ValueError(f"log_z of shape {self.log_z.shape} for {len(self.numbers)} rows")
        if self.numbers.size > len(self.numbers) and self.numbers.strides[1] != self.numbers.itemsize:
            raise ValueError("the numbers of each row of a block must be contiguous")

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, encoded."""
        return self.numbers.nbytes + HEADER_SIZE * len(self.digests)

    def encoded(self, indices: Sequence[int] | None = None) -> list[Encoded]:
        """Some of the rows, or all: the 16-byte header of each, and its numbers in place."""
        count, size = self.numbers.shape
        chosen = range(count) if indices is None else indices
        head = (MAGIC, ROW_VERSION, int(self.encoding), 0, size)
        if self.log_z is None:
            header = _HEADER.pack(*head, 0.0)
            return [(header, numbers) for numbers in self._parts(chosen)]
        log_z = self.log_z.tolist()
        return [
            (_HEADER.pack(*head, log_z[at]), numbers) for at, numbers in zip(chosen, self._parts(chosen), strict=True)
        ]

    def _parts(self, chosen: Sequence[int]) -> list[memoryview]:
        """The numbers of some rows as bytes, in place."""
        # By way of integers of the same width: memoryview cannot cast every float format.
        integers = self.numbers.view(np.uint16 if self.numbers.itemsize == 2 else np.uint32)
        if not len(integers):
            return []
        if not integers.flags.c_contiguous:
            return [integers[at].data.cast("B") for at in chosen]
        data, width = integers.data.cast("B"), integers.shape[1] * integers.itemsize
        return [data[at * width : (at + 1) * width] for at in chosen]

    def row(self, index: int) -> Row:
        """The log-probabilities of one row, float32 (V,), to the bit as clients read them; in place where it can be."""
        numbers = self.numbers[index]
        return numbers if self.log_z is None else _widened(numbers, self.encoding, float(self.log_z[index]))

    def logits(self, index: int) -> Row:
        """The logits that one row was made of, float32 (V,); of a block that is not F32, nor lossy."""
        return _widened(self.numbers[index], self.encoding, 0.0)

    def select(self, indices: Sequence[int]) -> RowBlock:
        """Some of the rows (a copy)."""
        log_z = None if self.log_z is None else self.log_z[indices]
        return RowBlock([self.digests[index] for index in indices], self.numbers[indices], log_z, self.encoding)

    def part(self, rows: range) -> RowBlock:
        """Some of the rows that are neighbours, in place."""
        part = slice(rows.start, rows.stop)
        log_z = None if self.log_z is None else self.log_z[part]
        return RowBlock(self.digests[part], self.numbers[part], log_z, self.encoding)

    @classmethod
    def joined(cls, blocks: Sequence[RowBlock]) -> RowBlock:
        """The rows of several blocks of the same V and encoding (a copy)."""
        log_z = [block.log_z for block in blocks if block.log_z is not None]
        return cls(
            [digest for block in blocks for digest in block.digests],
            np.concatenate([block.numbers for block in blocks]),
            np.concatenate(log_z) if log_z else None,
            blocks[0].encoding,
        )

    @classmethod
    def decoded(cls, digest: bytes, data: NDArray[np.uint8], vocab_size: int) -> RowBlock:
        """The block of one encoded row (a copy).

        Raises:
            ProtocolError: the bytes are not a row of that size in this version of rows.
        """
        encoding, log_z = _read_header(data.data, vocab_size)
        if data.size != encoded_size(vocab_size, encoding):
            raise ProtocolError(f"a row of V = {vocab_size} in encoding {encoding} cannot have {data.size} bytes")
        numbers = data[HEADER_SIZE:].copy().view(encoding.dtype)[None]
        return cls([digest], numbers, None if encoding is _F32 else np.array([log_z], np.float32), encoding)

    def small_values(self) -> list[bytes] | None:
        """All rows as bytes, where they are so small that notifications carry them; else None."""
        if encoded_size(self.numbers.shape[1], self.encoding) > _MAX_SMALL:
            return None
        return [header + bytes(numbers) for header, numbers in self.encoded()]

    def encode(self, index: int) -> bytes:
        """One row as bytes, header and numbers (a copy)."""
        return b"".join(*self.encoded([index]))


@dataclass(frozen=True, slots=True)
class VectorBlock:
    """Answers to queries: vectors of any length, encoded as rows in F32.

    Attributes:
        digests: the name of each.
        vectors: C-contiguous float32 arrays of shape (n,).
    """

    digests: list[bytes]
    vectors: Sequence[NDArray[np.float32]]

    @property
    def nbytes(self) -> int:
        """Bytes of all vectors, encoded."""
        return sum(vector.nbytes + HEADER_SIZE for vector in self.vectors)

    def small_values(self) -> list[bytes] | None:
        """As `RowBlock.small_values`."""
        if encoded_size(max(map(len, self.vectors), default=0), Encoding.F32) > _MAX_SMALL:
            return None
        return [header + bytes(numbers) for header, numbers in self.encoded()]

    def select(self, indices: Sequence[int]) -> VectorBlock:
        """Some of the vectors."""
        return VectorBlock([self.digests[index] for index in indices], [self.vectors[index] for index in indices])

    def encoded(self, indices: Sequence[int] | None = None) -> list[Encoded]:
        """Some of the vectors, or all: the 16-byte header of each, and its numbers in place."""
        chosen = self.vectors if indices is None else [self.vectors[index] for index in indices]
        head = (MAGIC, ROW_VERSION, int(Encoding.F32), 0)
        return [(_HEADER.pack(*head, len(vector), 0.0), vector.data.cast("B")) for vector in chosen]


Block = RowBlock | VectorBlock
"""What a backend has computed: rows, or answers to queries."""


Allocate = Callable[[int], tuple[NDArray[np.uint8], memoryview]]
"""Gives memory for so many bytes: to read it by, and to write it by."""


def decode_row(data: NDArray[np.uint8], vocab_size: int, allocate: Allocate | None = None) -> NDArray[np.float32]:
    """Read one encoded row.

    Args:
        data: the encoded row, uint8 of shape (size,). An F32 row is used in place, not copied.
        vocab_size: the V that the model info promises.
        allocate: gives the memory of a row that has to be decoded; None for new memory.

    Returns:
        read-only float32 log-probabilities of shape (V,).

    Raises:
        ProtocolError: the bytes are not a row of that size in this wire version.
    """
    encoding, log_z = _read_header(data.data, vocab_size)
    dtype = _DTYPES[encoding]
    if data.size != HEADER_SIZE + vocab_size * dtype.itemsize:
        raise ProtocolError(f"a row of V = {vocab_size} in encoding {encoding} cannot have {data.size} bytes")
    row = numbers = data[HEADER_SIZE:].view(dtype)
    if encoding is not _F32:
        if allocate is None:
            row = _widened(numbers, encoding, log_z).view()
        else:
            memory, writeable = allocate(4 * vocab_size)
            _widened(numbers, encoding, log_z, np.frombuffer(writeable, np.float32))
            row = memory.view(np.float32)
    # numpy lets owners be made writeable again, and views of writeable ones. What was received into is one of its own.
    owner = row.base
    while isinstance(owner, np.ndarray):
        owner.setflags(write=False)
        owner = owner.base
    row.setflags(write=False)
    return row


def decode_rows(values: Sequence[object], vocab_size: int) -> list[NDArray[np.float32]] | None:
    """As `decode_row` and `check_row` for many small rows at once, at a fraction of their time.

    Args:
        values: the encoded rows.
        vocab_size: the V that the model info promises.

    Returns:
        read-only rows, float32 (V,); None for a few, and when not all are `bytes` and sound rows in the same encoding:
        then each must be looked at by itself.
    """
    if len(values) < _MIN_BATCH or set(map(type, values)) != {bytes}:
        return None
    rows = decode_alike(values, vocab_size, vocab_size)  # type: ignore[arg-type]  # all are bytes
    if rows is None or not (rows.max(axis=1) >= _least_top(vocab_size)).all():
        return None
    # Each with memory of its own, which numpy lets nobody write to.
    data, width = rows.tobytes(), rows.itemsize * vocab_size
    return [np.frombuffer(data[at : at + width], np.float32) for at in range(0, len(data), width)]


def entry_ranges(entries: Sequence[int], encoding: Encoding) -> bytes:
    """Where entries of a row are: first and last byte of each, as decimal numbers with spaces between."""
    width = encoding.dtype.itemsize
    return " ".join([f"{(at := HEADER_SIZE + width * entry)} {at + width - 1}" for entry in entries]).encode()


def decode_entries(data: bytes, vocab_size: int, count: int) -> NDArray[np.float32]:
    """Read a few entries of a row.

    Args:
        data: the row's header, and right behind it the stored numbers of those entries.
        vocab_size: the V that the model info promises.
        count: how many entries.

    Returns:
        float32 log-probabilities of shape (count,).

    Raises:
        ProtocolError: the bytes are not so many entries of a row of that size, or one is no log-probability.
    """
    encoding, log_z = _read_header(memoryview(data), vocab_size)
    if len(data) != encoded_size(count, encoding):
        raise ProtocolError(f"{len(data)} bytes are not {count} entries of a row in encoding {encoding}")
    numbers = np.frombuffer(data, encoding.dtype, offset=HEADER_SIZE)
    entries = numbers.copy() if encoding is Encoding.F32 else _widened(numbers, encoding, log_z)
    return check_logprobs(entries)


def split_rows(data: bytes, count: int) -> list[bytes] | None:
    """Several encoded rows that stand one behind the other; None when these are not so many, and nothing else."""
    rows, at = [], 0
    for _ in range(count):
        if at + HEADER_SIZE > len(data):
            return None
        _, _, code, _, size, _ = _HEADER.unpack_from(data, at)
        encoding = _ENCODINGS.get(code)
        end = at if encoding is None else at + encoded_size(size, encoding)
        rows.append(data[at:end])
        if end == at or end > len(data):
            return None
        at = end
    return rows if at == len(data) else None


def decode_alike(values: Sequence[bytes | None], vocab_size: int, count: int) -> NDArray[np.float32] | None:
    """As `decode_entries` for many rows at once, at a fraction of its time.

    Returns:
        float32 log-probabilities of shape (n, count); None when not all are sound rows in the same encoding: then each
        must be looked at by itself.
    """
    first = values[0]
    if first is None or len(first) < HEADER_SIZE or first[5] not in _ENCODINGS:
        return None
    encoding = _ENCODINGS[first[5]]
    size = encoded_size(count, encoding)
    if any(data is None or len(data) != size for data in values):
        return None
    block = np.frombuffer(b"".join(values), np.uint8).reshape(len(values), size)  # type: ignore[arg-type]  # none is None
    expected = _HEADER.pack(MAGIC, ROW_VERSION, encoding, 0, vocab_size, 0.0)[:_LOG_Z_AT]
    log_z = np.ascontiguousarray(block[:, _LOG_Z_AT:HEADER_SIZE]).view("<f4")
    numbers = block[:, HEADER_SIZE:].copy().view(encoding.dtype)
    entries = numbers if encoding is Encoding.F32 else _widened(numbers, encoding, log_z)
    is_sound = (block[:, :_LOG_Z_AT] == np.frombuffer(expected, np.uint8)).all() and np.isfinite(log_z).all()
    return entries if is_sound and entries.max() <= _MAX_LOGPROB else None


def check_row(row: NDArray[np.float32]) -> NDArray[np.float32]:
    """Refuse what cannot be the row of a prompt; returns the row.

    Of V probabilities that sum to 1 the largest is at least 1 / V, so a row whose largest entry lies below -log V is
    none: one of -inf alone, of logits, or shifted. That costs no other pass; summing would cost several times as much.
    The rounding of logZ and of 16-bit numbers takes an entry as far down as up.

    Args:
        row: float32 (V,), whole.

    Raises:
        ProtocolError: an entry is NaN or far above 0, or all lie too low.
    """
    check_largest(float(np.maximum.reduce(row)), len(row))
    return row


def check_largest(most: float | np.float32, vocab_size: int) -> None:
    """Refuse what cannot be the largest entry of a row of V; see `check_row`.

    Raises:
        ProtocolError: it is NaN, far above 0 or too low.
    """
    if not _least_top(vocab_size) <= most <= _MAX_LOGPROB:
        raise ProtocolError(f"the largest of the row's {vocab_size} entries is {most}: these are no log-probabilities")


@lru_cache(64)
def _least_top(vocab_size: int) -> float:
    """The least that the largest entry of a row of V can be; see `check_row`."""
    return -math.log(vocab_size) - _MAX_LOGPROB


def check_logprobs(row: NDArray[np.float32]) -> NDArray[np.float32]:
    """Refuse what cannot be log-probabilities, some of a row or of several; returns them.

    Raises:
        ProtocolError: an entry is NaN, or far above 0.
    """
    # The largest is NaN when any is: one pass over the row, in the processor's cache.
    if not (most := row.max()) <= _MAX_LOGPROB:
        raise ProtocolError(f"the largest of {len(row)} entries is {most}: these are no log-probabilities")
    return row


def _read_header(data: memoryview, vocab_size: int) -> tuple[Encoding, float]:
    """The encoding and logZ of a row.

    Raises:
        ProtocolError: what begins there is not a row of that size in this wire version.
    """
    if len(data) < HEADER_SIZE:
        raise ProtocolError(f"a row of {len(data)} bytes is shorter than its {HEADER_SIZE}-byte header")
    magic, version, code, _, size, log_z = _HEADER.unpack_from(data)
    if magic != MAGIC or version != ROW_VERSION:
        raise ProtocolError(f"not a row of wire version {ROW_VERSION}: it begins with {magic!r}, version {version}")
    if size != vocab_size:
        raise ProtocolError(f"the row has V = {size}, the model's info says {vocab_size}")
    encoding = _ENCODINGS.get(code)
    if encoding is None:
        raise ProtocolError(f"the row has the unknown encoding {code}")
    if not math.isfinite(log_z):
        raise ProtocolError(f"the row's logZ is {log_z}")
    return encoding, log_z


def _widened(
    numbers: NDArray[Any],
    encoding: Encoding,
    log_z: float | NDArray[np.float32],
    out: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """The log-probabilities of numbers in 16 bits; in new memory, or in `out`."""
    row = np.empty(numbers.shape, np.float32) if out is None else out
    if encoding is _BF16:
        widen_bf16(numbers, row)
    else:
        row[...] = numbers
    with np.errstate(invalid="ignore"):  # What is no row may hold NaN of any kind; it is refused later.
        np.subtract(row, np.asarray(log_z, np.float32), out=row)
    return row


def widen_bf16(bits: NDArray[np.uint16], out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """The float32 values of bfloat16 bits, exactly; same shape, in new memory or in `out`."""
    row = np.empty(bits.shape, np.float32) if out is None else out
    wide = row.view(np.uint32)
    wide[...] = bits
    # Multiplying is what numpy does faster than shifting.
    np.multiply(wide, np.uint32(1 << 16), out=wide)
    return row


def narrow_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper 16 bits of float32 values: exact for values that are bfloat16 already; same shape."""
    return (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)
