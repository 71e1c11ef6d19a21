"""A worker's segment of rows in shared memory: made, written, and removed (`lmpool.rows.shared_memory`)."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import mmap
import os
import secrets
import struct
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lmpool.embedded import physical_memory
from lmpool.errors import ProtocolError
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.row import Encoding, RowBlock, encoded_size
from lmpool.rows.shared_memory import (
    BUCKET,
    HEADER,
    NAME,
    NOT_SHARED,
    PAGE,
    SLOT,
    WORD,
    Layout,
    Reference,
    Shared,
    fingerprint_bytes,
    folder,
    host_token,
    is_shared,
    row_in,
    segments_in,
    tag_of,
    whole_pages,
    whole_words,
)
from lmpool.workers.metrics.counters import Counters

_log = logging.getLogger("lmpool.worker")

_NONCE_SIZE = 8
# What is allocated and touched at a time, between looks whether that is still wanted.
_STEP = 64 * 2**20
_LEAST_SLOTS, _MOST_SLOTS = 64, 16_384
# Of what is free: other workers come, and others use the folder and the memory too.
_SHARE, _MOST_DEFAULT = 8, 4 * 2**30
_LOOK_S = 1.0
_ENTRY = struct.Struct("<Q")
_ENTRIES = BUCKET.size // _ENTRY.size


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

    def __init__(self, fd: int, path: Path, memory: mmap.mmap, layout: Layout) -> None:
        self._fd = fd
        self._path = path
        self._memory = memory
        self._bytes: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        self._words: NDArray[np.uint64] = np.frombuffer(memory, np.uint64)
        self._view = memoryview(memory)
        # By bucket of the index: which entry is the next to be replaced.
        self._fill = bytearray(layout.buckets)
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
        layout, view = self._layout, self._view
        self.written = number = self.written + 1
        slot = number % layout.slots
        replaced = self._digests[slot]
        self._digests[slot] = digest
        # It may have been written again since, into another slot.
        if replaced and self._numbers.get(replaced) == number - layout.slots:
            del self._numbers[replaced]
        else:
            replaced = b""
        self._numbers[digest] = number
        at = layout.first + slot * layout.stride
        begin, length = at + SLOT.size, len(header) + numbers.nbytes
        end, stop = begin + length, begin + whole_words(length)
        view[begin : begin + len(header)] = header
        view[begin + len(header) : end] = numbers
        view[end:stop] = bytes(stop - end)
        total = int(np.add.reduce(self._words[begin // WORD : stop // WORD]))
        SLOT.pack_into(self._memory, at, number, digest, length, total)
        self._index(digest, number)
        return number, b"" if replaced == digest else replaced

    def _index(self, digest: bytes, number: int) -> None:
        """Note in the file where a row is, in place of the oldest that its bucket knows."""
        bucket = self._layout.bucket_of(digest)
        entry = self._fill[bucket]
        self._fill[bucket] = (entry + 1) % _ENTRIES
        _ENTRY.pack_into(self._memory, PAGE + bucket * BUCKET.size + entry * _ENTRY.size, tag_of(digest) | number)

    def find(self, digest: bytes) -> int | None:
        """The number of a prompt's row, if it is still there."""
        number = self._numbers.get(digest)
        if number is None or not self.is_whole():
            return None
        data = self._bytes[(at := self._layout.slot_of(number)) : at + self._layout.stride]
        return number if isinstance(row_in(data, number, digest), np.ndarray) else None

    def row(self, number: int) -> NDArray[np.uint8]:
        """The encoded row that `find` has found, uint8 of shape (size,), in place."""
        at = self._layout.slot_of(number)
        _, _, length, _ = SLOT.unpack_from(self._memory, at)
        return self._bytes[at + SLOT.size : at + SLOT.size + length]

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
    stride = whole_pages(SLOT.size + whole_words(row))
    slots = min(_MOST_SLOTS, size // stride)
    if slots < _LEAST_SLOTS:
        return None
    # On average two entries of eight are taken.
    layout = Layout(
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
        pages = np.frombuffer(memory, np.uint8)[::PAGE]
        # Mapping a page at its first write takes ten times as long as the write.
        for at in range(0, len(pages), _STEP // PAGE):
            pages[at : at + _STEP // PAGE] = 0
        memory[: HEADER.size] = layout.pack()
        path = place / f"{NAME}{layout.nonce.hex()}"
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
    for path in segments_in(place):
        with suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                _log.info("removed %s, which a worker has left that ended", path)
            finally:
                os.close(fd)


def default_size() -> int:
    """Bytes that a segment has of what is free; 0 where there is no folder."""
    try:
        return min(_free_bytes() // _SHARE, _MOST_DEFAULT)
    except OSError:
        return 0


def _free_bytes() -> int:
    """Bytes that are free in the folder and in memory; no more than the container may have."""
    place = os.statvfs(folder())
    free = min(place.f_bavail * place.f_frsize, physical_memory())
    for line in Path("/proc/meminfo").read_text("ascii").splitlines():
        if line.startswith("MemAvailable:"):
            free = min(free, int(line.split()[1]) * 1024)
    return free


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

    def __init__(self, info: ModelInfo, worker: str, size: int | None, counters: Counters) -> None:
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
        """Make the segment, and another one when something has happened to it."""
        while self._is_wanted:
            if self.segment is None:
                await self.make()
            await asyncio.sleep(_LOOK_S)

    async def make(self) -> None:
        """Make a segment, if there is room for one."""
        await asyncio.to_thread(self._make)

    def _make(self) -> None:
        info = self._info
        try:
            segment = make_segment(info.fingerprint, info.vocab_size, self._size, lambda: self._is_wanted)
        except OSError as error:
            self._give_up(f"{folder()}: {error.strerror or error}")
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
                self._give_up(f"{self._size} bytes hold fewer than {_LEAST_SLOTS} rows of {row} bytes")

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
            self._drop()
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
        with self._lock:
            self._is_wanted = False
            self._drop()

    def _drop(self) -> None:
        if self.segment is not None:
            self.segment.close()
            self.segment, self._counters.shared_bytes = None, 0
