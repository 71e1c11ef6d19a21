"""A worker: fetches, computes and publishes, all three at once, until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial

from redis.exceptions import RedisError, ResponseError

from lmpool.aio import delays, end_tasks, finish
from lmpool.broker.server import Server
from lmpool.broker.server_checks import read_memory
from lmpool.errors import LMPoolError, ModelMismatch, ProtocolError, ServerError, SettingsError, WorkerError
from lmpool.protocol.adapter import MAX_LOADED
from lmpool.protocol.model_info import ModelInfo
from lmpool.workers.execution.contract import BackendSettings, BackendStats, Finished
from lmpool.workers.execution.engine_thread import EngineThread, Opened
from lmpool.workers.execution.watchdogs import Watchdog
from lmpool.workers.membership.heartbeat import CheckpointWatch, Loading, new_worker_id
from lmpool.workers.metrics.counters import CounterDelta, Counters
from lmpool.workers.metrics.prometheus import Health, Snapshot
from lmpool.workers.queue.consumer import STALE_S, InFlightJob
from lmpool.workers.serving import Serving, WorkerContext, assemble, check_before_loading
from lmpool.workers.settings import WorkerSettings

_log = logging.getLogger("lmpool.worker")

_PUBLISHERS = 2
# What a step brings that is no larger is published together with what others bring meanwhile: so many of them at most.
_SMALL_BYTES = 64 * 1024
_MAX_STEPS = 8
_LEAVE_S = 10.0
# How long to wait for jobs: at first briefly, for there may be some in others' lanes.
_MIN_BLOCK_MS = 4
_BLOCK_MS = 500
_GIVE_WAY_S = 0.001
# Steps that are shorter take less than a call of the server, so the backend would wait for the next batch: then a call
# takes several. With longer ones, what a worker takes beyond a batch would be missing to another.
_SHORT_STEP_S = 0.001
# Of prompts in a call that takes several batches, far below what a connection accepts as a reply.
_MAX_TAKEN_BYTES = 32 * 1024 * 1024
_UNPUBLISHED_BATCHES = 4
# For how long a worker takes nothing new, as a part of its lease, so that it may become empty for a prompt that must
# run alone. Claims are as far apart: a worker that does not become empty serves others half of the time.
_DRAIN_SHARE = 1 / 3


class Lifecycle:
    """Whether a worker goes on, and how its parts hear of changes.

    Attributes:
        stopping: set when the worker is to take nothing more and to finish what it holds.
        broken: why the backend is of no use any more, or None.
    """

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        self.broken: BaseException | None = None
        self._changed = asyncio.Event()

    def stop(self) -> None:
        """Take nothing more, and finish."""
        self.stopping.set()
        self.notify()

    def give_up(self, error: BaseException) -> None:
        """Note that the backend is of no use any more; the first reason counts. Jobs in flight stay so for now."""
        self.broken = self.broken or error

    def notify(self) -> None:
        """Wake all parts that wait for a change."""
        self._changed.set()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds; not any longer once the backend is broken."""
        while self.broken is None and not condition():
            await self.wait_for_change()

    async def wait_for_change(self, timeout_s: float | None = None) -> None:
        """Wait until something changes, or until some seconds have passed."""
        self._changed.clear()
        if timeout_s is None:
            await self._changed.wait()
            return
        timer = asyncio.get_running_loop().call_later(timeout_s, self._changed.set)
        await self._changed.wait()
        timer.cancel()


