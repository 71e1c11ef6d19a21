"""Rows in shared memory: each worker writes its rows into a segment, which programs on the same host map and read.

The worker writes a row once, and Redis stores a reference in place of the row. Slots are used in turn: row number g is
in slot g modulo the number of slots, until row g + slots overwrites it. A slot begins with the number and the digest of
its row. The writer sets the number to 0 before the row changes, so a reader that finds the same number before and after
it copies the row has the whole row (a seqlock). Processors that reorder stores or loads (ARM) need a checksum too.

Layout: a page with `HEADER`; an index of buckets with 8 entries (16 bits of a digest, 48 bits of a row's number); then
the slots, each a `SLOT` and an encoded row, in whole pages.
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
from hashlib import blake2b
from itertools import count
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import ProtocolError
from lmpool.protocol.row import HEADER_SIZE, Encoding, Row, decode_row, encoded_size, f32_header

FOLDER_VARIABLE = "LMPOOL_SHM_DIR"
"""Environment variable that replaces the folder /dev/shm. The folder must not be shared with other machines."""

PAGE = 4096
"""Bytes of a page of memory."""

NAME = "lmpool-"
"""The beginning of the names of segments, of their sockets and of the folders of sockets."""

SEALS = 0x1 | 0x2 | 0x4 | 0x10
"""F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_FUTURE_WRITE: few builds of Python define all four."""

PLACE_SIZE = 16
"""Bytes of a row's place within a known host: the segment's nonce and the row's number."""

HOST_SIZE = 16
"""Characters of a `host_token`."""

ROW_KEY_SIZE = 24
"""Bytes of a row's key at a row server: the nonce of a segment, and the digest of a prompt."""

DIRECT_MARK = b"+"
"""First character of the token of a client that reads rows from workers on other hosts; see `reader_token`."""

HEADER = struct.Struct("<6sH8s16sIQQQ")
"""The beginning of a segment: magic bytes, version of the layout, and the fields of `Layout`."""

SLOT = struct.Struct("<Q16sQQ?16s7x")
"""The beginning of a slot: number, digest, bytes of the encoded row, checksum, whether there is a checksum, and the
`Layout.fingerprint` of the row: later weights of the model use the same memory under another name."""

BUCKET = struct.Struct("<8Q")
"""A bucket of the index: eight entries of 16 bits of a digest and 48 bits of the row's number, or 0 if empty."""

WORD = 8
"""Bytes of a word; a checksum is a sum of words."""

_O_PATH = getattr(os, "O_PATH", 0)  # macOS lacks O_PATH, and no segment can be created on macOS.
_F_GET_SEALS = 1034  # Value of F_GET_SEALS in Linux's headers.
_NUMBER = struct.Struct("@Q")  # Native byte order: `struct` reads the number at once, not byte by byte.
_NUMBER_BITS = 48  # Bits of a row's number in an entry of the index.
_NUMBER_MASK = (1 << _NUMBER_BITS) - 1
# A reader skips segments of another version, and processes with other versions have another `host_token`: rows go
# through Redis between them. Increase the version when the layout of segments, references or places changes.
_MAGIC, _LAYOUT_VERSION = b"LMPSHM", 3
_REFERENCE = struct.Struct("<4sB16s8sQ")
_REFERENCE_MAGIC = b"LMPS"
# Versions of references without and with the address of a row server. A reference of another version counts as no row.
_PLAIN_REFERENCE, _DIRECT_REFERENCE = 1, 2
_PLACE = struct.Struct("<8sQ")
_MAX_NAME = 255  # Max bytes of a worker's name and address in a reference.
MAX_REFERENCE = _REFERENCE.size + _MAX_NAME
"""Max bytes of a reference."""
_MIN_ROW_BYTES = 4096  # Min bytes of a row in shared memory: a smaller row in Redis costs no more than a reference.
_ANSWER_S = 0.1  # Max seconds to wait for one worker's segment; a live worker sends its segment within 1 ms.
_ALL_ANSWER_S = 1.0  # Max seconds to wait for all segments together, even if many workers are frozen.
_MAX_SPARE, _MAX_SPARE_BYTES = 64, 64 * 2**20  # Max buffers, and max bytes of buffers, kept for later rows.


