"""A worker's segment of rows in shared memory: made, written, and removed (`lmpool.rows.shared_memory`)."""

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
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmpool.embedded import physical_memory
from lmpool.errors import ProtocolError
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.row import HEADER_SIZE, Encoded, Encoding, RowBlock, encoded_size
from lmpool.rows.shared_memory import (
    BUCKET,
    FOLDER_VARIABLE,
    HEADER,
    NAME,
    NOT_SHARED,
    PAGE,
    SEALS,
    SLOT,
    WORD,
    Layout,
    Reference,
    Shared,
    checksum_of,
    connect,
    fingerprint_bytes,
    folder,
    host_token,
    is_shared,
    name_of,
    own_folder,
    rounded_up,
    segments_in,
    tag_of,
)
from lmpool.workers.metrics.counters import WorkerCounters

_log = logging.getLogger("lmpool.worker")

_NONCE_SIZE = 8
# What is allocated and touched at a time, between looks whether that is still wanted.
_STEP = 64 * 2**20
_MIN_SLOTS, _MAX_SLOTS = 64, 16_384
# Of what is free: other workers come, and others use the folder and the memory too.
_SHARE, _MAX_DEFAULT = 8, 4 * 2**30
_LOOK_S = 1.0
_CONNECT_S = 0.1
_BACKLOG = 64
# After which a socket that has not got its name yet will not get it any more.
_OLD_S = 60
# What `accept` says of one connection, or for now: of memory and open files there may be some later.
_PASSING = (errno.EINTR, errno.ECONNABORTED, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_ENTRIES = BUCKET.size // WORD
_MFD_CLOEXEC, _MFD_ALLOW_SEALING, _F_ADD_SEALS = 1, 2, 1033
# Of what was free when a segment was begun this part stays free, however many workers make one at once.
_RESERVE_SHARE = 16
# How much memory a container uses, and how much of that is files that it can do without; cgroups of version 2 and 1.
_CONTAINER_MEMORY = (
    ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat", "inactive_file "),
    ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "/sys/fs/cgroup/memory/memory.stat", "total_inactive_file "),
)
# Processors whose stores are seen in their order, and whose loads happen in theirs.
_ORDERED = ("x86_64", "amd64")
_NUMBERS_AT = SLOT.size + HEADER_SIZE
_SLOT_AND_HEADER = struct.Struct(f"{SLOT.format}{HEADER_SIZE}s")


