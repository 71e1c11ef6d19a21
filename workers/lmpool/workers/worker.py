"""A worker: registers for a model, runs the tasks that serve the model until a stop is requested, and deregisters."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

from redis.exceptions import RedisError, ResponseError

from lmpool.aio import await_beside, delays, finish
from lmpool.broker.connection import CommandConnection, reply_timeout
from lmpool.broker.registries import AdapterRegistry
from lmpool.broker.scripts import read_alive_in, read_infos
from lmpool.broker.server import Server
from lmpool.broker.server_checks import check_server, read_memory
from lmpool.errors import LMPoolError, ModelMismatch, ProtocolError, ServerError, SettingsError, WorkerError
from lmpool.protocol.adapter import MAX_LOADED
from lmpool.protocol.keys import Keys
from lmpool.protocol.model_info import TRIE_SERVICE, ModelInfo
from lmpool.rows.cache import RowCache
from lmpool.rows.segment import SegmentWriter
from lmpool.rows.shared_memory import SegmentReader
from lmpool.trie.kernels import kernel_device
from lmpool.workers.dispatch import Dispatcher, FetchLoop, Lifecycle, ResultQueue
from lmpool.workers.execution.contract import BackendSettings, BackendStats
from lmpool.workers.execution.engine_thread import EngineThread, Opened, StepResult
from lmpool.workers.execution.in_flight import InFlight, entry_ids
from lmpool.workers.execution.watchdogs import watching_calls
from lmpool.workers.membership.adapters import AdapterCache, place_of
from lmpool.workers.membership.heartbeat import Beat, CheckpointWatch, Heartbeat, loading, new_worker_id
from lmpool.workers.membership.partitions import PartitionMover
from lmpool.workers.membership.versions import VersionKeeper
from lmpool.workers.metrics.counters import Health, Snapshot, WorkerCounters
from lmpool.workers.metrics.tracing import JobTraces
from lmpool.workers.queries import QueryAnswerer
from lmpool.workers.queue.consumer import Consumer
from lmpool.workers.queue.jobs import STALE_S, JobReader
from lmpool.workers.queue.leases import Leases
from lmpool.workers.queue.publisher import Publisher
from lmpool.workers.queue.row_server import RowServer
from lmpool.workers.settings import WorkerSettings
from lmpool.workers.trie import TrieInputs, warm_up

OnReady = Callable[[ModelInfo], None] | None

_log = logging.getLogger("lmpool.worker")

_VERSION = version("lmpool")  # Release of this worker, which surveys show.
MEASURES_PER_S = 40
"""Max times per second that all workers of a model with `--metrics-port` together read values that they all report."""

# Number of tasks that publish large rows: while one task waits for the server, the other task encodes rows.
_PUBLISHERS = 2
_LEAVE_S = 10.0  # Max seconds for a worker to deregister, and to publish the last results after the backend broke.


class Serving:
    """The objects with which a worker serves its model. Creating these objects sends nothing to the server.

    Raises:
        SettingsError: the model has the name of the trie workers, or a package for tracing is missing.
    """

    def __init__(self, worker: Worker, engine_thread: EngineThread, opened: Opened) -> None:
        server, settings, worker_id, counters = worker.server, worker.settings, worker.worker_id, worker.counters
        if opened.info.is_trie != (opened.info.backend == "trie"):
            raise SettingsError(f"name: {TRIE_SERVICE!r} is the name of trie workers: give the model another name")
        info = self.info = replace(
            opened.info,
            lease_s=settings.lease_s,
            queue_limit=settings.queue_limit,
            row_ttl_s=settings.row_ttl_s,
            vocabulary=opened.vocabulary.digest if opened.vocabulary else "",
            tokenizer=opened.tokenizer.digest if opened.tokenizer else "",
            answers_tries=settings.with_trie,
        )
        self.devices, ranks = opened.devices, worker.ranks
        self.spread: dict[str, str | int] = {}  # Fields of the heartbeat.
        if max(ranks, len(self.devices)) > 1:
            self.spread = {"ranks": ranks, "devices": " ".join(self.devices)}
        keys = Keys(settings.prefix)
        model = keys.model(info.name)
        # Wait half a lease for a reply, so that a lease renewal without a reply is sent again before the lease expires.
        redis = self.redis = server.client(reply_timeout_s=reply_timeout(info.lease_s / 2))
        self.connection = CommandConnection(server, model.jobs)
        self.connection.reply_timeout_s = reply_timeout(info.lease_s)
        self.engine_thread = engine_thread
        self.segments = SegmentReader()
        self.rows = RowCache(server, keys, info, self.segments)
        self.segment = worker.segment
        self.segment.change(info)
        self.row_server = RowServer(server, self.segment, settings, redis, self.connection)
        traces = JobTraces(info.name, worker_id) if settings.tracing else None
        reader = JobReader(redis, model, info, worker_id, counters, traces)
        self.publisher = Publisher(server, self.rows, self.segment, reader)
        self.heartbeat = Heartbeat(
            redis, keys, info, worker_id, opened.batch, opened.vocabulary, opened.tokenizer, worker.files
        )
        in_flight = self.in_flight = worker._in_flight
        limit = getattr(worker._backend, "max_adapters", MAX_LOADED)
        registry = AdapterRegistry(redis, keys.model(info.base), info.lineage)
        self.adapters = AdapterCache(registry, engine_thread, opened.adapters, limit, settings, worker_id, in_flight)
        self.trie_inputs = TrieInputs(server, keys, kernel_device(opened.device), settings, self.segments, counters)
        queries = QueryAnswerer(self.trie_inputs, self.publisher, info, redis, keys)
        self.consumer = Consumer(reader, self.connection)
        self.leases = Leases(reader, settings.max_deliveries)
        self.partitions = PartitionMover(
            server, self.heartbeat, self.consumer, self.leases, self.rows, settings.partitions
        )
        self.dispatcher = Dispatcher(worker._lifecycle, in_flight, engine_thread, queries, self.adapters, traces)
        engine_thread.on_finished = self.dispatcher.notify_early
        self.fetch_loop = FetchLoop(self.dispatcher, self.consumer, self.leases)

    async def close(self) -> None:
        """Close all connections."""
        self.row_server.close()
        self.publisher.datagrams.close()
        self.segments.close()
        self.rows.close()
        self.trie_inputs.close()
        self.connection.close()
        await self.redis.aclose()


class Worker:
    """Serves one model from one backend.

    Args:
        server: the pool's Redis.
        backend: settings of the backend, which is opened in a thread of its own.
        settings: see `WorkerSettings`.

    Attributes:
        segment: the shared memory for rows, which outlives changes of the weights.
        worker_id: id of the worker in Redis.
        ranks: number of processes that the model is spread over.
        is_hung: whether the backend's thread still runs after `run` returned; only the process's end ends this thread.
        health: whether the worker is alive and takes jobs.
    """

    def __init__(self, server: Server, backend: BackendSettings, settings: WorkerSettings | None = None) -> None:
        self.server, self._backend, self.settings = server, backend, settings or WorkerSettings()
        self.worker_id, self.counters = new_worker_id(), WorkerCounters()
        self.segment: SegmentWriter
        self.ranks: int = getattr(backend, "ranks", 1)
        self._serving: Serving | None = None
        self._is_ending = False  # Whether `stop` was called.
        self._stats_before: BackendStats | None = None  # Counters of the backend at the last check of the partitions.
        self._heartbeat_lock, self._claim_soon = asyncio.Lock(), asyncio.Event()
        self._is_complete = False  # Whether the next sweep checks everything.
        self._begin()
        self._measure_at = 0.0  # Monotonic time at which the next heartbeat reads the values of `MEASURES_PER_S`.
        self.is_hung, self.health = False, Health(self.settings.lease_s)

    def snapshot(self) -> Snapshot:
        """The worker's state for metrics; callable from any thread."""
        serving, stats, devices = self._serving, BackendStats(), self.ranks
        if serving is not None:
            stats, devices = serving.engine_thread.stats, len(serving.devices)
        state = not self.health.why_not_ready(), len(self._in_flight), self.health.silent_s, stats, self.counters
        return Snapshot(self._backend.served_as, self.worker_id, *state, self.ranks, devices)

    def stop(self) -> None:
        """Drain: take no more jobs, finish and publish the prompts in flight, then return from `run`."""
        if not self._lifecycle.stopping.is_set():
            _log.info("stopping: %d prompts to finish", len(self._in_flight))
        self._is_ending = True
        self._drain_soon()

    def _drain_soon(self) -> None:
        self.health.state = "draining"
        self._lifecycle.stop()

    def _begin(self) -> None:
        """Prepare to serve a version of the model."""
        self._lifecycle = Lifecycle()
        self._results = ResultQueue(self._lifecycle)
        self._in_flight: InFlight = {}
        self._claim_soon.set()  # The first claim is made as soon as the worker serves.
        if self._is_ending:
            self._drain_soon()

    def claim_now(self) -> None:
        """Claim the jobs of crashed workers now, without waiting for the next interval."""
        self._claim_soon.set()

    async def run(
        self,
        on_ready: OnReady = None,
        guard: AbstractContextManager[object] = nullcontext(),  # noqa: B008  nullcontext has no state
    ) -> None:
        """Serve until `stop`.

        Args:
            on_ready: called with the model's info when the worker takes jobs, for each version of the weights.
            guard: context manager that is open while the backend is open, for example `watching_process`.

        Raises:
            ModelMismatch: other workers serve the model with other weights.
            SettingsError: an adapter lies outside of the allowed folders, or the registry of adapters is full.
            ServerError: the server cannot be used at the start. A worker that serves waits for the server instead.
            WorkerError: the backend broke or hangs (see `is_hung`), or cannot load the weights that others serve.
        """
        await check_before_loading(self.server, self._backend, self.settings)
        self.health.start()
        self.files = CheckpointWatch(self._backend)
        engine_thread = EngineThread(
            self._backend.open, self._take_result, self._break, self.counters.stepped, tells_steps=self.settings.tracing
        )
        versions = self.versions = VersionKeeper(
            self.server, self.settings, self.worker_id, engine_thread, lambda: self._is_ending
        )
        guarded = ExitStack()
        try:
            async with loading(self.server, self.settings, self.worker_id, self._backend.served_as):
                opened = await versions.start(await engine_thread.start())
            guarded.enter_context(guard)
            on_size = partial(setattr, self.counters, "shared_bytes")
            self.segment = SegmentWriter(
                opened.info, self.worker_id, self.settings.shm_bytes, on_size, engine_thread.map_memory
            )
            guarded.callback(self.segment.close)
            engine_thread.write_to(self.segment.new_rows)
            on_hang = partial(self._break, hung=engine_thread)
            async with watching_calls(engine_thread, self.settings.step_timeout_s, on_hang):
                await self._run(engine_thread, opened, on_ready)
                while versions.next is not None and not self._is_ending:
                    opened = await self._change(engine_thread, opened)
                    await self._run_after_change(engine_thread, opened, on_ready)
                if self._lifecycle.broken is not None:  # The backend broke between two versions.
                    raise WorkerError(f"the backend broke: {_reason(self._lifecycle.broken)}")
        finally:
            await finish(versions.close())
            with guarded:
                await engine_thread.close(self.settings.step_timeout_s)
            self.is_hung = engine_thread.is_hung
            self.health.end()

    def _take_result(self, result: StepResult) -> None:
        self._results.put(result)

    async def _change(self, engine_thread: EngineThread, opened: Opened) -> Opened:
        """Load the next version of the weights; returns the backend's properties then."""
        self.health.state = "loading"
        async with loading(self.server, self.settings, self.worker_id, self.versions.next_name):
            # A step may still compute prompts that were dropped: its rows must not count as rows of the next version.
            await engine_thread.run("end of the last step", lambda _: None)
            engine_thread.published(self._results.take_all())
            self._begin()
            return await self.versions.change(opened)

    async def _run_after_change(self, engine_thread: EngineThread, opened: Opened, on_ready: OnReady) -> None:
        """Serve another version as `_run` does, but wait for a server that cannot be used, as a serving worker does."""
        waits = delays(self.settings.heartbeat_s)
        while True:
            try:
                await self._run(engine_thread, opened, on_ready)
                return
            except ServerError as error:
                if self.health.state != "loading" or self._is_ending:
                    raise
                _log.warning("cannot serve %r yet, will try again: %s", opened.info.name, error)
            await asyncio.sleep(next(waits))

    async def _run(self, engine_thread: EngineThread, opened: Opened, on_ready: OnReady) -> None:
        """Register for the model, serve the model until `stop`, and deregister."""
        _log.info("joining the pool")
        if self.settings.with_trie:
            await asyncio.to_thread(warm_up, kernel_device(opened.device))
        serving = self._serving = Serving(self, engine_thread, opened)
        try:
            await serving.partitions.choose_first()
            await serving.consumer.ensure_group()
            await serving.heartbeat.join(self._heartbeat_fields(serving))
            await serving.consumer.open_lane()
            if not serving.info.is_trie:
                await serving.adapters.register_own()
                await self.versions.confirm()
            self.health.answered()
            if not self._lifecycle.stopping.is_set():
                self.health.state = "ready"
            if on_ready is not None:
                on_ready(serving.info)
            await self._serve(serving)
            await self._leave(serving, "")
        except (ModelMismatch, ServerError, SettingsError, WorkerError) as error:
            await self._leave(serving, _reason(self._lifecycle.broken or error))
            raise
        except (RedisError, OSError) as error:
            raise self.server.explain(error) from error
        finally:
            await finish(serving.close())

    async def _leave(self, serving: Serving, reason: str) -> None:
        """Deregister, and release the prompts in flight with the reason why this worker ends."""
        is_broken = self._lifecycle.broken is not None
        try:
            # Do not wait for long: after a lease, other workers take over all jobs in any case.
            async with asyncio.timeout(min(self.settings.lease_s, _LEAVE_S)):
                await serving.consumer.close_lane()
                if released := await serving.leases.release_all(reason, entry_ids(serving.in_flight)):
                    _log.info("released %d prompts for other workers", released)
                if not is_broken:  # If the backend broke, keep the note of the adapter load that may have broken it.
                    await serving.adapters.leave()
                await serving.heartbeat.leave(for_good=not is_broken and (self._is_ending or not self.versions.next))
        except (RedisError, OSError, ProtocolError) as error:
            # No job is lost: the worker's keys expire, or other workers remove them.
            _log.warning("cannot deregister: %s", self.server.explain(error))

    async def _serve(self, serving: Serving) -> None:
        """Run all tasks until a stop is requested and the worker holds no prompts."""
        settings, dispatcher = self.settings, serving.dispatcher

        async def every(pause_s: float, action: Callable[[], Awaitable[object]]) -> None:
            """Repeat an action after each pause."""
            while True:
                await asyncio.sleep(pause_s)
                await serving.publisher.retry(action)

        async def drop_unwanted() -> None:
            if await dispatcher.drop_unwanted():
                serving.fetch_loop.check_now()  # Prompts in the backlog may take the place of dropped prompts.

        # The first claim begins before the first read for jobs: otherwise it would have to end this read.
        claiming = asyncio.create_task(self._claim(serving), name="claim")
        fetching = asyncio.create_task(serving.fetch_loop.fetch(), name="fetch")
        tasks: list[Any] = [
            fetching,
            *(self._results.run(dispatcher.publish, small=False) for _ in range(_PUBLISHERS)),
            self._results.run(dispatcher.publish, small=True),
            dispatcher.prepare(),
            serving.segment.run(),
            serving.publisher.retry(serving.row_server.run),
            *([] if serving.info.is_trie else [serving.adapters.run(), self._watch_versions(serving)]),
            every(settings.heartbeat_s, partial(self.send_heartbeat, serving)),
            every(settings.heartbeat_s, serving.segments.release_removed),
            self._show_draining(serving),
            every(settings.lease_s / 3, lambda: serving.leases.renew(entry_ids(serving.in_flight))),
            claiming,
            serving.fetch_loop.find_work_when_idle(),
            every(settings.lease_s / 3, partial(self._check_partitions, serving)),
            every(STALE_S, drop_unwanted),
            every(settings.log_every_s, partial(self._log_counters, serving)),
        ]
        # Watch all tasks during the drain: if a task failed unnoticed, the drain could wait forever for that task.
        await await_beside(self._drain(serving, fetching), tasks)
        if self._lifecycle.broken is not None:
            prefix = "" if serving.engine_thread.is_hung else "the backend broke: "
            raise WorkerError(f"{prefix}{_reason(self._lifecycle.broken)}") from self._lifecycle.broken

    async def _drain(self, serving: Serving, fetching: asyncio.Task[None]) -> None:
        """Wait until a stop is requested and the worker has finished the prompts in flight.

        The backend may run for any time. The server must accept the results within a lease and a heartbeat interval, or
        sooner after the backend broke, because other workers then wait for the prompts in flight.
        """
        in_flight, engine_thread, lifecycle = serving.in_flight, serving.engine_thread, self._lifecycle
        await lifecycle.stopping.wait()
        patience_s = self.settings.lease_s + self.settings.heartbeat_s
        if lifecycle.broken is not None:
            patience_s = min(patience_s, _LEAVE_S)
        await asyncio.wait([fetching], timeout=patience_s)
        await lifecycle.wait_for(lambda: not in_flight or not engine_thread.owed)
        try:
            async with asyncio.timeout(patience_s):
                await lifecycle.wait_for(lambda: not in_flight)
                if lifecycle.broken is not None:
                    await self._results.join()
        except TimeoutError:
            if lifecycle.broken is None and (engine_thread.owed or engine_thread.call is not None):
                # The backend loads an adapter, or has got prompts that waited for an adapter or for inputs.
                await self._drain(serving, fetching)
            elif lifecycle.broken is None:
                text = f"{len(in_flight)} prompts could not be published within {patience_s:g} s"
                if self.versions.next is None or self._is_ending:
                    raise ServerError(f"{text}; other workers take them over after a lease at the latest") from None
                # Change no weights while the backend computes prompts, and wait for the server as while serving.
                _log.warning("%s; the change of the version waits for them", text)
                await lifecycle.wait_for(lambda: not in_flight or self._is_ending)
                await self._drain(serving, fetching)  # A worker that must end now waits no longer than any other.

    async def _watch_versions(self, serving: Serving) -> None:
        """Drain when another version of the weights must be loaded; never returns."""
        await serving.publisher.retry(partial(self.versions.watch, self._drain_soon))

    async def _claim(self, serving: Serving) -> None:
        """Whenever this worker has the turn, claim jobs of silent workers and remove dead workers; never returns."""
        while True:
            await self._claim_soon.wait()
            self._claim_soon.clear()
            await serving.publisher.retry(serving.fetch_loop.claim)
            is_complete, self._is_complete = self._is_complete, False
            await serving.publisher.retry(partial(serving.heartbeat.sweep, is_complete=is_complete))

    async def _check_partitions(self, serving: Serving) -> None:
        """Move to another partition of the queue if this worker is idle and is needed more there."""
        mover, fetch_loop, stats = serving.partitions, serving.fetch_loop, serving.engine_thread.stats
        was_idle, self._stats_before = stats == self._stats_before, stats
        if serving.info.is_trie or not await mover.follow() or not fetch_loop.is_idle:
            return
        loads = await mover.read_loads()
        if not fetch_loop.is_idle or (target := mover.better_partition(loads, was_idle=was_idle)) is None:
            return
        # A heartbeat during the move would register the worker twice.
        # Pause first: a claim may hold up the pause for as long as a job runs alone, and heartbeats must go on.
        async with fetch_loop.paused(), self._heartbeat_lock:
            if fetch_loop.is_idle:
                await mover.move(target)
        fetch_loop.check_now()
        self._claim_soon.set()  # The last worker of the other partition may have left jobs.

    async def send_heartbeat(self, serving: Serving) -> None:
        """Write the heartbeat, and read the state of the queue."""
        try:
            async with self._heartbeat_lock:
                try:
                    beat = await self._beat(serving)
                except ResponseError as error:
                    text = "clients will not see this worker any more: its heartbeat is refused: %s"
                    _log.warning(text, self.server.explain(error))
                    raise
            if beat.is_complete:
                # Remove the queue's lifetime before the info is checked: without an info, the queue must expire.
                await serving.consumer.keep_queue()
                await serving.heartbeat.keep_info()
                if not serving.info.is_trie:
                    await serving.adapters.renew()
            if beat.is_complete or not self.versions.is_used:
                await self.versions.keep()
            # Only the metrics show the state of the queue, and the server's memory use.
            if self.settings.metrics_port and time.monotonic() >= self._measure_at:
                partitions = Keys(self.settings.prefix).partitions(serving.heartbeat.info)
                self._measure_at = time.monotonic() + self.counters.serving * len(partitions) / MEASURES_PER_S
                await serving.consumer.measure(partitions)
                self.counters.memory = await read_memory(serving.redis)
        except (RedisError, OSError, LMPoolError) as error:
            self.health.trouble = str(self.server.explain(error))
            raise
        self.health.answered()

    async def _beat(self, serving: Serving) -> Beat:
        """Write the heartbeat; this worker may get the turn to claim jobs of silent workers."""
        sent_at, consumer = time.time(), serving.consumer
        fields = self._heartbeat_fields(serving)
        beat = await serving.heartbeat.send(fields, takes_turns=not self._lifecycle.stopping.is_set())
        self.counters.note_clock(beat.server_time, sent_at)
        if serving.partitions.is_single:  # Otherwise the measurement counts the workers of all partitions.
            self.counters.serving = beat.workers
        # The jobs of a read without a reply stay with this worker: only this worker claims them, after a lease.
        has_lost_jobs = time.monotonic() - consumer.failed_at < 2 * self.settings.lease_s
        self._is_complete |= beat.is_complete
        if beat.has_turn or has_lost_jobs:
            self._claim_soon.set()
        return beat

    async def _show_draining(self, serving: Serving) -> None:
        """When a stop is requested, report that the worker drains, and close its lane: this ends a read for jobs."""
        await self._lifecycle.stopping.wait()
        # Store rows whole from now on, for clients on other hosts: the row server ends with this worker.
        serving.segment.address = b""
        try:
            # Close the lane after this heartbeat, so that no heartbeat in flight reports "ready" afterwards.
            await self.send_heartbeat(serving)
            await serving.consumer.close_lane()
        except (RedisError, OSError, LMPoolError) as error:
            _log.warning("cannot show that this worker drains: %s", self.server.explain(error))

    def _heartbeat_fields(self, serving: Serving) -> dict[str, str | int | float]:
        stats = serving.engine_thread.stats
        return {
            "state": "draining" if self._lifecycle.stopping.is_set() else "ready",
            "version": _VERSION,
            "capacity": serving.heartbeat.batch,
            "in_flight": len(serving.in_flight),
            **serving.spread,
            "failures": serving.dispatcher.failures,
            "homed": self.counters.homed,
            "stolen": self.counters.stolen,
            "claimed": self.counters.claimed,
            **({"shared": self.counters.shared} if self.counters.shared_bytes else {}),
            **({"direct": serving.segment.address.decode()} if serving.segment.address else {}),
            **self.counters.since_heartbeat(stats),
            **({} if serving.info.is_trie else serving.adapters.heartbeat_fields()),
            **stats._asdict(),
        }

    async def _log_counters(self, serving: Serving) -> None:
        line, in_flight = self.counters.describe_since_log(serving.engine_thread.stats), len(serving.in_flight)
        if line or in_flight:
            _log.info("%s, %d in flight, %d failures", line or "no step", in_flight, serving.dispatcher.failures)

    def _break(self, error: BaseException, hung: EngineThread | None = None) -> None:
        """Stop the worker, because the backend broke or its thread `hung`; log and keep the first reason."""
        if hung is not None:
            _log.error("%s; its thread is at\n%s", error, hung.stack())
            hung.abandon(error)
        if self._lifecycle.broken is not None:
            return  # Later errors follow from the first: the step, its engine and each process report the same end.
        if hung is None:
            traceback = None if isinstance(error, WorkerError) else error
            _log.error("the backend broke: %s", _reason(error), exc_info=traceback)
        self._lifecycle.broken = error
        self.health.broken = str(error) or type(error).__name__
        self.stop()


