"""The thread of a backend: submits prompts, runs steps and returns results to the event loop.

The event loop uses `EngineThread`, and the thread uses `_Engine`. They exchange calls and results through queues.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import LMPoolError, ProtocolError, WorkerError
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.row import Encoding, NewRows, VectorBlock, check_row
from lmpool.protocol.tokenizer import PackedTokenizer
from lmpool.vocabulary import Vocabulary
from lmpool.workers.execution import contract, yielding
from lmpool.workers.execution.in_flight import InFlightPrompt

T = TypeVar("T")

_log = logging.getLogger("lmpool.worker")

# Factor per full step by which the recent max step time decays; a max is used, because some steps return at once.
_STEP_TIME_DECAY = 0.9
# Max batches of bulk prompts and continuations that a worker holds. While other clients are active, the Lua scripts put
# at most three batches of these prompts in a worker's streams, so a fourth lets the worker reach the rows behind them.
# A bulk client that was alone may have put more batches into the streams: see `capacity`.
_MAX_YIELDING_BATCHES = 4
# Max batches of bulk prompts and continuations that a worker holds while it takes single entries to reach a row.
_MAX_BATCHES_BEFORE_ROWS = 8
# Seconds between two entries that a worker reads beyond `_MAX_YIELDING_BATCHES` while only bulk clients are active.
_BEYOND_LIMIT_S = 1.0
_MAP_CHECK_S = 0.1  # While the backend maps shared memory: seconds between two checks that its thread is alive.


class Opened(NamedTuple):
    """Properties of a backend, read in its thread: see `Backend`."""

    info: ModelInfo
    batch: int
    device: str
    vocabulary: Vocabulary | None
    tokenizer: PackedTokenizer | None
    adapters: Mapping[str, str]
    devices: Sequence[str]


class StepResult(NamedTuple):
    """The results of one step, or of several steps that are published together.

    Attributes:
        finished: the results as the backend returned them.
        prompts: the prompts that have a result.
        stale: prompts whose adapter the backend does not have.
        step: monotonic times when the step began and ended; None unless jobs are traced.
    """

    finished: contract.Finished
    prompts: Sequence[InFlightPrompt] = ()
    stale: Sequence[InFlightPrompt] = ()
    step: tuple[float, float] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all rows and vectors, encoded."""
        blocks, _, answers = self.finished
        return sum(block.nbytes for block in blocks) + (answers.nbytes if answers is not None else 0)

    @property
    def ended(self) -> list[InFlightPrompt]:
        """The prompts that were not submitted again: a new submission has released the memory of their answers."""
        return [prompt for prompt in (*self.prompts, *self.stale) if prompt.status == "ended"]


class Call(NamedTuple):
    """One call of the backend: the thread runs it, and the watchdog names it in errors. Compare calls with `is`."""

    description: str
    run: Callable[[_Engine], None] = lambda _: None


class _Capacity(NamedTuple):
    """Number of interactive rows that the backend accepts, counted when `taken` rows had arrived in its thread."""

    rows: int = 0
    taken: int = 0


