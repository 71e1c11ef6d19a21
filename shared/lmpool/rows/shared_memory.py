"""Rows in shared memory: a file for each worker on /dev/shm, which the programs of its host read.

The worker writes a row once, into a slot of its own file, and Redis gets a reference in its place. Slots are used in
turn: row number g lies in slot g modulo their count, until row number g + count is written there. Each has its number,
its digest and a checksum before it, so a reader knows a row that is being written, has been replaced, or was spoilt by
somebody else for what it is: none. Nobody waits for anybody, and no order of memory accesses is assumed.

Readers use `pread`, never a mapping: a file that somebody cuts would end a process that has it mapped. The worker does
map it, for that is twice as fast, and looks at its length first.

A file has a name only while its worker holds the lock on it: it is made without one, and whoever gets the lock of a
file removes it. It is named by a random nonce, which stands in it too: who can read the nonce that a reference names is
on the same host as far as this matters.

Layout: a page of `HEADER`, an index (buckets of 8 numbers: 16 bits of the digest, 48 of the row's number), then the
slots, each a `SLOT` and an encoded row, in whole pages.
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import ProtocolError
from lmpool.protocol.row import HEADER_SIZE, Encoding, Row, RowBlock, decode_row, encoded_size

FOLDER_VARIABLE = "LMPOOL_SHM_DIR"
"""Environment variable that names another folder than /dev/shm; it must be in memory."""

PLACE_SIZE = 16
"""Bytes that say where a row is, once its host is known: the segment's nonce and the row's number."""

PAGE, WORD = 4096, 8
"""Slots are whole pages, checksums the sums of words."""

NAME = "lmpool-"
"""What the names of segments begin with."""

HEADER = struct.Struct("<6sH8s16sIQQQ")
"""How a segment begins: see `Layout`."""

SLOT = struct.Struct("<Q16sQQ24x")
"""How a slot begins: the row's number, its digest, the length of the encoded row and its checksum."""

BUCKET = struct.Struct("<8Q")
"""A part of the index: 16 bits of a digest and the row's number each, or 0."""

NUMBER_MASK = (1 << 48) - 1
"""The bits of an index entry that are the row's number."""

# A reference and a slot would cost as much as a smaller row.
_LEAST_ROW = 4096
_MAGIC, _LAYOUT = b"LMPSHM", 1
_REFERENCE = struct.Struct("<4sB16s8sQ")
_REFERENCE_MAGIC, _REFERENCE_VERSION = b"LMPS", 1
_MOST_NAME = 255
_PLACE = struct.Struct("<8sQ")
_PLACE_AT = _REFERENCE.size - _PLACE.size
_NUMBER_BITS = 48
_MOST_SPARE, _MOST_SPARE_BYTES = 64, 64 * 2**20
_LEAST_MAPPED, _LARGE = 65_536, 4 * 2**20


class Reference(NamedTuple):
    """Where a row is.

    Attributes:
        host: the host of the worker's segment (`host_token`).
        nonce: names the segment.
        number: of the row in it.
        worker: whose segment it is, or b"".
    """

    host: bytes
    nonce: bytes
    number: int
    worker: bytes = b""

    def pack(self) -> bytes:
        """The reference as a value of Redis; `submit.lua` and `entries.lua` know how it begins."""
        return _REFERENCE.pack(_REFERENCE_MAGIC, _REFERENCE_VERSION, *self[:3]) + self.worker


def is_reference(value: object) -> bool:
    """Whether a value of Redis is a reference, of this version or another, and no row."""
    return isinstance(value, bytes) and value.startswith(_REFERENCE_MAGIC)


def place_of(reference: bytes | None) -> bytes:
    """The part of a packed reference that notifications carry; zeros for none."""
    return bytes(_PLACE.size) if reference is None else reference[_PLACE_AT : _PLACE_AT + _PLACE.size]


def unpack_reference(value: bytes) -> Reference | None:
    """Read a reference; None for one of another version, or of which a part is missing."""
    if not _REFERENCE.size <= len(value) <= _REFERENCE.size + _MOST_NAME:
        return None
    magic, version, host, nonce, number = _REFERENCE.unpack_from(value)
    if magic != _REFERENCE_MAGIC or version != _REFERENCE_VERSION:
        return None
    return Reference(host, nonce, number, value[_REFERENCE.size :])


def folder() -> Path:
    """Where segments lie."""
    return Path(os.environ.get(FOLDER_VARIABLE) or "/dev/shm")