def folder() -> Path:
    """The folder of the sockets of this user's segments; workers create it."""
    return Path(os.environ.get(FOLDER_VARIABLE) or "/dev/shm", f"{NAME}{os.geteuid()}")


def host_token() -> bytes:
    """16 characters that are equal for processes that can share memory; b"" if this machine has no folder for it.

    The characters depend on the kernel's boot, the file system, the user and the layout of segments; host names do not
    show who shares memory.
    """
    own = folder()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        place = own.parent.stat()
    except OSError:
        return b""
    text = f"{boot} {place.st_dev} {place.st_ino} {own.name} {_LAYOUT_VERSION}"
    return blake2b(text.encode(), digest_size=8).hexdigest().encode()


def reader_token(host: bytes, *, is_direct: bool) -> bytes:
    """The token in jobs and reply keys: the `host_token`, or the mark of a client that also reads from row servers.

    `finish.lua` and `submit.lua` read the token at the end of reply keys.
    """
    return DIRECT_MARK + host.rjust(HOST_SIZE, b"-") if is_direct else host


def name_of(nonce: bytes) -> str:
    """The name of a segment and of its socket."""
    return f"{NAME}{nonce.hex()}"


@contextmanager
def own_folder(place: Path, *, make: bool = False) -> Iterator[str]:
    """Open a folder of sockets; yields a short path to it, because the path of a socket has at most 107 bytes.

    Raises `OSError` if the folder does not exist, another user owns it, or other users may write to it.
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


def segments_in(place: Path) -> Iterator[Path]:
    """The sockets of segments in a user's folder; none in a folder that other users can write to."""
    with suppress(OSError), own_folder(place):
        for path in place.glob(f"{NAME}*"):
            with suppress(OSError):  # An entry that cannot be read must not hide other entries.
                if path.is_socket():
                    yield path


@contextmanager
def connect(path: Path, timeout_s: float) -> Iterator[socket.socket]:
    """Connect to the socket that hands out a segment; raises `OSError` as `receive_segment`."""
    with own_folder(path.parent) as opened, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(f"{opened}/{path.name}")
        yield connection


def receive_segment(path: Path, timeout_s: float) -> mmap.mmap:
    """Map the segment that a socket hands out.

    Raises `OSError` if no worker serves the socket, the worker is frozen, or other processes can change the memory;
    `ValueError` if the worker sends no memory, or empty memory.
    """
    with connect(path, timeout_s) as connection:
        _, (fd,), _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
    try:
        if fcntl.fcntl(fd, _F_GET_SEALS) & SEALS != SEALS:
            raise OSError(errno.EPERM, f"the memory of {path} is not sealed")
        return mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    finally:
        os.close(fd)


class Reference(NamedTuple):
    """The place of a row.

    Attributes:
        host: host of the segment (`host_token`).
        nonce: nonce of the segment.
        number: number of the row.
        worker: name of the worker.
        address: "HOST:PORT" of the worker's row server, or b"".
    """

    host: bytes
    nonce: bytes
    number: int
    worker: bytes = b""
    address: bytes = b""

    def pack(self) -> bytes:
        """The reference as stored in Redis; `submit.lua` and `entries.lua` check its first bytes."""
        version, name = _PLAIN_REFERENCE, self.worker
        if self.address:
            version, name = _DIRECT_REFERENCE, self.worker + b" " + self.address
        return _REFERENCE.pack(_REFERENCE_MAGIC, version, *self[:3]) + name


def is_reference(value: object) -> bool:
    """Whether a stored value is a reference (of any version) and not a row."""
    return isinstance(value, bytes) and value.startswith(_REFERENCE_MAGIC)


def place_of(reference: bytes | None) -> bytes:
    """The part of a packed reference that notifications carry; zeros if there is no reference."""
    return bytes(PLACE_SIZE) if reference is None else reference[_REFERENCE.size - PLACE_SIZE : _REFERENCE.size]


def split_reference(packed: bytes) -> tuple[bytes, bytes]:
    """The bytes of a packed reference before the number of the row, and the bytes after it."""
    return packed[: _REFERENCE.size - WORD], packed[_REFERENCE.size :]


