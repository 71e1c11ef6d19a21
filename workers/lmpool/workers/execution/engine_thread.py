"""The thread that a backend runs in: takes jobs, steps, hands rows back; and the watchdogs that notice a hang."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import LMPoolError, WorkerError
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.row import NewRows, VectorBlock
from lmpool.protocol.tokenizer import PackedTokenizer
from lmpool.vocabulary import Vocabulary
from lmpool.workers.execution.answer_memory import AnswerMemory
from lmpool.workers.execution.continuations import Continuations
from lmpool.workers.execution.contract import (
    Backend,
    BackendJob,
    BackendStats,
    Finished,
    TellsHead,
    TellsTokenizer,
    WritesInPlace,
    check_answers,
    check_first_rows,
    failure_of,
    is_device_error,
)
from lmpool.workers.execution.yielding import QUIET_S, YieldingJobs

_log = logging.getLogger("lmpool.worker")

_FALLS = 0.9

# Jobs of bulk clients and continuations that a worker holds, in batches. The scripts put at most two batches of bulk
# prompts and three of both kinds in the streams of a worker next to other clients, held ones included: with a fourth,
# the worker reaches the rows behind them. A bulk client that was alone may have put more there: see `capacity`.
_MAX_YIELDING_BATCHES = 4
# Max batches of such jobs that a worker holds when it takes single jobs to reach a row behind them.
_MAX_BATCHES_BEFORE_ROWS = 8
# Seconds between two jobs that a worker takes beyond the first limit while bulk clients are alone.
_BEYOND_LIMIT_S = 1.0


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


@dataclass(frozen=True, slots=True)
class _Abort:
    """Prompts that nobody waits for any more."""

    digests: Collection[bytes]


@dataclass(frozen=True, slots=True)
class _Promote:
    """Prompts that do not yield to others any more."""

    digests: Collection[bytes]


@dataclass(frozen=True, slots=True)
class _WriteTo:
    """Where the memory of rows is to come from."""

    new_rows: NewRows


_Held = dict[bytes, BackendJob]
"""The prompts that the backend holds: digest -> the job as the backend has it."""

_Command = Sequence[BackendJob] | _Load | _Drop | _Abort | _Promote | _WriteTo


class Opened(NamedTuple):
    """What a backend is, read in its thread: see the properties of `Backend`."""

    info: ModelInfo
    batch: int
    device: str
    vocabulary: Vocabulary | None
    tokenizer: PackedTokenizer | None
    adapters: Mapping[str, str]


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of the backend that is under way; each is an object of its own.

    Attributes:
        command: what it was asked to do; None for a step.
    """

    command: _Command | None = None

    @property
    def description(self) -> str:
        """What it does, for people."""
        match self.command:
            case None:
                return "step"
            case _Load(name=name):
                return f"load of the adapter {name!r}"
            case _Drop(adapter=adapter):
                return f"drop of the adapter {adapter!r}"
            case _Abort(digests=digests):
                return f"abort of {len(digests)} prompts"
            case _Promote(digests=digests):
                return f"submission of {len(digests)} prompts"
            case _WriteTo():
                return "preparation to write rows"
            case jobs:
                return f"submission of {len(jobs)} prompts"


class _Room(NamedTuple):
    """What the backend has capacity for, as seen by its thread.

    Attributes:
        capacity: rows of interactive clients that it accepts: what yields to them takes up no capacity.
        taken: such rows that had arrived so far.
    """

    capacity: int = 0
    taken: int = 0


class _Told(NamedTuple):
    """What the thread tells the event loop: what a step brought, and how the backend is after it."""

    finished: Finished
    stats: BackendStats
    room: _Room


