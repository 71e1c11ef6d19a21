"""Create, write and remove a worker's segment of rows in shared memory; `lmpool.rows.shared_memory` has the layout."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import mmap
import os
import platform
import secrets
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmpool.embedded import physical_memory
from lmpool.errors import ProtocolError
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.row import HEADER_SIZE, Encoded, Encoding, RowBlock, encoded_size
from lmpool.rows import shared_memory
from lmpool.rows.shared_memory import BUCKET, PAGE, SLOT, WORD, Layout, Shared, folder, name_of, rounded_up

_log = logging.getLogger("lmpool.worker")

_NONCE_SIZE = 8  # Bytes of the random part of a segment's name, so that all names differ.
_MIN_SLOTS, _MAX_SLOTS = 64, 16_384  # Min and max rows per segment; fewer rows are overwritten before they are read.
_NAME_CHECK_S = 1.0  # Seconds between two checks that the worker's socket still exists.
_ORDERED = ("x86_64", "amd64")  # Processors that keep the order of stores and of loads.
# Values of these constants in Linux's headers.
_MFD_CLOEXEC, _MFD_ALLOW_SEALING, _F_ADD_SEALS, _F_SEAL_SHRINK = 1, 2, 1033, 2
_STEP_BYTES = 64 * 2**20  # Bytes to allocate between two checks that the segment is wanted and fits into free memory.
_RESERVE_SHARE = 16  # 1/16 of the free memory stays free, even if many workers create segments at once.
_DEFAULT_SHARE = 8  # A segment takes 1/8 of the free memory by default: other programs need memory too.
_MAX_DEFAULT_BYTES = 4 * 2**30  # Max default size of a segment; --shm-bytes can set more.
_CONNECT_S = 0.1  # Timeout in seconds of a connection to a worker; a live worker accepts within 1 ms.
_BACKLOG = 64  # Max readers that wait for a connection at once.
_OLD_S = 0.1  # Min age in seconds of a socket to remove; a worker listens microseconds after creating its socket.
# Files with a container's used memory, and with the part that is file cache (reclaimable): cgroups version 2 and 1.
_CONTAINER_MEMORY = (
    ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat", "inactive_file "),
    ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "/sys/fs/cgroup/memory/memory.stat", "total_inactive_file "),
)
_SLOT_AND_HEADER = struct.Struct(f"{SLOT.format}{HEADER_SIZE}s")


MapMemory = Callable[[int, mmap.mmap], None]
"""A function of a descriptor and its mapped memory, which other processes may map during the call."""


class SegmentListener:
    """The socket that hands out a segment, in its own thread, because the event loop may be busy while a reader waits.

    The caller closes `fd`, the descriptor of the memory. The constructor raises `OSError` if the folder cannot be used.
    """

    def __init__(self, fd: int, path: Path) -> None:
        self._fd = fd
        self._path = path
        self._is_closed = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # Before `bind`: `path.chmod` fails if another worker removes the socket before this worker listens.
            os.fchmod(self._socket.fileno(), 0o600)
            with shared_memory.own_folder(path.parent, make=True) as opened:
                self._socket.bind(f"{opened}/{path.name}")
            self._socket.listen(_BACKLOG)
        except BaseException:
            self._socket.close()
            with suppress(OSError):
                path.unlink()
            raise
        self._thread = threading.Thread(target=self._serve, name="lmpool-segment", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # The socket is closed, or memory or descriptors are short at the moment.
                time.sleep(0 if self._is_closed else _CONNECT_S)
                continue
            with suppress(OSError), connection:
                connection.settimeout(_CONNECT_S)
                socket.send_fds(connection, [b"\0"], [self._fd])

    def close(self) -> None:
        """Remove the socket."""
        self._is_closed = True
        with suppress(OSError):
            self._path.unlink()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        # Wait for the end of the thread: after this call, the descriptor number `fd` may belong to another file.
        self._thread.join()
        self._socket.close()


class Segment:
    """The rows that one worker wrote last, in sealed memory whose descriptor this object owns.

    The backend's thread calls `new_rows`, any thread `write`, `find` and `row`, and one other thread all other methods.
    A slot may be reused while `row` is read: the copy is whole if `find` returned its number before and after the copy.
    The constructor raises `OSError` if the folder of sockets cannot be used.
    """

    def __init__(self, fd: int, memory: mmap.mmap, layout: Layout) -> None:
        self._fd = fd
        self._path = folder() / name_of(layout.nonce)
        self._memory = memory
        self._bytes: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        self._view = memoryview(memory)
        self._words = self._view.cast("Q")
        self._layout = layout
        self._oldest = bytearray(layout.buckets)  # Index of the entry to replace next, per bucket.
        # Number and digest of the row in each slot; the digest is b"" until the row is computed.
        self._held: list[tuple[int, bytes]] = [(0, b"")] * layout.slots
        self._numbers: dict[bytes, int] = {}  # Digest -> number of the row.
        self._replaced: list[bytes] = []
        self._stored: set[bytes] = set()  # Digests of rows that Redis stores too.
        self._last = layout.slots - 1  # Start value: the first row is in slot 0, and no row has number 0.
        # Slots that `new_rows` handed out, ordered by row number: first row number, weak reference to the memory.
        self._lent: deque[tuple[int, weakref.ref[NDArray[np.uint8]]]] = deque()
        self._lock = threading.Lock()
        self.nonce, self.size, self.slots = layout.nonce, layout.size, layout.slots
        self._first, self._stride = layout.first, layout.stride
        # Add checksums where processors reorder stores: there the numbers in slots do not prove that a row is whole.
        self.is_summed = platform.machine().lower() not in _ORDERED
        self._listener = SegmentListener(fd, self._path)

    def keep_name(self) -> bool:
        """Create the socket again if another program removed it; returns whether the socket still existed.

        Raises `OSError` if the folder cannot be used.
        """
        if self._path.is_socket():
            return True
        self._listener.close()
        self._listener = SegmentListener(self._fd, self._path)
        return False

    def new_rows(self, count: int, vocab_size: int, encoding: Encoding) -> NDArray[Any] | None:
        """The memory of adjacent slots, for rows that a step will compute (`NewRows`); None if too few slots are free.

        The slots stay reserved as long as any view of the memory exists.
        """
        layout = self._layout
        if vocab_size != layout.vocab_size or not 0 < count <= layout.slots // 2:
            return None
        with self._lock:
            first = self._last + 1
            if (beyond := first % layout.slots + count) > layout.slots:  # Use adjacent slots: begin at slot 0.
                first += layout.slots - (beyond - count)
            if not self._take(first, count):
                return None
            at = self._at(first)
            # Every view has this array as its base, so the array lives as long as the last view.
            memory = np.frombuffer(self._view[at : at + count * layout.stride], np.uint8)
            self._lent.append((first, weakref.ref(memory)))
        shape, strides = (count, vocab_size), (layout.stride, encoding.dtype.itemsize)
        return np.ndarray(shape, encoding.dtype, memory, SLOT.size + HEADER_SIZE, strides)

    def _take(self, first: int, count: int) -> bool:
        """Take the slots of these row numbers for new rows; returns False if one of the slots is still in use."""
        while self._lent and self._lent[0][1]() is None:
            self._lent.popleft()
        if self._lent and first + count > self._lent[0][0] + self.slots:
            return False
        self._last = first + count - 1
        for number in range(first, first + count):
            before, digest = self._held[slot := number % self.slots]
            self._held[slot] = number, b""
            if digest and self._numbers.get(digest) == before:  # The row has no newer copy in another slot.
                del self._numbers[digest]
                if digest in self._stored:
                    self._stored.discard(digest)
                else:
                    self._replaced.append(digest)
            self._words[self._at(number) // WORD] = 0
        return True

    def first_of(self, numbers: NDArray[Any]) -> int | None:
        """The row number of the first of these rows, if they are in adjacent slots of `new_rows`; else None."""
        layout = self._layout
        at = numbers.ctypes.data - self._bytes.ctypes.data - layout.first - SLOT.size - HEADER_SIZE
        if not 0 <= at < layout.slots * layout.stride or numbers.strides[0] != layout.stride:
            return None
        return self._held[at // layout.stride][0]

    def write(
        self, digests: Sequence[bytes], rows: Sequence[Encoded], numbers: Sequence[int] | None = None
    ) -> list[int | None]:
        """Write encoded rows; returns the number of each row, or None for a row without a free slot.

        `numbers` are the numbers of rows that were computed in their slots (`new_rows`).
        """
        written: list[int | None] = []
        with self._lock:  # Lock, so that `new_rows` takes no slot that is being written.
            end = self._last + self.slots
            for index, (digest, row) in enumerate(zip(digests, rows, strict=True)):
                number = self._last + 1 if numbers is None else numbers[index]
                if numbers is None and (number > end or not self._take(number, 1)):
                    written.append(None)
                    continue
                written.append(number)
                self._write(digest, row, number, is_there=numbers is not None)
                # Register the row last: `find` takes no lock, and other threads may copy the row that it returns.
                self._held[number % self.slots] = number, digest
                self._numbers[digest] = number
        return written

    def _write(self, digest: bytes, row: Encoded, number: int, *, is_there: bool) -> None:
        """Write the beginning of a slot, and the row itself unless `is_there` (it was computed in the slot)."""
        header, values = row
        length = len(header) + values.nbytes
        at = self._at(number)
        begin, end = at + SLOT.size, at + SLOT.size + length
        if not is_there:
            self._view[begin + len(header) : end] = values
        if rest := -length % WORD:
            self._view[end : end + rest] = bytes(rest)
        facts = digest, length, 0, self.is_summed, self._layout.fingerprint
        _SLOT_AND_HEADER.pack_into(self._memory, at, 0, *facts, header)
        if self.is_summed:
            checksum = shared_memory.checksum_of(self._bytes[begin : begin + rounded_up(length, WORD)])
            SLOT.pack_into(self._memory, at, 0, digest, length, checksum, True, self._layout.fingerprint)
        # Write the number last, and in one store, which `struct` does not guarantee.
        self._words[at // WORD] = number
        # Add the row to the index, in place of the oldest entry of its bucket.
        bucket = int.from_bytes(digest[:WORD], "little") % self._layout.buckets
        entry = self._oldest[bucket]
        self._oldest[bucket] = (entry + 1) % (BUCKET.size // WORD)
        self._words[(PAGE + bucket * BUCKET.size) // WORD + entry] = shared_memory.tag_of(digest) | number

    def _at(self, number: int) -> int:
        return self._first + number % self.slots * self._stride

    def note_stored(self, digests: Iterable[bytes]) -> None:
        """Note that Redis stores these rows too: Redis keeps these rows when their slots are reused."""
        with self._lock:
            self._stored.update(digest for digest in digests if digest in self._numbers)

    def replaced(self) -> list[bytes]:
        """The digests of the rows whose slots were reused since the last call."""
        with self._lock:
            replaced, self._replaced = self._replaced, []
        return [digest for digest in replaced if digest not in self._numbers]

    def find(self, digest: bytes) -> int | None:
        """The number of a prompt's row, if the segment still has the row."""
        return self._numbers.get(digest)

    def row(self, number: int) -> NDArray[np.uint8]:
        """The encoded row with this number, uint8 of shape (size,), not copied."""
        begin = self._at(number) + SLOT.size
        length = SLOT.unpack_from(self._memory, self._at(number))[2]
        return self._bytes[begin : begin + length]

    def rename(self, fingerprint: str) -> None:
        """Give the memory another name, for rows of other weights of the model; no method finds the earlier rows then.

        Readers that have mapped the memory under its earlier name still find those rows until they are overwritten, and
        never a row of the other weights. `keep_name` creates the socket if this method cannot.
        """
        nonce, wanted = secrets.token_bytes(_NONCE_SIZE), shared_memory.fingerprint_bytes(fingerprint)
        if wanted == self._layout.fingerprint:
            return
        with self._lock:
            self._layout = self._layout._replace(nonce=nonce, fingerprint=wanted)
            self._held = [(number, b"") for number, _ in self._held]
            self._numbers, self._replaced, self._stored = {}, [], set()
            self._memory[: shared_memory.HEADER.size] = self._layout.pack()
            self.nonce, self._path = nonce, folder() / name_of(nonce)
        self._listener.close()
        with suppress(OSError):
            self._listener = SegmentListener(self._fd, self._path)

    def close(self) -> None:
        """Stop handing out the segment. Processes that have mapped the segment can read it until they release it."""
        self._listener.close()
        os.close(self._fd)


