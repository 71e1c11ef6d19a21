"""Rows in shared memory: a segment for each worker, which the programs of its host map.

The worker writes a row once, into a slot of its segment, and Redis gets a reference in its place. Slots are used in
turn: row number g lies in slot g modulo their count, until row number g + count is written there. Each has its number
and its digest before it, and the number is zeroed before the row changes: a reader who finds the number before and
after copying has the row, as with a seqlock. Where processors reorder stores or loads (ARM), there is a checksum too.

A segment is memory without a name, sealed: nobody can cut it, which would end all that have mapped it, and nobody but
its worker can write to it. The worker hands it out through a socket in a folder that only this user's programs can use
(/dev/shm/lmpool-UID). The socket is named by a random nonce, which stands in the segment too: who can be given the
segment that a reference names is on the same host as far as this matters.

Layout: a page of `HEADER`, an index (buckets of 8 numbers: 16 bits of the digest, 48 of the row's number), then the
slots, each a `SLOT` and an encoded row, in whole pages.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import mmap
import os
import socket
import stat
import struct
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import count
from pathlib import Path
from time import monotonic
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import ProtocolError
from lmpool.protocol.row import HEADER_SIZE, Encoding, Row, RowBlock, decode_row, encoded_size

FOLDER_VARIABLE = "LMPOOL_SHM_DIR"
"""Environment variable that names another folder than /dev/shm; it must be one of this machine alone."""

PLACE_SIZE = 16
"""Bytes that say where a row is, once its host is known: the segment's nonce and the row's number."""

PAGE, WORD = 4096, 8
"""Slots are whole pages, checksums the sums of words."""

NAME = "lmpool-"
"""What the names of segments begin with: of their sockets, of their folders, and of their memory."""

SEALS = 0x1 | 0x2 | 0x4 | 0x10
"""What nobody can do to a segment: F_SEAL_SEAL, _SHRINK, _GROW, _FUTURE_WRITE; few builds of Python name all."""

HEADER = struct.Struct("<6sH8s16sIQQQ")
"""How a segment begins: see `Layout`."""

SLOT = struct.Struct("<Q16sQQ?23x")
"""How a slot begins: the row's number, its digest, the length of the encoded row, its checksum if it has one."""

BUCKET = struct.Struct("<8Q")
"""A part of the index: 16 bits of a digest and the row's number each, or 0."""

NUMBER_MASK = (1 << 48) - 1
"""The bits of an index entry that are the row's number."""

# A reference and a slot would cost as much as a smaller row.
_MIN_ROW = 4096
_F_GET_SEALS = 1034
# Not on macOS, where no segment can be made.
_O_PATH = getattr(os, "O_PATH", 0)
_MAGIC, _LAYOUT = b"LMPSHM", 2
_REFERENCE = struct.Struct("<4sB16s8sQ")
_REFERENCE_MAGIC, _REFERENCE_VERSION = b"LMPS", 1
_MAX_NAME = 255
_PLACE = struct.Struct("<8sQ")
# Read at once, not byte by byte.
_NUMBER = struct.Struct("@Q")
_PLACE_AT = _REFERENCE.size - _PLACE.size
_NUMBER_BITS = 48
_MAX_SPARE, _MAX_SPARE_BYTES = 64, 64 * 2**20
_MIN_MAPPED, _LARGE = 65_536, 4 * 2**20
# A worker that lives answers within less than a millisecond, and is asked again every second.
_ANSWER_S, _ALL_ANSWER_S = 0.1, 1.0


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
    if not _REFERENCE.size <= len(value) <= _REFERENCE.size + _MAX_NAME:
        return None
    magic, version, host, nonce, number = _REFERENCE.unpack_from(value)
    if magic != _REFERENCE_MAGIC or version != _REFERENCE_VERSION:
        return None
    return Reference(host, nonce, number, value[_REFERENCE.size :])


def folder() -> Path:
    """Where the sockets of this user's segments are; the folder is made by workers."""
    return Path(os.environ.get(FOLDER_VARIABLE) or "/dev/shm", f"{NAME}{os.geteuid()}")


def host_token() -> bytes:
    """16 characters that processes have in common which see the same folder with the same rights; b"" for no folder.

    Of the kernel's start, the file system and the user; it tells whether to try to read a segment's nonce.
    """
    own = folder()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        place = own.parent.stat()
    except OSError:
        return b""
    return blake2b(f"{boot} {place.st_dev} {place.st_ino} {own.name}".encode(), digest_size=8).hexdigest().encode()


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
        return PAGE + rounded_up(self.buckets * BUCKET.size, PAGE)

    @property
    def size(self) -> int:
        """Bytes of the segment."""
        return self.first + self.stride * self.slots

    def pack(self) -> bytes:
        """The first bytes of a segment."""
        return HEADER.pack(_MAGIC, _LAYOUT, *self)

    @classmethod
    def read(cls, memory: mmap.mmap) -> Layout | None:
        """That of a segment; None for what is none of this release."""
        if len(memory) < HEADER.size:
            return None
        magic, version, *rest = HEADER.unpack_from(memory)
        layout = cls(*rest)
        is_sound = magic == _MAGIC and version == _LAYOUT and layout.buckets > 0 and layout.slots > 0
        return layout if is_sound and layout.stride >= SLOT.size and layout.size == len(memory) else None

    def slot_of(self, number: int) -> int:
        """Where row `number` lies."""
        return self.first + number % self.slots * self.stride

    def bucket_of(self, digest: bytes) -> int:
        """The number of the bucket that may know a digest."""
        return int.from_bytes(digest[:WORD], "little") % self.buckets