class EngineThread:
    """Runs a backend in a thread, so that the event loop can renew leases during a forward.

    Args:
        make: makes the backend; called in the thread, because engines bind to the thread that starts them.
        on_result: called in the event loop with the results of each step.
        on_broken: called in the event loop with the exception that ended the thread.
        on_step: called in the thread after each step, with its seconds and its number of results.
        tells_steps: whether to set `StepResult.step`.

    Attributes:
        on_finished: called in the thread with the results of each step, before `on_result`.
        batch: number of prompts in a full step.
        step_s: recent max seconds of a step; infinity before the first step.
        stats: the backend's counters after its last step.
        call: the call that the backend has not returned from; None if no call runs.
        is_hung: whether the thread does not return from the backend; only the end of the process ends the thread.
        owed: number of prompts that the backend has not answered yet.
        yielding: number of unanswered prompts that wait while rows are computed (`YieldingPrompts`).
    """

    def __init__(
        self,
        make: Callable[[], contract.Backend],
        on_result: Callable[[StepResult], None],
        on_broken: Callable[[BaseException], None],
        on_step: Callable[[float, int], None] = lambda seconds, answers: None,
        *,
        tells_steps: bool = False,
    ) -> None:
        self.on_finished: Callable[[StepResult], None] = lambda result: None
        self._make, self._on_result, self._on_broken, self._on_step = make, on_result, on_broken, on_step
        self._loop, self._tells_steps = asyncio.get_running_loop(), tells_steps
        self._ready: Future[tuple[Opened, _Capacity]] = Future()
        self._closed = asyncio.Event()
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._results: deque[tuple[StepResult, contract.BackendStats, _Capacity]] = deque()
        self._is_woken = self.is_hung = False
        self._awaited: set[Future[Any]] = set()  # The results of calls by `run` that have not returned.
        self._broken: BaseException | None = None  # The exception that ended the thread.
        self._capacity, self.stats = _Capacity(), contract.BackendStats()
        self._sent = 0  # Number of rows that were sent to the thread, to compare with `_Capacity.taken`.
        self._submitted_at = self._interactive_at = -math.inf
        self.owed, self.yielding, self.batch, self.step_s = 0, 0, 1, math.inf
        self.call: Call | None = None
        # Use a daemon thread: a forward that never returns must not keep the process alive after a stop.
        self._thread = threading.Thread(target=self._run, name="lmpool-backend", daemon=True)

    async def start(self) -> Opened:
        """Make the backend and return its properties; raises the exception that `make` raises."""
        self._thread.start()
        opened, self._capacity = await asyncio.wrap_future(self._ready)
        self.batch = opened.batch
        self._memory = yielding.AnswerMemory(opened.info)
        return opened

    @property
    def capacity(self) -> int:
        """Number of prompts that the backend accepts now, in addition to the prompts that were sent to it.

        Prompts that yield to rows have their own limit. At this limit, a worker still takes single entries, because the
        stream's next entry may be a row, and a bulk prompt may take long. The worker takes one entry after another
        while interactive clients are active, else one entry per second.
        """
        free = _MAX_YIELDING_BATCHES * self.batch - self.yielding
        if free <= 0:
            now = time.monotonic()
            may_be_row = now - self._interactive_at < yielding.QUIET_S or now - self._submitted_at > _BEYOND_LIMIT_S
            free = int(may_be_row and self.yielding < _MAX_BATCHES_BEFORE_ROWS * self.batch)
        return min(self._capacity.rows - (self._sent - self._capacity.taken), free)

    def submit(self, prompts: Sequence[InFlightPrompt]) -> None:
        """Hand prompts to the backend, now or when there is memory for their answers (`AnswerMemory`)."""
        self._submitted_at = time.monotonic()
        yields, is_large = 0, False
        for prompt in prompts:
            prompt.status = "pending"
            prompt.yields = prompt.bulk or prompt.generate is not None
            yields += prompt.yields
            if prompt.generate is not None or prompt.positions is not None or prompt.head is not None:
                is_large = True
            if not prompt.bulk:
                self._interactive_at = self._submitted_at
        self.owed += len(prompts)
        self.yielding += yields
        self._send(self._memory.admit(prompts) if is_large else prompts)

    def _send(self, prompts: Sequence[InFlightPrompt]) -> None:
        if prompts:
            rows = sum(not prompt.yields for prompt in prompts)
            self._sent += rows
            self._calls.put(Call(f"submission of {len(prompts)} prompts", lambda engine: engine.take(prompts, rows)))

    def published(self, prompts: Sequence[InFlightPrompt]) -> None:
        """Release the memory of answers that are published."""
        if any(prompt.answer_bytes for prompt in prompts):
            self._send(self._memory.free(prompts))

    def abort(self, prompts: Iterable[InFlightPrompt]) -> None:
        """Drop prompts before the backend's next step. The running step may still return results for these prompts."""
        dropped = {prompt for prompt in prompts if prompt.is_owed}
        ready = self._memory.drop(dropped)
        self._end(dropped)
        self._calls.put(Call(f"abort of {len(dropped)} prompts", lambda engine: engine.abort(dropped)))
        self._send(ready)

    def promote(self, prompts: Iterable[InFlightPrompt]) -> None:
        """Make bulk prompts interactive, because an interactive client waits for them too."""
        bulk = {prompt for prompt in prompts if prompt.bulk}
        pending = {prompt for prompt in bulk if prompt.status == "pending"}
        for prompt in bulk - pending:
            prompt.bulk = False
        self._memory.promote(bulk - pending)
        if pending:
            self._calls.put(Call(f"submission of {len(pending)} prompts", lambda engine: engine.promote(pending)))

    async def load_adapter(self, name: str, source: str) -> str:
        """Load an adapter between two steps; return its revision.

        Raises:
            LMPoolError: the adapter cannot be loaded.
        """
        return await self.run(f"load of the adapter {name!r}", lambda backend: backend.load_adapter(name, source))

    async def run(self, description: str, call: Callable[[contract.Backend], T]) -> T:
        """Call the backend between two steps; return the result.

        Raises:
            LMPoolError: `call` raised it. After any other exception the backend counts as broken.
        """
        if self._broken is not None:
            raise WorkerError(f"the backend broke before the {description}: {self._broken}")
        result = Future[T]()

        def run(engine: _Engine) -> None:
            # The caller was cancelled, or `abandon` has ended the wait.
            if result.done() or not result.set_running_or_notify_cancel():
                return
            with suppress(InvalidStateError):
                try:
                    result.set_result(call(engine.backend))
                except LMPoolError as error:
                    result.set_exception(error)
                except BaseException as error:
                    result.set_exception(WorkerError(f"the backend broke during the {description}: {error}"))
                    raise

        self._calls.put(Call(description, run))
        self._awaited.add(result)
        try:
            return await asyncio.wrap_future(result)
        finally:
            self._awaited.discard(result)

    def drop_adapter(self, adapter: str) -> None:
        """Drop an adapter. Prompts that name the adapter are returned as `stale`, now or after their submission."""
        self._calls.put(Call(f"drop of the adapter {adapter!r}", lambda engine: engine.drop_adapter(adapter)))

    def write_to(self, new_rows: NewRows) -> None:
        """Have the backend write rows into the memory of `new_rows`, if the backend can."""
        self._calls.put(Call("preparation to write rows", lambda engine: engine.write_to(new_rows)))

    def map_memory(self, fd: int, memory: Any) -> None:
        """Let the backend's other processes map shared memory; waits for the backend's thread."""
        done = threading.Event()

        def map_it(engine: _Engine) -> None:
            try:
                if isinstance(engine.backend, contract.MapsMemory):
                    engine.backend.map_memory(fd, memory)
            finally:
                done.set()

        self._calls.put(Call("mapping of shared memory", map_it))
        while not done.wait(_MAP_CHECK_S) and not self.is_hung and self._thread.is_alive():
            pass

    def abandon(self, error: BaseException) -> None:
        """Stop waiting for the thread, which hangs, and fail the calls by `run`."""
        self.is_hung = True
        self._fail_calls(error)

    def _fail_calls(self, error: BaseException) -> None:
        for result in self._awaited:
            with suppress(InvalidStateError):  # The thread has just returned.
                result.set_exception(error)

    def _end_broken(self, error: BaseException) -> None:
        self._broken = self._broken or error
        self._fail_calls(WorkerError(f"the backend broke: {error}"))
        self._on_broken(error)

    def stack(self) -> str:
        """The stack of the thread, as in a traceback."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame else ""

    async def close(self, timeout_s: float | None = None) -> None:
        """End the thread after its running step and close the backend. A thread that takes over `timeout_s` hangs."""
        self._calls.put(None)
        if self._thread.is_alive() and not self.is_hung:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._closed.wait()
            except TimeoutError:
                _log.error("the backend hangs: it has not closed within %g s (step_timeout_s)", timeout_s)
                self.is_hung = True

    def _end(self, prompts: Iterable[InFlightPrompt]) -> None:
        for prompt in prompts:
            if prompt.status != "ended":  # Skip prompts that were aborted before.
                prompt.status = "ended"
                self.owed -= 1
                self.yielding -= prompt.yields

    def _receive(self) -> None:
        # Clear the flag first: a result that arrives from now on must wake the event loop again.
        self._is_woken = False
        while self._results:
            result, self.stats, self._capacity = self._results.popleft()
            self._end(result.prompts)
            self._end(result.stale)
            self._on_result(result)

    # The methods below run in the backend's thread.

    def _post(self, callback: Callable[..., object], *args: object) -> None:
        with suppress(RuntimeError):  # If the loop is closed, no task waits for results.
            self._loop.call_soon_threadsafe(callback, *args)

    def _run(self) -> None:
        # Report every failure to the event loop, because the event loop waits for `_ready` and `_closed`.
        try:
            if not self._ready.set_running_or_notify_cancel():
                return  # The caller of `start` was cancelled, so make no backend.
            began = time.monotonic()
            backend = self._make()
            try:
                _log.info("the model runs after %.1f s; reading its vocabulary", time.monotonic() - began)
                vocabulary = backend.vocabulary()
                tokenizer = backend.tokenizer() if isinstance(backend, contract.TellsTokenizer) else None
                about = backend.info, backend.batch, backend.device
                devices = backend.devices if isinstance(backend, contract.TellsDevices) else [backend.device]
                opened = Opened(*about, vocabulary, tokenizer, dict(backend.adapters), tuple(devices))
                if isinstance(backend, contract.TellsEnd):
                    backend.when_broken(partial(self._post, self._end_broken))
                self._ready.set_result((opened, _Capacity(backend.capacity())))
                self._serve(_Engine(backend, self._send_result))
            except BaseException as error:  # noqa: BLE001  the error is reported before `close`, which may take long
                self._fail(error)
            finally:
                self.call = None
                backend.close()
        except BaseException as error:  # noqa: BLE001  making or closing the backend failed
            self._fail(error)
        finally:
            self._post(self._closed.set)

    def _fail(self, error: BaseException) -> None:
        if self._ready.done():
            self._post(self._end_broken, error)
        else:
            self._ready.set_exception(error)

    def _serve(self, engine: _Engine) -> None:
        while True:
            # Before the next step, run all calls that have arrived, so that the step is full.
            while not self._calls.empty() or not (engine.held or engine.has_yielding):
                if (call := self._calls.get()) is None:
                    return
                self.call = call
                call.run(engine)
                self.call = None
            if engine.has_yielding:
                self.call = Call("submission of prompts")
                engine.submit_yielding()
            if engine.held:
                self.call = Call("step")
                began = time.monotonic()
                finished = engine.backend.step()
                self.call, ended = None, time.monotonic()
                digests = check_answers(finished, engine.held, engine.info)
                try:
                    for block in finished.blocks:
                        if block.digests:  # Check one row per block: clients check only some rows.
                            check_row(block.row(0))
                except ProtocolError as error:
                    raise WorkerError(f"the backend has returned something that is not a row: {error}") from error
                self._note_step_time(ended - began, len(digests))
                result = engine.take_results(finished, digests)
                self.on_finished(result)
                self._on_step(ended - began, len(result.prompts))
                engine.send(result._replace(step=(began, ended)) if self._tells_steps else result)

    def _note_step_time(self, seconds: float, answers: int) -> None:
        if self.step_s == math.inf or seconds > self.step_s:
            self.step_s = seconds
        elif answers >= self.batch:
            self.step_s = max(seconds, _STEP_TIME_DECAY * self.step_s)

    def _send_result(self, result: StepResult, stats: contract.BackendStats, capacity: _Capacity) -> None:
        self._results.append((result, stats, capacity))
        # Waking the event loop can cost as much as a short step, so skip the wake-up while one is already pending.
        if not self._is_woken:
            self._is_woken = True
            self._post(self._receive)


class _Engine:
    """The prompts in a backend's thread, and the calls of the backend that the thread runs.

    Attributes:
        held: the prompts that the backend holds, by digest.
        yielding: the prompts that wait in this thread for the backend.
    """

    def __init__(self, backend: contract.Backend, send_result: Callable[..., None]) -> None:
        self.backend, self.info, self._send_result = backend, backend.info, send_result
        self.held: dict[bytes, InFlightPrompt] = {}
        self.yielding = yielding.YieldingPrompts(backend.batch)
        self._held_yielding: set[InFlightPrompt] = set()  # Prompts that the backend holds and that yield to rows.
        self._taken = 0  # Number of rows that have arrived from the event loop.

    @property
    def has_yielding(self) -> bool:
        """Whether prompts wait for the backend."""
        return bool(self.yielding.continuations or self.yielding.bulk)

    def send(self, result: StepResult) -> None:
        """Send a result to the event loop, with the backend's capacity after this result."""
        capacity = self.backend.capacity() + len(self._held_yielding)
        self._send_result(result, self.backend.stats(), _Capacity(capacity, self._taken))

    def take(self, prompts: Sequence[InFlightPrompt], rows: int) -> None:
        """Take prompts from the event loop; `rows` of them are requests for rows, and the others let rows go first."""
        self._taken += rows
        if rows:
            self.yielding.interactive_at = time.monotonic()
        is_mixed = rows < len(prompts)
        served = {"", *self.backend.adapters}
        if of_head := {prompt: prompt.head for prompt in prompts if prompt.head is not None}:
            if stale := [prompt for prompt in of_head if prompt.adapter not in served]:
                self.send(StepResult(contract.Finished([], {}), stale=stale))
            prompts = [prompt for prompt in prompts if prompt not in of_head]
            of_head = {prompt: head for prompt, head in of_head.items() if prompt.adapter in served}
            answers: dict[bytes, NDArray[np.float32]] = {}
            failures: dict[bytes, str] = {}
            for prompt, head in of_head.items():
                try:
                    answers[prompt.digest] = cast(contract.TellsHead, self.backend).head(head, prompt.adapter)
                except Exception as error:  # noqa: BLE001  a query must not end the worker, whatever its backend raises
                    failures[prompt.digest] = contract.failure_of(error)
            vectors = VectorBlock(list(answers), list(answers.values())) if answers else None
            self.send(StepResult(contract.Finished([], failures, vectors), list(of_head)))
        self._submit(self.yielding.keep(prompts) if is_mixed else prompts)

    def _submit(self, prompts: Sequence[InFlightPrompt]) -> None:
        """Give prompts to the backend; report prompts whose adapter the backend does not have."""
        backend = self.backend
        if any(prompt.adapter for prompt in prompts):
            served = {"", *backend.adapters}
            if stale := [prompt for prompt in prompts if prompt.adapter not in served]:
                prompts = [prompt for prompt in prompts if prompt.adapter in served]
                self.send(StepResult(contract.Finished([], {}), stale=stale))
        backend.submit(prompts)
        for prompt in prompts:
            self.held[prompt.digest] = prompt
            if prompt.generate is not None:
                yielding.begin(prompt, prompt.generate)
            if prompt.bulk or prompt.generate is not None:
                self._held_yielding.add(prompt)

    def submit_yielding(self) -> None:
        """Give the backend the waiting prompts that are due before its next step."""
        continuations = sum(prompt.generate is not None for prompt in self._held_yielding)
        bulk_tokens = sum(yielding.count_new_tokens(prompt) for prompt in self._held_yielding if prompt.bulk)
        due = self.yielding.next(len(self.held), continuations, bulk_tokens, self.backend.capacity())
        if due:
            self._submit(due)

    def take_results(self, finished: contract.Finished, digests: Iterable[bytes]) -> StepResult:
        """Turn the results of a step into results for the event loop; keep continuations that have not ended."""
        prompts = [self.held.pop(digest) for digest in digests]
        if self._held_yielding:
            self._held_yielding.difference_update(prompts)
            if continuations := {prompt.digest: prompt for prompt in prompts if prompt.generate is not None}:
                finished, longer = yielding.advance(finished, continuations)
                # Let rows that arrived during the step run before the next tokens of continuations.
                self.yielding.keep_longer(longer)
                prompts = [prompt for prompt in prompts if prompt not in longer]
        return StepResult(finished, prompts)

    def abort(self, prompts: Collection[InFlightPrompt]) -> None:
        """Drop prompts that wait for the backend or that the backend holds."""
        self.yielding.drop(prompts)
        self._abort_held([prompt for prompt in prompts if self.held.get(prompt.digest) is prompt])
        self.send(StepResult(contract.Finished([], {})))  # Report the new capacity.

    def _abort_held(self, prompts: Sequence[InFlightPrompt]) -> None:
        self.backend.abort([prompt.digest for prompt in prompts])
        for prompt in prompts:
            del self.held[prompt.digest]
        self._held_yielding.difference_update(prompts)

    def promote(self, prompts: Collection[InFlightPrompt]) -> None:
        """Make bulk prompts interactive, whether they wait for the backend or the backend holds them."""
        held = [prompt for prompt in prompts if self.held.get(prompt.digest) is prompt]
        for prompt in prompts:
            prompt.bulk = False
        self._held_yielding.difference_update(held)
        # Submit the held prompts again, because some backends treat bulk prompts differently.
        if rows := [*held, *self.yielding.promote(prompts)]:
            self._submit(rows)

    def drop_adapter(self, adapter: str) -> None:
        """Drop an adapter and the prompts that name it; an adapter that cannot be dropped stays loaded."""
        stale = [prompt for prompt in self.held.values() if prompt.adapter == adapter]
        self._abort_held(stale)
        try:
            self.backend.drop_adapter(adapter)
        except Exception as error:
            if contract.is_device_error(error):
                raise
            _log.warning("adapter %r cannot be dropped; it stays loaded until the worker ends", adapter, exc_info=error)
        if stale:
            self.send(StepResult(contract.Finished([], {}), stale=stale))

    def write_to(self, new_rows: NewRows) -> None:
        """Have the backend write rows into the memory of `new_rows`, except rows that are only for continuations."""

        def memory(count: int, vocab_size: int, encoding: Encoding) -> NDArray[Any] | None:
            is_unread = bool(self.held) and all(prompt.generate is not None for prompt in self.held.values())
            return None if is_unread else new_rows(count, vocab_size, encoding)

        if isinstance(self.backend, contract.WritesInPlace):
            self.backend.write_to(memory)


