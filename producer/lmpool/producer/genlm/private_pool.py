"""A pool of one's own: a server and one worker as child processes, for a program that wants no server of its own."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import redis

from lmpool.attached import FOLDER_VARIABLE, LAUNCH
from lmpool.embedded import EmbeddedServer
from lmpool.errors import ModelError
from lmpool.protocol.keys import Keys

PREFIX = "lmpool"

_STOP_S = 5.0
_POLL_S = 0.05
_LINES_SHOWN = 20
# A socket's path has some 100 bytes, and the server's folder adds its own name.
_LONGEST_TEMPORARY_FOLDER = 60


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """The worker that a private pool runs.

    Attributes:
        model: what `lmpool worker` is to serve.
        backend: by which backend.
        options: further options of the command.
        load_timeout: seconds until it must serve.
    """

    model: str
    backend: str
    options: Sequence[str] = ()
    load_timeout: float = 1800.0


class PrivatePool:
    """A server and a worker in a temporary folder, from the constructor to `close`.

    Both end with this process, however it ends. A fork of this process may use them and leaves them to its parent.

    Args:
        command: what the worker is to serve.

    Raises:
        ModelError: the worker ended before it served, or did not serve in time; its log is quoted.
        ServerError: there is no server program, or it does not start.
    """

    def __init__(self, command: WorkerCommand) -> None:
        self._command = command
        self._lock = threading.Lock()
        self._folder = Path(tempfile.mkdtemp(prefix="lmpool-", dir=_temporary_folder()))
        self._server = EmbeddedServer(folder=self._folder / "server")
        self._process: subprocess.Popen[bytes] | None = None
        _pools.add(self)
        # Before the server's own, which is registered when it starts: handlers run last in, first out.
        try:
            self._server.start()
            atexit.register(self.close)
            self._process = self._launch()
            self._await_model(self._process)
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """URL of the server."""
        return self._server.url

    @property
    def log(self) -> str:
        """What the worker has printed last."""
        with contextlib.suppress(OSError):
            lines = self._log_path.read_text("utf-8", "replace").splitlines()
            return "\n".join(lines[-_LINES_SHOWN:])
        return ""

    @property
    def worker_pid(self) -> int:
        """Process id of the worker; 0 once it is closed."""
        return 0 if self._process is None else self._process.pid

    def close(self) -> None:
        """End the worker and the server and remove their files; closing twice does nothing."""
        with self._lock:
            process, self._process = self._process, None
            if process is not None:
                _end(process)
            self._server.stop()
            shutil.rmtree(self._folder, ignore_errors=True)
        atexit.unregister(self.close)

    def after_fork(self) -> None:
        """Leave everything to the parent process."""
        process, self._process = self._process, None
        self._lock = threading.Lock()
        atexit.unregister(self.close)
        if process is not None and process.stdin is not None:
            # The worker must hear of the parent's end although this process lives on.
            process.stdin.close()
            _left_to_the_parent.append(process)

    @property
    def _log_path(self) -> Path:
        return self._folder / "worker.log"

    def _launch(self) -> subprocess.Popen[bytes]:
        command = self._command
        # Without -P a file of the user's in the working directory could stand for a module.
        program = [sys.executable, "-P", "-c", LAUNCH, "worker", "--backend", command.backend]
        # Nobody but this program names adapters here.
        options = ["--redis", self.url, "--prefix", PREFIX, "--adapter-hub", *command.options]
        with self._log_path.open("wb") as log:
            return subprocess.Popen(
                [*program, *options, "--", command.model],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                bufsize=0,
                env={**os.environ, FOLDER_VARIABLE: str(self._folder)},
                # Ctrl-C is this program's alone: in a notebook it ends a cell and not the model.
                start_new_session=True,
            )

    def _await_model(self, process: subprocess.Popen[bytes]) -> None:
        name, seconds = self._command.model, self._command.load_timeout
        deadline = time.monotonic() + seconds
        with contextlib.closing(redis.Redis.from_url(self.url)) as client:
            while not client.hlen(Keys(PREFIX).models()):
                if (code := process.poll()) is not None:
                    raise ModelError(f"the worker for {name!r} ended with code {code} before it served:\n{self.log}")
                if time.monotonic() > deadline:
                    raise ModelError(f"{name!r} is not served within load_timeout = {seconds:g} s:\n{self.log}")
                time.sleep(_POLL_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _temporary_folder() -> str | None:
    """Where temporary folders are made; None for the usual place, unless its path is too long for a socket."""
    return "/tmp" if len(os.fsencode(tempfile.gettempdir())) > _LONGEST_TEMPORARY_FOLDER else None


_pools: weakref.WeakSet[PrivatePool] = weakref.WeakSet()
_left_to_the_parent: list[subprocess.Popen[bytes]] = []


def _after_fork() -> None:
    for pool in list(_pools):
        pool.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
