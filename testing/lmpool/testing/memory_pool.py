"""A whole pool in this process: a server that keeps everything in memory, and workers with synthetic models."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import redis as redis_sync

from lmpool.aio import end_tasks
from lmpool.broker.server import Server
from lmpool.embedded import socket_path, socket_url
from lmpool.errors import LMPoolError, SettingsError
from lmpool.protocol.model_info import ModelInfo
from lmpool.testing.backend import Gate, GatedSettings, SyntheticModel
from lmpool.workers.execution.contract import BackendSettings
from lmpool.workers.settings import WorkerSettings
from lmpool.workers.trie.backend import TrieSettings
from lmpool.workers.worker import Worker

T = TypeVar("T")

_LONGEST_FOLDER = 75


class LoopThread:
    """Runs an asynchronous context manager in a thread, and coroutines beside it.

    Args:
        context: entered by `start` and left by `stop`, in the thread.
        name: the thread's name.
    """

    def __init__(self, context: AbstractAsyncContextManager[object], name: str) -> None:
        self._context = context
        self._begun = threading.Event()
        self._error: BaseException | None = None
        # A daemon: a notebook that is closed in the middle must not wait for it.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Enter the context; raises what that raises."""
        self._thread.start()
        self._begun.wait()
        if self._error is not None:
            self.stop()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread; returns what it returns."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def stop(self) -> None:
        """Leave the context and end the thread; raises what leaving raises."""
        if self._error is None:
            self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        # Whatever fails, the thread that started this one waits for it and must hear of it.
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001
            self._error = error
        finally:
            self._begun.set()

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        async with self._context:
            self._begun.set()
            await self._over.wait()