class EngineThread:
    """Runs a backend in a thread, so that the event loop can renew leases while a forward runs.

    Args:
        make: makes the backend; called in the thread, for engines bind to the thread they start in.
        on_finished: called in the event loop with what each step brought.
        on_broken: called in the event loop with the exception that ended the thread.
        on_step: called in the thread after each step, with its seconds and how many jobs it has answered.
        tells_steps: have `Finished.step` told.

    Attributes:
        batch: prompts that make a full step.
        step_s: seconds that a step over a whole batch takes at most, lately; infinity before the first.
        stats: the backend's counters after its last step.
        call: what the backend has been asked to do and has not done yet.
        is_hung: the thread does not return from the backend; only the end of the process ends it.
        stepping_since: monotonic time when the step that runs now began, or None.
    """

    def __init__(
        self,
        make: Callable[[], Backend],
        on_finished: Callable[[Finished], None],
        on_broken: Callable[[BaseException], None],
        on_step: Callable[[float, int], None] = lambda seconds, answers: None,
        *,
        tells_steps: bool = False,
    ) -> None:
        self._make = make
        self._on_finished = on_finished
        self._on_broken = on_broken
        self._on_step = on_step
        self._tells_steps = tells_steps
        self._commands: SimpleQueue[_Command | None] = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[Opened] = self._loop.create_future()
        self._closed = asyncio.Event()
        self._sent = 0
        self._outstanding: set[bytes] = set()
        self._yields: set[bytes] = set()
        self._submitted_at = self._interactive_at = -math.inf
        self._told: deque[_Told] = deque()
        self._is_woken = False
        self._room = _Room()
        self.batch = 1
        self.step_s = math.inf
        self.stats = BackendStats()
        self.call: Call | None = None
        self.is_hung = False
        self._loads: set[asyncio.Future[str]] = set()
        self._yielding = YieldingJobs(1)
        self.stepping_since: float | None = None
        # A daemon: a forward that never returns must not keep a process alive that was told to stop now.
        self._thread = threading.Thread(target=self._run, name="lmpool-backend", daemon=True)

    async def start(self) -> Opened:
        """Make the backend; returns what it is. Raises what making it raised."""
        self._thread.start()
        opened = await self._ready
        self.batch = opened.batch
        self._answers = AnswerMemory(opened.info)
        return opened

    @property
    def capacity(self) -> int:
        """How many prompts the backend can take now, besides those that are on their way to it.

        What yields to rows of interactive clients takes up none of their capacity: it has a limit of its own. At that
        limit the worker takes one job after another while interactive clients ask, and one a second otherwise: the
        next entry of the stream may be a row, and a bulk prompt may take long to end.
        """
        room, yields = self._room, len(self._yields)
        free = _MAX_YIELDING_BATCHES * self.batch - yields
        if free <= 0:
            now = time.monotonic()
            may_be_row = now - self._interactive_at < QUIET_S or now - self._submitted_at > _BEYOND_LIMIT_S
            free = int(may_be_row and yields < _MAX_BATCHES_BEFORE_ROWS * self.batch)
        return min(room.capacity - (self._sent - room.taken), free)

    @property
    def yielding(self) -> int:
        """How many prompts the backend owes that yield to rows of interactive clients (`YieldingJobs`)."""
        return len(self._yields)

    @property
    def is_busy(self) -> bool:
        """Whether the backend owes results."""
        return bool(self._outstanding)

    @property
    def outstanding(self) -> Set[bytes]:
        """The digests of the prompts that the backend has not answered yet."""
        return self._outstanding

    def submit(self, jobs: Sequence[BackendJob]) -> None:
        """Hand jobs to the backend, now or when there is memory for their answers (`AnswerMemory`)."""
        self._submitted_at = time.monotonic()
        if any(not job.bulk for job in jobs):
            self._interactive_at = self._submitted_at
        self._outstanding.update([job.digest for job in jobs])
        self._yields.update([job.digest for job in jobs if job.bulk or job.generate is not None])
        self._send(self._answers.admit(jobs))

    def _send(self, jobs: Sequence[BackendJob]) -> None:
        if jobs:
            self._sent += _count_rows(jobs)
            self._commands.put(jobs)

    def published(self, digests: Iterable[bytes]) -> None:
        """Note that what was told of these prompts takes up no memory any more."""
        self._send(self._answers.free(digests))

    def abort(self, digests: Collection[bytes]) -> None:
        """Have the backend drop prompts before its next step; those of the present step may still be answered."""
        self._outstanding.difference_update(digests)
        self._yields.difference_update(digests)
        self._commands.put(_Abort(digests))
        self._send(self._answers.drop(digests))

    def promote(self, digests: Collection[bytes]) -> None:
        """Have prompts yield to others no more, for others than bulk clients have joined them."""
        self._answers.promote(digests)
        self._commands.put(_Promote(digests))

    async def load_adapter(self, name: str, source: str) -> str:
        """Have the backend load an adapter between two steps; returns its revision.

        Raises:
            LMPoolError: it cannot be loaded.
        """
        command = _Load(name, source, self._loop.create_future())
        self._commands.put(command)
        self._loads.add(command.loaded)
        try:
            return await command.loaded
        finally:
            self._loads.discard(command.loaded)

    def write_to(self, new_rows: NewRows) -> None:
        """Have the backend write rows there, if it can."""
        self._commands.put(_WriteTo(new_rows))

    def drop_adapter(self, adapter: str) -> None:
        """Have the backend forget an adapter; jobs that name it come back as stale, now or when they are submitted."""
        self._commands.put(_Drop(adapter))

    def abandon(self, error: WorkerError) -> None:
        """Wait for the thread no more: it hangs. Who waits for an adapter is told."""
        self.is_hung = True
        for loaded in self._loads:
            _resolve(loaded, error)

    def stack(self) -> str:
        """Where the thread is, as in a traceback."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame else ""

    async def close(self, timeout_s: float | None = None) -> None:
        """End the thread after its present step and free the backend; a thread that takes longer than this hangs."""
        self._commands.put(None)
        if self._thread.is_alive() and not self.is_hung:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._closed.wait()
            except TimeoutError:
                _log.error("the backend hangs: it has not closed within %g s (step_timeout_s)", timeout_s)
                self.is_hung = True

    def _note_step(self, seconds: float, answers: int) -> None:
        # The longest counts, and is forgotten slowly: engines that compute ahead hand over at once what is ready.
        if self.step_s == math.inf or seconds > self.step_s:
            self.step_s = seconds
        elif answers >= self.batch:
            self.step_s = max(seconds, _FALLS * self.step_s)

    def _post(self, callback: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            pass  # The loop is closed: the process is on its way out and nobody needs the result.

    def _run(self) -> None:
        # Whatever fails, the event loop must hear of it: it waits for `_ready` and for `_closed`.
        try:
            began = time.monotonic()
            backend = self._make()
            try:
                _log.info("the model runs after %.1f s: reading what its tokens stand for", time.monotonic() - began)
                vocabulary = backend.vocabulary()
                tokenizer = backend.tokenizer() if isinstance(backend, TellsTokenizer) else None
                adapters = dict(backend.adapters)
                opened = Opened(backend.info, backend.batch, backend.device, vocabulary, tokenizer, adapters)
                self._post(self._set_ready, opened, _Room(backend.capacity()))
                self._serve(backend)
            except BaseException as error:  # noqa: BLE001  told before `close`, which may take long
                self._post(self._fail, error)
            finally:
                self.call = None
                backend.close()
        except BaseException as error:  # noqa: BLE001  making or closing it failed
            self._post(self._fail, error)
        finally:
            self._post(self._closed.set)

    def _serve(self, backend: Backend) -> None:
        info = backend.info
        held: _Held = {}
        self._yielding = yielding = YieldingJobs(backend.batch)
        self._continuations = Continuations()
        self._held_yielding: set[bytes] = set()
        taken = 0

        def tell(finished: Finished) -> None:
            self._tell(finished, backend, _Room(backend.capacity() + len(self._held_yielding), taken))

        while True:
            try:
                command = self._commands.get(block=not (held or yielding))
                if command is None:
                    return
                self.call = Call(command)
                stale = self._execute(backend, command, held)
                of_head = _told_of_head(backend, command)
                self.call = None
                if isinstance(command, Sequence):
                    taken += _count_rows(command)
                if of_head is not None:
                    tell(of_head)
                if stale or isinstance(command, _Abort):  # There is room again.
                    tell(Finished([], {}, stale=stale))
                continue  # Take all that has come before the next step, so that it runs full.
            except Empty:
                pass
            if yielding and (due := self._next_yielding(backend, held)):
                self.call = Call(due)
                if stale := self._submit(backend, due, held):
                    tell(Finished([], {}, stale=stale))
            if not held:
                continue
            self.call = Call()
            self.stepping_since = began = time.monotonic()
            finished = backend.step()
            self.stepping_since = self.call = None
            seconds = time.monotonic() - began
            answered = check_answers(finished, held, info)
            check_first_rows(finished.blocks, info)
            self._note_step(seconds, len(answered))
            if self._continuations:
                finished, longer = self._continuations.advance(finished)
                # Not to the backend before what has arrived since: rows go first.
                yielding.go_on(longer)
                self._release(held, [job.digest for job in longer])
                answered = finished.digests
            self._on_step(seconds, len(answered))
            self._release(held, answered)
            tell(finished._replace(step=(began, began + seconds)) if self._tells_steps else finished)

    def _next_yielding(self, backend: Backend, held: _Held) -> list[BackendJob]:
        """The jobs that must not yield any longer."""
        growing = bulk_tokens = 0
        for digest in self._held_yielding:
            growing += digest in self._continuations
            bulk_tokens += self._continuations.count_new(held[digest]) if held[digest].bulk else 0
        return self._yielding.next(len(held), growing, bulk_tokens, backend.capacity())

    def _release(self, held: _Held, digests: Collection[bytes]) -> None:
        """Note that the backend holds prompts no more."""
        for digest in digests:
            del held[digest]
        if self._held_yielding:
            self._held_yielding.difference_update(digests)

    def _execute(self, backend: Backend, command: _Command, held: _Held) -> tuple[bytes, ...]:
        """Do what is asked; returns the jobs that name an adapter that the backend does not have."""
        match command:
            case _Load():
                self._load(backend, command)
                return ()
            case _Drop():
                stale = tuple(digest for digest, job in held.items() if job.adapter == command.adapter)
                backend.abort(stale)
                self._continuations.drop(stale)
                _drop(backend, command.adapter)
                self._release(held, stale)
            case _WriteTo():
                if isinstance(backend, WritesInPlace):
                    backend.write_to(self._continuations.leaving_out(command.new_rows, held))
                return ()
            case _Abort():
                self._yielding.drop(command.digests)
                self._continuations.drop(command.digests)
                aborted = [digest for digest in command.digests if digest in held]
                backend.abort(aborted)
                self._release(held, aborted)
                return ()
            case _Promote():
                self._continuations.promote(command.digests)
                held_bulk = [held[digest] for digest in command.digests if digest in held and held[digest].bulk]
                # A backend that tells bulk prompts from others learns of it this way.
                promoted = [job._replace(bulk=False) for job in held_bulk]
                return self._submit(backend, [*promoted, *self._yielding.promote(command.digests)], held)
            case jobs:
                if any(job.head is not None for job in jobs):
                    jobs = [job for job in jobs if job.head is None]
                return self._submit(backend, self._yielding.sort(jobs), held)
        return stale

    def _submit(self, backend: Backend, jobs: Sequence[BackendJob], held: _Held) -> tuple[bytes, ...]:
        """Give jobs to the backend; returns those that name an adapter that it does not have."""
        stale = tuple(job.digest for job in jobs if job.adapter and job.adapter not in backend.adapters)
        served = [job for job in jobs if job.digest not in stale] if stale else jobs
        self._continuations.drop(stale)
        served = self._continuations.begin(served)
        backend.submit(served)
        held.update([(job.digest, job) for job in served])
        if self._held_yielding:
            self._held_yielding.difference_update([job.digest for job in served])
        if self._continuations or any(job.bulk for job in served):
            self._held_yielding.update(job.digest for job in served if job.bulk or job.digest in self._continuations)
        return stale

    def _load(self, backend: Backend, command: _Load) -> None:
        try:
            revision = backend.load_adapter(command.name, command.source)
        except LMPoolError as error:
            self._post(_resolve, command.loaded, error)
        except BaseException as error:
            text = f"the backend broke while it loaded the adapter {command.name!r}: {error}"
            self._post(_resolve, command.loaded, WorkerError(text))
            raise
        else:
            self._post(_resolve, command.loaded, revision)

    def _set_ready(self, opened: Opened, room: _Room) -> None:
        self._room = room
        if not self._ready.done():  # Who waited may have been cancelled.
            self._ready.set_result(opened)

    def _tell(self, finished: Finished, backend: Backend, room: _Room) -> None:
        self._told.append(_Told(finished, backend.stats(), room))
        # Waking the event loop takes as long as some steps do: it is not woken again before it has come to look.
        if not self._is_woken:
            self._is_woken = True
            self._post(self._on_told)

    def _on_told(self) -> None:
        # Before it looks: what is told from now on wakes it again.
        self._is_woken = False
        while self._told:
            finished, self.stats, self._room = self._told.popleft()
            ended = (*finished.digests, *finished.stale)
            self._outstanding.difference_update(ended)
            self._yields.difference_update(ended)
            self._on_finished(finished)

    def _fail(self, error: BaseException) -> None:
        """Tell whoever waits for the backend, or whoever uses it."""
        if self._ready.done():
            self._on_broken(error)
        else:
            self._ready.set_exception(error)


def _told_of_head(backend: Backend, command: _Command) -> Finished | None:
    """What jobs want of the model's head: no step is needed for it."""
    if not isinstance(command, Sequence) or all(job.head is None for job in command):
        return None
    answers: dict[bytes, NDArray[np.float32]] = {}
    failures: dict[bytes, str] = {}
    # Checked here only: isinstance of a protocol takes longer than the rest of a submission.
    with_head = backend if isinstance(backend, TellsHead) else None
    for job in command:
        if job.head is None:
            continue
        try:
            if with_head is None:
                raise WorkerError(f"the backend {backend.info.backend!r} has hidden states in its info, and no head()")
            answers[job.digest] = with_head.head(job.head)
        except Exception as error:  # noqa: BLE001  a query must not end the worker, whatever its backend raises
            failures[job.digest] = failure_of(error)
    return Finished([], failures, VectorBlock(list(answers), list(answers.values())) if answers else None)


def _drop(backend: Backend, adapter: str) -> None:
    """Have a backend forget an adapter; one that it cannot remove stays loaded."""
    try:
        backend.drop_adapter(adapter)
    except Exception as error:
        if is_device_error(error):
            raise
        _log.warning("the adapter %r cannot be removed: it stays loaded until the worker ends", adapter, exc_info=error)


def _count_rows(jobs: Sequence[BackendJob]) -> int:
    """How many jobs do not yield."""
    return len(jobs) - sum([job.bulk or job.generate is not None for job in jobs])


def _resolve(future: asyncio.Future[str], outcome: str | BaseException) -> None:
    if future.done():
        return  # Who waited has been cancelled.
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