def remove_abandoned(place: Path) -> None:
    """Remove the sockets of workers that ended without removing their sockets."""
    old = time.time() - _OLD_S
    for path in shared_memory.segments_in(place):
        with suppress(OSError):
            try:
                if path.stat().st_mtime < old:
                    with shared_memory.connect(path, _CONNECT_S):
                        pass
            except ConnectionRefusedError:
                path.unlink()
                _log.info("removed %s: the worker that created this socket has ended", path)


def default_size() -> int:
    """The default size of a segment in bytes, derived from the free memory; 0 if the free memory is unknown."""
    with suppress(OSError):
        return max(0, min(free_bytes() // _DEFAULT_SHARE, _MAX_DEFAULT_BYTES))
    return 0


def free_bytes() -> int:
    """Bytes of memory that are free on the machine and within the container's limit."""
    lines = map(str.split, Path("/proc/meminfo").read_text("ascii").splitlines())
    known = {words[0]: int(words[1]) * 1024 for words in lines}
    limit = physical_memory()
    free = min(limit, known.get("MemAvailable:", limit))
    if limit < known.get("MemTotal:", limit):
        for usage, details, reclaimable in _CONTAINER_MEMORY:
            with suppress(OSError, ValueError):
                used = int(Path(usage).read_text("ascii"))
                parts = Path(details).read_text("ascii").splitlines()
                used -= sum(int(part.split()[1]) for part in parts if part.startswith(reclaimable))
                return min(free, limit - used)
    return free


def make_segment(
    fingerprint: str,
    vocab_size: int,
    size: int,
    is_wanted: Callable[[], bool],
    before_sealing: MapMemory = lambda _, __: None,
) -> Segment | None:
    """Create a segment of at most `size` bytes for a model's rows; takes about a second for each 3 GiB.

    Returns None if `size` is too small, or as soon as `is_wanted` returns False. Raises `OSError` if the folder of
    sockets cannot be used, or too little memory is free.
    """
    stride = rounded_up(SLOT.size + rounded_up(encoded_size(vocab_size, Encoding.F32), WORD), PAGE)
    slots = min(_MAX_SLOTS, size // stride)
    if slots < _MIN_SLOTS:
        return None
    # With half as many buckets as slots, a bucket uses two of its eight entries on average.
    nonce, buckets = secrets.token_bytes(_NONCE_SIZE), -(-slots // 2)
    layout = Layout(nonce, shared_memory.fingerprint_bytes(fingerprint), vocab_size, buckets, stride, slots)
    place = folder()
    try:
        with shared_memory.own_folder(place, make=True):
            remove_abandoned(place)
    except OSError as error:
        raise OSError(error.errno, f"{place}: {error.strerror}") from error
    reserve = free_bytes() // _RESERVE_SHARE
    if not hasattr(os, "memfd_create"):  # macOS and old Linux systems lack `memfd_create`.
        raise OSError(errno.ENOSYS, "this Python cannot make sealed memory (os.memfd_create)")
    with ExitStack() as cleanup:
        fd = os.memfd_create(name_of(nonce), _MFD_CLOEXEC | _MFD_ALLOW_SEALING)
        cleanup.callback(os.close, fd)
        for at in range(0, layout.size, _STEP_BYTES):
            if not is_wanted():
                return None
            missing, free = layout.size - at, free_bytes()
            # Check before every step: other workers may allocate too, and without memory the kernel kills a process.
            if missing > free - reserve:
                raise OSError(errno.ENOSPC, f"{missing} bytes more are needed, and {free} are free")
            os.posix_fallocate(fd, at, min(_STEP_BYTES, missing))
        # Seal the size first: an access to memory that another process has shrunk would end this process (SIGBUS).
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK)
        if (left := os.fstat(fd).st_size) < layout.size:
            raise OSError(errno.EIO, f"another process has shrunk the memory from {layout.size} to {left} bytes")
        memory = mmap.mmap(fd, layout.size)
        before_sealing(fd, memory)  # No process can map sealed memory for writing.
        fcntl.fcntl(fd, _F_ADD_SEALS, shared_memory.SEALS)
        # Map all pages now: mapping a page at its first write would take ten times as long as the write.
        pages = np.frombuffer(memory, np.uint8)[::PAGE]
        for at in range(0, len(pages), _STEP_BYTES // PAGE):
            pages[at : at + _STEP_BYTES // PAGE] = 0
        memory[: shared_memory.HEADER.size] = layout.pack()
        segment = Segment(fd, memory, layout)
        cleanup.pop_all()
    return segment


class SegmentWriter:
    """Writes one worker's rows to a segment. While there is no segment, rows go through Redis.

    All versions of the model's weights use the same memory, because allocating it may take longer than loading weights.

    `size` limits the bytes of the segment: None for a part of the free memory, 0 for no segment. `on_size` receives the
    segment's size whenever the size changes. `map_memory` receives the segment's memory while other processes of the
    worker can map it for writing.
    """

    def __init__(
        self,
        info: ModelInfo,
        worker: str,
        size: int | None,
        on_size: Callable[[int], None] = lambda _: None,
        map_memory: MapMemory = lambda _, __: None,
    ) -> None:
        self._info = info
        self._worker = worker.encode()
        self._on_size = on_size
        self._map_memory = map_memory
        self._is_wanted = size != 0 and shared_memory.is_shared(info.vocab_size)
        self._size = default_size() if size is None else size
        self.segment: Segment | None = None
        self.host = b""  # The host of clients that can read the segment; b"" if there is no segment.
        self.address = b""  # "HOST:PORT" of the worker's row server; b"" if there is none.
        self._lock = threading.Lock()
        self._making: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Create the segment, and keep its socket in place. This method may be cancelled and called again."""
        if self._making is None:
            self._making = asyncio.create_task(asyncio.to_thread(self.make), name="segment")
        await asyncio.shield(self._making)
        while self._is_wanted:
            await asyncio.sleep(_NAME_CHECK_S)
            try:
                if self.segment is not None and not self.segment.keep_name():
                    _log.warning("another program removed the socket of this worker's shared memory; created it again")
            except OSError as error:
                # Clients that have mapped the segment can still read it; other clients get rows through Redis.
                _log.debug("%s: %s", folder(), error)

    def change(self, info: ModelInfo) -> None:
        """Write rows of other weights of the model from now on, under another name of the segment."""
        with self._lock:
            self._info = info
            if self.segment is not None:
                self.segment.rename(info.fingerprint)

    def make(self) -> None:
        """Create a segment, if enough memory is free; blocks for up to seconds."""
        info = self._info
        row_bytes = encoded_size(info.vocab_size, Encoding.F32)
        why = f"{self._size} bytes hold fewer than {_MIN_SLOTS} rows of {row_bytes} bytes"
        try:
            segment = make_segment(
                info.fingerprint, info.vocab_size, self._size, lambda: self._is_wanted, self._map_memory
            )
        except OSError as error:
            segment, why = None, error.strerror or str(error)
        with self._lock:
            if segment is not None and not self._is_wanted:  # The worker has stopped without waiting for this thread.
                segment.close()
            elif segment is not None:
                self.host = shared_memory.host_token()  # Set first: the event loop reads it once a segment exists.
                segment.rename(self._info.fingerprint)  # The weights may have changed since this thread began.
                self.segment = segment
                self._on_size(segment.size)
                _log.info("shared memory of %d rows for clients on this machine", segment.slots)
            elif self._is_wanted:
                self._is_wanted = False
                folders = f"name another folder by {shared_memory.FOLDER_VARIABLE}"
                why += f". Choose --shm-bytes, give the machine or container more memory, or {folders}"
                off = "--shm-bytes 0 turns this message off"
                _log.warning("rows go through Redis, not through shared memory: %s; %s", why, off)

    @property
    def is_wanted(self) -> bool:
        """Whether there is a segment, or will be one."""
        return self._is_wanted

    def write(self, block: RowBlock, leave_out: Collection[bytes], overwrite: Collection[bytes]) -> Shared:
        """Write the rows of a block as `write_rows` does; `leave_out` are rows that Redis stores."""
        segment = self.segment
        if segment is None:
            return shared_memory.NOT_SHARED
        segment.note_stored(leave_out)
        return Shared(self.write_rows(block, leave_out, overwrite), segment.replaced(), self.host, self.address)

    def write_rows(
        self, block: RowBlock, leave_out: Collection[bytes], overwrite: Collection[bytes]
    ) -> dict[bytes, bytes]:
        """Write the rows of a block except `leave_out`; returns the references of the rows that have slots, by digest.

        A row that the segment has is written again only if it is in `overwrite`. Any thread may call this method.
        """
        segment = self.segment
        if segment is None:
            return {}
        digests = [digest for digest in block.digests if digest not in leave_out]
        numbers = {digest: None if digest in overwrite else segment.find(digest) for digest in digests}
        rows = [row for row, digest in enumerate(block.digests) if numbers.get(digest, 0) is None]
        first = segment.first_of(block.numbers)
        in_place = None if first is None else [first + row for row in rows]
        written = segment.write([block.digests[row] for row in rows], block.encoded(rows), in_place)
        numbers.update(zip((block.digests[row] for row in rows), written, strict=True))
        # All references differ only in the number of the row, which is before the worker's name.
        sample = shared_memory.Reference(self.host, segment.nonce, 0, b"", self.address).pack()
        head, tail = shared_memory.split_reference(sample)
        return {
            digest: head + number.to_bytes(WORD, "little") + self._worker + tail
            for digest, number in numbers.items()
            if number is not None
        }

    def note_stored(self, digests: Iterable[bytes]) -> None:
        """See `Segment.note_stored`."""
        if self.segment is not None:
            self.segment.note_stored(digests)

    def new_rows(self, count: int, vocab_size: int, encoding: Encoding) -> NDArray[Any] | None:
        """See `Segment.new_rows`; None if there is no segment."""
        segment = self.segment
        return None if segment is None else segment.new_rows(count, vocab_size, encoding)

    def find(self, digest: bytes) -> RowBlock | None:
        """A copy of the row of a prompt, or None if the segment does not have the row."""
        segment = self.segment
        if segment is None or (number := segment.find(digest)) is None:
            return None
        with suppress(ProtocolError):
            block = RowBlock.decoded(digest, segment.row(number), self._info.vocab_size)
            if segment.find(digest) == number:  # The slot of the row was not reused during the copy.
                return block
        return None

    @property
    def row_bytes(self) -> int:
        """Bytes of an encoded row."""
        return encoded_size(self._info.vocab_size, self._info.row_encoding)

    def copy_to(self, memory: memoryview, key: bytes) -> bool:
        """Copy an encoded row to `memory`, which has `row_bytes` bytes; returns whether the segment has the row.

        `key` is the nonce of the segment and the digest of the prompt.
        """
        segment, digest = self.segment, key[_NONCE_SIZE:]
        if segment is None or segment.nonce != key[:_NONCE_SIZE] or (number := segment.find(digest)) is None:
            return False
        if len(row := segment.row(number).data) != len(memory):
            return False  # The row has another encoding than the model info, so it does not fit into `memory`.
        memory[:] = row
        # `find` returns a number only while the slot has the whole row, so this copy is whole.
        return segment.find(digest) == number

    def close(self) -> None:
        """Remove the segment."""
        with self._lock:
            self._is_wanted = False
            if self.segment is not None:
                self.segment.close()
                self.segment, self.host = None, b""
                self._on_size(0)
