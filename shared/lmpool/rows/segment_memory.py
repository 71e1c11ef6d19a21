"""The memory of a segment: created and sealed by its worker, handed out through a socket, mapped by readers.

The memory has no name in a file system and is sealed: only its worker can write to it, and no process can shrink it,
which would crash every process that has mapped the memory. Its socket is in a folder that only programs of this user
can use (/dev/shm/lmpool-UID).
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

import numpy as np

from lmpool.embedded import physical_memory

FOLDER_VARIABLE = "LMPOOL_SHM_DIR"
"""Environment variable that replaces the folder /dev/shm. The folder must not be shared with other machines."""

PAGE = 4096
"""Bytes of a page of memory."""

NAME = "lmpool-"
"""The beginning of the names of segments, of their sockets and of the folders of sockets."""

SEALS = 0x1 | 0x2 | 0x4 | 0x10
"""F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_FUTURE_WRITE: few builds of Python define all four."""

_log = logging.getLogger("lmpool.worker")

_O_PATH = getattr(os, "O_PATH", 0)  # macOS lacks this flag, and no segment can be created there.
_MFD_CLOEXEC, _MFD_ALLOW_SEALING, _F_ADD_SEALS, _F_GET_SEALS = 1, 2, 1033, 1034  # Values from Linux's headers.
_STEP_BYTES = 64 * 2**20  # Bytes to allocate between two checks that the segment is still wanted and fits.
_RESERVE_SHARE = 16  # 1/16 of the free memory stays free, even if many workers create segments at once.
_DEFAULT_SHARE = 8  # A segment takes 1/8 of the free memory by default: other programs need memory too.
_MAX_DEFAULT_BYTES = 4 * 2**30  # Max default size of a segment; --shm-bytes can set more.
_CONNECT_S = 0.1  # Timeout of a connection to a worker; a live worker accepts within 1 ms.
_BACKLOG = 64  # Max readers that wait for a connection at once.
_OLD_S = 0.1  # Min age of a socket to remove; a worker listens microseconds after creating it.
# Files with a container's used memory, and with the part that is file cache (reclaimable): cgroups version 2 and 1.
_CONTAINER_MEMORY = (
    ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat", "inactive_file "),
    ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "/sys/fs/cgroup/memory/memory.stat", "total_inactive_file "),
)


def folder() -> Path:
    """The folder of the sockets of this user's segments; workers create it."""
    return Path(os.environ.get(FOLDER_VARIABLE) or "/dev/shm", f"{NAME}{os.geteuid()}")


def host_token() -> bytes:
    """16 characters that are equal for processes that use the same folder; b"" if this machine has no such folder.

    The characters depend on the kernel's boot, the file system and the user; host names do not show who shares memory.
    """
    own = folder()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        place = own.parent.stat()
    except OSError:
        return b""
    return blake2b(f"{boot} {place.st_dev} {place.st_ino} {own.name}".encode(), digest_size=8).hexdigest().encode()


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
    with suppress(OSError), own_folder(place) as opened, os.scandir(opened) as entries:
        for entry in entries:
            with suppress(OSError):
                if entry.name.startswith(NAME) and stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode):
                    yield place / entry.name


def _connect(path: Path, timeout_s: float) -> socket.socket:
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
    """Map the segment that a socket hands out; None for memory that is empty or not sealed.

    Raises `OSError` if no worker serves the socket, or if the worker is frozen.
    """
    with _connect(path, timeout_s) as connection:
        _, received, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not received:
        return None
    (fd,) = received
    try:
        is_sealed = fcntl.fcntl(fd, _F_GET_SEALS) & SEALS == SEALS
        return mmap.mmap(fd, 0, prot=mmap.PROT_READ) if is_sealed else None
    except ValueError:  # The memory is empty.
        return None
    finally:
        os.close(fd)


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
            with own_folder(path.parent, make=True) as opened:
                self._socket.bind(f"{opened}/{path.name}")
            path.chmod(0o600)
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


def create_memory(name: str, size: int, is_wanted: Callable[[], bool]) -> tuple[int, mmap.mmap] | None:
    """Create sealed memory of `size` bytes: its file descriptor and its only writable mapping.

    Creation takes about 1 s for each 3 GiB. Returns None once `is_wanted` returns False. Raises `OSError` if the folder
    cannot be used, or too little memory is free.
    """
    place = folder()
    try:
        with own_folder(place, make=True):
            remove_abandoned(place)
    except OSError as error:
        raise OSError(error.errno, f"{place}: {error.strerror}") from error
    reserve = free_bytes() // _RESERVE_SHARE
    if not hasattr(os, "memfd_create"):  # Missing on macOS and in builds of Python for old systems.
        raise OSError(errno.ENOSYS, "this Python cannot make sealed memory (os.memfd_create)")
    fd = os.memfd_create(name, _MFD_CLOEXEC | _MFD_ALLOW_SEALING)
    try:
        for at in range(0, size, _STEP_BYTES):
            if not is_wanted():
                os.close(fd)
                return None
            # Check before every step: other workers may allocate too, and without memory the kernel kills a process.
            if size - at > (free := free_bytes()) - reserve:
                raise OSError(errno.ENOSPC, f"{size - at} bytes more are needed, and {free} are free")
            os.posix_fallocate(fd, at, min(_STEP_BYTES, size - at))
        memory = mmap.mmap(fd, size)
        fcntl.fcntl(fd, _F_ADD_SEALS, SEALS)
        # Map all pages now: mapping a page at its first write would take ten times as long as the write.
        pages = np.frombuffer(memory, np.uint8)[::PAGE]
        for at in range(0, len(pages), _STEP_BYTES // PAGE):
            pages[at : at + _STEP_BYTES // PAGE] = 0
    except BaseException:
        os.close(fd)
        raise
    return fd, memory


def remove_abandoned(place: Path) -> None:
    """Remove the sockets of workers that ended without removing their sockets."""
    old = time.time() - _OLD_S
    for path in segments_in(place):
        try:
            if path.stat().st_mtime < old:
                _connect(path, _CONNECT_S).close()
        except ConnectionRefusedError:
            with suppress(OSError):
                path.unlink()
                _log.info("removed %s: the worker that created this socket has ended", path)
        except OSError:
            pass


def default_size() -> int:
    """The default size of a segment in bytes, derived from the free memory; 0 if the free memory is unknown."""
    try:
        return max(0, min(free_bytes() // _DEFAULT_SHARE, _MAX_DEFAULT_BYTES))
    except OSError:
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
