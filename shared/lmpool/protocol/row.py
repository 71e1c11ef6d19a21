"""Encode and decode rows (16-bit and 32-bit), and hidden states with the head that turns them into rows.

A row is a 16-byte header, then V raw little-endian numbers:

    offset  0  4 bytes  magic "LMPR"
            4  uint8    wire version
            5  uint8    encoding
            6  uint16   zero
            8  uint32   V
           12  float32  logZ

The value of entry i is `number[i] - logZ`. The numbers have a fixed width, so GETRANGE can read one entry. Encodings:

    F32    float32 log-probabilities, logZ = 0
    BF16   bfloat16 logits and their logZ: exact when the engine's logits are bfloat16
    F16    float16 numbers and their logZ: exact when the engine's logits are float16, else lossy

`workers/lmpool/workers/backends/row_encoder.py` chooses the encoding of a backend's rows.
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
"""Version of the layout of rows, separate from the wire version because cached rows outlive a release."""

MAGIC = b"LMPR"
HEADER_SIZE = 16
"""Bytes of the header of a row."""

FACTS = 3
"""How many numbers describe a head besides its weights: scale, soft cap, and 1 if the head has a bias."""

_HEADER = struct.Struct("<4sBBHIf")
_LOG_Z_AT = 12  # Offset of logZ in the header.
_MIN_BATCH = 4  # Min number of rows that are decoded together; fewer rows are decoded faster one by one.
_MAX_SMALL = 2048  # Max bytes of an encoded row or result that a notification carries to save the client a request.
_MAX_LOGPROB = 1.0  # Largest log-probability that rounding of float32 numbers and logZ can produce.


class Encoding(IntEnum):
    """The encoding of the numbers of a row, by its code on the wire."""

    F32 = 1  # float32 log-probabilities. Codes are part of the wire format: never reuse a code.
    BF16 = 2  # bfloat16 logits.
    F16 = 3  # float16 logits.

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numpy dtype of the stored numbers; uint16 for the bits of bfloat16."""
        return _DTYPES[self]


# The encodings by code; a lookup in the enum class takes ten times as long.
_ENCODINGS = {int(encoding): encoding for encoding in Encoding}
_DTYPES = dict(zip(_ENCODINGS, map(np.dtype, ("<f4", "<u2", "<f2")), strict=True))
_F32, _BF16 = Encoding.F32, Encoding.BF16


@lru_cache(64)
def f32_header(vocab_size: int) -> bytes:
    """The header of every row of V entries in F32."""
    return _HEADER.pack(MAGIC, ROW_VERSION, _F32, 0, vocab_size, 0.0)


def encoded_size(vocab_size: int, encoding: Encoding) -> int:
    """Bytes of one encoded row."""
    return HEADER_SIZE + vocab_size * encoding.dtype.itemsize


Row = NDArray[np.float32]
"""float32 log-probabilities: a row of shape (V,), or n rows of shape (n, V)."""

Values = NDArray[np.float32]
"""Weights of tokens or values of trie nodes, of any shape."""

Encoded = tuple[bytes, memoryview]
"""An encoded row: header and numbers."""

NewRows = Callable[[int, int, Encoding], NDArray[Any] | None]
"""A function of n, V and an encoding that allocates an uninitialized array (n, V) where a backend can write rows that
need no later copy; it may return None."""


def no_new_rows(_: int, __: int, ___: Encoding) -> None:
    """`NewRows` that always returns None."""


