"""A whole pool in this process: a server that stores everything in memory, and workers with synthetic models."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Self

import numpy as np
import redis as redis_sync
from numpy.typing import NDArray

from lmpool.aio import end_tasks
from lmpool.broker.server import Server
from lmpool.embedded import socket_path, socket_url
from lmpool.errors import LMPoolError, SettingsError
from lmpool.protocol.model_info import TRIE_SERVICE, ModelInfo
from lmpool.synthetic import synthetic_row, synthetic_vocabulary
from lmpool.vocabulary import Vocabulary
from lmpool.workers.backends.synthetic import SyntheticBackend, SyntheticSettings
from lmpool.workers.execution.contract import Backend, BackendSettings, Finished
from lmpool.workers.settings import WorkerSettings
from lmpool.workers.trie import TrieSettings
from lmpool.workers.worker import Worker

_DEFAULT_V = 512  # Vocabulary size of a model that sets neither `vocab_size` nor `vocabulary`.
_SHM_BYTES = 128 * 2**20  # Bytes of a worker's shared memory for rows: enough for a test, and quick to allocate.
_MAX_FOLDER_BYTES = 75  # Max bytes of the temporary folder's path: the path of a socket has at most about 100 bytes.
# The fields of `SyntheticModel` that are settings of its backend (first tuple) or of its worker (second tuple).
_OF_BACKEND = ("name", "vocab_size", "seed", "step_ms", "max_batch", "max_prompt_tokens", "encoding", "fail_token")
_OF_WORKER = ("lease_s", "queue_limit", "row_ttl_s", "with_trie")


@dataclass(frozen=True, slots=True)
class SyntheticModel:
    """A model with generated rows: every prompt has a row, and a test can compute it beforehand.

    Attributes:
        name: the model's name.
        vocab_size: V; 0 for the size of `vocabulary`, or for 512 if there is no vocabulary.
        vocabulary: the byte string of every token (`Vocabulary` or byte strings), such as those of your tokenizer;
            None for `lmpool.synthetic.synthetic_vocabulary`.
        seed: number that selects the rows: models with different seeds have different rows.
        step_ms: duration of a step of the backend, in ms.
        max_batch: max prompts in one step.
        max_prompt_tokens: tokens of the longest prompt that the model accepts.
        encoding: "f32" or "bf16", the encoding of rows on the wire; clients receive the same rows with both.
        fail_token: prompts that contain this token id fail with `WorkerError`; -1 for no such token.
        lease_s: seconds after which other workers take over the jobs of a killed worker.
        queue_limit: max waiting prompts; further prompts fail with `QueueFull`.
        row_ttl_s: seconds that a row stays in the pool's cache.
        with_trie: whether its worker answers trie calls by reference (`prompt=`) without trie workers; needs numba.

    Raises:
        SettingsError, InvalidVocabulary: a value is malformed.
    """

    name: str = "synthetic"
    vocab_size: int = 0
    vocabulary: Vocabulary | Iterable[bytes] | None = None
    seed: int = 0
    step_ms: float = 0.0
    max_batch: int = 32
    max_prompt_tokens: int = 131_072
    encoding: str = "f32"
    fail_token: int = -1
    lease_s: float = 15.0
    queue_limit: int = 100_000
    row_ttl_s: float = 3600.0
    with_trie: bool = False

    def __post_init__(self) -> None:
        if self.vocabulary is not None and not isinstance(self.vocabulary, Vocabulary):
            object.__setattr__(self, "vocabulary", Vocabulary(self.vocabulary))
        known = 0 if self.vocabulary is None else len(self.tokens)
        if self.vocab_size == 0:
            object.__setattr__(self, "vocab_size", known or _DEFAULT_V)
        elif known and self.vocab_size != known:
            raise SettingsError(f"vocab_size: {self.vocab_size} is not the {known} tokens of the vocabulary: omit it")
        if self.name == TRIE_SERVICE:
            raise SettingsError(f"name: {self.name!r} is the name of trie workers: give the model another name")
        _ = self.backend, self.worker("lmpool")

    @property
    def tokens(self) -> Vocabulary:
        """The byte string of every token, as the pool publishes it."""
        if isinstance(self.vocabulary, Vocabulary):
            return self.vocabulary
        return synthetic_vocabulary(self.vocab_size, self.seed)

    @property
    def backend(self) -> SyntheticSettings:
        """Settings of the synthetic backend that serves this model."""
        return SyntheticSettings(**{name: getattr(self, name) for name in _OF_BACKEND})

    def worker(self, prefix: str) -> WorkerSettings:
        """Settings of a worker of this model, in a pool whose Redis keys begin with `prefix`."""
        settings = {name: getattr(self, name) for name in _OF_WORKER}
        # Set no real step timeout: a stalled worker must stay stalled while the user debugs.
        return WorkerSettings(prefix=prefix, step_timeout_s=1e9, shm_bytes=_SHM_BYTES, **settings)

    def row(self, prompt: Iterable[int]) -> NDArray[np.float32]:
        """The row that the pool returns for a prompt.

        Args:
            prompt: token ids, each below `vocab_size`.

        Returns:
            float32 log-probabilities of shape (V,).

        Raises:
            InvalidPrompt: the prompt is empty or has ids outside the vocabulary.
        """
        return synthetic_row(prompt, vocab_size=self.vocab_size, seed=self.seed)


class MemoryWorker:
    """A worker that runs in the pool's thread. Each method blocks until it is done, so call it from another thread.

    Attributes:
        info: the info of the model that the worker serves.
    """

    info: ModelInfo

    def __init__(self) -> None:
        # Each step of the backend waits for `_is_open`, unless `_is_over` is set because the worker is ended.
        self._is_open, self._is_over = threading.Event(), threading.Event()
        self._is_open.set()

    async def start(self, worker: Worker) -> None:
        """Start the worker in the running event loop; return when it takes prompts. Raises as `Worker.run` does."""
        self._loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = self._loop.create_future()

        def serve(info: ModelInfo) -> None:  # The worker calls this for each version of its weights.
            self.info = info
            if not ready.done():
                ready.set_result(None)

        self._worker = worker
        self._task = self._loop.create_task(worker.run(serve), name=f"worker {worker.worker_id}")
        await asyncio.wait([ready, self._task], return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            self._task.result()

    @property
    def is_running(self) -> bool:
        """Whether the worker serves prompts, or still finishes its last prompts."""
        return not self._task.done()

    def stall(self) -> None:
        """Make all steps hang, as if the model hung: the worker takes prompts, but does not answer them."""
        self._is_open.clear()

    def resume(self) -> None:
        """Let steps end again, after `stall`."""
        self._is_open.set()

    def stop(self) -> None:
        """End the worker as SIGTERM would: it finishes its prompts, even if it was stalled, and deregisters.

        Raises:
            LMPoolError: the worker had failed before this call.
        """
        asyncio.run_coroutine_threadsafe(self.end(drains=True), self._loop).result()

    def kill(self) -> None:
        """End the worker as SIGKILL would: other workers take over its prompts after a lease.

        Raises:
            LMPoolError: the worker had failed before this call.
        """
        asyncio.run_coroutine_threadsafe(self.end(), self._loop).result()

    async def end(self, *, drains: bool = False) -> None:
        """End the worker as `stop` does if `drains`, else as `kill` does; called in the pool's event loop."""
        had_ended = self._task.done()
        if drains:
            self._worker.stop()
        else:
            self._is_over.set()
        self._is_open.set()
        await (asyncio.wait([self._task]) if drains else end_tasks([self._task]))
        if (drains or had_ended) and not self._task.cancelled():
            self._task.result()