def is_shared(vocab_size: int) -> bool:
    """Whether rows of this length are worth a segment."""
    return encoded_size(vocab_size, Encoding.F32) >= _MIN_ROW


def fingerprint_bytes(fingerprint: str) -> bytes:
    """16 bytes that stand for a fingerprint."""
    return blake2b(fingerprint.encode(), digest_size=16).digest()


def name_of(nonce: bytes) -> str:
    """The name of a segment, and of the socket that hands it out."""
    return f"{NAME}{nonce.hex()}"


def rounded_up(size: int, unit: int) -> int:
    """A size in bytes, rounded up to a multiple of `unit`: whole pages (`PAGE`), or whole words (`WORD`)."""
    return -(-size // unit) * unit


@contextmanager
def own_folder(place: Path, *, make: bool = False) -> Iterator[str]:
    """Open a folder of sockets, or make it; gives a short path to it: the name of a socket has at most 107 bytes.

    Raises:
        OSError: it does not exist, another user owns it, or other users may write to it.
    """
    if make:
        place.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(place, _O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found, user = os.fstat(fd), os.geteuid()
        if found.st_uid != user or found.st_mode & 0o022:
            has = f"user {found.st_uid} owns the folder, and its mode is {stat.S_IMODE(found.st_mode):o}"
            raise OSError(errno.EPERM, f"{has}; user {user} must own it, mode 700: name another by {FOLDER_VARIABLE}")
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def segments_in(place: Path, prefix: str = NAME) -> Iterator[Path]:
    """The sockets in a user's folder that may hand out segments; none in a folder that others can write to."""
    with suppress(OSError), own_folder(place) as opened, os.scandir(opened) as entries:
        for entry in entries:
            with suppress(OSError):
                if entry.name.startswith(prefix) and stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode):
                    yield place / entry.name


def connect(path: Path, timeout_s: float) -> socket.socket:
    """A connection with the worker that hands out a segment.

    Raises:
        OSError: there is none (ConnectionRefusedError: it has ended), or it takes longer.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        with own_folder(path.parent) as opened:
            connection.connect(f"{opened}/{path.name}")
    except BaseException:
        connection.close()
        raise
    return connection


def receive_segment(path: Path, timeout_s: float) -> mmap.mmap | None:
    """Map the segment that a socket hands out; None when there is none that is safe to map.

    Raises:
        OSError: nobody hands it out.
    """
    with connect(path, timeout_s) as connection:
        _, received, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not received:
        return None
    (fd,) = received
    try:
        is_sealed = fcntl.fcntl(fd, _F_GET_SEALS) & SEALS == SEALS
        return mmap.mmap(fd, 0, prot=mmap.PROT_READ) if is_sealed else None
    except ValueError:
        return None  # It is empty.
    finally:
        os.close(fd)


def checksum_of(row: NDArray[np.uint8]) -> int:
    """The sum of the words of a row, which is as long as some words, modulo 2^64."""
    return int(np.add.reduce(row.view(np.uint64)))


@lru_cache(64)
def _f32_header(vocab_size: int) -> bytes:
    """The header of all rows of V in F32."""
    ((header, _),) = RowBlock([b""], np.zeros((1, vocab_size), np.float32), None, Encoding.F32).encoded()
    return header


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
            if len(free) < _MAX_SPARE and (len(free) + 1) * len(memory) <= _MAX_SPARE_BYTES:
                free.append(memory)

        lent[number] = weakref.ref(array, give_back)
        return array


def _new_memory(size: int) -> mmap.mmap | bytearray:
    """Memory of a process's own: what a child has of it by a fork does not change with what is written here."""
    # A process has some 65,000 mappings at most, and may keep more rows than that.
    if size < _MIN_MAPPED:
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
    """A segment that is mapped for reading, with the numbers of its layout that each read needs."""

    layout: Layout
    memory: mmap.mmap
    view: memoryview
    first: int
    stride: int
    slots: int


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
        self._wanted = b""
        self._is_closed = False
        # Rows, and what some of them are decoded from.
        self._memory, self._encoded = RowMemory(), RowMemory()
        self.host = host_token()
        self.counts = ReadCounts()

    @property
    def has_any(self) -> bool:
        """Whether there is anything that `find` could search."""
        return bool(self._searched)

    async def look(self, fingerprint: str) -> None:
        """Have `find` search the segments with a model's rows that are there now; let go of those that are gone."""
        # At once: those of another model must not be searched any more.
        self._wanted = fingerprint_bytes(fingerprint)
        self._search_wanted()
        if unknown := await self.let_go() - set(map(name_of, self._segments)):
            # A worker that is frozen keeps this waiting, and the loop must not.
            received = await asyncio.to_thread(self._receive, unknown)
            if not self._is_closed:
                for segment in received:
                    self._segments.setdefault(segment.layout.nonce, segment)
                self._search_wanted()

    def _search_wanted(self) -> None:
        self._searched = [found for found in self._segments.values() if found.layout.fingerprint == self._wanted]

    async def let_go(self) -> set[str]:
        """Let go of the segments that are gone, whose memory is free only then; returns the names of all there are.

        To be called from time to time by whoever reads.
        """
        present = await asyncio.to_thread(lambda: {path.name for path in segments_in(self._folder)})
        self._segments = {nonce: found for nonce, found in self._segments.items() if name_of(nonce) in present}
        self._search_wanted()
        self._unreadable.clear()
        return present

    def _receive(self, names: Collection[str]) -> list[_OpenSegment]:
        """Map segments, without those that cannot be read now; frozen workers take no more than some time together."""
        found, until = [], monotonic() + _ALL_ANSWER_S
        for name in names:
            if monotonic() > until:
                break
            with suppress(OSError):
                memory = receive_segment(self._folder / name, _ANSWER_S)
                layout = None if memory is None else Layout.read(memory)
                if memory is not None and layout is not None and name_of(layout.nonce) == name:
                    place = layout.first, layout.stride, layout.slots
                    found.append(_OpenSegment(layout, memory, memoryview(memory), *place))
        return found

    def _open(self, nonce: bytes) -> _OpenSegment | None:
        found = self._segments.get(nonce)
        if found is not None or nonce in self._unreadable:
            return found
        for received in self._receive([name_of(nonce)]):
            self._segments[nonce] = received
            return received
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
            if self._usual_size == HEADER_SIZE + 4 * out.size and self._read_f32(segment, number, digest, out):
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
            at = PAGE + bucket * BUCKET.size
            entries = segment.memory[at : at + BUCKET.size]
            # Mostly the tag is nowhere among these bytes.
            if tag in entries:
                wanted = tag_of(digest)
                alike = [entry & NUMBER_MASK for entry in BUCKET.unpack(entries) if entry & ~NUMBER_MASK == wanted]
                # What was written last first: the others may have been replaced, and so may this one.
                for number in sorted(alike, reverse=True):
                    if number:
                        yield segment, number

    def _read_f32(self, segment: _OpenSegment, number: int, digest: bytes, out: Row) -> bool:
        """Read a row in F32 that has no checksum to where it is wanted, float32 (V,); False for anything else."""
        at = segment.first + number % segment.slots * segment.stride
        begin = at + SLOT.size + HEADER_SIZE
        slot = segment.memory[at:begin]
        seen, whose, length, _, is_summed = SLOT.unpack_from(slot)
        if seen != number or whose != digest or length != self._usual_size or is_summed:
            return False
        if slot[SLOT.size :] != _f32_header(out.size):
            return False
        numbers = out.view(np.uint8)
        numbers.data[:] = segment.view[begin : begin + numbers.size]
        if _number_at(segment, at) != number:
            return False
        self.counts.rows += 1
        return True

    def _read(self, segment: _OpenSegment, number: int, digest: bytes, vocab_size: int) -> Row | None:
        if self._usual_size == HEADER_SIZE + 4 * vocab_size:
            array, writeable = self._memory.take(4 * vocab_size)
            if self._read_f32(segment, number, digest, np.frombuffer(writeable, np.float32)):
                return array.view(np.float32)
        return self._read_any(segment, number, digest, vocab_size)

    def _read_any(self, segment: _OpenSegment, number: int, digest: bytes, vocab_size: int) -> Row | None:
        """Read a row in whatever encoding."""
        at = segment.layout.slot_of(number)
        seen, whose, length, expected, is_summed = SLOT.unpack_from(segment.memory, at)
        size = rounded_up(length, WORD)
        if seen != number or whose != digest or not HEADER_SIZE <= size <= segment.stride - SLOT.size:
            return None
        begin = at + SLOT.size
        if is_summed or length == encoded_size(vocab_size, Encoding.F32):
            # Checked and decoded are the same bytes, and a row in F32 is not decoded at all.
            data, writeable = self._encoded.take(size)
            writeable[:] = segment.view[begin : begin + size]
            if is_summed and checksum_of(data) != expected:
                return None
        else:
            data = np.frombuffer(segment.view[begin : begin + size], np.uint8)
        try:
            row = decode_row(data[:length], vocab_size, self._memory.take)
        except ProtocolError:
            return None  # Of another model, or of another version of rows, or it has just been replaced.
        if _number_at(segment, at) != number:
            return None
        self._usual_size = length
        self.counts.rows += 1
        return row

    def close(self) -> None:
        """Let go of all segments."""
        self._is_closed = True
        self._segments.clear()
        self._searched.clear()


def _number_at(segment: _OpenSegment, at: int) -> int:
    """The number that stands in a slot; it is zeroed before a row is replaced."""
    (number,) = _NUMBER.unpack_from(segment.memory, at)
    return int(number)


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