def host_token() -> bytes:
    """16 characters that processes have in common which see the same folder with the same rights; b"" for no folder.

    Of the kernel's start, the file system and the user. It tells whether to try: who cannot read a segment's nonce is
    on another host, whatever this says.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        place = folder().stat()
    except OSError:
        return b""
    return blake2b(f"{boot} {place.st_dev} {place.st_ino} {os.geteuid()}".encode(), digest_size=8).hexdigest().encode()


class Layout(NamedTuple):
    """How a segment is divided.

    Attributes:
        nonce: names it.
        fingerprint: 16 bytes that stand for that of its rows.
        vocab_size: V.
        buckets: of the index.
        stride: bytes from one slot to the next.
        slots: how many.
    """

    nonce: bytes
    fingerprint: bytes
    vocab_size: int
    buckets: int
    stride: int
    slots: int

    @property
    def first(self) -> int:
        """Where the first slot begins."""
        return PAGE + whole_pages(self.buckets * BUCKET.size)

    @property
    def size(self) -> int:
        """Bytes of the segment."""
        return self.first + self.stride * self.slots

    def pack(self) -> bytes:
        """The first bytes of a segment."""
        return HEADER.pack(_MAGIC, _LAYOUT, *self)

    @classmethod
    def read(cls, fd: int) -> Layout | None:
        """That of a file; None for one that is no segment of this release."""
        data = os.pread(fd, HEADER.size, 0)
        if len(data) < HEADER.size:
            return None
        magic, version, *rest = HEADER.unpack(data)
        layout = cls(*rest)
        is_sound = magic == _MAGIC and version == _LAYOUT and layout.buckets > 0 and layout.slots > 0
        return layout if is_sound and layout.stride >= SLOT.size else None

    def slot_of(self, number: int) -> int:
        """Where row `number` lies."""
        return self.first + number % self.slots * self.stride

    def bucket_of(self, digest: bytes) -> int:
        """The number of the bucket that may know a digest."""
        return int.from_bytes(digest[:WORD], "little") % self.buckets


def is_shared(vocab_size: int) -> bool:
    """Whether rows of this length are worth a segment."""
    return encoded_size(vocab_size, Encoding.F32) >= _LEAST_ROW


def fingerprint_bytes(fingerprint: str) -> bytes:
    """16 bytes that stand for a fingerprint."""
    return blake2b(fingerprint.encode(), digest_size=16).digest()


def whole_pages(size: int) -> int:
    """A size, rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