def unpack_reference(value: bytes) -> Reference | None:
    """Decode a reference; None if it is incomplete or of another version."""
    if _REFERENCE.size <= len(value) <= MAX_REFERENCE:
        magic, version, host, nonce, number = _REFERENCE.unpack_from(value)
        if magic == _REFERENCE_MAGIC and version in (_PLAIN_REFERENCE, _DIRECT_REFERENCE):
            worker, _, address = value[_REFERENCE.size :].partition(b" ")
            return Reference(host, nonce, number, worker, address)
    return None


class Shared(NamedTuple):
    """Rows of a block that were written to a segment."""

    references: Mapping[bytes, bytes]  # Digest -> the value that Redis stores for the row.
    replaced: Sequence[bytes]  # Digests of older rows whose slots were reused.
    host: bytes  # Host of the segment (`host_token`).
    address: bytes = b""  # "HOST:PORT" of the worker's row server, or b"".

    def is_readable(self, reader: bytes) -> bool:
        """Whether a client with this `reader_token` can read the rows."""
        return reader[-HOST_SIZE:] == self.host or (bool(self.address) and reader.startswith(DIRECT_MARK))


NOT_SHARED = Shared({}, (), b"")


class Layout(NamedTuple):
    """The division of a segment: rows of V numbers, buckets of the index, and slots that are `stride` bytes apart."""

    nonce: bytes
    fingerprint: bytes
    vocab_size: int
    buckets: int
    stride: int
    slots: int

    @property
    def first(self) -> int:
        """The offset of the first slot."""
        return PAGE + rounded_up(self.buckets * BUCKET.size, PAGE)

    @property
    def size(self) -> int:
        """Bytes of the segment."""
        return self.first + self.stride * self.slots

    def pack(self) -> bytes:
        """The first bytes of a segment."""
        return HEADER.pack(_MAGIC, _LAYOUT_VERSION, *self)

    @classmethod
    def read(cls, memory: mmap.mmap) -> Layout | None:
        """Read the layout of a segment; None for memory that is no segment of this release."""
        if len(memory) < HEADER.size:
            return None
        magic, version, *rest = HEADER.unpack_from(memory)
        layout = cls(*rest)
        is_sound = magic == _MAGIC and version == _LAYOUT_VERSION and layout.buckets > 0 and layout.slots > 0
        return layout if is_sound and layout.stride >= SLOT.size and layout.size == len(memory) else None


def is_shared(vocab_size: int) -> bool:
    """Whether rows of V entries are large enough for shared memory."""
    return encoded_size(vocab_size, Encoding.F32) >= _MIN_ROW_BYTES


def fingerprint_bytes(fingerprint: str) -> bytes:
    return blake2b(fingerprint.encode(), digest_size=16).digest()


def rounded_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def checksum_of(row: NDArray[np.uint8]) -> int:
    """The sum of the 8-byte words of a row, modulo 2^64."""
    return int(np.add.reduce(row.view(np.uint64)))


def tag_of(digest: bytes) -> int:
    """The bits of a digest in an entry of the index, shifted to their position."""
    return int.from_bytes(digest[WORD : WORD + 2], "little") << _NUMBER_BITS


