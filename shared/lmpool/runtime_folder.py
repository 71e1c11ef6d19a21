"""The folder of an embedded server: private, with one owner at a time, where clients find the socket.

owner.lock    flock held by the owner, with its process id; decides who may touch the folder. Why a server has ended
              by itself is in the file for those who wait for that lock
users.lock    POSIX lock shared by all `lmpool up`
server.pid    POSIX lock held by the server itself, with its process id; tells an orphan from a stale file
server.log    what the server printed
redis.sock    the socket
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

from lmpool.errors import LMPoolError, ServerError, SettingsError

if sys.platform != "win32":
    import fcntl

READY_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0

# sun_path is 108 bytes on Linux and 104 elsewhere, one of them the closing NUL.
_SOCKET_PATH_LIMIT = 107 if sys.platform == "linux" else 103
_FILES = {"owner.lock", "users.lock", "server.pid", "server.log", "redis.sock", "appendonlydir", "appendonly.aof"}
_PING_TIMEOUT_S = 2.0


class AlreadyRunning(ServerError):
    """Another owner has this folder; its server can be joined.

    Attributes:
        pid: process id of the owner, 0 when it cannot be read.
        url: where its server listens.
    """

    def __init__(self, message: str, *, pid: int = 0, url: str = "") -> None:
        super().__init__(message)
        self.pid = pid
        self.url = url


def runtime_dir() -> Path:
    """The folder of this user's embedded server: LMPOOL_RUNTIME_DIR, or one that all shells agree on."""
    if chosen := os.environ.get("LMPOOL_RUNTIME_DIR"):
        return Path(chosen).expanduser().absolute()
    uid = os.geteuid()
    # Not $XDG_RUNTIME_DIR: it is unset in cron, containers and `su`, and clients there must come here too.
    session = Path(f"/run/user/{uid}")
    with contextlib.suppress(OSError):
        if session.lstat().st_uid == uid and session.is_dir():
            return session / "lmpool"
    return Path(tempfile.gettempdir()).absolute() / f"lmpool-{uid}"


def find() -> str | None:
    """URL of this user's live embedded server, None when there is none. Blocks for 2 s at most.

    Raises:
        ServerError: the folder is a symlink or belongs to another user.
        SettingsError: the folder's path is too long for a socket.
    """
    if sys.platform == "win32":
        return None
    folder = runtime_dir()
    path = socket_path(folder)
    if not os.path.lexists(folder):
        return None
    with explained(folder):
        secure(folder)
    return socket_url(path) if ping(path).startswith((b"+PONG", b"-LOADING")) else None


@contextlib.contextmanager
def explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except LMPoolError:
        raise
    except OSError as error:
        raise ServerError(f"the embedded server cannot use its folder {folder}: {error}") from error


def socket_url(path: Path) -> str:
    return "unix://" + urllib.parse.quote(str(path))


def socket_path(folder: Path) -> Path:
    path = folder / "redis.sock"
    if (length := len(os.fsencode(path))) > _SOCKET_PATH_LIMIT:
        raise SettingsError(
            f"the socket's path {path} has {length} bytes and the limit is {_SOCKET_PATH_LIMIT}: "
            "set LMPOOL_RUNTIME_DIR to a shorter folder"
        )
    return path


def secure(folder: Path) -> None:
    """Refuse a folder that is not ours alone; close one that is to others."""
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode):
        raise ServerError(f"{folder} is not a folder: remove it, or set LMPOOL_RUNTIME_DIR to another")
    if info.st_uid != os.geteuid():
        raise ServerError(
            f"{folder} belongs to user {info.st_uid}, not to user {os.geteuid()}: "
            "set LMPOOL_RUNTIME_DIR to a folder of yours"
        )
    if info.st_mode & 0o777 == 0o700:
        return
    # LMPOOL_RUNTIME_DIR may name a home folder, or /tmp for root: closing that would break other programs.
    if info.st_mode & stat.S_ISVTX or not {entry.name for entry in folder.iterdir()} <= _FILES:
        raise ServerError(
            f"{folder} has mode {info.st_mode & 0o7777:o} and is not lmpool's alone: "
            "set LMPOOL_RUNTIME_DIR to a folder of its own"
        )
    folder.chmod(0o700)


def ping(path: Path) -> bytes:
    """What the server at the socket answers to PING; nothing when there is no such server of ours."""
    return _ask(path, b"PING")


def memory_limit(path: Path) -> int:
    """Bytes that the server at the socket may hold; 0 when it does not tell."""
    *_, last = _ask(path, b"CONFIG GET maxmemory").split() or [b""]
    return int(last) if last.isdigit() else 0


def _ask(path: Path, command: bytes) -> bytes:
    try:
        info = path.lstat()
        if not stat.S_ISSOCK(info.st_mode) or info.st_uid != os.geteuid():
            return b""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_PING_TIMEOUT_S)
            connection.connect(str(path))
            connection.sendall(command + b"\r\n")
            return connection.recv(64)
    except OSError:
        return b""


def take_ownership(folder: Path) -> int:
    """Descriptor of the owner's lock, which is held.

    Raises:
        AlreadyRunning: somebody else holds it, and its server answers or has had the time to.
    """
    path, server = folder / "owner.lock", folder / "redis.sock"
    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = _read_pid(lock)
            os.close(lock)
            # A silent server is one that its owner starts or ends just now: joinable, or ours, in a moment.
            if not ping(server).startswith(b"+PONG") and time.monotonic() < deadline:
                time.sleep(0.01)
                continue
            url = socket_url(server)
            raise AlreadyRunning(f"process {pid} already runs the embedded server at {url}", pid=pid, url=url) from None
        # The last owner may have removed the file after it was opened here; that lock guards nothing.
        if os.fstat(lock).st_nlink:
            os.ftruncate(lock, 0)
            os.pwrite(lock, b"%d" % os.getpid(), 0)
            return lock
        os.close(lock)


def end_orphan(pid_file: Path) -> None:
    """End the server of an owner that was killed where no death signal ended it.

    A dying server removes the socket's path, so a new one must not listen there before the old one is gone.
    """
    try:
        lock = os.open(pid_file, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    with os.fdopen(lock, "r+b", buffering=0):
        start = time.monotonic()
        while not _locks(lock):
            waited = time.monotonic() - start
            # The lock is held, so this is the id of the server and of no later process.
            pid = _read_pid(lock)
            if waited > 2 * STOP_TIMEOUT_S:
                raise ServerError(f"the server of an earlier owner, process {pid}, does not end: kill it")
            if pid > 1:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM if waited < STOP_TIMEOUT_S else signal.SIGKILL)
            time.sleep(0.05)


def _locks(lock: int) -> bool:
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _read_pid(lock: int) -> int:
    digits = os.pread(lock, 32, 0)
    return int(digits) if digits.isdigit() else 0


def clear(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).unlink(missing_ok=True)


def ending(code: int) -> str:
    """How a process has ended, by the return code that `subprocess` has for it."""
    if code >= 0:
        return f"ended with code {code}"
    with contextlib.suppress(ValueError):
        return f"was ended by signal {-code} ({signal.Signals(-code).name})"
    return f"was ended by signal {-code}"


def last_lines(log: Path, count: int = 10) -> str:
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return "it left no log"
    return f"the end of {log} is\n" + "\n".join(lines[-count:])