def whole_words(size: int) -> int:
    """A size, rounded up to whole words."""
    return -(-size // WORD) * WORD


def segments_in(place: Path) -> Iterator[Path]:
    """The files in a folder that may be segments."""
    with suppress(OSError), os.scandir(place) as entries:
        for entry in entries:
            if entry.name.startswith(NAME) and entry.is_file(follow_symlinks=False):
                yield Path(entry.path)


def checksum_of(row: NDArray[np.uint8]) -> int:
    """The sum of the words of a row, which is as long as some words, modulo 2^64."""
    return int(np.add.reduce(row.view(np.uint64)))


@lru_cache(64)
def _f32_header(vocab_size: int) -> tuple[bytes, int]:
    """The header of all rows of V in F32, and the sum of its words."""
    ((header, _),) = RowBlock([b""], np.zeros((1, vocab_size), np.float32), None, Encoding.F32).encoded()
    return header, checksum_of(np.frombuffer(header, np.uint8))


def row_in(data: NDArray[np.uint8], number: int, digest: bytes) -> NDArray[np.uint8] | int | None:
    """The encoded row in what was read of a slot; its length if that is more; None when it is not that row."""
    if len(data) < SLOT.size:
        return None
    seen, whose, length, expected = SLOT.unpack_from(data.data)
    if seen != number or whose != digest or length < HEADER_SIZE:
        return None
    end = SLOT.size + whole_words(length)
    if end > len(data):
        return int(length)
    row = data[SLOT.size : end]
    return row[:length] if checksum_of(row) == expected else None


def tag_of(digest: bytes) -> int:
    """What an index entry knows of a digest, where it stands in the entry."""
    return int.from_bytes(digest[WORD : WORD + 2], "little") << _NUMBER_BITS


class RowMemory:
    """Memory for rows, used again: the system gives out new pages far more slowly than rows are copied."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap | bytearray] = []
        self._lent: dict[int, weakref.ref[NDArray[np.uint8]]] = {}
        self._numbers = count()
        self._size = 0

    def take(self, size: int) -> tuple[NDArray[np.uint8], memoryview]:
        """Memory of that size that is used again once nobody has a view of the array; it holds anything.

        Returns:
            a uint8 array of shape (size,) that nobody can make writeable, and what to write to it by.
        """
        memory = self._next(size)
        writeable = memoryview(memory)
        return self._lend(memory, writeable.toreadonly()), writeable

    def take_writeable(self, size: int) -> NDArray[np.uint8]:
        """As `take`, for an array that its user may change, and for sizes that vary."""
        # In eighths of a power of two.
        step = max(PAGE, 1 << max(0, (size - 1).bit_length() - 3))
        memory = self._next(-(-size // step) * step)
        return self._lend(memory, memoryview(memory)[:size])

    def _next(self, size: int) -> mmap.mmap | bytearray:
        if size != self._size:
            self._free, self._size = [], size
        return self._free.pop() if self._free else _new_memory(size)

    def _lend(self, memory: mmap.mmap | bytearray, view: memoryview) -> NDArray[np.uint8]:
        free, lent, number = self._free, self._lent, next(self._numbers)
        # All views of it have it as their base, so it ends with the last of them.
        array = np.frombuffer(view, np.uint8)

        def give_back(_: object) -> None:
            del lent[number]
            if len(free) < _MOST_SPARE and (len(free) + 1) * len(memory) <= _MOST_SPARE_BYTES:
                free.append(memory)

        lent[number] = weakref.ref(array, give_back)
        return array


def _new_memory(size: int) -> mmap.mmap | bytearray:
    """Memory of a process's own: what a child has of it by a fork does not change with what is written here."""
    # A process has some 65,000 mappings at most, and may keep more rows than that.
    if size < _LEAST_MAPPED:
        return bytearray(size)
    try:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return bytearray(size)
    if size >= _LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class _OpenSegment(NamedTuple):
    """A segment that is open for reading."""

    fd: int
    layout: Layout
    first: int
    stride: int
    slots: int

    @classmethod
    def of(cls, fd: int, layout: Layout) -> _OpenSegment:
        """That file, with what is needed for each read at hand."""
        return cls(fd, layout, layout.first, layout.stride, layout.slots)


@dataclass(slots=True)
class ReadCounts:
    """What has become of reads.

    Attributes:
        rows: how many rows have been read.
        lost: how many that were to be there had been replaced, or could not be read here.
    """

    rows: int = 0
    lost: int = 0


class SegmentReader:
    """Reads rows from all segments of this host that this process may read.

    Attributes:
        host: what references to them say (`host_token`); b"" where there can be none.
        counts: count the reads.
    """

    def __init__(self) -> None:
        self._folder = folder()
        self._segments: dict[bytes, _OpenSegment] = {}
        self._searched: list[_OpenSegment] = []
        self._unreadable: set[bytes] = set()
        self._usual_size = 0
        self._head = bytearray(SLOT.size + HEADER_SIZE)
        # Rows, and what some of them are decoded from.
        self._memory, self._encoded = RowMemory(), RowMemory()
        self.host = host_token()
        self.counts = ReadCounts()

    @property
    def has_any(self) -> bool:
        """Whether there is anything that `find` could search."""
        return bool(self._searched)

    def look(self, fingerprint: str) -> None:
        """Have `find` search the segments with a model's rows that are there now; close those that are gone."""
        for name in self.let_go():
            with suppress(ValueError):
                self._open(bytes.fromhex(name))
        wanted = fingerprint_bytes(fingerprint)
        self._searched = [found for found in self._segments.values() if found.layout.fingerprint == wanted]

    def let_go(self) -> set[str]:
        """Close the segments that are gone, whose memory is free only then; returns the names of those that are there.

        To be called from time to time by whoever reads.
        """
        present = {path.name.removeprefix(NAME) for path in segments_in(self._folder)}
        for nonce in [nonce for nonce in self._segments if nonce.hex() not in present]:
            os.close(self._segments.pop(nonce).fd)
        self._searched = [found for found in self._searched if found.layout.nonce in self._segments]
        self._unreadable.clear()
        return present

    def _open(self, nonce: bytes) -> _OpenSegment | None:
        found = self._segments.get(nonce)
        if found is not None or nonce in self._unreadable:
            return found
        with suppress(OSError):
            fd = os.open(self._folder / f"{NAME}{nonce.hex()}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            layout = Layout.read(fd)
            if layout is not None and layout.nonce == nonce:
                found = self._segments[nonce] = _OpenSegment.of(fd, layout)
                return found
            os.close(fd)
        self._unreadable.add(nonce)
        return None

    def read(self, reference: Reference, digest: bytes, vocab_size: int) -> Row | None:
        """The row that a reference stands for; None when it is not there any more, or not on this host.

        Args:
            reference: where it is.
            digest: of its prompt.
            vocab_size: the V that the model info promises.

        Returns:
            read-only float32 log-probabilities of shape (V,), in memory of their own.
        """
        segment = self._open(reference.nonce)
        row = None if segment is None else self._read(segment, reference.number, digest, vocab_size)
        self.counts.lost += row is None
        return row

    def read_at(self, place: bytes, digest: bytes, vocab_size: int) -> Row | None:
        """As `read`, of a place that a notification has named."""
        nonce, number = _PLACE.unpack(place)
        return self.read(Reference(self.host, nonce, number), digest, vocab_size)

    def find(self, digest: bytes, vocab_size: int) -> Row | None:
        """As `read`, for a row that may be in any of the segments that the last `look` has seen."""
        for segment, number in self._candidates(digest):
            row = self._read(segment, number, digest, vocab_size)
            if row is not None:
                return row
        return None

    def find_into(self, digest: bytes, out: Row) -> bool:
        """As `find`, into an array of the caller's, float32 (V,), which holds anything when the row is not there."""
        for segment, number in self._candidates(digest):
            if self._is_usually_f32(out.size) and self._read_f32(segment, number, digest, out):
                return True
            row = self._read(segment, number, digest, out.size)
            if row is not None:
                out[:] = row
                return True
        return False

    def _candidates(self, digest: bytes) -> Iterator[tuple[_OpenSegment, int]]:
        """Where a row may be, by the indexes of the segments: the segment, and its number there."""
        hashed, tag = int.from_bytes(digest[:WORD], "little"), digest[WORD : WORD + 2]
        for segment in self._searched:
            bucket = hashed % segment.layout.buckets
            entries = os.pread(segment.fd, BUCKET.size, PAGE + bucket * BUCKET.size)
            # Mostly the tag is nowhere among these bytes.
            if tag in entries and len(entries) == BUCKET.size:
                wanted = tag_of(digest)
                alike = [entry & NUMBER_MASK for entry in BUCKET.unpack(entries) if entry & ~NUMBER_MASK == wanted]
                # What was written last first: the others may have been replaced, and so may this one.
                for number in sorted(alike, reverse=True):
                    if number:
                        yield segment, number

    def _is_usually_f32(self, vocab_size: int) -> bool:
        return self._usual_size == HEADER_SIZE + 4 * vocab_size

    def _read_f32(self, segment: _OpenSegment, number: int, digest: bytes, out: Row) -> bool:
        """Read a row in F32 to where it is wanted, float32 (V,); False when there is something else."""
        os.preadv(segment.fd, [self._head, out.data], segment.first + number % segment.slots * segment.stride)
        seen, whose, length, expected = SLOT.unpack_from(self._head)
        header, total = _f32_header(out.size)
        if seen != number or whose != digest or length != self._usual_size or self._head[SLOT.size :] != header:
            return False
        numbers = out.view(np.uint8)
        whole = numbers.size // WORD * WORD
        # The words of the row: its header, and its numbers, the last of which may be half a word.
        total += checksum_of(numbers[:whole]) + int.from_bytes(numbers[whole:], "little")
        if total % 2**64 != expected:
            return False
        self.counts.rows += 1
        return True

    def _read(self, segment: _OpenSegment, number: int, digest: bytes, vocab_size: int) -> Row | None:
        if self._is_usually_f32(vocab_size):
            array, writeable = self._memory.take(4 * vocab_size)
            if self._read_f32(segment, number, digest, np.frombuffer(writeable, np.float32)):
                return array.view(np.float32)
        return self._read_any(segment, number, digest, vocab_size)

    def _read_any(self, segment: _OpenSegment, number: int, digest: bytes, vocab_size: int) -> Row | None:
        """Read a row in whatever encoding."""
        fd, layout = segment.fd, segment.layout
        most = layout.stride - SLOT.size
        size, at = min(self._usual_size or most, most), layout.slot_of(number)
        # Once more when it is longer than most.
        for _ in range(2):
            data, writeable = self._encoded.take(SLOT.size + whole_words(size))
            row = row_in(data[: os.preadv(fd, [writeable], at)], number, digest)
            if row is None or isinstance(row, np.ndarray):
                break
            if (size := row) > most:
                return None
        if not isinstance(row, np.ndarray):
            return None
        self._usual_size = row.size
        self.counts.rows += 1
        try:
            return decode_row(row, vocab_size, self._memory.take)
        except ProtocolError:
            return None  # Of another model, or of another version of rows.

    def close(self) -> None:
        """Close all files."""
        for segment in self._segments.values():
            os.close(segment.fd)
        self._segments.clear()
        self._searched.clear()


class Shared(NamedTuple):
    """Rows of a block that were written to a segment.

    Attributes:
        references: digest -> what Redis gets in place of the row.
        replaced: digests of the rows that were in their slots before.
        host: of the segment (`host_token`).
    """

    references: Mapping[bytes, bytes] = MappingProxyType({})
    replaced: Sequence[bytes] = ()
    host: bytes = b""


NOT_SHARED = Shared()
