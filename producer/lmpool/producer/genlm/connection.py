"""Connections of a language model: `ModelConnection` to a running pool, `PrivatePool` with a worker of its own.

Both survive a fork of the process: the child does not touch the connections of its parent.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import math
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
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import redis

from lmpool.broker.server import RedisLike
from lmpool.cli import FOLDER_VARIABLE, LAUNCH
from lmpool.embedded import EmbeddedServer
from lmpool.errors import ModelError, ProducerClosed
from lmpool.producer.client.requests import ENDLESS_S, check_timeout
from lmpool.producer.client.session import Priority, WhenAbsent
from lmpool.producer.metrics import ProducerStats
from lmpool.producer.producer import Producer
from lmpool.producer.sync import SyncProducer
from lmpool.protocol.keys import Keys

PREFIX = "lmpool"
"""Prefix of a private pool's Redis keys."""

_STOP_S = 5.0  # Seconds that the worker has to stop before it is killed.
_POLL_S = 0.05  # Between two checks whether the model is served.
_LINES_SHOWN = 20  # Lines of the worker's log in an error.
_MAX_FOLDER_PATH = 60  # Bytes: a socket's path has at most 107, and the server's folder adds its name.


@dataclass(frozen=True, slots=True)
class Address:
    """The arguments of `Producer`; a `timeout` of infinity means no deadline."""

    model: str | None = None
    redis: RedisLike | None = field(default=None, repr=False)  # It may hold a password.
    timeout: float = math.inf
    cache_bytes: int = 256 * 1024 * 1024
    prefix: str = "lmpool"
    when_absent: WhenAbsent = "raise"
    priority: Priority = "interactive"

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of `Producer` and `SyncProducer`."""
        options = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "model"}
        return options | {"timeout": seconds_of(self.timeout)}


def seconds_of(timeout: float) -> float:
    """The timeout of a producer for the timeout of a language model, where infinity means no deadline.

    Raises:
        SettingsError: not a number above 0.
    """
    return ENDLESS_S if timeout == math.inf else check_timeout(timeout)


class LazyProducer(SyncProducer):
    """A producer that connects at its first call, so that it can be closed while it connects."""

    def _connect(self) -> None:
        pass


class Owned(Protocol):
    """A resource that is closed together with a connection."""

    def close(self) -> None:
        """Close it; closing it twice does nothing."""
        ...


class ModelConnection:
    """Holds producers: one for the coroutines of each thread, and one for synchronous callers in any thread."""

    def __init__(self, address: Address, owned: Owned | None = None) -> None:
        self._address = address
        self._owned = owned
        self._start_afresh()
        _connections.add(self)
        atexit.register(self.close)

    def _start_afresh(self) -> None:
        # Concurrent event loops are in different threads, and a producer has one session at a time.
        self._of_thread = threading.local()
        self._producers: weakref.WeakSet[Producer] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._sync: LazyProducer | None = None
        self._closed = False

    def after_fork(self) -> None:
        """Start again in a child process."""
        # Closing the producers would remove descriptors from epoll instances that the child shares with its parent.
        _left_to_parent.append((self._of_thread, self._sync, self._owned))
        closed = self._closed
        self._owned = None
        self._start_afresh()
        self._closed = closed

    @property
    def producer(self) -> Producer:
        """The producer of coroutines in this thread.

        Raises:
            ProducerClosed: the connection is closed.
        """
        self._check_open()
        producer: Producer | None = getattr(self._of_thread, "producer", None)
        if producer is None:
            producer = self._of_thread.producer = Producer(self._address.model, **self._address.options)
            self._producers.add(producer)
        return producer

    @property
    def sync(self) -> LazyProducer:
        """The producer of synchronous callers; connects at the first use.

        Raises:
            ProducerClosed: the connection is closed.
        """
        if (sync := self._sync) is not None:
            return sync
        with self._lock:
            self._check_open()
            if self._sync is None:
                self._sync = LazyProducer(self._address.model, **self._address.options)
            return self._sync

    def forget_rows(self) -> None:
        """Drop the rows in the memory of this thread's producers."""
        for producer in self._used():
            producer.clear_cache()

    def stats(self) -> ProducerStats:
        """Counts of the requests of this thread's producers."""
        total = ProducerStats()
        for producer in self._used():
            for name, count in asdict(producer.stats()).items():
                total.add(name, count)
        return total

    def _used(self) -> list[Producer | SyncProducer]:
        """The producers of this thread: its own, and the one of synchronous callers."""
        producers: list[Producer | SyncProducer | None] = [getattr(self._of_thread, "producer", None), self._sync]
        return [producer for producer in producers if producer is not None]

    def close(self) -> None:
        """Close the producers and the owned resource; closing twice does nothing.

        Sessions end in their own event loops, as soon as these run.
        """
        self._closed = True
        for producer in list(self._producers):
            producer.close_soon()
        with self._lock:
            sync, self._sync = self._sync, None
            if sync is not None:
                sync.close()
            if self._owned is not None:
                self._owned.close()
        atexit.unregister(self.close)

    async def aclose(self) -> None:
        """As `close`, without blocking the event loop."""
        self._closed = True
        producer: Producer | None = getattr(self._of_thread, "producer", None)
        if producer is not None:
            await producer.close()
        await asyncio.to_thread(self.close)

    def abandon(self) -> None:
        """Close without waiting: the garbage collector calls this, in any thread and at any moment."""
        for producer in list(self._producers):
            producer.close_soon()
        if self._sync is None and self._owned is None:
            atexit.unregister(self.close)
            return
        try:
            threading.Thread(target=self.close, name="lmpool-close", daemon=True).start()
        except RuntimeError:  # The interpreter is ending and starts no more threads.
            self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ProducerClosed("this PooledLM is closed")


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """The worker that a private pool runs.

    Attributes:
        model: hub name or folder of the model, the argument of `lmpool worker`.
        backend: name of its backend.
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
        command: the worker.

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
        """The last lines that the worker has printed."""
        with contextlib.suppress(OSError):
            lines = self._log_path.read_text("utf-8", "replace").splitlines()
            return "\n".join(lines[-_LINES_SHOWN:])
        return ""

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
            _left_to_parent.append(process)

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
    return "/tmp" if len(os.fsencode(tempfile.gettempdir())) > _MAX_FOLDER_PATH else None


_connections: weakref.WeakSet[ModelConnection] = weakref.WeakSet()
_pools: weakref.WeakSet[PrivatePool] = weakref.WeakSet()
# Kept alive in a child process, which must not close what its parent uses.
_left_to_parent: list[Any] = []


def _after_fork() -> None:
    for connection in list(_connections):
        connection.after_fork()
    for pool in list(_pools):
        pool.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