class _GatedSynthetic(SyntheticBackend):
    """A synthetic backend, with the user's vocabulary, whose steps hang while its worker is stalled."""

    def __init__(self, model: SyntheticModel, worker: MemoryWorker) -> None:
        super().__init__(replace(model.backend, step_ms=0.0))
        self._model, self._worker = model, worker
        self.served_as = model.name

    def open(self) -> Backend:
        """See `BackendSettings.open`."""
        return self

    def vocabulary(self) -> Vocabulary:
        """See `Backend.vocabulary`."""
        return self._model.tokens

    def step(self) -> Finished:
        """See `Backend.step`."""
        finished = super().step()
        # Wait for the duration of a step, and as long as the worker is stalled.
        if not self._worker._is_over.wait(self._model.step_ms / 1000):
            self._worker._is_open.wait()
        return finished


class MemoryPool:
    """A pool that exists while its `with` or `async with` block runs; the end of the block removes all its files.

    Any number of pools may be open at once, separate from each other and from all other servers of the user. Other
    processes of the same user connect to a pool by its URL. The methods of a pool may be called from any thread.

    Args:
        models: the models that the pool serves from the start, each by one worker; by default one `SyntheticModel()`.
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
        """URL of the pool's server: for `Producer(redis=...)`, `LMPOOL_REDIS_URL`, or any client of Redis.

        Raises:
            LMPoolError: the pool is not open.
        """
        if not self._url:
            raise LMPoolError("the pool is not open: use it as `with lmpool.testing.pool() as pool:`")
        return self._url

    @property
    def redis(self) -> redis_sync.Redis:
        """A Redis client of the pool's server; the pool closes this client.

        Raises:
            LMPoolError: the pool is not open.
        """
        if self._redis is None:
            self._redis = redis_sync.Redis.from_url(self.url)
        return self._redis

    @property
    def model(self) -> SyntheticModel:
        """The first model that the pool serves."""
        return self.models[0]

    @property
    def worker(self) -> MemoryWorker:
        """The worker that was started first."""
        return self.workers[0]

    def serve(self, model: SyntheticModel) -> MemoryWorker:
        """Start another worker, for a new model or for a model that is served already.

        Raises:
            ModelMismatch: the model is served with other weights.
        """
        worker = MemoryWorker()
        return self._start(worker, _GatedSynthetic(model, worker), model.worker(self._prefix))

    def serve_tries(self) -> MemoryWorker:
        """Start a trie worker, which answers trie calls for any vocabulary. Needs numba (`lmpool[trie]`).

        Raises:
            SettingsError: numba is not installed.
        """
        return self._start(MemoryWorker(), TrieSettings(), WorkerSettings(prefix=self._prefix))

    def _start(self, worker: MemoryWorker, backend: BackendSettings, settings: WorkerSettings) -> MemoryWorker:
        server = Server(self.url)

        async def start() -> None:
            await worker.start(Worker(server, backend, settings))
            self.workers.append(worker)

        asyncio.run_coroutine_threadsafe(start(), self._loop).result()
        return worker

    def __enter__(self) -> Self:
        if self._url:
            raise LMPoolError("the pool is open already: make another with `lmpool.testing.pool()`")
        self._is_open, self._ended = Future[None](), Future[None]()

        def run() -> None:
            try:
                self._ended.set_result(asyncio.run(self._serve()))
            except BaseException as error:  # noqa: BLE001  the thread that waits receives the error
                self._ended.set_exception(error)

        # Use a daemon thread: a notebook that is closed must not wait for the pool.
        self._thread = threading.Thread(target=run, name="lmpool-testing", daemon=True)
        self._thread.start()
        wait([self._is_open, self._ended], return_when=FIRST_COMPLETED)
        if self._ended.done():
            self._ended.result()
        try:
            for model in self.models:
                self.serve(model)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()
        self._ended.result()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.__exit__, *error)

    def __repr__(self) -> str:
        names = ", ".join(repr(model.name) for model in self.models)
        return f"MemoryPool({names}; {self._url or 'closed'})"

    def __reduce__(self) -> str:
        raise LMPoolError("an in-memory pool belongs to its process and cannot be pickled: pass its `url` to others")

    async def _serve(self) -> None:
        """Run the server until the pool is closed; then end the workers and remove all files of the server."""
        for name in ("fakeredis", "lupa"):  # Without lupa, fakeredis cannot run Lua scripts.
            if find_spec(name) is None:
                raise SettingsError(f"an in-memory pool needs {name}: pip install 'lmpool[testing]'")
        from lmpool.testing.front import Front  # Import late: fakeredis is optional and slow to import.

        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        is_long = len(os.fsencode(tempfile.gettempdir())) > _MAX_FOLDER_BYTES
        # Use a private folder, because the server has no password.
        with tempfile.TemporaryDirectory(prefix="lmp", dir="/tmp" if is_long else None) as folder:
            path = socket_path(Path(folder))
            async with Front(path):
                self._url = socket_url(path)
                self._is_open.set_result(None)
                await self._over.wait()
                self._url = ""
                workers, self.workers = self.workers, []
                if self._redis is not None:
                    self._redis.close()
                    self._redis = None
                ends = await asyncio.gather(*(worker.end() for worker in workers), return_exceptions=True)
                for end in ends:  # Raise the error of a worker that failed before the pool was closed.
                    if isinstance(end, BaseException):
                        raise end


def pool(*models: SyntheticModel, prefix: str = "lmpool") -> MemoryPool:
    """An in-memory pool that is open during its block: `with pool() as memory:` or `async with pool() as memory:`.

    See `MemoryPool` for the arguments and errors.
    """
    return MemoryPool(*models, prefix=prefix)