def check_answers(finished: contract.Finished, held: Collection[bytes], info: ModelInfo) -> list[bytes]:
    """Refuse results that no worker may publish.

    Args:
        finished: the results of a step.
        held: digests of the prompts that the backend holds.
        info: the backend's info.

    Returns:
        the digests that have a result.

    Raises:
        WorkerError: a result for a prompt that was not submitted, two results for a prompt, or a row of a wrong length.
    """
    digests = [digest for block in finished.blocks for digest in block.digests]
    digests += [*(finished.answers.digests if finished.answers else ()), *finished.failures]
    who = f"the backend {info.backend!r} has returned"
    if len(set(digests)) < len(digests):
        twice = [digest for digest, count in Counter(digests).items() if count > 1]
        raise WorkerError(f"{who} two results in one step for {len(twice)} prompts, such as {twice[0].hex()}")
    if strangers := [digest for digest in digests if digest not in held]:
        text = f"results for {len(strangers)} prompts that were not submitted, such as {strangers[0].hex()}"
        raise WorkerError(f"{who} {text}")
    for block in finished.blocks:
        if block.numbers.shape[1] != info.vocab_size:
            raise WorkerError(f"{who} rows of {block.numbers.shape[1]} entries; its info says V = {info.vocab_size}")
    return digests
