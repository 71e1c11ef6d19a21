"""The backend's own thread: takes jobs, steps, hands rows back to the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import NamedTuple

from lmpool.card import ModelCard
from lmpool.vocab import Vocabulary
from lmpool.workers.answers import check_answers
from lmpool.workers.backend import Backend, BackendJob, BackendStats, Finished

_Order = Sequence[BackendJob] | None


class Opened(NamedTuple):
    """What a backend is, read in its thread: see the properties of `Backend`."""

    card: ModelCard
    batch: int
    device: str
    vocabulary: Vocabulary | None


class Stepper:
    """Runs a backend in a thread, so that the event loop can renew leases while a forward runs.

    Args:
        make: makes the backend; called in the thread, for engines bind to the thread they start in.
        on_finished: called in the event loop with what each step brought.
        on_broken: called in the event loop with the exception that ended the thread.
    """

    def __init__(
        self,
        make: Callable[[], Backend],
        on_finished: Callable[[Finished], None],
        on_broken: Callable[[BaseException], None],
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
                opened = Opened(backend.card, backend.batch, backend.device, backend.vocabulary())
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
        held: set[bytes] = set()
        taken = 0
        while True:
            try:
                order = self._orders.get(block=not held)
                if order is None:
                    return
                backend.submit(order)
                held.update(job.digest for job in order)
                taken += len(order)
                continue  # Take all that has come before the next step, so that it runs full.
            except Empty:
                pass
            finished = backend.step()
            held.difference_update(check_answers(finished, held, card))
            self._post(self._step_done, finished, backend.stats(), backend.capacity(), taken)

    def _set_ready(self, opened: Opened, capacity: int) -> None:
        self._capacity = capacity
        if not self._ready.done():  # Who waited may have been cancelled.
            self._ready.set_result(opened)

    def _step_done(self, finished: Finished, stats: BackendStats, capacity: int, taken: int) -> None:
        self._capacity, self._capacity_seen_at = capacity, taken
        self._returned += len(finished.digests)
        self.stats = stats
        self._on_finished(finished)

    def _fail(self, error: BaseException) -> None:
        """Tell whoever waits for the backend, or whoever uses it."""
        if self._ready.done():
            self._on_broken(error)
        else:
            self._ready.set_exception(error)