async def check_before_loading(server: Server, backend: BackendSettings, settings: WorkerSettings) -> None:
    """Check everything that can be checked before the model is loaded, which may take minutes.

    Raises:
        ModelMismatch: live workers serve another backend under this name.
        ServerError: the server cannot be used.
        SettingsError: an adapter lies outside of the allowed folders.
    """
    for doubt in (await check_server(server))[1]:
        _log.warning("%s", doubt)
    for source in getattr(backend, "adapter_folders", {}).values():
        place_of(settings, source, is_own=True)
    if not (kind := getattr(backend, "kind", "")):
        return
    name, keys = backend.served_as, Keys(settings.prefix)
    try:
        async with server.client() as redis:
            packed = (await read_infos(redis, keys, name)).get(name.encode())
            info = ModelInfo.unpack(packed) if isinstance(packed, bytes) else None
            served, numbers = (info.backend, info.partitions) if info is not None else (kind, (0,))
            partitions = [keys.model(name, number) for number in numbers]
            if served != kind and (await read_alive_in(redis, partitions)).serving:
                advice = "serve it under another --name, or stop those workers first"
                raise ModelMismatch(f"the model {name!r} is served by the backend {served}, not {kind}: {advice}")
    except ProtocolError as error:
        _log.warning("the info of the model %r cannot be read, and will be replaced: %s", name, error)
    except (RedisError, OSError) as error:
        raise server.explain(error) from error


def _reason(error: BaseException) -> str:
    """The text of an exception; for an exception that is not an LMPoolError, also its class."""
    return str(error) if isinstance(error, LMPoolError) else f"{type(error).__name__}: {error}"