class FetchLoop:
    """Brings jobs to the backend as long as it has capacity: new ones, and those of workers that fell silent.

    Args:
        worker: explains and counts errors of the server.
        lifecycle: whether to go on.
        serving: the consumer that jobs are taken from, and the dispatcher that they go to.
    """

    def __init__(self, worker: WorkerContext, lifecycle: Lifecycle, serving: Serving) -> None:
        self._server = worker.server
        self._counters = worker.counters
        self._lifecycle = lifecycle
        self._in_flight = serving.in_flight
        self._engine_thread = serving.engine_thread
        self._consumer = serving.consumer
        self._dispatcher = serving.dispatcher
        self._lease_s = serving.info.lease_s
        # What a trie job asks for is larger than its prompt, and has no limit that would be of use here.
        self._most_job_bytes = math.inf if serving.info.is_trie else 4 * serving.info.max_prompt_tokens
        # Locked from taking jobs until they are in `_in_flight`: a job that is not is neither renewed nor counted.
        self._taking = asyncio.Lock()

    async def fetch(self) -> None:
        """Take jobs until the worker stops: a batch when the backend is idle, the next one while it computes."""
        waits, lifecycle, block_ms = delays(), self._lifecycle, _BLOCK_MS
        while not lifecycle.stopping.is_set():
            await lifecycle.wait_for(lambda: lifecycle.stopping.is_set() or self._capacity_for_new() > 0)
            if lifecycle.stopping.is_set():
                return
            try:
                async with self._taking:
                    # Waiting for the lock may have taken long: a suspect job may have run alone meanwhile.
                    if lifecycle.stopping.is_set() or (capacity := self._capacity_for_new()) <= 0:
                        continue
                    jobs = await self._consumer.take(self._count_to_take(capacity), block_ms)
                    if not jobs:
                        await self._find_more(capacity)
                    block_ms = self._next_block(jobs, block_ms)
                    was_idle = not self._in_flight
                    await self._dispatcher.accept(jobs)
            except (RedisError, OSError, LMPoolError) as error:
                self._counters.server_errors += 1
                _log.warning("cannot fetch, will try again: %s", self._server.explain(error))
                await asyncio.sleep(next(waits))
                continue
            waits = delays()
            if was_idle and self._in_flight:
                # An idle backend is to begin: its thread needs the interpreter that the next fetch would occupy. What
                # it has computed by then is sent first.
                await lifecycle.wait_for_change(_GIVE_WAY_S)
                await asyncio.sleep(0)

    def _next_block(self, jobs: Sequence[InFlightJob], block_ms: int) -> int:
        """For how long the next read may wait: not for long where there may soon be something to steal."""
        if self._consumer.is_alone:
            return _BLOCK_MS
        if jobs:
            return _MIN_BLOCK_MS
        if self._in_flight:  # Until about the end of its step.
            return int(min(_BLOCK_MS, max(_MIN_BLOCK_MS, 1000 * self._engine_thread.step_s)))
        return min(4 * block_ms, _BLOCK_MS)

    async def _find_more(self, capacity: int) -> None:
        """Have the worker's lane get something, where it and the shared stream have nothing."""
        await self._consumer.refill()
        if not self._in_flight:
            await self._consumer.steal(min(capacity, self._engine_thread.batch), self._engine_thread.step_s)

    async def claim(self) -> None:
        """Take over jobs of silent workers, as long as there are some and this one has capacity.

        Raises:
            RedisError, OSError, LMPoolError: the server cannot be used.
        """
        lifecycle = self._lifecycle
        async with self._taking:
            alone, claims = False, 0
            while not lifecycle.stopping.is_set() and (self._capacity() > 0 or alone):
                count = max(1, min(self._capacity(), self._engine_thread.batch))
                claimed = await self._consumer.claim(count, self._in_flight.entry_ids())
                self._counters.claimed += len(claimed.jobs)
                if claimed.jobs:
                    _log.info("took over %d prompts of workers that fell silent", len(claimed.jobs))
                elif not claimed.alone and claims >= claimed.further:
                    break
                claims += 1
                await self._dispatcher.accept(claimed.jobs)
                alone = claimed.alone
                if alone and claimed.jobs:
                    # The job that may have killed other workers runs with nothing else in this worker.
                    await lifecycle.wait_for(lambda: not self._in_flight)
                elif alone and not await self._drain():
                    # Another worker may be empty sooner; if none is, the next claim tries again.
                    break

    async def _drain(self) -> bool:
        """Wait, for a part of a lease, until this worker holds nothing; returns whether it does."""
        try:
            async with asyncio.timeout(_DRAIN_SHARE * self._lease_s):
                await self._lifecycle.wait_for(lambda: not self._in_flight)
        except TimeoutError:
            return False
        return True

    def _capacity(self) -> int:
        """How many more prompts may be taken."""
        if self._lifecycle.broken is not None:
            return 0
        return min(self._engine_thread.capacity, self._unpublished_capacity())

    def _count_to_take(self, capacity: int) -> int:
        """A batch, or as many whole ones as there is capacity for when a step takes less than a call of the server."""
        batch = self._engine_thread.batch
        is_short = self._engine_thread.step_s < _SHORT_STEP_S and capacity * self._most_job_bytes <= _MAX_TAKEN_BYTES
        return capacity // batch * batch if is_short and capacity > batch else min(capacity, batch)

    def _capacity_for_new(self) -> int:
        # None for a part of a batch: it would be published as a part, and leave capacity for a part again.
        return self._capacity() if self._unpublished_capacity() >= self._engine_thread.batch else 0

    def _unpublished_capacity(self) -> int:
        # A prompt that yields to others may take hundreds of steps, and is not published before the last.
        unpublished = len(self._in_flight) - self._engine_thread.yielding
        return _UNPUBLISHED_BATCHES * self._engine_thread.batch - unpublished


