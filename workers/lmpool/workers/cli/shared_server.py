"""The embedded server that all `lmpool up` of a user share: it stays until the last of them has ended, in whatever way.

A process of its own, the supervisor (`python -m lmpool.workers.cli.shared_server`), owns the server. Each `up` holds
the shared POSIX lock of `users.lock`, which the kernel releases with the process and which no fork inherits. Once
nobody holds it, the supervisor stops the server. When the server ends otherwise, the supervisor leaves the reason in
`owner.lock` and ends too; then every `up` starts a supervisor, of which one gets the folder, and the others join.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from lmpool.embedded import (
    READY_TIMEOUT_S,
    STOP_TIMEOUT_S,
    AlreadyRunning,
    EmbeddedServer,
    clear,
    explained,
    is_owned,
    memory_limit,
    ping,
    runtime_dir,
    secure,
    socket_path,
    socket_url,
    unlock,
)
from lmpool.errors import LMPoolError, ServerError

if sys.platform != "win32":
    import fcntl

_log = logging.getLogger("lmpool.worker")

_USERS = "users.lock"
# The bytes of that file: one is held by whoever uses the server, the other by whoever is about to stop using it.
_USING, _LEAVING = 0, 1
# A server that ends again so soon after it was started again would do so for ever.
_MIN_LIFE_S = 60.0
_POLL_S = 0.1
# What the supervisor says of its start, unless it says what went wrong.
_STARTED, _RUNNING = "started", "running"


class SharedServer:
    """A process's part in the embedded server of its user, from `join` to `leave` or to the end of the process.

    Args:
        memory_bytes: as of `EmbeddedServer`, for a server that is started.
    """

    def __init__(self, memory_bytes: int | None = None) -> None:
        self._memory = memory_bytes
        self._folder = runtime_dir()
        self._socket = socket_path(self._folder)
        self._users = -1
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._watcher: threading.Thread | None = None
        self._is_leaving = False

    @property
    def url(self) -> str:
        """Where it listens, as redis-py wants it."""
        return socket_url(self._socket)

    def join(self) -> bool:
        """Start the server, or join the one that runs; from now on it stays.

        Returns:
            whether it was started.

        Raises:
            ServerError: it cannot be started, or the folder cannot be used.
        """
        if sys.platform == "win32":
            raise ServerError("there is no embedded server on Windows: name a server with LMPOOL_REDIS_URL")
        with explained(self._folder):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            secure(self._folder)
            self._users = _hold(self._folder)
        try:
            return self._start_or_join()
        except BaseException:
            self.leave()
            raise

    def watch(self, give_up: Callable[[str], None]) -> None:
        """Have the server started again when it ends before `leave`; once a minute at most.

        Args:
            give_up: called, in a thread, with the reason why there is no server any more.
        """
        self._watcher = threading.Thread(target=self._watch, args=(give_up,), name="lmpool-server", daemon=True)
        self._watcher.start()

    def leave(self) -> bool:
        """Stop using the server, and wait for its end when nobody else uses it; does nothing the second time.

        Returns:
            whether others go on using it.
        """
        users, self._users = self._users, -1
        if users < 0:
            return False
        self._is_leaving = True
        # One at a time: of two that leave together, both would take the other for one that stays.
        fcntl.lockf(users, fcntl.LOCK_EX, 1, _LEAVING)
        is_last = _locks_alone(users)
        os.close(users)
        if is_last and self._watcher is not None:
            self._watcher.join(STOP_TIMEOUT_S)
        return not is_last

    def _start_or_join(self) -> bool:
        with explained(self._folder):
            # Whom it joins may be about to end.
            for _ in range(3):
                if is_owned(self._folder) and ping(self._socket).startswith(b"+PONG"):
                    self._memory = memory_limit(self._socket) or self._memory
                    return False
                if self._start():
                    return True
        raise ServerError(f"the embedded server in {self._folder} has ended again and again")

    def _start(self) -> bool:
        """Start a supervisor; False when another one has the folder."""
        program = [sys.executable, "-P", "-m", "lmpool.workers.cli.shared_server", str(self._folder)]
        process = subprocess.Popen(
            [*program, *([] if self._memory is None else [str(self._memory)])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # It hears nothing of a Ctrl-C in this terminal, and outlives it.
            start_new_session=True,
        )
        assert process.stdout is not None
        with process.stdout as told:
            text = told.read().decode("utf-8", "replace").strip()
        if text == _STARTED:
            self._supervisor = process
            return True
        code = process.wait()
        if text != _RUNNING:
            raise ServerError(text or f"the embedded server's supervisor ended with code {code}")
        return False

    def _watch(self, give_up: Callable[[str], None]) -> None:
        started_at = -_MIN_LIFE_S
        while True:
            reason = self._await_end()
            if self._is_leaving:
                return
            if time.monotonic() - started_at < _MIN_LIFE_S:
                give_up(f"{reason}; it had been started again less than {_MIN_LIFE_S:g} s before")
                return
            _log.warning("%s; starting it again: what it had cached is lost", reason)
            try:
                self._start_or_join()
            except LMPoolError as error:
                give_up(f"your server cannot be started again: {error}")
                return
            started_at = time.monotonic()
            _log.info("your server runs again at %s", self.url)

    def _await_end(self) -> str:
        """Wait until nobody owns the server; returns what its last owner says of its end."""
        try:
            lock = os.open(self._folder / "owner.lock", os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            return "your server has ended"
        try:
            fcntl.flock(lock, fcntl.LOCK_SH)
            told = os.pread(lock, 8192, 0).decode("utf-8", "replace")
        finally:
            unlock(lock)
        if self._supervisor is not None:
            self._supervisor.wait()
            self._supervisor = None
        if not told or told.isdigit():
            return "your server's supervisor has ended"
        return " | ".join(f"your server {told}".splitlines())


def _hold(folder: Path) -> int:
    """Descriptor of the users' lock, held with others; waits while a supervisor stops the server.

    Raises:
        ServerError: that does not end.
    """
    deadline = time.monotonic() + READY_TIMEOUT_S + 2 * STOP_TIMEOUT_S
    while time.monotonic() < deadline:
        users = os.open(folder / _USERS, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.lockf(users, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, _USING)
        except (BlockingIOError, PermissionError):
            os.close(users)
            time.sleep(0.01)
            continue
        # A supervisor may have removed the file after it was opened here; that lock keeps no server.
        if os.fstat(users).st_nlink:
            return users
        os.close(users)
    raise ServerError(f"the embedded server in {folder} does not end: kill the processes that use it")


def _locks_alone(users: int) -> bool:
    """Hold the users' lock alone, if nobody else holds it."""
    try:
        fcntl.lockf(users, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _USING)
    except (BlockingIOError, PermissionError):
        return False
    return True


def main() -> None:
    """Own the server of the folder that is named until nobody uses it, or until it ends otherwise."""
    folder = Path(sys.argv[1])
    try:
        server = EmbeddedServer(int(sys.argv[2]) if len(sys.argv) > 2 else None, folder)
        server.start()
    except AlreadyRunning:
        print(_RUNNING)
        return
    except LMPoolError as error:
        print(error)
        return
    print(_STARTED)
    _close_output()
    users = os.open(folder / _USERS, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    while server.running:
        if _locks_alone(users):
            server.stop()
            # Before the lock is released, so that whoever waits for it makes a file of its own.
            clear(folder, _USERS)
            return
        time.sleep(_POLL_S)


def _close_output() -> None:
    """Let go of the pipe to whoever started this process, which reads it to its end."""
    sys.stdout.flush()
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (1, 2):
        os.dup2(nothing, number)
    os.close(nothing)


if __name__ == "__main__":
    main()
