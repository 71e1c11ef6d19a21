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

Layout: a page of `_HEADER`, an index (buckets of 8 numbers: 16 bits of the digest, 48 of the row's number), then the
slots, each a `_SLOT` and an encoded row, in whole pages.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import mmap
import os
import secrets
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import ProtocolError
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.row import HEADER_SIZE, Encoding, Row, RowBlock, decode_row, encoded_size

FOLDER_VARIABLE = "LMPOOL_SHM_DIR"
"""Environment variable that names another folder than /dev/shm; it must be in memory."""


PLACE_SIZE = 16
"""Bytes that say where a row is, once its host is known: the segment's nonce and the row's number."""

_log = logging.getLogger("lmpool")

# A reference and a slot would cost as much as a smaller row.
_LEAST_ROW = 4096
_PAGE = 4096
_NAME = "lmpool-"
_MAGIC, _LAYOUT = b"LMPSHM", 1
_HEADER = struct.Struct("<6sH8s16sIQQQ")
_SLOT = struct.Struct("<Q16sQQ24x")
_REFERENCE = struct.Struct("<4sB16s8sQ")
_REFERENCE_MAGIC, _REFERENCE_VERSION = b"LMPS", 1
_MOST_NAME = 255
_PLACE = struct.Struct("<8sQ")
_PLACE_AT = _REFERENCE.size - _PLACE.size
_NONCE_SIZE = 8
_BUCKET = struct.Struct("<8Q")
_TAG = struct.Struct("<H")
_NUMBER_BITS = 48
_NUMBER_MASK = (1 << _NUMBER_BITS) - 1
_WORD = 8
# What is allocated and touched at a time, between looks whether that is still wanted.
_STEP = 64 * 2**20
_LEAST_SLOTS, _MOST_SLOTS = 64, 16_384
# Of what is free: other workers come, and others use the folder and the memory too.
_SHARE, _MOST_DEFAULT = 8, 4 * 2**30
_LOOK_S = 1.0
_MOST_SPARE = 64


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


class _Layout(NamedTuple):
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
        return _PAGE + _whole_pages(self.buckets * _BUCKET.size)

    @property
    def size(self) -> int:
        """Bytes of the segment."""
        return self.first + self.stride * self.slots

    def pack(self) -> bytes:
        return _HEADER.pack(_MAGIC, _LAYOUT, *self)

    @classmethod
    def read(cls, fd: int) -> _Layout | None:
        """That of a file; None for one that is no segment of this release."""
        data = os.pread(fd, _HEADER.size, 0)
        if len(data) < _HEADER.size:
            return None
        magic, version, *rest = _HEADER.unpack(data)
        layout = cls(*rest)
        is_sound = magic == _MAGIC and version == _LAYOUT and layout.buckets > 0 and layout.slots > 0
        return layout if is_sound and layout.stride >= _SLOT.size else None

    def slot_of(self, number: int) -> int:
        """Where row `number` lies."""
        return self.first + number % self.slots * self.stride

    def bucket_of(self, digest: bytes) -> int:
        """Where the index may know a digest."""
        return _PAGE + int.from_bytes(digest[:_WORD], "little") % self.buckets * _BUCKET.size


def is_shared(vocab_size: int) -> bool:
    """Whether rows of this length are worth a segment."""
    return encoded_size(vocab_size, Encoding.F32) >= _LEAST_ROW


def fingerprint_bytes(fingerprint: str) -> bytes:
    """16 bytes that stand for a fingerprint."""
    return blake2b(fingerprint.encode(), digest_size=16).digest()


def default_size() -> int:
    """Bytes that a segment has of what is free; 0 where there is no folder."""
    try:
        return min(_free_bytes() // _SHARE, _MOST_DEFAULT)
    except OSError:
        return 0


def _free_bytes() -> int:
    """Bytes that are free in the folder and in memory."""
    place = os.statvfs(folder())
    free = place.f_bavail * place.f_frsize
    for line in Path("/proc/meminfo").read_text("ascii").splitlines():
        if line.startswith("MemAvailable:"):
            free = min(free, int(line.split()[1]) * 1024)
    return free


def _whole_pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _whole_words(size: int) -> int:
    return -(-size // _WORD) * _WORD


class Segment:
    """The rows that one worker has written last. Used by one thread at a time.

    Args:
        fd: the file, locked, of this layout, allocated; owned from now on.
        path: its name.
        memory: the file, mapped.
        layout: how it is divided.

    Attributes:
        nonce: names it.
        size: bytes.
        slots: how many rows it holds.
        written: how many rows have been written.
    """

    def __init__(self, fd: int, path: Path, memory: mmap.mmap, layout: _Layout) -> None:
        self._fd = fd
        self._path = path
        self._memory = memory
        self._bytes: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        self._layout = layout
        # Which row is in which slot, and where: what others may have written into the file decides nothing here.
        self._digests: list[bytes] = [b""] * layout.slots
        self._numbers: dict[bytes, int] = {}
        self.nonce = layout.nonce
        self.size, self.slots = layout.size, layout.slots
        self.written = 0

    def is_whole(self) -> bool:
        """Whether the file is as long as it was, and has its name; a write beyond its end would end the process."""
        status = os.fstat(self._fd)
        return status.st_size == self.size and status.st_nlink > 0

    def write(self, digest: bytes, header: bytes, numbers: memoryview) -> tuple[int, bytes]:
        """Write one encoded row; returns its number, and the digest of the row that was there before, or b"".

        Only while the segment `is_whole`.
        """
        layout = self._layout
        self.written = number = self.written + 1
        at, slot = layout.slot_of(number), number % layout.slots
        replaced, self._digests[slot] = self._digests[slot], digest
        # It may have been written again since.
        if replaced and (replaced == digest or self._numbers.get(replaced) != number - layout.slots):
            replaced = b""
        elif replaced:
            del self._numbers[replaced]
        self._numbers[digest] = number
        begin = at + _SLOT.size
        length = len(header) + numbers.nbytes
        row = self._bytes[begin : begin + _whole_words(length)]
        row[len(header) : length] = np.frombuffer(numbers, np.uint8)
        row[: len(header)] = np.frombuffer(header, np.uint8)
        row[length:] = 0
        _SLOT.pack_into(self._memory, at, number, digest, length, _checksum(row))
        self._index(digest, number)
        return number, replaced

    def _index(self, digest: bytes, number: int) -> None:
        """Note in the file where a row is: in place of what is known of the same digest, or of the oldest row."""
        place = self._layout.bucket_of(digest)
        entries = _BUCKET.unpack_from(self._memory, place)
        tag = _tag(digest)
        oldest = min(entries, key=lambda entry: -1 if entry & ~_NUMBER_MASK == tag and entry else entry & _NUMBER_MASK)
        struct.pack_into("<Q", self._memory, place + _WORD * entries.index(oldest), tag | number)

    def find(self, digest: bytes) -> int | None:
        """The number of a prompt's row, if it is still there."""
        number = self._numbers.get(digest)
        if number is None:
            return None
        data = self._bytes[(at := self._layout.slot_of(number)) : at + self._layout.stride]
        return number if isinstance(_row_in(data, number, digest), np.ndarray) else None

    def row(self, number: int) -> NDArray[np.uint8]:
        """The encoded row that `find` has found, uint8 of shape (size,), in place."""
        at = self._layout.slot_of(number)
        _, _, length, _ = _SLOT.unpack_from(self._memory, at)
        return self._bytes[at + _SLOT.size : at + _SLOT.size + length]

    def close(self) -> None:
        """Remove the file; who has it open reads it to the end."""
        with suppress(OSError):
            self._path.unlink()
        os.close(self._fd)


def make_segment(fingerprint: str, vocab_size: int, size: int, is_wanted: Callable[[], bool]) -> Segment | None:
    """Make a segment for a model's rows; takes about a second for each 3 GiB.

    Args:
        fingerprint: that of the rows.
        vocab_size: V.
        size: bytes that it may have.
        is_wanted: asked from time to time; when it says no, there is none.

    Raises:
        OSError: the folder cannot be used, or has no room for it.
    """
    row = encoded_size(vocab_size, Encoding.F32)
    stride = _whole_pages(_SLOT.size + _whole_words(row))
    slots = min(_MOST_SLOTS, size // stride)
    if slots < _LEAST_SLOTS:
        return None
    # On average two entries of eight are taken.
    layout = _Layout(
        secrets.token_bytes(_NONCE_SIZE), fingerprint_bytes(fingerprint), vocab_size, -(-slots // 2), stride, slots
    )
    place = folder()
    remove_abandoned(place)
    # Filling it would take from others what they have counted on.
    if layout.size > (free := _free_bytes()):
        raise OSError(errno.ENOSPC, f"{layout.size} bytes are wanted, and {free} are free")
    # Without a name: nobody finds it before it is ready, and nothing is left of it if this process ends before that.
    fd = os.open(place, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for at in range(0, layout.size, _STEP):
            if not is_wanted():
                os.close(fd)
                return None
            os.posix_fallocate(fd, at, min(_STEP, layout.size - at))
        memory = mmap.mmap(fd, layout.size)
        pages = np.frombuffer(memory, np.uint8)[::_PAGE]
        # Mapping a page at its first write takes ten times as long as the write.
        for at in range(0, len(pages), _STEP // _PAGE):
            pages[at : at + _STEP // _PAGE] = 0
        memory[: _HEADER.size] = layout.pack()
        path = place / f"{_NAME}{layout.nonce.hex()}"
        _name(fd, path)
    except BaseException:
        os.close(fd)
        raise
    return Segment(fd, path, memory, layout)


def _name(fd: int, path: Path) -> None:
    """Give a name to a file that has none."""
    parent = os.open(path.parent, os.O_PATH | os.O_CLOEXEC)
    try:
        # With a folder: only then Python has the system follow the link.
        os.link(f"/proc/self/fd/{fd}", path.name, src_dir_fd=parent, dst_dir_fd=parent, follow_symlinks=True)
    finally:
        os.close(parent)


def remove_abandoned(place: Path) -> None:
    """Remove the segments of workers that have ended without doing so."""
    for path in _segments_in(place):
        with suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                _log.info("removed %s, which a worker has left that ended", path)
            finally:
                os.close(fd)


def _segments_in(place: Path) -> Iterator[Path]:
    with suppress(OSError), os.scandir(place) as entries:
        for entry in entries:
            if entry.name.startswith(_NAME) and entry.is_file(follow_symlinks=False):
                yield Path(entry.path)


def _checksum(row: NDArray[np.uint8]) -> int:
    """The sum of the words of a row, which is as long as some words, modulo 2^64."""
    return int(np.add.reduce(row.view(np.uint64)))


def _row_in(data: NDArray[np.uint8], number: int, digest: bytes) -> NDArray[np.uint8] | int | None:
    """The encoded row in what was read of a slot; its length if that is more; None when it is not that row."""
    if len(data) < _SLOT.size:
        return None
    seen, whose, length, checksum = _SLOT.unpack_from(data.data)
    if seen != number or whose != digest or length < HEADER_SIZE:
        return None
    end = _SLOT.size + _whole_words(length)
    if end > len(data):
        return int(length)
    row = data[_SLOT.size : end]
    return row[:length] if _checksum(row) == checksum else None


def _tag(digest: bytes) -> int:
    """What an index entry knows of a digest, where it stands in the entry."""
    (tag,) = _TAG.unpack_from(digest, _WORD)
    return int(tag) << _NUMBER_BITS


class _Lent(np.ndarray[Any, np.dtype[np.uint8]]):
    """Memory that goes back where it came from when nothing looks at it any more.

    It is made right on the memory: where that were an array, numpy would let views of this one be views of that.
    """

    memory: mmap.mmap
    free: list[mmap.mmap]

    def __del__(self) -> None:
        if len(self.free) < _MOST_SPARE:
            self.free.append(self.memory)


class RowMemory:
    """Memory for rows, used again: the system gives out new pages far more slowly than rows are copied."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._size = 0

    def take(self, size: int) -> NDArray[np.uint8]:
        """Memory of that size, uint8, that is used again once nobody has a view of it."""
        if size != self._size:
            self._free, self._size = [], size
        memory = self._free.pop() if self._free else mmap.mmap(-1, size)
        lent = _Lent(size, np.uint8, memory)
        lent.memory, lent.free = memory, self._free
        return lent.view(np.ndarray)


class _OpenSegment(NamedTuple):
    """A segment that is open for reading."""

    fd: int
    layout: _Layout


class SegmentReader:
    """Reads rows from all segments of this host that this process may read.

    Attributes:
        host: what references to them say (`host_token`); b"" where there can be none.
        rows: how many rows have been read.
        bytes_read: bytes of these.
        lost: how many had been replaced, or could not be read here.
    """

    def __init__(self) -> None:
        self._folder = folder()
        self._segments: dict[bytes, _OpenSegment] = {}
        self._searched: list[_OpenSegment] = []
        self._unreadable: set[bytes] = set()
        self._usual_size = 0
        self._memory = RowMemory()
        self.host = host_token()
        self.rows = self.bytes_read = self.lost = 0

    @property
    def has_any(self) -> bool:
        """Whether there is anything that `find` could search."""
        return bool(self._searched)

    def look(self, fingerprint: str) -> None:
        """Have `find` search the segments with a model's rows that are there now; close those that are gone."""
        present = {path.name.removeprefix(_NAME) for path in _segments_in(self._folder)}
        for nonce in [nonce for nonce in self._segments if nonce.hex() not in present]:
            os.close(self._segments.pop(nonce).fd)
        self._unreadable.clear()
        for name in present:
            with suppress(ValueError):
                self._open(bytes.fromhex(name))
        wanted = fingerprint_bytes(fingerprint)
        self._searched = [found for found in self._segments.values() if found.layout.fingerprint == wanted]

    def _open(self, nonce: bytes) -> _OpenSegment | None:
        found = self._segments.get(nonce)
        if found is not None or nonce in self._unreadable:
            return found
        with suppress(OSError):
            fd = os.open(self._folder / f"{_NAME}{nonce.hex()}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            layout = _Layout.read(fd)
            if layout is not None and layout.nonce == nonce:
                found = self._segments[nonce] = _OpenSegment(fd, layout)
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
        self.lost += row is None
        return row

    def read_at(self, place: bytes, digest: bytes, vocab_size: int) -> Row | None:
        """As `read`, of a place that a notification has named."""
        nonce, number = _PLACE.unpack(place)
        return self.read(Reference(self.host, nonce, number), digest, vocab_size)

    def find(self, digest: bytes, vocab_size: int) -> Row | None:
        """As `read`, for a row that may be in any of the segments that the last `look` has seen."""
        for fd, layout in self._searched:
            entries = os.pread(fd, _BUCKET.size, layout.bucket_of(digest))
            if len(entries) < _BUCKET.size:
                continue
            tag = _tag(digest)
            for entry in _BUCKET.unpack(entries):
                if entry and entry & ~_NUMBER_MASK == tag:
                    row = self._read(_OpenSegment(fd, layout), entry & _NUMBER_MASK, digest, vocab_size)
                    if row is not None:
                        return row
        return None

    def _read(self, segment: _OpenSegment, number: int, digest: bytes, vocab_size: int) -> Row | None:
        fd, layout = segment
        most = layout.stride - _SLOT.size
        size, at = min(self._usual_size or most, most), layout.slot_of(number)
        # Once more when it is longer than most.
        for _ in range(2):
            data = self._memory.take(_SLOT.size + _whole_words(size))
            row = _row_in(data[: os.preadv(fd, [data.data], at)], number, digest)
            if row is None or isinstance(row, np.ndarray):
                break
            if (size := row) > most:
                return None
        if not isinstance(row, np.ndarray):
            return None
        self._usual_size = row.size
        self.rows += 1
        self.bytes_read += row.size
        try:
            return decode_row(row, vocab_size)
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


class SegmentWriter:
    """Writes one worker's rows to a segment, as long as it has one: without one they go through Redis.

    Args:
        info: what the worker serves.
        worker: its name.
        size: bytes that the segment may take; None for a part of what is free, 0 for no segment.

    Attributes:
        segment: None as long as it is being made, and where there is none.
    """

    def __init__(self, info: ModelInfo, worker: str, size: int | None) -> None:
        self._info = info
        self._worker = worker.encode()
        self._is_wanted = size != 0 and is_shared(info.vocab_size)
        self._size = default_size() if size is None else size
        self._host = host_token()
        self.segment: Segment | None = None

    @property
    def host(self) -> bytes:
        """What clients say that can read the segment; b"" without one."""
        return self._host if self.segment is not None else b""

    async def run(self) -> None:
        """Make the segment, and another one when something has happened to it."""
        while self._is_wanted:
            if self.segment is None:
                self.segment = await asyncio.to_thread(self._make)
            await asyncio.sleep(_LOOK_S)

    def _make(self) -> Segment | None:
        info = self._info
        try:
            segment = make_segment(info.fingerprint, info.vocab_size, self._size, lambda: self._is_wanted)
        except OSError as error:
            self._give_up(f"{folder()}: {error.strerror or error}")
            return None
        if segment is None and self._is_wanted:
            row = encoded_size(info.vocab_size, Encoding.F32)
            self._give_up(f"{self._size} bytes hold fewer than {_LEAST_SLOTS} rows of {row} bytes")
        return segment

    def _give_up(self, why: str) -> None:
        self._is_wanted = False
        _log.warning(
            "rows go through Redis, not through shared memory: %s. Give %s more room (for Docker --shm-size, for a "
            "pod an emptyDir of medium Memory), or choose --shm-bytes; 0 turns this message off",
            why,
            folder(),
        )

    def write(self, block: RowBlock, leave_out: Collection[bytes], overwrite: Collection[bytes]) -> Shared:
        """Write the rows of a block.

        Args:
            block: the rows.
            leave_out: digests of those that go through Redis.
            overwrite: digests of those that are written even if the segment has a row of theirs.
        """
        segment = self.segment
        if segment is None:
            return NOT_SHARED
        if not segment.is_whole():
            _log.warning("somebody has cut or removed the shared memory of this worker: it makes another one")
            self.segment = None
            segment.close()
            return NOT_SHARED
        references, replaced = {}, []
        for digest, (header, numbers) in zip(block.digests, block.encoded(), strict=True):
            if digest in leave_out:
                continue
            number = None if digest in overwrite else segment.find(digest)
            if number is None:
                number, before = segment.write(digest, header, numbers)
                if before:
                    replaced.append(before)
            references[digest] = Reference(self._host, segment.nonce, number, self._worker).pack()
        return Shared(references, replaced, self._host)

    def find(self, digest: bytes) -> RowBlock | None:
        """The row of a prompt, if the segment has it (a copy)."""
        number = None if self.segment is None else self.segment.find(digest)
        if self.segment is None or number is None:
            return None
        try:
            return RowBlock.decoded(digest, self.segment.row(number), self._info.vocab_size)
        except ProtocolError:
            return None

    def close(self) -> None:
        """Remove the segment."""
        self._is_wanted = False
        if self.segment is not None:
            self.segment.close()
            self.segment = None
