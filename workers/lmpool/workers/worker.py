"""A worker: fetch, compute and publish, all three at once, until told to stop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace

from redis.exceptions import RedisError, ResponseError

from lmpool.backoff import delays
from lmpool.broker import scripts
from lmpool.broker.adapter_registry import AdapterRegistry
from lmpool.broker.line import CommandLine, reply_timeout
from lmpool.broker.patch_level import read_doubt
from lmpool.broker.queue import read_queue
from lmpool.broker.server import Server
from lmpool.broker.server_memory import read_memory
from lmpool.errors import LMPoolError, ModelMismatch, ProtocolError, ServerError, SettingsError, WorkerError
from lmpool.protocol.keys import GROUP, Keys
from lmpool.protocol.model_info import TRIE_SERVICE, ModelCard
from lmpool.rows.cluster import rows_on
from lmpool.tasks import end_tasks
from lmpool.workers.asked import Asked
from lmpool.workers.backend.contract import BackendSettings, BackendStats, Finished
from lmpool.workers.backend.engine_thread import Opened, Stepper
from lmpool.workers.backend.watchdog import Watchdog
from lmpool.workers.dispatch import Delivery
from lmpool.workers.duty import Duty
from lmpool.workers.held import Holdings
from lmpool.workers.membership.adapter_sources import AdapterSources
from lmpool.workers.membership.adapter_trials import AdapterTrials
from lmpool.workers.membership.adapters import AdapterKeeper
from lmpool.workers.membership.heartbeat import Presence, new_worker_id
from lmpool.workers.membership.loading import Loading
from lmpool.workers.metrics.counters import Figures
from lmpool.workers.metrics.health import Health
from lmpool.workers.metrics.meter import Meter
from lmpool.workers.metrics.prometheus import Look
from lmpool.workers.queue.consumer import Intake
from lmpool.workers.queue.feeder import Feeder
from lmpool.workers.queue.publisher import Publisher
from lmpool.workers.queue.unwanted import STALE_S, Unwanted
from lmpool.workers.settings import WorkerSettings
from lmpool.workers.trie.backend import warm_up
from lmpool.workers.trie.inputs import Larder

_log = logging.getLogger("lmpool.worker")

_PUBLISHERS = 2
_LEAVE_S = 10.0


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
        self._sources = AdapterSources.of(self._settings)
        self._duty = Duty()
        self._is_refused = False
        self._held = Holdings()
        self._finished: asyncio.Queue[Finished] = asyncio.Queue()
        self.is_hung = False
        self._figures = Figures()
        self._meter = Meter(self._figures)
        self.health = Health(self._settings.lease_s, self._settings.step_timeout_s)
        self._stats: Callable[[], BackendStats] = BackendStats

    @property
    def worker_id(self) -> str:
        """The worker's name in Redis."""
        return self._id

    def look(self) -> Look:
        """What the worker is and has done, for metrics; from any thread."""
        is_ready = not self.health.why_not_ready()
        silent_s, held = self.health.silent_s, len(self._held)
        return Look(self._backend.served_as, self._id, is_ready, held, silent_s, self._stats(), self._figures)

    def stop(self) -> None:
        """Drain: take nothing more, finish and publish what is held, then return from `run`."""
        if not self._duty.stopping.is_set():
            _log.info("stopping: %d prompts to finish", len(self._held))
        self.health.state = "draining"
        self._duty.stop()

    async def run(
        self,
        on_ready: Callable[[ModelCard], None] | None = None,
        guard: AbstractContextManager[object] = nullcontext(),  # noqa: B008  it has no state
    ) -> None:
        """Serve until `stop`.

        Args:
            on_ready: called once with the card when the worker takes jobs.
            guard: is entered when the backend is open and left when it is closed; see `ProcessWatchdog`.

        Raises:
            ModelMismatch: the model, or an adapter of it, is served with other weights, or is so by now because this
                worker was silent long.
            SettingsError: an adapter lies where none may, one that is in service cannot be loaded, or other workers
                lack one of this worker's.
            ServerError: the server cannot be used at the start; later the worker waits for it instead.
            WorkerError: the backend broke, or hangs: see `is_hung`.
        """
        await self._check_server()
        for source in getattr(self._backend, "adapter_folders", {}).values():
            self._sources.place(source, is_own=True)
        self.health.start()
        self._stepper = Stepper(self._backend.open, self._on_finished, self._break, self._figures)
        guarded = ExitStack()
        try:
            async with Loading(self._server, self._settings, self._id, self._backend.served_as):
                opened = await self._stepper.start()
            guarded.enter_context(guard)
            async with Watchdog(self._stepper, self._settings.step_timeout_s, self._hang):
                await self._run(opened, on_ready)
        finally:
            with guarded:
                await self._stepper.close(self._settings.step_timeout_s)
            self.is_hung = self._stepper.is_hung
            self.health.end()

    async def _check_server(self) -> None:
        """A wrong address or password must not cost the loading of a model first."""
        # With a client of its own: a connection that idles while the model loads may be cut meanwhile.
        redis = self._server.client()
        try:
            await redis.ping()
            memory = await read_memory(redis)
        except (RedisError, OSError) as error:
            raise self._server.explain(error) from error
        finally:
            await redis.aclose()
        for doubt in (await read_doubt(self._server), memory and memory.doubt()):
            if doubt:
                _log.warning("%s", doubt)

    async def _run(self, opened: Opened, on_ready: Callable[[ModelCard], None] | None) -> None:
        """Join the model, serve it until `stop`, and leave it."""
        settings = self._settings
        if opened.card.is_trie != (opened.card.backend == "trie"):
            raise SettingsError(f"name: trie workers serve as {TRIE_SERVICE!r}: serve the model under another name")
        if settings.with_trie:
            await asyncio.to_thread(warm_up, opened.device)
        self._card = card = replace(
            opened.card,
            lease_s=settings.lease_s,
            queue_limit=settings.queue_limit,
            row_ttl_s=settings.row_ttl_s,
            vocabulary=opened.vocabulary.digest if opened.vocabulary else "",
            answers_tries=settings.with_trie,
        )
        keys = Keys(settings.prefix)
        self._keys = keys.model(card.name)
        # Half a lease: a renewal whose reply does not come is sent again before the lease has passed.
        self._redis = self._server.client(reply_timeout_s=reply_timeout(card.lease_s / 2))
        reader = CommandLine(self._server, self._keys.jobs)
        reader.reply_timeout_s = reply_timeout(card.lease_s)
        rows = rows_on(self._server, keys, card)
        unwanted = Unwanted(self._redis, self._keys, self._figures)
        self._intake = Intake(
            self._redis, reader, self._keys, card, self._id, settings.max_deliveries, unwanted, self._figures
        )
        self._publisher = Publisher(self._server, rows, self._keys, card.fingerprint, self._id, unwanted, self._figures)
        self._presence = Presence(self._redis, keys, card, self._id, opened.batch, opened.vocabulary)
        registry = AdapterRegistry(self._redis, self._keys, card.fingerprint)
        trials = AdapterTrials(self._redis, keys, card.name, self._id, settings)
        self._adapters = AdapterKeeper(
            registry, self._stepper, opened.adapters, self._sources, trials, self._beat, self._presence.others
        )
        self._larder = Larder(self._server, keys, opened.device, settings, self._figures)
        asked = Asked(self._larder, self._publisher, card)
        self._delivery = Delivery(self._held, self._stepper, self._publisher, self._larder, asked, card, self._adapters)
        self._feeder = Feeder(
            self._server, self._duty, self._held, self._stepper, self._intake, self._delivery, self._figures
        )
        try:
            await self._join()
            self._show_ready()
            if on_ready is not None:
                on_ready(card)
            await self._serve()
            await self._leave("")
        except (ModelMismatch, ServerError, SettingsError, WorkerError) as error:
            await self._leave(_reason(self._duty.broken or error))
            raise
        except LMPoolError:
            raise  # Some are OSErrors too.
        except (RedisError, OSError) as error:
            raise self._server.explain(error) from error
        finally:
            rows.close()
            self._larder.close()
            reader.close()
            await self._redis.aclose()

    async def _join(self) -> None:
        await self._intake.ensure_group()
        await self._presence.join(self._counters())
        if not self._card.is_trie:
            await self._adapters.start()

    def _show_ready(self) -> None:
        self._stats = lambda: self._stepper.stats
        self.health.watch(lambda: self._stepper.stepping_since)
        self.health.answered()
        if not self._duty.stopping.is_set():
            self.health.state = "ready"

    async def _leave(self, reason: str) -> None:
        """Deregister; give what is still held to others, with the reason why this worker ends."""
        try:
            # After a lease others take it all by themselves.
            async with asyncio.timeout(min(self._settings.lease_s, _LEAVE_S)):
                if handed := await self._intake.hand_back(reason):
                    _log.info("handed %d prompts back: other workers take them over", handed)
                await self._adapters.leave(is_broken=self._duty.broken is not None)
                await self._presence.leave(for_good=self._duty.broken is None)
        except (RedisError, OSError, ProtocolError) as error:
            # Nothing is lost: what stays there expires or is swept.
            _log.warning("cannot deregister: %s", self._server.explain(error))

    async def _serve(self) -> None:
        """Run all parts until the worker is told to stop and holds nothing any more."""
        fetching = asyncio.create_task(self._feeder.fetch(), name="fetch")
        draining = asyncio.create_task(self._drain(fetching), name="drain")
        parts = [
            asyncio.create_task(part, name=name)
            for name, part in [
                *((f"publish-{i}", self._publish_all()) for i in range(_PUBLISHERS)),
                ("supply", self._delivery.supply(self._duty.look_again)),
                *([] if self._card.is_trie else [("adapters", self._adapters.run())]),
                ("heartbeat", self._every(self._settings.heartbeat_s, self._beat)),
                ("farewell", self._say_draining()),
                ("leases", self._every(self._settings.lease_s / 3, self._renew)),
                ("claims", self._every(self._settings.lease_s / 3, self._claim)),
                ("unwanted", self._every(STALE_S, self._let_go)),
                ("log", self._every(self._settings.log_every_s, self._log_counters)),
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
        if self._duty.broken is not None:
            what = "" if self._stepper.is_hung else "the backend broke: "
            raise WorkerError(f"{what}{_reason(self._duty.broken)}") from self._duty.broken

    async def _drain(self, fetching: asyncio.Task[None]) -> None:
        """Wait until the worker is told to stop and has finished what it holds.

        The server gets a lease to answer in, and some more; less when the backend broke, for then others wait for what
        is held here. The backend gets the time that it needs.
        """
        await self._duty.stopping.wait()
        patience = self._settings.lease_s + self._settings.heartbeat_s
        if self._duty.broken is not None:
            patience = min(patience, _LEAVE_S)
        await asyncio.wait([fetching], timeout=patience)
        await self._duty.until(lambda: not self._held or not self._stepper.is_busy)
        try:
            async with asyncio.timeout(patience):
                await self._duty.until(lambda: not self._held)
                if self._duty.broken is not None:
                    await self._finished.join()  # What was computed before is published.
        except TimeoutError:
            if self._duty.broken is None:
                raise ServerError(
                    f"{len(self._held)} prompts could not be published within {patience:g} s: "
                    "they are left to other workers, which take them over after a lease at the latest"
                ) from None

    async def _publish_all(self) -> None:
        while True:
            await self._delivery.publish(await self._finished.get(), self._id)
            self._finished.task_done()
            self._duty.look_again()

    async def _renew(self) -> None:
        entries = self._held.all_entries()
        for at in range(0, len(entries), scripts.MOST_AT_ONCE):
            part = entries[at : at + scripts.MOST_AT_ONCE]
            await scripts.RENEW(self._redis, [self._keys.jobs], [GROUP, self._id, *part])

    async def _claim(self) -> None:
        await self._feeder.claim()
        await self._presence.sweep()

    async def _let_go(self) -> None:
        if await self._delivery.let_go():
            self._duty.look_again()

    async def _beat(self) -> None:
        try:
            await self._show()
            await self._intake.keep_queue()
            asked_at = time.time()
            self._figures.look_at(await read_queue(self._redis, self._keys), asked_at)
        except (RedisError, OSError, LMPoolError) as error:
            self.health.trouble = str(self._server.explain(error))
            raise
        self.health.answered()

    async def _show(self) -> None:
        """Write the heartbeat; say once if the server refuses it, which need not be the first of its troubles."""
        try:
            await self._presence.beat(self._counters())
        except ResponseError as error:
            if not self._is_refused:
                text = str(self._server.explain(error))
                _log.warning("clients will not see this worker any more, for its heartbeat is refused: %s", text)
            self._is_refused = True
            raise
        self._is_refused = False

    async def _say_draining(self) -> None:
        """Show at once that the worker drains, not with the next heartbeat only."""
        await self._duty.stopping.wait()
        try:
            await self._beat()
        except (RedisError, OSError, LMPoolError) as error:
            _log.warning("cannot say that this worker drains: %s", self._server.explain(error))

    def _counters(self) -> dict[str, str | int | float]:
        stats = self._stepper.stats
        return {
            "state": "draining" if self._duty.stopping.is_set() else "ready",
            "held": len(self._held),
            "failures": self._delivery.failures,
            **self._meter.lately(stats),
            **({} if self._card.is_trie else self._adapters.shown()),
            **stats._asdict(),
        }

    async def _log_counters(self) -> None:
        line = self._meter.describe(self._stepper.stats)
        _log.info("%s, %d held, %d failures", line, len(self._held), self._delivery.failures)

    def _on_finished(self, finished: Finished) -> None:
        self._finished.put_nowait(finished)
        self._duty.look_again()  # The backend has room again.

    def _break(self, error: BaseException) -> None:
        """Begin to end, for the backend is of no use any more."""
        _log.error("the backend broke", exc_info=error)
        self._duty.give_up(error)
        self.health.broken = str(error) or type(error).__name__
        self.stop()

    def _hang(self, error: WorkerError) -> None:
        _log.error("%s; its thread is at\n%s", error, self._stepper.stack())
        self._stepper.abandon(error)
        self._duty.give_up(error)
        self.health.broken = str(error)
        self.stop()

    async def _every(self, seconds: float, action: Callable[[], object]) -> None:
        """Repeat an action; one that the server did not answer soon again."""
        waits = delays()
        pause = seconds
        while True:
            await asyncio.sleep(pause)
            try:
                await action()  # type: ignore[misc]
                waits = delays()
                pause = seconds
            except ModelMismatch:
                raise
            except (RedisError, OSError, LMPoolError) as error:
                self._figures.server_errors += 1
                _log.warning("will try again: %s", self._server.explain(error))
                await self._server.reconnect(self._redis, error)
                pause = min(seconds, next(waits))


def _reason(error: BaseException) -> str:
    """An exception for who was not there: our own say themselves what happened, others need their names."""
    return str(error) if isinstance(error, LMPoolError) else f"{type(error).__name__}: {error}"