class MemoryWorker:
    """A worker that runs in the pool's thread. What is called here from another thread returns when it is done.

    Args:
        gate: what the steps of its backend pass through.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def start(self, worker: Worker) -> None:
        """Start in the running event loop; returns when the worker takes prompts.

        Raises:
            As `Worker.run`.
        """
        self._loop = asyncio.get_running_loop()
        ready: asyncio.Future[ModelInfo] = self._loop.create_future()
        self._worker = worker
        self._task = self._loop.create_task(worker.run(ready.set_result), name=f"worker {worker.worker_id}")
        first: list[asyncio.Future[Any]] = [ready, self._task]
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self.end()
            raise
        if self._task.done():
            self._task.result()
        self._info = ready.result()

    @property
    def info(self) -> ModelInfo:
        """What it serves."""
        return self._info

    @property
    def is_running(self) -> bool:
        """Whether it serves, or still finishes what it holds."""
        return not self._task.done()

    def stall(self) -> None:
        """Let no step end any more, as when a model hangs: prompts are taken and held, and not answered."""
        self._gate.shut()

    def resume(self) -> None:
        """Go on after `stall`."""
        self._gate.open()

    def stop(self) -> None:
        """End it as SIGTERM ends a worker: it finishes what it holds, after a stall too, and deregisters.

        Raises:
            LMPoolError: the worker had failed.
        """
        self._gate.open()
        self._wait_for(self._drain())

    def kill(self) -> None:
        """End it as SIGKILL ends a worker: what it holds is not answered, and taken over by others after a lease.

        Raises:
            LMPoolError: the worker had failed.
        """
        self._wait_for(self.end())

    async def end(self) -> None:
        """As `kill`, from the pool's event loop."""
        had_ended = self._task.done()
        self._gate.give_up()
        await end_tasks([self._task])
        if had_ended and not self._task.cancelled():
            self._task.result()

    async def _drain(self) -> None:
        self._worker.stop()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()

    def _wait_for(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()


class MemoryPool:
    """A pool that lives while its context (`with` or `async with`) is open, and leaves nothing behind.

    Any number of pools may be open at once. They do not see each other, nor any other server of the user's. Other
    processes of the same user reach one by its URL. Its methods may be called from any thread.

    Args:
        models: what is served from the start, each by one worker; none stands for one `SyntheticModel()`.
        prefix: prefix of the pool's Redis keys.

    Raises:
        SettingsError: fakeredis is not installed, or two models have the same name.
    """

    def __init__(self, *models: SyntheticModel, prefix: str = "lmpool") -> None:
        self.models = models or (SyntheticModel(),)
        if len({model.name for model in self.models}) < len(self.models):
            names = ", ".join(repr(model.name) for model in self.models)
            raise SettingsError(f"models: {names}: each needs a name of its own")
        self.workers: list[MemoryWorker] = []
        self._prefix = prefix
        self._url = ""
        self._redis: redis_sync.Redis | None = None

    @property
    def url(self) -> str:
        """Where the pool's server listens: for `Producer(redis=...)`, `LMPOOL_REDIS_URL`, or any client of Redis.

        Raises:
            LMPoolError: the pool is not open.
        """
        if not self._url:
            raise LMPoolError("the pool is not open: use it as `with lmpool.testing.pool() as pool:`")
        return self._url

    @property
    def redis(self) -> redis_sync.Redis:
        """A client of the pool's server, which the pool closes.

        Raises:
            LMPoolError: the pool is not open.
        """
        if self._redis is None:
            self._redis = redis_sync.Redis.from_url(self.url)
        return self._redis

    @property
    def model(self) -> SyntheticModel:
        """The first of the models that the pool was made with."""
        return self.models[0]

    @property
    def worker(self) -> MemoryWorker:
        """The worker that was started first."""
        return self.workers[0]

    def serve(self, model: SyntheticModel) -> MemoryWorker:
        """Start another worker: for another model, or one more for a model that is served.

        Raises:
            ModelMismatch: the model is served with other weights.
        """
        gate = Gate()
        return self._start(gate, GatedSettings(model, gate), model.worker(self._prefix))

    def serve_tries(self) -> MemoryWorker:
        """Start a trie worker, which answers trie calls for any vocabulary. Needs numba (`lmpool[trie]`).

        Raises:
            SettingsError: numba is not installed.
        """
        return self._start(Gate(), TrieSettings(), WorkerSettings(prefix=self._prefix))

    def _start(self, gate: Gate, backend: BackendSettings, settings: WorkerSettings) -> MemoryWorker:
        if not self._url:
            raise LMPoolError("the pool is not open: enter it first, `with lmpool.testing.pool() as pool:`")
        return self._thread.call(self._start_worker(gate, backend, settings))

    async def _start_worker(self, gate: Gate, backend: BackendSettings, settings: WorkerSettings) -> MemoryWorker:
        worker = MemoryWorker(gate)
        await worker.start(Worker(Server(self.url), backend, settings))
        self.workers.append(worker)
        return worker

    def __enter__(self) -> Self:
        if self._url:
            raise LMPoolError("the pool is open already: make another with `lmpool.testing.pool()`")
        self._thread = LoopThread(self._open(_front()), "lmpool-testing")
        self._thread.start()
        try:
            for model in self.models:
                self.serve(model)
        except BaseException:
            self._thread.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.stop()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.__exit__, kind, error, trace)

    def __repr__(self) -> str:
        names = ", ".join(repr(model.name) for model in self.models)
        return f"MemoryPool({names}; {self._url or 'closed'})"

    def __reduce__(self) -> str:
        raise LMPoolError("an in-memory pool is this process's and cannot be pickled: give other processes its `url`")

    @asynccontextmanager
    async def _open(self, front: Callable[[Path], AbstractAsyncContextManager[None]]) -> AsyncIterator[None]:
        """The server while it is open; whatever happens, nothing is left of it and of the workers."""
        # A folder of its own, which nobody else may enter: the server has no password.
        with tempfile.TemporaryDirectory(prefix="lmp", dir=_short_folder()) as folder:
            path = socket_path(Path(folder))
            async with front(path):
                self._url = socket_url(path)
                try:
                    yield
                finally:
                    self._url = ""
                    await self._end()

    async def _end(self) -> None:
        """End what uses the server; raises what one of the workers failed with before."""
        workers, self.workers = self.workers, []
        if self._redis is not None:
            self._redis.close()
            self._redis = None
        ends = await asyncio.gather(*(worker.end() for worker in workers), return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end


def _short_folder() -> str | None:
    """Where the socket's folder is made: the path of a socket has some 100 bytes, that of TMPDIR may have more."""
    return "/tmp" if len(os.fsencode(tempfile.gettempdir())) > _LONGEST_FOLDER else None


def _front() -> Callable[[Path], AbstractAsyncContextManager[None]]:
    """What makes the server, imported only now: fakeredis takes a while, and not everybody has it."""
    if not hasattr(asyncio, "start_unix_server"):
        raise SettingsError("an in-memory pool listens on a Unix socket, which Python has not on this system")
    try:
        import lupa  # noqa: F401  fakeredis does without, and then knows no scripts

        from lmpool.testing.front import Front
    except ModuleNotFoundError as error:
        if error.name not in ("fakeredis", "lupa"):
            raise
        raise SettingsError(
            f"an in-memory pool needs {error.name}: install it with pip install 'lmpool[testing]'"
        ) from error
    return Front


def pool(*models: SyntheticModel, prefix: str = "lmpool") -> MemoryPool:
    """An in-memory pool, open as long as its context: `with pool() as memory:` or `async with pool() as memory:`.

    See `MemoryPool` for the arguments and errors.
    """
    return MemoryPool(*models, prefix=prefix)