class Worker:
    """Serves one model from one backend.

    Args:
        server: the pool's Redis.
        backend: what the backend is told; it is opened in a thread of its own.
        settings: see `WorkerSettings`.

    Attributes:
        is_hung: `run` has ended, but the backend's thread has not: only the end of the process ends it.
        health: whether it lives and takes jobs.
    """

    def __init__(self, server: Server, backend: BackendSettings, settings: WorkerSettings | None = None) -> None:
        self._server = server
        self._backend = backend
        self._settings = settings or WorkerSettings()
        self._id = new_worker_id()
        self._counters = Counters()
        self._delta = CounterDelta(self._counters)
        self._lifecycle = Lifecycle()
        self._finished: asyncio.Queue[Finished] = asyncio.Queue()
        self._finished_small: asyncio.Queue[Finished] = asyncio.Queue()
        self._serving: Serving | None = None
        self._is_refused = False
        self._beating = asyncio.Lock()
        self.is_hung = False
        self.health = Health(self._settings.lease_s, self._settings.step_timeout_s)

    @property
    def worker_id(self) -> str:
        """The worker's name in Redis."""
        return self._id

    def snapshot(self) -> Snapshot:
        """What the worker is and has done, for metrics; for any thread."""
        is_ready, silent_s = not self.health.why_not_ready(), self.health.silent_s
        serving = self._serving
        stats = BackendStats() if serving is None else serving.engine_thread.stats
        return Snapshot(
            self._backend.served_as, self._id, is_ready, self._count_in_flight(), silent_s, stats, self._counters
        )

    def _count_in_flight(self) -> int:
        return 0 if self._serving is None else len(self._serving.in_flight)

    def stop(self) -> None:
        """Drain: take nothing more, finish and publish the jobs in flight, then return from `run`."""
        if not self._lifecycle.stopping.is_set():
            _log.info("stopping: %d prompts to finish", self._count_in_flight())
        self.health.state = "draining"
        self._lifecycle.stop()

    async def run(
        self,
        on_ready: Callable[[ModelInfo], None] | None = None,
        guard: AbstractContextManager[object] = nullcontext(),  # noqa: B008  it has no state
    ) -> None:
        """Serve until `stop`.

        Args:
            on_ready: called once with the info when the worker takes jobs.
            guard: is entered when the backend is open and left when it is closed; see `ProcessWatchdog`.

        Raises:
            ModelMismatch: the model is served with other weights, or is so by now because this worker was silent long.
            SettingsError: an adapter lies where none may, or the registry of adapters is full.
            ServerError: the server cannot be used at the start; later the worker waits for it instead.
            WorkerError: the backend broke, or hangs: see `is_hung`.
        """
        await check_before_loading(self._server, self._backend, self._settings)
        self.health.start()
        files = CheckpointWatch(self._backend)
        engine_thread = EngineThread(
            self._backend.open,
            self._on_finished,
            self._break,
            self._counters.stepped,
            tells_steps=self._settings.tracing,
        )
        guarded = ExitStack()
        try:
            async with Loading(self._server, self._settings, self._id, self._backend.served_as):
                opened = await engine_thread.start()
            guarded.enter_context(guard)
            async with Watchdog(engine_thread, self._settings.step_timeout_s, partial(self._hang, engine_thread)):
                await self._run(engine_thread, opened, files, on_ready)
        finally:
            with guarded:
                await engine_thread.close(self._settings.step_timeout_s)
            self.is_hung = engine_thread.is_hung
            self.health.end()

    async def _run(
        self,
        engine_thread: EngineThread,
        opened: Opened,
        files: CheckpointWatch,
        on_ready: Callable[[ModelInfo], None] | None,
    ) -> None:
        """Join the model, serve it until `stop`, and leave it."""
        _log.info("joining the pool")
        worker = WorkerContext(self._server, self._settings, self._id, self._counters, files)
        max_adapters = getattr(self._backend, "max_adapters", MAX_LOADED)
        serving = self._serving = await assemble(worker, engine_thread, opened, max_adapters)
        try:
            await self._join(serving)
            self._set_ready(engine_thread)
            if on_ready is not None:
                on_ready(serving.info)
            await self._serve(serving, FetchLoop(worker, self._lifecycle, serving))
            await self._leave(serving, "")
        except (ModelMismatch, ServerError, SettingsError, WorkerError) as error:
            await self._leave(serving, _reason(self._lifecycle.broken or error))
            raise
        except LMPoolError:
            raise  # Some are OSErrors too.
        except (RedisError, OSError) as error:
            raise self._server.explain(error) from error
        finally:
            await finish(serving.close())

    async def _join(self, serving: Serving) -> None:
        await serving.consumer.ensure_group()
        await serving.heartbeat.join(self._heartbeat_fields(serving))
        await serving.consumer.open_lane()
        if not serving.info.is_trie:
            await serving.adapters.register_own()

    def _set_ready(self, engine_thread: EngineThread) -> None:
        self.health.watch(lambda: engine_thread.stepping_since)
        self.health.answered()
        if not self._lifecycle.stopping.is_set():
            self.health.state = "ready"

    async def _leave(self, serving: Serving, reason: str) -> None:
        """Deregister; give the jobs still in flight to others, with the reason why this worker ends."""
        try:
            # After a lease others take it all by themselves.
            async with asyncio.timeout(min(self._settings.lease_s, _LEAVE_S)):
                if handed := await serving.consumer.hand_back(reason, serving.in_flight.entry_ids()):
                    _log.info("handed %d prompts back: other workers take them over", handed)
                await serving.adapters.leave(is_broken=self._lifecycle.broken is not None)
                await serving.heartbeat.leave(for_good=self._lifecycle.broken is None)
        except (RedisError, OSError, ProtocolError) as error:
            # Nothing is lost: what stays there expires or is swept.
            _log.warning("cannot deregister: %s", self._server.explain(error))

    async def _serve(self, serving: Serving, loop: FetchLoop) -> None:
        """Run all parts until the worker is told to stop and holds nothing any more."""
        lease_s, every = self._settings.lease_s, partial(self._every, serving)
        fetching = asyncio.create_task(loop.fetch(), name="fetch")
        draining = asyncio.create_task(self._drain(serving, fetching), name="drain")
        parts = [
            asyncio.create_task(part, name=name)
            for name, part in [
                *((f"publish-{i}", self._publish_all(serving)) for i in range(_PUBLISHERS)),
                ("publish-small", self._publish_small(serving)),
                ("prepare", serving.dispatcher.prepare(self._lifecycle.notify)),
                ("segment", serving.segment.run()),
                *([] if serving.info.is_trie else [("adapters", serving.adapters.run())]),
                ("heartbeat", every(self._settings.heartbeat_s, partial(self._send_heartbeat, serving))),
                ("segments", every(self._settings.heartbeat_s, serving.segments.let_go)),
                ("draining", self._show_draining(serving)),
                ("leases", every(lease_s / 3, partial(self._renew, serving))),
                ("claims", every(lease_s / 3, partial(self._claim, serving, loop))),
                ("unwanted", every(STALE_S, partial(self._drop_unwanted, serving))),
                ("log", every(self._settings.log_every_s, partial(self._log_counters, serving))),
            ]
        ]
        pending = {fetching, draining, *parts}
        try:
            # All are watched to the end: the drain would wait for ever for a part that failed.
            while not draining.done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            await end_tasks([fetching, draining, *parts])
        if self._lifecycle.broken is not None:
            prefix = "" if serving.engine_thread.is_hung else "the backend broke: "
            raise WorkerError(f"{prefix}{_reason(self._lifecycle.broken)}") from self._lifecycle.broken

    async def _drain(self, serving: Serving, fetching: asyncio.Task[None]) -> None:
        """Wait until the worker is told to stop and has finished the jobs in flight.

        The server gets a lease to answer in, and some more; less when the backend broke, for then others wait for the
        jobs in flight here. The backend gets the time that it needs.
        """
        in_flight, engine_thread = serving.in_flight, serving.engine_thread
        await self._lifecycle.stopping.wait()
        patience = self._settings.lease_s + self._settings.heartbeat_s
        if self._lifecycle.broken is not None:
            patience = min(patience, _LEAVE_S)
        await asyncio.wait([fetching], timeout=patience)
        await self._lifecycle.wait_for(lambda: not in_flight or not engine_thread.is_busy)
        try:
            async with asyncio.timeout(patience):
                await self._lifecycle.wait_for(lambda: not in_flight)
                if self._lifecycle.broken is not None:
                    # What was computed before is published.
                    await self._finished.join()
                    await self._finished_small.join()
        except TimeoutError:
            if self._lifecycle.broken is None:
                raise ServerError(
                    f"{len(in_flight)} prompts could not be published within {patience:g} s: "
                    "they are left to other workers, which take them over after a lease at the latest"
                ) from None

    async def _publish_all(self, serving: Serving) -> None:
        while True:
            finished = await self._finished.get()
            await serving.dispatcher.publish(finished, self._id)
            serving.engine_thread.published([*finished.digests, *finished.stale])
            self._finished.task_done()
            self._lifecycle.notify()

    async def _publish_small(self, serving: Serving) -> None:
        """Publish small rows and answers, those of several steps together.

        Two calls of the server and their replies cost as much as some dozen of them. One publisher is enough: the more
        there is to do, the more goes together.
        """
        finished = self._finished_small
        while True:
            steps = [await finished.get()]
            while len(steps) < _MAX_STEPS and not finished.empty():
                steps.append(finished.get_nowait())
            await serving.dispatcher.publish(steps[0] if len(steps) == 1 else Finished.joined(steps), self._id)
            for step in steps:
                serving.engine_thread.published([*step.digests, *step.stale])
                finished.task_done()
            self._lifecycle.notify()

    async def _renew(self, serving: Serving) -> None:
        await serving.consumer.renew(serving.in_flight.entry_ids())

    async def _claim(self, serving: Serving, loop: FetchLoop) -> None:
        await loop.claim()
        # This one is among them, unless its own deadline has just passed.
        self._counters.serving = max(1, await serving.heartbeat.sweep())

    async def _drop_unwanted(self, serving: Serving) -> None:
        if await serving.dispatcher.drop_unwanted():
            self._lifecycle.notify()

    async def _send_heartbeat(self, serving: Serving) -> None:
        try:
            async with self._beating:
                await self._write_heartbeat(serving)
            if not serving.info.is_trie:
                await serving.adapters.renew()
            await serving.consumer.keep_queue()
            await serving.consumer.measure()
            if self._settings.metrics_port:  # Nobody else is told.
                self._counters.memory = await read_memory(serving.redis)
        except (RedisError, OSError, LMPoolError) as error:
            self.health.trouble = str(self._server.explain(error))
            raise
        self.health.answered()

    async def _write_heartbeat(self, serving: Serving) -> None:
        """Write the heartbeat; log once if the server refuses it, which need not be the first of its errors."""
        try:
            self._counters.lane = await serving.heartbeat.send(self._heartbeat_fields(serving))
        except ResponseError as error:
            if not self._is_refused:
                text = str(self._server.explain(error))
                _log.warning("clients will not see this worker any more, for its heartbeat is refused: %s", text)
            self._is_refused = True
            raise
        self._is_refused = False

    async def _show_draining(self, serving: Serving) -> None:
        """Have others take what lies in the lane, and show that the worker drains, not with the next heartbeat only."""
        await self._lifecycle.stopping.wait()
        try:
            # In this order: a heartbeat under way that says that it takes jobs has come before.
            await self._send_heartbeat(serving)
            await serving.consumer.close_lane()
        except (RedisError, OSError, LMPoolError) as error:
            _log.warning("cannot say that this worker drains: %s", self._server.explain(error))

    def _heartbeat_fields(self, serving: Serving) -> dict[str, str | int | float]:
        stats = serving.engine_thread.stats
        return {
            "state": "draining" if self._lifecycle.stopping.is_set() else "ready",
            "in_flight": len(serving.in_flight),
            "failures": serving.dispatcher.failures,
            "homed": self._counters.homed,
            "stolen": self._counters.stolen,
            "claimed": self._counters.claimed,
            **({"shared": self._counters.shared} if self._counters.shared_bytes else {}),
            **self._delta.since_heartbeat(stats),
            **({} if serving.info.is_trie else serving.adapters.heartbeat_fields()),
            **stats._asdict(),
        }

    async def _log_counters(self, serving: Serving) -> None:
        line, in_flight = self._delta.describe_since_log(serving.engine_thread.stats), len(serving.in_flight)
        if line or in_flight:
            _log.info("%s, %d in flight, %d failures", line or "no step", in_flight, serving.dispatcher.failures)

    def _on_finished(self, finished: Finished) -> None:
        # A step that only failed does not wait for others' rows.
        is_small = 0 < finished.nbytes <= _SMALL_BYTES
        if finished.step is not None and self._serving is not None:
            self._serving.dispatcher.trace_step(finished)
        (self._finished_small if is_small else self._finished).put_nowait(finished)
        self._lifecycle.notify()  # The backend has room again.

    def _break(self, error: BaseException) -> None:
        """Begin to end, for the backend is of no use any more."""
        _log.error("the backend broke", exc_info=error)
        self._lifecycle.give_up(error)
        self.health.broken = str(error) or type(error).__name__
        self.stop()

    def _hang(self, engine_thread: EngineThread, error: WorkerError) -> None:
        _log.error("%s; its thread is at\n%s", error, engine_thread.stack())
        engine_thread.abandon(error)
        self._lifecycle.give_up(error)
        self.health.broken = str(error)
        self.stop()

    async def _every(self, serving: Serving, seconds: float, action: Callable[[], Awaitable[object]]) -> None:
        """Repeat an action; one that the server did not answer is repeated sooner."""
        waits = delays()
        pause = seconds
        while True:
            await asyncio.sleep(pause)
            try:
                await action()
                waits = delays()
                pause = seconds
            except ModelMismatch:
                raise
            except (RedisError, OSError, LMPoolError) as error:
                self._counters.server_errors += 1
                _log.warning("will try again: %s", self._server.explain(error))
                await self._server.reconnect(serving.redis, error)
                pause = min(seconds, next(waits))


def _reason(error: BaseException) -> str:
    """An exception as a reason for people: our own say themselves what happened, others need their names."""
    return str(error) if isinstance(error, LMPoolError) else f"{type(error).__name__}: {error}"