@dataclass(frozen=True, slots=True)
class RowBlock:
    """The rows of one step of a backend: one block of numbers, one digest per row.

    Attributes:
        digests: digest of the prompt of each row.
        numbers: array of shape (n, V) in the encoding's dtype; each row is contiguous.
        log_z: float32 array of shape (n,), or None for F32.
        encoding: how `numbers` are stored.
    """

    digests: list[bytes]
    numbers: NDArray[Any]
    log_z: NDArray[np.float32] | None
    encoding: Encoding

    def __post_init__(self) -> None:
        numbers, log_z = self.numbers, self.log_z
        log_z_shape = None if log_z is None else log_z.shape
        scaled = None if self.encoding is _F32 else numbers.shape[:1]
        if numbers.dtype != self.encoding.dtype or numbers.ndim != 2 or log_z_shape != scaled:
            raise ValueError(f"{numbers.dtype} of shape {numbers.shape} with log_z {log_z!r} are no {self.encoding!r}")
        if len(self.digests) != len(numbers):
            raise ValueError(f"{len(self.digests)} digests for {len(numbers)} rows")
        if numbers.size > len(numbers) and numbers.strides[1] != numbers.itemsize:
            raise ValueError("the numbers of each row of a block must be contiguous")

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, encoded."""
        return self.numbers.nbytes + HEADER_SIZE * len(self.digests)

    def encoded(self, indices: Sequence[int] | None = None) -> list[Encoded]:
        """The header and the numbers of the rows at `indices` (None: of all rows), without a copy of the numbers."""
        count, size = self.numbers.shape
        chosen = range(count) if indices is None else indices
        if not count:
            return []
        # View the numbers as integers of the same width: memoryview cannot cast every float format.
        integers = self.numbers.view(np.uint16 if self.numbers.itemsize == 2 else np.uint32)
        if integers.flags.c_contiguous:
            data, width = integers.data.cast("B"), size * integers.itemsize
            parts = [data[at * width : (at + 1) * width] for at in chosen]
        else:
            parts = [integers[at].data.cast("B") for at in chosen]
        if self.log_z is None:
            header = f32_header(size)
            return [(header, numbers) for numbers in parts]
        head, log_z = (MAGIC, ROW_VERSION, int(self.encoding), 0, size), self.log_z.tolist()
        return [(_HEADER.pack(*head, log_z[at]), numbers) for at, numbers in zip(chosen, parts, strict=True)]

    def row(self, index: int) -> Row:
        """The log-probabilities of one row, float32 (V,), with the bits that clients decode; not copied for F32."""
        numbers = self.numbers[index]
        return numbers if self.log_z is None else _widened(numbers, self.encoding, float(self.log_z[index]))

    def logits(self, index: int) -> Row:
        """The logits of one row, float32 (V,), of a block that is neither F32 nor lossy."""
        return _widened(self.numbers[index], self.encoding, 0.0)

    def select(self, indices: Sequence[int]) -> RowBlock:
        """The rows at `indices`: a copy, except for adjacent rows that are given as a range."""
        at: Any = slice(indices.start, indices.stop) if isinstance(indices, range) else indices
        log_z = None if self.log_z is None else self.log_z[at]
        return RowBlock([self.digests[index] for index in indices], self.numbers[at], log_z, self.encoding)

    @classmethod
    def joined(cls, blocks: Sequence[RowBlock]) -> RowBlock:
        """The rows of several blocks of the same V and encoding (a copy)."""
        log_z = [block.log_z for block in blocks if block.log_z is not None]
        digests = [digest for block in blocks for digest in block.digests]
        numbers = np.concatenate([block.numbers for block in blocks])
        return cls(digests, numbers, np.concatenate(log_z) if log_z else None, blocks[0].encoding)

    @classmethod
    def decoded(cls, digest: bytes, data: NDArray[np.uint8], vocab_size: int) -> RowBlock:
        """The block of one encoded row (a copy); raises `ProtocolError` as `decode_row`."""
        encoding, log_z, numbers = _open(data, vocab_size, vocab_size)
        log_zs = None if encoding is _F32 else np.array([log_z], np.float32)
        return cls([digest], numbers[None].copy(), log_zs, encoding)

    def encode(self, index: int) -> bytes:
        """One row as bytes, header and numbers (a copy)."""
        return b"".join(*self.encoded([index]))


@dataclass(frozen=True, slots=True)
class VectorBlock:
    """Results of queries: vectors of any length, encoded as rows in F32.

    Attributes:
        digests: digest of the prompt and query of each vector.
        vectors: C-contiguous float32 arrays of shape (n,).
    """

    digests: list[bytes]
    vectors: Sequence[NDArray[np.float32]]

    @property
    def nbytes(self) -> int:
        """Bytes of all vectors, encoded."""
        return sum(vector.nbytes + HEADER_SIZE for vector in self.vectors)

    def select(self, indices: Sequence[int]) -> VectorBlock:
        """The vectors at `indices`."""
        return VectorBlock([self.digests[index] for index in indices], [self.vectors[index] for index in indices])

    def encoded(self) -> list[Encoded]:
        """The header and the numbers of all vectors, without a copy of the numbers."""
        return [(f32_header(len(vector)), vector.data.cast("B")) for vector in self.vectors]


Block = RowBlock | VectorBlock
"""Results of one step of a backend: rows, or results of queries."""


def small_values(block: Block) -> list[bytes] | None:
    """All results of a block as bytes if they are small enough for notifications, else None."""
    encoded = block.encoded()
    is_small = all(numbers.nbytes <= _MAX_SMALL - HEADER_SIZE for _, numbers in encoded)
    return [header + bytes(numbers) for header, numbers in encoded] if is_small else None


Allocate = Callable[[int], tuple[NDArray[np.uint8], memoryview]]
"""A function that allocates bytes: returns a view for reading and a view for writing."""


def decode_row(data: NDArray[np.uint8], vocab_size: int, allocate: Allocate | None = None) -> NDArray[np.float32]:
    """Decode one encoded row, uint8 (size,), to read-only float32 log-probabilities (V,).

    An F32 row is used in place, not copied. `allocate` allocates the memory of a row in another encoding (None: new
    memory). Raises `ProtocolError` if the bytes are not a row of V entries in this version of rows.
    """
    encoding, log_z, numbers = _open(data, vocab_size, vocab_size)
    row = numbers
    if encoding is not _F32 and allocate is None:
        row = _widened(numbers, encoding, log_z).view()
    elif encoding is not _F32 and allocate is not None:
        memory, writeable = allocate(4 * vocab_size)
        _widened(numbers, encoding, log_z, np.frombuffer(writeable, np.float32))
        row = memory.view(np.float32)
    # Freeze the base arrays too: numpy lets a caller make a view writeable again while its base is writeable.
    owner = row.base
    while isinstance(owner, np.ndarray):
        owner.setflags(write=False)
        owner = owner.base
    row.setflags(write=False)
    return row


def decode_rows(values: Sequence[object], vocab_size: int) -> list[NDArray[np.float32]] | None:
    """Decode and check many small rows together, in a fraction of the time of `decode_row` and `check_row`.

    Returns None if there are few rows, or if not all are `bytes` and valid in the same encoding: then the caller must
    decode each row alone.
    """
    if len(values) < _MIN_BATCH or set(map(type, values)) != {bytes}:
        return None
    rows = decode_alike(values, vocab_size, vocab_size)  # type: ignore[arg-type]  # all are bytes
    if rows is None or not (rows.max(axis=1) >= _min_largest(vocab_size)).all():
        return None
    # Each row views a bytes object of its own, which numpy never lets a caller write to.
    data, width = rows.tobytes(), rows.itemsize * vocab_size
    return [np.frombuffer(data[at : at + width], np.float32) for at in range(0, len(data), width)]


def entry_ranges(entries: Sequence[int], encoding: Encoding) -> bytes:
    """Byte ranges of entries in an encoded row: first and last byte of each, as decimal numbers with spaces between."""
    width = encoding.dtype.itemsize
    return " ".join([f"{(at := HEADER_SIZE + width * entry)} {at + width - 1}" for entry in entries]).encode()


def decode_entries(data: bytes, vocab_size: int, count: int) -> NDArray[np.float32]:
    """Decode `count` entries of a row of V, from the row's header directly followed by the entries' stored numbers.

    Returns float32 log-probabilities of shape (count,); raises `ProtocolError` if the bytes cannot be these entries.
    """
    encoding, log_z, numbers = _open(np.frombuffer(data, np.uint8), vocab_size, count)
    return check_logprobs(numbers.copy() if encoding is _F32 else _widened(numbers, encoding, log_z))


def split_rows(data: bytes, count: int) -> list[bytes] | None:
    """Split bytes into `count` consecutive encoded rows; None if the bytes are anything else."""
    rows, at = list[bytes](), 0
    while at + HEADER_SIZE <= len(data):
        _, _, code, _, size, _ = _HEADER.unpack_from(data, at)
        end = at + encoded_size(size, _ENCODINGS.get(code, _F32))
        rows.append(data[at:end])
        at = end
    return rows if at == len(data) and len(rows) == count else None


def decode_alike(values: Sequence[bytes | None], vocab_size: int, count: int) -> NDArray[np.float32] | None:
    """Decode entries of many rows together, in a fraction of the time of `decode_entries`: float32 (n, count).

    Returns None if not all are valid rows in the same encoding: then the caller must decode each row alone.
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
    entries = numbers if encoding is _F32 else _widened(numbers, encoding, log_z)
    is_sound = (block[:, :_LOG_Z_AT] == np.frombuffer(expected, np.uint8)).all() and np.isfinite(log_z).all()
    return entries if is_sound and entries.max() <= _MAX_LOGPROB else None