class SegmentListener:
    """The socket that hands out a segment, in a thread: the loop may be busy, and whoever connects waits.

    Args:
        fd: what is handed out; it stays the caller's.
        path: the name of the socket.

    Raises:
        OSError: the folder cannot be used.
    """

    def __init__(self, fd: int, path: Path) -> None:
        self._fd = fd
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Named when it answers: one that does not is removed by other workers.
        hidden = path.with_name(f".{path.name}")
        try:
            with own_folder(path.parent, make=True) as opened:
                self._socket.bind(f"{opened}/{hidden.name}")
            hidden.chmod(0o600)
            self._socket.listen(_BACKLOG)
            hidden.rename(path)
        except BaseException:
            self._socket.close()
            with suppress(OSError):
                hidden.unlink()
            raise
        self._thread = threading.Thread(target=self._answer, name="lmpool-segment", daemon=True)
        self._thread.start()

    def _answer(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if error.errno in _PASSING:
                    time.sleep(_CONNECT_S)
                    continue
                return  # It is closed.
            with suppress(OSError), connection:
                connection.settimeout(_CONNECT_S)
                socket.send_fds(connection, [b"\0"], [self._fd])

    @property
    def is_there(self) -> bool:
        """Whether its name is."""
        return self._path.is_socket()

    def close(self) -> None:
        """Remove it."""
        with suppress(OSError):
            self._path.unlink()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        # What it hands out may be closed after this, and its number be that of another file.
        self._thread.join()
        self._socket.close()


class _Lent(NamedTuple):
    """Slots whose memory somebody has: the number of the first, and that memory, as long as it is in use."""

    first: int
    memory: weakref.ref[NDArray[np.uint8]]


class Segment:
    """The rows that one worker has written last.

    The backend's thread takes `new_rows`; all else is for one other thread.

    Args:
        fd: of the memory, sealed; owned from now on.
        path: the name under which it is handed out.
        memory: the same, mapped.
        layout: how it is divided.

    Attributes:
        nonce: names it.
        size: bytes.
        slots: how many rows it holds.
        is_summed: whether rows have checksums: where the numbers of slots alone do not tell whether a row is whole.

    Raises:
        OSError: the folder cannot be used.
    """

    def __init__(self, fd: int, path: Path, memory: mmap.mmap, layout: Layout) -> None:
        self._fd = fd
        self._path = path
        self._memory = memory
        self._bytes: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        self._view = memoryview(memory)
        self._words = self._view.cast("Q")
        # By bucket of the index: which entry is the next to be replaced.
        self._fill = bytearray(layout.buckets)
        self._layout = layout
        # Which row is in which slot, or will be, and where rows are.
        self._held: list[tuple[int, bytes]] = [(0, b"")] * layout.slots
        self._numbers: dict[bytes, int] = {}
        self._replaced: list[bytes] = []
        # Rows that Redis has itself, too.
        self._stored: set[bytes] = set()
        # The first one lies in the first slot, and none is number 0.
        self._last = layout.slots - 1
        # Slots that somebody writes to, or reads from, in the order of their numbers.
        self._lent: deque[_Lent] = deque()
        self._lock = threading.Lock()
        self.nonce = layout.nonce
        self.size, self.slots = layout.size, layout.slots
        self._first, self._stride = layout.first, layout.stride
        self.is_summed = platform.machine().lower() not in _ORDERED
        self._listener = SegmentListener(fd, path)

    def keep_name(self) -> bool:
        """See that it is handed out under its name; False if that was not so.

        Raises:
            OSError: the folder cannot be used.
        """
        if self._listener.is_there:
            return True
        self._listener.close()
        self._listener = SegmentListener(self._fd, self._path)
        return False

    def new_rows(self, count: int, vocab_size: int, encoding: Encoding) -> NDArray[Any] | None:
        """The memory of some slots, for rows that are about to be computed (`NewRows`); None when there is none.

        It stays theirs as long as anybody has a view of it.
        """
        layout = self._layout
        if vocab_size != layout.vocab_size or not 0 < count <= layout.slots // 2:
            return None
        with self._lock:
            first = self._last + 1
            # Slots that lie side by side.
            if (beyond := first % layout.slots + count) > layout.slots:
                first += layout.slots - (beyond - count)
            if not self._take(first, count):
                return None
            at = self._at(first)
            # All views of it have it as their base, so it ends with the last of them.
            memory = np.frombuffer(self._view[at : at + count * layout.stride], np.uint8)
            self._lent.append(_Lent(first, weakref.ref(memory)))
        shape, strides = (count, vocab_size), (layout.stride, encoding.dtype.itemsize)
        return np.ndarray(shape, encoding.dtype, memory, _NUMBERS_AT, strides)

    def _take(self, first: int, count: int) -> bool:
        """Use the slots of these numbers for other rows, unless somebody still needs one of them."""
        while self._lent and self._lent[0].memory() is None:
            self._lent.popleft()
        if self._lent and first + count > self._lent[0].first + self.slots:
            return False
        self._last = first + count - 1
        for number in range(first, first + count):
            before, digest = self._held[slot := number % self.slots]
            self._held[slot] = number, b""
            # It may have been written again since, into another slot.
            if digest and self._numbers.get(digest) == before:
                del self._numbers[digest]
                if digest in self._stored:
                    self._stored.discard(digest)
                else:
                    self._replaced.append(digest)
            # From here on it is no row.
            self._words[self._at(number) // WORD] = 0
        return True

    def first_of(self, numbers: NDArray[Any]) -> int | None:
        """The number of the first of some rows that lie in `new_rows` one after the other; None if they do not."""
        layout = self._layout
        at = numbers.ctypes.data - self._bytes.ctypes.data - layout.first - _NUMBERS_AT
        if not 0 <= at < layout.slots * layout.stride or numbers.strides[0] != layout.stride:
            return None
        return self._held[at // layout.stride][0]

    def write(
        self, digests: Sequence[bytes], rows: Sequence[Encoded], numbers: Sequence[int] | None = None
    ) -> list[int | None]:
        """Write encoded rows; returns the number of each, or None of one that there is no room for now.

        Args:
            digests: of their prompts.
            rows: the rows.
            numbers: those of the rows, where they have been computed in their slots (`new_rows`).
        """
        slots = self.slots
        written: list[int | None] = []
        # As long as this is there, nobody else gets the slots that are copied to.
        copying = np.empty(0, np.uint8)
        with self._lock:
            for index, digest in enumerate(digests):
                number = self._last + 1 if numbers is None else numbers[index]
                if numbers is None and not self._take(number, 1):
                    written.append(None)
                    continue
                if numbers is None and not any(written):
                    self._lent.append(_Lent(number, weakref.ref(copying)))
                written.append(number)
                self._held[number % slots] = number, digest
                self._numbers[digest] = number
        for digest, row, slot in zip(digests, rows, written, strict=True):
            if slot is not None:
                self._write(digest, row, slot, is_there=numbers is not None)
        return written

    def _write(self, digest: bytes, row: Encoded, number: int, *, is_there: bool) -> None:
        """Write what stands before a row, and the row itself unless it is there already; note where it is."""
        header, values = row
        length = len(header) + values.nbytes
        at = self._at(number)
        begin = at + SLOT.size
        end = begin + length
        if not is_there:
            self._view[begin + len(header) : end] = values
        if rest := -length % WORD:
            self._view[end : end + rest] = bytes(rest)
        _SLOT_AND_HEADER.pack_into(self._memory, at, 0, digest, length, 0, self.is_summed, header)
        if self.is_summed:
            total = checksum_of(self._bytes[begin : begin + rounded_up(length, WORD)])
            SLOT.pack_into(self._memory, at, 0, digest, length, total, True)
        # Last, and at once, which `struct` does not promise.
        self._words[at // WORD] = number
        self._index(digest, number)

    def _index(self, digest: bytes, number: int) -> None:
        """Note in the segment where a row is, in place of the oldest that its bucket knows."""
        bucket = self._layout.bucket_of(digest)
        entry = self._fill[bucket]
        self._fill[bucket] = (entry + 1) % _ENTRIES
        self._words[(PAGE + bucket * BUCKET.size) // WORD + entry] = tag_of(digest) | number

    def _at(self, number: int) -> int:
        """Where a row lies; see `Layout.slot_of`."""
        return self._first + number % self.slots * self._stride

    def note_stored(self, digests: Iterable[bytes]) -> None:
        """Note that Redis has these rows themselves: they stay there when their slots are used again."""
        with self._lock:
            self._stored.update(digest for digest in digests if digest in self._numbers)

    def replaced(self) -> list[bytes]:
        """The digests of the rows that have been in slots which others have by now, since this was called last."""
        with self._lock:
            replaced, self._replaced = self._replaced, []
        return [digest for digest in replaced if digest not in self._numbers]

    def find(self, digest: bytes) -> int | None:
        """The number of a prompt's row, if it is still there."""
        return self._numbers.get(digest)

    def row(self, number: int) -> NDArray[np.uint8]:
        """The encoded row that `find` has found, uint8 of shape (size,), in place."""
        at = self._at(number)
        length = SLOT.unpack_from(self._memory, at)[2]
        return self._bytes[at + SLOT.size : at + SLOT.size + length]

    def close(self) -> None:
        """Hand it out no more; who has it reads it until they let go of it."""
        self._listener.close()
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
    stride = rounded_up(SLOT.size + rounded_up(row, WORD), PAGE)
    slots = min(_MAX_SLOTS, size // stride)
    if slots < _MIN_SLOTS:
        return None
    # On average two entries of eight are taken.
    layout = Layout(
        secrets.token_bytes(_NONCE_SIZE), fingerprint_bytes(fingerprint), vocab_size, -(-slots // 2), stride, slots
    )
    place = folder()
    try:
        with own_folder(place, make=True):
            remove_abandoned(place)
    except OSError as error:
        raise OSError(error.errno, f"{place}: {error.strerror}") from error
    least = free_bytes() // _RESERVE_SHARE
    # Not on macOS, nor in every Python that was built for old systems.
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "this Python cannot make sealed memory (os.memfd_create)")
    fd = os.memfd_create(name_of(layout.nonce), _MFD_CLOEXEC | _MFD_ALLOW_SEALING)
    try:
        for at in range(0, layout.size, _STEP):
            if not is_wanted():
                os.close(fd)
                return None
            # Looked at each time, for other workers may take theirs: too much would end a process, not a call.
            if layout.size - at > (free := free_bytes()) - least:
                raise OSError(errno.ENOSPC, f"{layout.size - at} bytes more are wanted, and {free} are free")
            os.posix_fallocate(fd, at, min(_STEP, layout.size - at))
        memory = mmap.mmap(fd, layout.size)
        # From now on this mapping is the only way to write to it.
        fcntl.fcntl(fd, _F_ADD_SEALS, SEALS)
        pages = np.frombuffer(memory, np.uint8)[::PAGE]
        # Mapping a page at its first write takes ten times as long as the write.
        for at in range(0, len(pages), _STEP // PAGE):
            pages[at : at + _STEP // PAGE] = 0
        memory[: HEADER.size] = layout.pack()
        return Segment(fd, place / name_of(layout.nonce), memory, layout)
    except BaseException:
        os.close(fd)
        raise


def remove_abandoned(place: Path) -> None:
    """Remove the sockets of workers that have ended without doing so."""
    old = time.time() - _OLD_S
    for path in [*segments_in(place), *segments_in(place, f".{NAME}")]:
        try:
            # One that is being made has no name yet, and may get it or be gone at any instant.
            if path.name.startswith(NAME) or path.stat().st_mtime < old:
                connect(path, _CONNECT_S).close()
        except ConnectionRefusedError:
            with suppress(OSError):
                path.unlink()
                _log.info("removed %s, which a worker has left that ended", path)
        except OSError:
            pass


def default_size() -> int:
    """Bytes that a segment has of what is free; 0 where nobody knows."""
    try:
        return max(0, min(free_bytes() // _SHARE, _MAX_DEFAULT))
    except OSError:
        return 0


def free_bytes() -> int:
    """Bytes of memory that are free, on the machine and within the container's limit."""
    known = {}
    for line in Path("/proc/meminfo").read_text("ascii").splitlines():
        name, _, size = line.partition(":")
        if name in ("MemTotal", "MemAvailable"):
            known[name] = int(size.split()[0]) * 1024
    limit = physical_memory()
    free = min(limit, known.get("MemAvailable", limit))
    return min(free, limit - _used_by_container()) if limit < known.get("MemTotal", limit) else free


def _used_by_container() -> int:
    for usage, details, reclaimable in _CONTAINER_MEMORY:
        with suppress(OSError, ValueError):
            used = int(Path(usage).read_text("ascii"))
            lines = Path(details).read_text("ascii").splitlines()
            return used - sum(int(line.split()[1]) for line in lines if line.startswith(reclaimable))
    return 0


class SegmentWriter:
    """Writes one worker's rows to a segment, as long as it has one: without one they go through Redis.

    Args:
        info: what the worker serves.
        worker: its name.
        size: bytes that the segment may take; None for a part of what is free, 0 for no segment.
        counters: are told how large it is.

    Attributes:
        segment: None as long as it is being made, and where there is none.
    """

    def __init__(self, info: ModelInfo, worker: str, size: int | None, counters: WorkerCounters) -> None:
        self._info = info
        self._worker = worker.encode()
        self._counters = counters
        self._is_wanted = size != 0 and is_shared(info.vocab_size)
        self._size = default_size() if size is None else size
        self._host = host_token()
        self.segment: Segment | None = None
        self._lock = threading.Lock()

    @property
    def host(self) -> bytes:
        """What clients say that can read the segment; b"" without one."""
        return self._host if self.segment is not None else b""

    async def run(self) -> None:
        """Make the segment, and see that it is handed out."""
        await self.make()
        while self._is_wanted:
            await asyncio.sleep(_LOOK_S)
            self._keep_name()

    def _keep_name(self) -> None:
        try:
            if self.segment is not None and not self.segment.keep_name():
                _log.warning("somebody has removed the socket of this worker's shared memory: it is there again")
        except OSError as error:
            # Clients that have the segment read on; the others are given rows through Redis.
            _log.debug("%s: %s", folder(), error)

    async def make(self) -> None:
        """Make a segment, if there is room for one."""
        await asyncio.to_thread(self._make)

    def _make(self) -> None:
        info = self._info
        try:
            segment = make_segment(info.fingerprint, info.vocab_size, self._size, lambda: self._is_wanted)
        except OSError as error:
            self._give_up(error.strerror or str(error))
            return
        with self._lock:
            # The worker may have ended meanwhile, and waits for no thread.
            if segment is not None and not self._is_wanted:
                segment.close()
            elif segment is not None:
                self.segment, self._counters.shared_bytes = segment, segment.size
                _log.info("rows for this machine: %d of them in shared memory", segment.slots)
            elif self._is_wanted:
                row = encoded_size(info.vocab_size, Encoding.F32)
                self._give_up(f"{self._size} bytes hold fewer than {_MIN_SLOTS} rows of {row} bytes")

    def _give_up(self, why: str) -> None:
        self._is_wanted = False
        _log.warning(
            "rows go through Redis, not through shared memory: %s. Choose --shm-bytes, give the machine or container "
            "more memory, or name another folder by %s; --shm-bytes 0 turns this message off",
            why,
            FOLDER_VARIABLE,
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
        segment.note_stored(leave_out)
        digests = [digest for digest in block.digests if digest not in leave_out]
        numbers = {digest: None if digest in overwrite else segment.find(digest) for digest in digests}
        rows = [row for row, digest in enumerate(block.digests) if numbers.get(digest, 0) is None]
        first = segment.first_of(block.numbers)
        written = segment.write(
            [block.digests[row] for row in rows],
            block.encoded(rows),
            None if first is None else [first + row for row in rows],
        )
        numbers.update(zip((block.digests[row] for row in rows), written, strict=True))
        # A number is the last of a reference, but for the worker.
        head = Reference(self._host, segment.nonce, 0).pack()[:-WORD]
        references = {
            digest: head + number.to_bytes(WORD, "little") + self._worker
            for digest, number in numbers.items()
            if number is not None
        }
        return Shared(references, segment.replaced(), self._host)

    def note_stored(self, digests: Iterable[bytes]) -> None:
        """See `Segment.note_stored`."""
        if self.segment is not None:
            self.segment.note_stored(digests)

    def new_rows(self, count: int, vocab_size: int, encoding: Encoding) -> NDArray[Any] | None:
        """See `Segment.new_rows`; None without a segment, too."""
        segment = self.segment
        return None if segment is None else segment.new_rows(count, vocab_size, encoding)

    def find(self, digest: bytes) -> RowBlock | None:
        """The row of a prompt, if the segment has it (a copy)."""
        segment = self.segment
        number = None if segment is None else segment.find(digest)
        if segment is None or number is None:
            return None
        try:
            block = RowBlock.decoded(digest, segment.row(number), self._info.vocab_size)
        except ProtocolError:
            return None
        # Its slot may have been given to another row meanwhile.
        return block if segment.find(digest) == number else None

    def close(self) -> None:
        """Remove the segment."""
        with self._lock:
            self._is_wanted = False
            self._drop()

    def _drop(self) -> None:
        if self.segment is not None:
            self.segment.close()
            self.segment, self._counters.shared_bytes = None, 0