class RowMemory:
    """Memory that is reused for rows: getting new pages from the system is far slower than copying rows."""

    def __init__(self) -> None:
        self._free: list[NDArray[np.uint8]] = []
        self._lent: dict[int, weakref.ref[NDArray[np.uint8]]] = {}
        self._numbers = count()
        self._size = 0

    def take(self, size: int) -> tuple[NDArray[np.uint8], memoryview]:
        """Take memory, which is reused once no view of the array exists; its content is undefined.

        Returns a uint8 array (size,) that can never be made writeable, and a buffer to write to it.
        """
        memory = self._next(size)
        writeable = memory.data
        return self._lend(memory, writeable.toreadonly()), writeable

    def take_writeable(self, size: int) -> NDArray[np.uint8]:
        """Take memory like `take`, but as an array that the caller may change, and for sizes that vary."""
        # Round the size up to an eighth of a power of two, so that memory of a similar size can be reused.
        step = max(PAGE, 1 << max(0, (size - 1).bit_length() - 3))
        memory = self._next(-(-size // step) * step)
        return self._lend(memory, memory.data[:size])

    def _next(self, size: int) -> NDArray[np.uint8]:
        if size != self._size:
            self._free, self._size = [], size
        return self._free.pop() if self._free else np.empty(size, np.uint8)

    def _lend(self, memory: NDArray[np.uint8], view: memoryview) -> NDArray[np.uint8]:
        free, lent, number = self._free, self._lent, next(self._numbers)
        # Every view has this array as its base, so the array lives as long as the last view.
        array = np.frombuffer(view, np.uint8)

        def give_back(_: object) -> None:
            del lent[number]
            if len(free) < _MAX_SPARE and (len(free) + 1) * len(memory) <= _MAX_SPARE_BYTES:
                free.append(memory)

        lent[number] = weakref.ref(array, give_back)
        return array


class _OpenSegment(NamedTuple):
    layout: Layout
    memory: mmap.mmap
    view: memoryview
    first: int  # Offset of the first slot: `layout.first` would compute it again at each access.


@dataclass(slots=True)
class ReadCounts:
    """Counts of the outcomes of reads."""

    rows: int = 0  # Rows that were read.
    lost: int = 0  # References whose row was overwritten, or cannot be read by this process.
    direct: int = 0  # Rows that were read from row servers.


class SegmentReader:
    """Reads rows from all segments of this host that this process may read."""

    def __init__(self) -> None:
        self._folder = folder()
        self._segments: dict[bytes, _OpenSegment] = {}
        self._searched: list[_OpenSegment] = []
        self._unreadable: set[bytes] = set()
        self._wanted = b""
        self._is_closed = False
        self._rows, self._encoded = RowMemory(), RowMemory()
        self.host = host_token()  # Token of this host, which references contain; b"" if no segment can be read.
        self.counts = ReadCounts()

    @property
    def has_any(self) -> bool:
        """Whether `find` has a segment to search."""
        return bool(self._searched)

    async def refresh(self, fingerprint: str) -> None:
        """Let `find` search the existing segments with a model's rows; release segments that were removed."""
        # Select segments before the first await: from now on `find` must search segments of this model only.
        self.select(fingerprint)
        if unknown := await self.release_removed() - set(map(name_of, self._segments)):
            # Receive in a thread: a frozen worker would block the event loop.
            received = await asyncio.to_thread(self._receive, unknown)
            if not self._is_closed:
                self._segments = {segment.layout.nonce: segment for segment in received} | self._segments
                self._select()

    def select(self, fingerprint: str) -> None:
        """Let `find` search only the known segments with a model's rows."""
        self._wanted = fingerprint_bytes(fingerprint)
        self._select()

    def _select(self) -> None:
        self._searched = [found for found in self._segments.values() if found.layout.fingerprint == self._wanted]

    async def release_removed(self) -> set[str]:
        """Release segments that their workers have removed: the kernel frees a segment when no process maps it.

        Returns the names of all existing segments.
        """
        present = await asyncio.to_thread(lambda: {path.name for path in segments_in(self._folder)})
        self._segments = {nonce: found for nonce, found in self._segments.items() if name_of(nonce) in present}
        self._select()
        self._unreadable.clear()
        return present

    def _receive(self, names: Collection[str]) -> list[_OpenSegment]:
        """Map the named segments, except segments that cannot be read at the moment."""
        found, until = [], monotonic() + _ALL_ANSWER_S
        for name in names:
            if monotonic() > until:
                break
            with suppress(OSError, ValueError):
                memory = receive_segment(self._folder / name, _ANSWER_S)
                layout = Layout.read(memory)
                if layout is not None and name_of(layout.nonce) == name:
                    found.append(_OpenSegment(layout, memory, memoryview(memory), layout.first))
        return found

    def read(self, reference: Reference, digest: bytes, vocab_size: int) -> Row | None:
        """Copy the row of a reference, float32 (V,), into new read-only memory.

        Returns None if the row was overwritten or is on another host.
        """
        nonce = reference.nonce
        if nonce not in self._segments and nonce not in self._unreadable:
            self._segments |= {found.layout.nonce: found for found in self._receive([name_of(nonce)])}
            if nonce not in self._segments:
                self._unreadable.add(nonce)
        segment = self._segments.get(nonce)
        row = None if segment is None else self._read(segment, reference.number, digest, vocab_size, None)
        self.counts.lost += row is None
        return row

    def follow(self, value: bytes, digest: bytes, vocab_size: int) -> Row | None:
        """Copy the row of a reference as stored in Redis; None if `read` returns None, or for another version."""
        reference = unpack_reference(value)
        return None if reference is None else self.read(reference, digest, vocab_size)

    def read_at(self, place: bytes, digest: bytes, vocab_size: int) -> Row | None:
        """Copy the row at the place that a notification carries; None if `read` returns None."""
        return self.read(Reference(self.host, *_PLACE.unpack(place)), digest, vocab_size)

    def find(self, digest: bytes, vocab_size: int, out: Row | None = None) -> Row | None:
        """Copy the row of a digest from any segment that the last `refresh` found; None if no segment has the row.

        `out` is a float32 array (V,) to read into; its content is undefined if the row is not found.
        """
        hashed, tag = int.from_bytes(digest[:WORD], "little"), digest[WORD : WORD + 2]
        for segment in self._searched:
            at = PAGE + hashed % segment.layout.buckets * BUCKET.size
            entries = segment.memory[at : at + BUCKET.size]
            if tag not in entries:  # A cheap check before unpacking; it rarely finds a wrong match.
                continue
            wanted = tag_of(digest)
            alike = [entry & _NUMBER_MASK for entry in BUCKET.unpack(entries) if entry & ~_NUMBER_MASK == wanted]
            for number in sorted(filter(None, alike), reverse=True):  # Newest row first: old rows may be overwritten.
                row = self._read(segment, number, digest, vocab_size, out)
                if row is not None:
                    return row
        return None

    def _read(self, segment: _OpenSegment, number: int, digest: bytes, vocab_size: int, out: Row | None) -> Row | None:
        layout = segment.layout
        at = segment.first + number % layout.slots * layout.stride
        begin = at + SLOT.size + HEADER_SIZE
        slot = segment.memory[at:begin]
        seen, whose, length, checksum, is_summed, fingerprint = SLOT.unpack_from(slot)
        if seen != number or whose != digest or fingerprint != layout.fingerprint:
            return None
        if not HEADER_SIZE <= length <= layout.stride - SLOT.size:
            return None
        size = 4 * vocab_size
        if length == HEADER_SIZE + size and not is_summed and slot[SLOT.size :] == f32_header(vocab_size):
            if out is None:
                array, writeable = self._rows.take(size)
                row = array.view(np.float32)
            else:
                row, writeable = out, out.view(np.uint8).data
            writeable[:] = segment.view[begin : begin + size]
        else:
            encoded = segment.view[at + SLOT.size : at + SLOT.size + rounded_up(length, WORD)]
            data = np.frombuffer(encoded, np.uint8)
            if is_summed:
                # Copy the row first: the bytes that are checked must be the bytes that are decoded.
                data, writeable = self._encoded.take(len(encoded))
                writeable[:] = encoded
                if checksum_of(data) != checksum:
                    return None
            elif length == HEADER_SIZE + size:
                return None  # The header is damaged. Decoding would return a view of the segment, not a copy.
            try:
                row = decode_row(data[:length], vocab_size, self._rows.take)
            except ProtocolError:  # The row is of another model or version, or is being overwritten.
                return None
            if out is not None:
                out[:] = row
        if _number_at(segment, at) != number:
            return None
        self.counts.rows += 1
        return row

    def close(self) -> None:
        """Release all segments."""
        self._is_closed = True
        self._segments.clear()
        self._searched.clear()


def _number_at(segment: _OpenSegment, at: int) -> int:
    """The row number in a slot; the writer sets it to 0 before the row changes."""
    return int(_NUMBER.unpack_from(segment.memory, at)[0])