def check_row(row: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return `row`, float32 (V,), after checking that it can be a row of log-probabilities.

    Of V probabilities that sum to 1 the largest is at least 1 / V. So if the largest entry is below -log V, the row is
    all -inf, or logits, or shifted. This check needs one pass; summing would take several times as long. Rounding of
    logZ and of 16-bit numbers can raise or lower an entry by up to `_MAX_LOGPROB`. Raises `ProtocolError`.
    """
    check_largest(float(np.maximum.reduce(row)), len(row))
    return row


def check_largest(most: float | np.float32, vocab_size: int) -> None:
    """Raise `ProtocolError` if the largest entry of a row of V is NaN, far above 0 or too low; see `check_row`."""
    if not _min_largest(vocab_size) <= most <= _MAX_LOGPROB:
        raise ProtocolError(f"the largest of the row's {vocab_size} entries is {most}: these are no log-probabilities")


@lru_cache(64)
def _min_largest(vocab_size: int) -> float:
    """The smallest value that the largest entry of a row of V can have; see `check_row`."""
    return -math.log(vocab_size) - _MAX_LOGPROB


def check_logprobs(row: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return these entries of rows; raise `ProtocolError` if an entry is NaN or far above 0."""
    # The maximum is NaN if any entry is NaN.
    if not (most := row.max()) <= _MAX_LOGPROB:
        raise ProtocolError(f"the largest of {len(row)} entries is {most}: these are no log-probabilities")
    return row


def check_logits(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return these logits or logZ; raise `ProtocolError` if their largest value is NaN or +inf."""
    if not (most := logits.max()) < np.inf:
        raise ProtocolError(f"the largest of {len(logits)} logits is {most}")
    return logits


def _open(data: NDArray[np.uint8], vocab_size: int, count: int) -> tuple[Encoding, float, NDArray[Any]]:
    """The encoding, logZ and `count` numbers of a row of V, not copied; raises `ProtocolError` for other bytes."""
    if len(data) < HEADER_SIZE:
        raise ProtocolError(f"a row of {len(data)} bytes is shorter than its {HEADER_SIZE}-byte header")
    magic, version, code, _, size, log_z = _HEADER.unpack_from(data.data)
    if magic != MAGIC or version != ROW_VERSION:
        raise ProtocolError(f"not a row of wire version {ROW_VERSION}: it begins with {magic!r}, version {version}")
    if size != vocab_size:
        raise ProtocolError(f"the row has V = {size}, the model's info says {vocab_size}")
    encoding = _ENCODINGS.get(code)
    if encoding is None or not math.isfinite(log_z):
        raise ProtocolError(f"the row has the unknown encoding {code}" if encoding is None else f"its logZ is {log_z}")
    dtype = _DTYPES[encoding]
    if len(data) != HEADER_SIZE + count * dtype.itemsize:
        raise ProtocolError(f"{count} entries of a row in encoding {encoding} cannot have {len(data)} bytes")
    return encoding, log_z, data[HEADER_SIZE:].view(dtype)


def _widened(numbers: NDArray[Any], encoding: Encoding, log_z: float | Row, out: Row | None = None) -> Row:
    """The log-probabilities of 16-bit numbers, in new memory or in `out`."""
    row = np.empty(numbers.shape, np.float32) if out is None else out
    if encoding is _BF16:
        widen_bf16(numbers, row)
    else:
        row[...] = numbers
    with np.errstate(invalid="ignore"):  # Invalid rows may hold NaN; a later check refuses these rows.
        np.subtract(row, np.asarray(log_z, np.float32), out=row)
    return row


def widen_bf16(bits: NDArray[np.uint16], out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """The float32 values of bfloat16 bits, exactly; same shape, in new memory or in `out`."""
    row = np.empty(bits.shape, np.float32) if out is None else out
    wide = row.view(np.uint32)
    wide[...] = bits
    # Multiply instead of shifting by 16 bits: numpy multiplies faster.
    np.multiply(wide, np.uint32(1 << 16), out=wide)
    return row


def narrow_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper 16 bits of float32 values, in the same shape: exact if the values are bfloat16."""
    return (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)


_HIDDEN_DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def width_of(numbers: int, dtype: str) -> int:
    """How many float32 numbers carry `numbers` numbers of a model's dtype; raises `ProtocolError` for other dtypes."""
    if dtype not in _HIDDEN_DTYPES:
        raise ProtocolError(f"hidden states in {dtype}: expected one of {', '.join(_HIDDEN_DTYPES)}")
    return -(-numbers * int(np.dtype(_HIDDEN_DTYPES[dtype]).itemsize) // 4)


def pack_numbers(numbers: NDArray[Any]) -> NDArray[np.float32]:
    """View numbers (n, m) of a model's dtype (uint16 for the bits of bfloat16) as float32 (n, width)."""
    if numbers.dtype == np.float32:
        return numbers
    if numbers.shape[1] % 2:
        numbers = np.pad(numbers, ((0, 0), (0, 1)))
    return np.ascontiguousarray(numbers).view(np.float32)


def unpack_numbers(answer: NDArray[np.float32], count: int, size: int, dtype: str) -> NDArray[Any]:
    """Decode the result of `pack_numbers` to (count, size): float16 for float16, else float32, as numpy lacks bfloat16.

    Raises `ProtocolError` if a number is NaN or infinite.
    """
    numbers = np.ascontiguousarray(answer).reshape(count, -1).view(_HIDDEN_DTYPES[dtype])[:, :size]
    values: NDArray[Any] = widen_bf16(np.ascontiguousarray(numbers)) if dtype == "bfloat16" else numbers
    if not np.isfinite(values).all():
        raise ProtocolError(f"of {count} times {size} numbers in {dtype} some are not finite")
    return values


@dataclass(frozen=True, slots=True)
class Head:
    """Turns the last hidden states of a model into its rows.

    Attributes:
        weights: (V, d); float16 for a float16 model, float32 for a float32 or bfloat16 model.
        bias: float32 (V,), or None.
        scale: factor of the logits after the product with the weights.
        soft_cap: c if the last step turns logits into c * tanh(logits / c); else None.
        dtype: the model's dtype, to which the result of each operation is rounded.
        down: float32 (r, d), the first LoRA factor that an adapter has for the head; None without one.
        up: float32 (V, r), the second factor times the adapter's scale; None without one.
    """

    weights: NDArray[Any]
    bias: NDArray[np.float32] | None
    scale: float
    soft_cap: float | None
    dtype: str
    down: NDArray[np.float32] | None = None
    up: NDArray[np.float32] | None = None

    def logits(self, hidden: NDArray[Any]) -> NDArray[np.float32]:
        """The logits of hidden states (n, d): float32 (n, V)."""
        logits: NDArray[np.float32] = hidden.astype(np.float32) @ self.weights.astype(np.float32, copy=False).T
        if self.bias is not None:
            logits += self.bias
        logits = self._rounded(logits)
        if self.down is not None and self.up is not None:
            added = hidden.astype(np.float32) @ self.down.T @ self.up.T
            logits = self._rounded(np.asarray(logits + added, np.float32))
        if self.scale != 1:
            logits = self._rounded(logits * np.float32(self.scale))
        if self.soft_cap is not None:
            cap = np.float32(self.soft_cap)
            logits = self._rounded(cap * self._rounded(np.tanh(self._rounded(logits / cap))))
        return logits

    def logprobs(self, hidden: NDArray[Any]) -> NDArray[np.float32]:
        """The rows of hidden states (n, d): float32 log-probabilities (n, V)."""
        logits = self.logits(hidden)
        logits -= logits.max(axis=1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True, dtype=np.float64)).astype(np.float32)
        return logits

    def _rounded(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """The values rounded to the model's dtype, as the model rounds after each operation."""
        if self.dtype == "bfloat16":
            bits = np.ascontiguousarray(values).view(np.uint32)
            # Round to the nearest bfloat16, ties to even.
            return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
        return values.astype(np.float16).astype(np.float32) if self.dtype == "float16" else values


def pack_facts(scale: float, soft_cap: float | None, has_bias: bool) -> NDArray[np.float32]:
    """A head's scale, its soft cap (0 for none), and 1 if it has a bias, as float32 of shape (FACTS,)."""
    return np.array([scale, 0 if soft_cap is None else soft_cap, has_bias], np.float32)
