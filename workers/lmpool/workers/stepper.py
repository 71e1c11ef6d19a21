"""The backend's own thread: takes jobs, steps, hands rows back to the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import NamedTuple

from lmpool.card import ModelCard
from lmpool.errors import LMPoolError
from lmpool.vocab import Vocabulary
from lmpool.workers.answers import check_answers
from lmpool.workers.backend import Backend, BackendJob, BackendStats, Finished
from lmpool.workers.figures import Figures


@dataclass(frozen=True, slots=True)
class _Load:
    """An adapter to load, and who waits for its revision."""

    name: str
    source: str
    loaded: asyncio.Future[str]


@dataclass(frozen=True, slots=True)
class _Drop:
    """An adapter to forget."""

    adapter: str


_Order = Sequence[BackendJob] | _Load | _Drop | None


class Opened(NamedTuple):
    """What a backend is, read in its thread: see the properties of `Backend`."""

    card: ModelCard
    batch: int
    device: str
    vocabulary: Vocabulary | None
    adapters: Mapping[str, str]


class Stepper:
    """Runs a backend in a thread, so that the event loop can renew leases while a forward runs.

    Args:
        make: makes the backend; called in the thread, for engines bind to the thread they start in.
        on_finished: called in the event loop with what each step brought.
        on_broken: called in the event loop with the exception that ended the thread.
        figures: counts steps.

    Attributes:
        stepping_since: monotonic time when the step that runs now began, or None.
    """

    def __init__(
        self,
        make: Callable[[], Backend],
        on_finished: Callable[[Finished], None],
        on_broken: Callable[[BaseException], None],
        figures: Figures | None = None,
    ) -> None:
        self._make = make
        self._on_finished = on_finished
        self._on_broken = on_broken
        self._orders: SimpleQueue[_Order] = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[Opened] = self._loop.create_future()
        self._closed = asyncio.Event()
        self._sent = 0
        self._returned = 0
        self._capacity = 0
        self._capacity_seen_at = 0
        self.batch = 1
        self.stats = BackendStats()
        self.stepping_since: float | None = None
        self._figures = figures or Figures()
        # A daemon: a forward that never returns must not keep a process alive that was told to stop now.
        self._thread = threading.Thread(target=self._run, name="lmpool-backend", daemon=True)

    async def start(self) -> Opened:
        """Make the backend; returns what it is. Raises what making it raised."""
        self._thread.start()
        opened = await self._ready
        self.batch = opened.batch
        return opened

    @property
    def room(self) -> int:
        """Prompts that the backend can take now, those already on their way to it counted."""
        return self._capacity - (self._sent - self._capacity_seen_at)

    @property
    def is_busy(self) -> bool:
        """Whether the backend owes results."""
        return self._sent > self._returned

    def submit(self, jobs: Sequence[BackendJob]) -> None:
        """Hand jobs to the backend."""
        self._sent += len(jobs)
        self._orders.put(jobs)

    async def load_adapter(self, name: str, source: str) -> str:
        """Have the backend load an adapter between two steps; returns its revision.

        Raises:
            LMPoolError: it cannot be loaded.
        """
        order = _Load(name, source, self._loop.create_future())
        self._orders.put(order)
        return await order.loaded

    def drop_adapter(self, adapter: str) -> None:
        """Have the backend forget an adapter; jobs that name it come back as stale, now or when they are submitted."""
        self._orders.put(_Drop(adapter))

    async def close(self) -> None:
        """End the thread after its present step and free the backend."""
        self._orders.put(None)
        if self._thread.is_alive():
            await self._closed.wait()

    def _post(self, callback: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            pass  # The loop is closed: the process is on its way out and nobody needs the result.

    def _run(self) -> None:
        # Whatever fails, the event loop must hear of it: it waits for `_ready` and for `_closed`.
        try:
            backend = self._make()
            try:
                opened = Opened(
                    backend.card, backend.batch, backend.device, backend.vocabulary(), dict(backend.adapters)
                )
                self._post(self._set_ready, opened, backend.capacity())
                self._serve(backend)
            except BaseException as error:  # noqa: BLE001  told before `close`, which may take long
                self._post(self._fail, error)
            finally:
                backend.close()
        except BaseException as error:  # noqa: BLE001  making or closing it failed
            self._post(self._fail, error)
        finally:
            self._post(self._closed.set)

    def _serve(self, backend: Backend) -> None:
        card = backend.card
        held: dict[bytes, str] = {}
        taken = 0
        while True:
            try:
                order = self._orders.get(block=not held)
                if order is None:
                    return
                stale = self._obey(backend, order, held)
                taken += len(order) if isinstance(order, Sequence) else 0
                if stale:
                    self._post(
                        self._step_done, Finished([], {}, stale=stale), backend.stats(), backend.capacity(), taken
                    )
                continue  # Take all that has come before the next step, so that it runs full.
            except Empty:
                pass
            self.stepping_since = began = time.monotonic()
            finished = backend.step()
            self.stepping_since = None
            self._figures.step_s.observe(time.monotonic() - began)
            done = check_answers(finished, held, card)
            self._figures.batch.observe(len(done))
            for digest in done:
                del held[digest]
            self._post(self._step_done, finished, backend.stats(), backend.capacity(), taken)

    def _obey(
        self, backend: Backend, order: Sequence[BackendJob] | _Load | _Drop, held: dict[bytes, str]
    ) -> tuple[bytes, ...]:
        """Do what is ordered; returns the jobs that name an adapter that the backend does not have."""
        match order:
            case _Load():
                self._load(backend, order)
                return ()
            case _Drop():
                stale = tuple(digest for digest, adapter in held.items() if adapter == order.adapter)
                backend.abort(stale)
                backend.drop_adapter(order.adapter)
                for digest in stale:
                    del held[digest]
            case jobs:
                stale = tuple(job.digest for job in jobs if job.adapter and job.adapter not in backend.adapters)
                served = [job for job in jobs if job.digest not in stale] if stale else jobs
                backend.submit(served)
                held.update((job.digest, job.adapter) for job in served)
        return stale

    def _load(self, backend: Backend, order: _Load) -> None:
        try:
            revision = backend.load_adapter(order.name, order.source)
        except LMPoolError as error:
            self._post(_tell, order.loaded, error)
        except BaseException as error:
            self._post(_tell, order.loaded, error)
            raise  # The backend is broken.
        else:
            self._post(_tell, order.loaded, revision)

    def _set_ready(self, opened: Opened, capacity: int) -> None:
        self._capacity = capacity
        if not self._ready.done():  # Who waited may have been cancelled.
            self._ready.set_result(opened)

    def _step_done(self, finished: Finished, stats: BackendStats, capacity: int, taken: int) -> None:
        self._capacity, self._capacity_seen_at = capacity, taken
        self._returned += len(finished.digests) + len(finished.stale)
        self.stats = stats
        self._on_finished(finished)

    def _fail(self, error: BaseException) -> None:
        """Tell whoever waits for the backend, or whoever uses it."""
        if self._ready.done():
            self._on_broken(error)
        else:
            self._ready.set_exception(error)


def _tell(future: asyncio.Future[str], outcome: str | BaseException) -> None:
    if future.done():
        return  # Who waited has been cancelled.
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
