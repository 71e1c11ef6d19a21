"""The sessions of a producer, one per event loop, which connect, watch the model and its workers, and close."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeVar

from redis.exceptions import RedisError

from lmpool import errors
from lmpool.aio import copy_error, delays, end_tasks, ended, finish, outcome, pauses, silence_limit
from lmpool.broker.connection import reply_timeout
from lmpool.broker.scripts import read_pointer
from lmpool.broker.server import Server
from lmpool.producer.client.adapters import Adapters
from lmpool.producer.client.discovery import CLOSED, TROUBLE, Vocabularies
from lmpool.producer.client.receive import Receiver, Requester
from lmpool.producer.client.requests import ALONE_S, ENDLESS_S, Deadline, PendingRequest, SessionSettings, Stage
from lmpool.producer.client.submit import Homes
from lmpool.producer.client.versions import WeightVersions
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.version import name_of_version, split_name

T = TypeVar("T")

WhenFull = Literal["wait", "raise"]
"""Whether requests wait or fail while the queue is full."""
WhenAbsent = Literal["wait", "raise"]
"""Whether requests, and the opening of a session, wait or fail while no worker serves the model."""
Priority = Literal["interactive", "bulk"]
"""Whether workers take a client's prompts in turn with other clients, or after the prompts of interactive clients."""

_log = logging.getLogger("lmpool.producer")

# Number of tasks that fetch announced rows: one task decodes rows while the other task waits for the server.
_COLLECTORS = 2
_WATCH_S = 1.0  # Seconds between two checks of the model, its workers, and requests without a reply.
# Seconds between two such checks while answers arrive, or nothing is requested: each check costs the server commands.
_CALM_WATCH_S = 5.0
# Max requests without a reply that are checked per second, so that the check does not occupy the server for long.
_MAX_RECHECKED = 2000
_GOODBYE_S = 1.0  # Max seconds for the commands that remove this client from the server when the session closes.
_USED_S = 5.0  # Max seconds for which a publisher waits until new clients use its version.
# Max workers, chosen at random, that the session checks every second: have they left the pool?
_MAX_WORKERS_CHECKED = 32
# Max seconds between two tries to open a session while the server is unreachable or no worker serves the model.
_MAX_RETRY_INTERVAL_S = 1.0


class Session(Requester):
    """Requests rows from one model's workers, in one event loop.

    Attributes:
        closed: whether the session has ended.
        blocks: number of `async with` blocks of the producer that are running in this event loop.
        vocabularies: the vocabularies, tokenizers and token sets of the pool.
        adapters: the adapters of the model.
        fetching_head: lock of the caller that fetches the model's head (last layer), which can have a gigabyte.
    """

    def __init__(self, server: Server, settings: SessionSettings) -> None:
        super().__init__(server, settings)
        self.closed = False
        self.blocks = 0
        self._connections.partitions.poll = self._poll_loads
        self._receiver = Receiver(self._connections, self._requests, self._submitter, self._follow_model)
        self.vocabularies = Vocabularies(self._connections, settings.keys)
        self.adapters = Adapters(self._connections)
        self.fetching_head = asyncio.Lock()
        self._supervisor: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None
        self._has_logged_absence = False
        self._alone_since: float | None = None
        self._next_recheck = 0

    async def open(self, model: str | None, seen: ModelInfo | None = None) -> None:
        """Connect and read the model info. After a failure the caller may try again.

        `seen`: the info that the client has used last; this session uses no older version of the model's weights.
        """
        try:
            try:
                info = await self._discovery.info(model)
                if seen is not None and _is_older(info, seen):
                    info = await self._newer(info, seen.version)
            except errors.UnknownModel as error:
                if not error.is_loading:
                    # Workers cannot store model infos if the server refuses writes: report the refusal instead.
                    await self._connections.check_writes(model or "")
                if model and self._settings.when_absent == "wait":
                    await self._discovery.want(model)
                raise
            self._wanted = model or info.base
            self._adopt(info)
            await self._liveness.poll()
        except errors.LMPoolError:
            raise
        except (RedisError, OSError) as error:
            raise self._connections.server.explain(error) from error
        self._submitter.homes.has_choice = self._liveness.count > 1
        self._supervisor = self.loop.create_task(self._supervise(), name="lmpool-producer")
        # Let the new task begin: a task that is cancelled before its first step does not run its `finally`.
        await asyncio.sleep(0)
        await self._connections.scan_segments()

    async def _supervise(self) -> None:
        """Run the background tasks until cancelled, by `close` or by the end of `asyncio.run`."""
        self._connections.datagrams.open(self._receiver.on_datagram)
        parts = [self._receiver.read_all(), self._watch(), self._connections.follow_segments()]
        parts += [self._receiver.collect() for _ in range(_COLLECTORS)]
        try:
            await asyncio.gather(*map(self._connections.spawn, parts))
        except asyncio.CancelledError:
            raise
        except BaseException:
            _log.exception("a background task failed; closing the connection to the pool")
            raise
        finally:
            self.closed = self._connections.closed = True
            # If the program closed the loop without cancelling its tasks, no cleanup can run any more.
            if not self.loop.is_closed():
                await self._connections.end_tasks()
                with suppress(*TROUBLE):  # If the cleanup fails, the keys of this client expire on the server.
                    async with asyncio.timeout(_GOODBYE_S):
                        await self._submitter.cancel_all()
                for request in self._requests:
                    self._requests.resolve(request, errors.ProducerClosed(CLOSED))
                await self._connections.close()

    async def close(self) -> None:
        """End all requests, remove this client from the server, and close the connections."""
        if self._supervisor is None:
            self.closed = self._connections.closed = True
            await self._connections.close()
        elif not self.closed:
            self.close_soon()
            await asyncio.wait([self._supervisor])

    def close_soon(self) -> None:
        """Close an open session without waiting."""
        if self._supervisor is not None:
            self._supervisor.cancel()

    async def _watch(self) -> None:
        """Check the model, its workers and late requests, because notifications can be lost.

        While answers arrive, or nothing is requested, check every few seconds; otherwise every second.
        """
        checked_at, answered = -math.inf, -1
        while True:
            await asyncio.sleep(_WATCH_S)
            is_calm = not self._requests or self._receiver.messages > answered
            answered = self._receiver.messages
            if is_calm and self._connections.trouble is None and self.loop.time() - checked_at < _CALM_WATCH_S:
                with self._connections.noting():
                    await self.adapters.renew()
                continue
            checked_at, absence = self.loop.time(), None
            try:
                # Set a shorter timeout than redis-py's, which was chosen before the lease of the model was known.
                async with silence_limit(reply_timeout(self.info.lease_s)):
                    await self._reload_info()
                    await self.adapters.renew()
                    if self._requests:
                        absence = await self._liveness.check(self.loop.time())
                    else:
                        self._liveness.missing_since = None
                    if absence is not None and self._settings.when_absent == "raise":
                        self._give_up(list(self._requests), absence)
                    elif absence is not None and not self._has_logged_absence:
                        _log.warning("%s; requests wait until their deadlines", absence)
                    self._has_logged_absence = absence is not None
                    self._submitter.homes.has_choice = self._liveness.count > 1
                # Keep the recorded error while requests are sent again: only the connection for requests may be broken.
                if not self._submitter.is_retrying:
                    self._connections.trouble = None
                if self._requests:
                    await self._recheck()
                await self._check_homes()
            except TROUBLE as error:
                self._liveness.missing_since = None  # Heartbeats could not be read: no worker counts as missing.
                self._connections.note(error)
                await self._connections.server.reconnect(self._connections.redis, error)
            self._end_endless(absence or self._connections.trouble)

    async def _check_homes(self) -> None:
        """Discard homes (workers that computed prefixes of prompts) that left the pool; check a few at once."""
        homes, info = self._submitter.homes, self.info

        async def check(partition: int, workers: Sequence[bytes]) -> None:
            # Do not record the error: it concerns no request, and recorded errors end requests without a deadline.
            with suppress(*TROUBLE):
                async with silence_limit(reply_timeout(info.lease_s)):
                    homes.forget(await self._discovery.gone(info.name, workers, partition))

        await asyncio.gather(*(check(*part) for part in homes.sample(_MAX_WORKERS_CHECKED).items()))

    async def _poll_loads(self) -> None:
        with suppress(*TROUBLE):
            await self._liveness.poll()

    async def _recheck(self) -> None:
        """Fetch rows whose notifications were lost; submit requests again that got no reply within a lease."""
        now, lease_s = self.loop.time(), self.info.lease_s
        waiting = (request for request in self._requests if request.stage is Stage.WAITING)
        late = [request for request in waiting if now - request.since > _WATCH_S]
        # Continue where the last check ended, so that slow requests at the front do not hide later requests.
        at = self._next_recheck if self._next_recheck < len(late) else 0
        late = late[at : at + _MAX_RECHECKED]
        self._next_recheck = at + len(late)
        # If the master of a row does not answer, other requests must still be submitted again.
        with self._connections.noting():
            await self._submitter.fetch([request.prompt.digest for request in late])
        pending = filter(self._requests.is_open, late)
        # Include all late warming requests (which need no row): only `submit.lua` checks whether their rows are cached.
        silent = [request for request in pending if request.warm or now - request.since > lease_s]
        if silent:
            await self._submitter.submit(silent, again=True)

    def _end_endless(self, why: errors.LMPoolError | None) -> None:
        """End requests without a deadline when the error `why` has lasted for `ALONE_S` seconds."""
        now = self.loop.time()
        if why is None or not self._requests:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        elif (seconds := now - self._alone_since) >= ALONE_S:
            error = type(why)(f"no row could be had for {seconds:.0f} s: {why}")
            self._give_up([request for request in self._requests if request.until - now > ENDLESS_S / 2], error)

    def _give_up(self, requests: list[PendingRequest], error: errors.LMPoolError) -> None:
        for request in requests:
            self._requests.resolve(request, error)
            self._submitter.cancel(request)

    def _adopt(self, info: ModelInfo) -> None:
        """Switch to a model, or to other weights of the same model."""
        self._connections.adopt(info)
        self._requests.restart(info.fingerprint)
        self._submitter.homes = Homes(has_choice=self._liveness.count > 1)
        self._settings.counters.model = self._wanted  # Not the version's name: series of metrics must not end.
        self.info = info

    def _follow_model(self) -> None:
        """Read the info of the changed model and send all requests again."""

        async def reload() -> None:
            with self._connections.noting():
                await self._reload_info()

        if self._following is None or self._following.done():
            self._following = self._connections.spawn(reload())
        self._submitter.retry_soon()

    async def _reload_info(self) -> None:
        info = await self._discovery.find(self._wanted)
        if info is not None and _is_older(info, self.info):
            info = await self._discovery.find_served(self.info.base, self.info.version)
        if info is not None and info.fingerprint == self.info.fingerprint:
            self.info = info  # Before the poll: another task may change to a later version during the poll.
            if self._connections.follow(info):
                await self._liveness.poll()
        elif info is not None:  # Without an info, no worker serves the model, and requests wait for a worker.
            self._change_model(info)
            await self._connections.scan_segments()

    def _change_model(self, info: ModelInfo) -> None:
        if _is_older(info, self.info):
            return  # Another task has changed to a later version meanwhile.
        _log.info("the model %r has changed: sending %d prompts again", info.name, len(self._requests))
        self._adopt(info)
        self._submitter.retry_soon()

    async def _newer(self, info: ModelInfo, least: int) -> ModelInfo:
        """Return the info of version `least`, if workers serve it; raises UnknownModel otherwise."""
        if (served := await self._discovery.find_served(info.base, least)) is not None:
            return served
        text = f"version {least} of {info.base!r} is not served, and clients use version {info.version}"
        raise errors.UnknownModel(f"{text}: this client has seen version {least} and takes no older one")

    @property
    def versions(self) -> WeightVersions:
        """The versions of the model's weights."""
        return WeightVersions(self._connections)

    async def reach(self, number: int, deadline: Deadline) -> None:
        """Wait until this session uses version `number` of the model's weights, or a later one.

        Raises:
            DeadlineExceeded: no worker has served such a version within the deadline.
            SettingsError: this session is for one version, which is older.
        """
        if (pinned := split_name(self._wanted)[1]) is not None and pinned < number:
            raise errors.SettingsError(f"min_version: {number} is above {pinned}, the version of this producer")
        try:
            async with deadline.limit():
                for wait in pauses():
                    if self.info.version >= number:
                        return
                    with self._connections.noting():
                        if (served := await self._discovery.find_served(self.info.base, number)) is not None:
                            self._change_model(served)
                        else:
                            await self._reload_info()
                    if self.info.version < number:
                        await asyncio.sleep(wait)
        except errors.DeadlineExceeded as late:
            text = f"no worker has served version {number} of {self.info.base!r} within {deadline.seconds:g} s"
            raise errors.DeadlineExceeded(f"{text}: clients use version {self.info.version}") from late

    async def until_used(self, number: int) -> None:
        """Wait until new clients use version `number` too, unless other workers serve the one before; at most 5 s."""
        connections, base, until = self._connections, self.info.base, self.loop.time() + _USED_S
        with connections.noting():  # The version is served in any case.
            for wait in pauses():
                used = await read_pointer(connections.redis, connections.keys, base)
                if used >= number or self.loop.time() > until:
                    return
                if (await self._discovery.alive(name_of_version(base, used), self.info.partitions)).serving:
                    return
                await asyncio.sleep(wait)


def _is_older(info: ModelInfo, seen: ModelInfo) -> bool:
    """Whether an info is of an earlier version of the same checkpoint."""
    return info.version < seen.version and info.lineage == seen.lineage


class CopiedAsItself:
    """Base class for objects that hold connections: `copy` and `deepcopy` return the object itself."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


@dataclass(slots=True, eq=False)
class _Attempt:
    """An attempt to open a session, shared by concurrent callers.

    Attributes:
        waiting: number of callers that wait for the session.
        timeout_s: longest timeout of the waiting callers.
        server: the server to connect to, or None before the first try.
        absence: the last error because of an unreachable server or a model that is not served.
        is_over: whether the producer was closed, or all callers have given up.
    """

    task: asyncio.Task[Session] = field(init=False)
    waiting: int = 0
    timeout_s: float = 0.0
    server: Server | None = None
    absence: errors.LMPoolError | None = None
    is_over: bool = False


class SessionPerLoop:
    """Holds a session for each event loop.

    Attributes:
        by_loop: the sessions, some of which may be closed.
        session: the session that was opened last, in any loop, or None.
    """

    def __init__(
        self, server: Callable[[], Server], make: Callable[[Server], Session], model: str | None, waits: bool = False
    ) -> None:
        self._server = server
        self._make = make
        self._model = model
        self._waits = waits  # Whether `open` waits while no worker serves the model.
        # `close_soon` may run in another thread. The lock is reentrant, because the garbage collector may call
        # `close_soon` while this thread holds the lock.
        self._lock = threading.RLock()
        self._opening: dict[asyncio.AbstractEventLoop, _Attempt] = {}
        self.by_loop: dict[asyncio.AbstractEventLoop, Session] = {}
        self.session: Session | None = None

    async def open(self, deadline: Deadline) -> Session:
        """Return the session of the running event loop; concurrent callers share one attempt to open it.

        Without a deadline, this call waits for as long as a worker loads the model.
        """
        session = self.by_loop.get(deadline.loop)
        if session is not None and not session.closed:
            return session
        while True:
            part = deadline.bounded()
            try:
                return await self._open(part)
            except errors.NoWorker as error:
                absence = error.__cause__
                if part is deadline or not isinstance(absence, errors.UnknownModel) or not absence.is_loading:
                    raise

    async def request(self, adapter: object, deadline: Deadline, ask: Callable[[Session, str], Awaitable[T]]) -> T:
        """Call `ask` in a session, and again whenever a worker reports that the adapter has changed.

        `ask` receives the session and the adapter's name in jobs, which is "name@digest", or "" for none.
        """
        for wait in delays():
            session = await self.open(deadline)
            if isinstance(adapter, str) and not adapter:
                return await ask(session, "")
            try:
                return await ask(session, await session.adapters.qualified(adapter, deadline))
            except errors.AdapterChanged:
                session.adapters.doubt()
            # Wait: the worker may read a changed adapter earlier than this client can.
            await asyncio.sleep(wait)
        raise AssertionError("the delays never end")

    async def _open(self, deadline: Deadline) -> Session:
        loop = deadline.loop
        attempt = self._opening.get(loop)
        if attempt is None or attempt.task.done() or attempt.is_over:
            attempt = _Attempt()
            attempt.task = loop.create_task(self._connect(attempt), name="lmpool-connect")
            with self._lock:
                for old in list(self._opening):
                    if old.is_closed():  # The program closed this loop, so its attempt never ends.
                        self._opening.pop(old, None)
                self._opening[loop] = attempt
        attempt.waiting += 1
        attempt.timeout_s = max(attempt.timeout_s, deadline.seconds)
        try:
            async with deadline.limit():
                await ended(attempt.task)
        except errors.DeadlineExceeded as error:
            absence = attempt.absence
            if error.__cause__ is None:
                raise  # The deadline had passed before the wait began.
            if absence is not None:
                kind = errors.NoWorker if isinstance(absence, errors.UnknownModel) else type(absence)
                raise kind(f"{error}: {absence}") from copy_error(absence)
            if attempt.server is not None:
                raise attempt.server.explain(TimeoutError(str(error))) from error
            raise
        finally:
            attempt.waiting -= 1
            if not attempt.waiting:
                self._abandon(attempt, loop)
        if attempt.is_over:
            raise errors.ProducerClosed(CLOSED)
        return outcome(attempt.task)

    def _abandon(self, attempt: _Attempt, loop: asyncio.AbstractEventLoop) -> None:
        """End an attempt whose callers have given up, so that the next caller does not wait for a dead server."""

        def forget(_: object) -> None:
            with self._lock:
                if self._opening.get(loop) is attempt:
                    del self._opening[loop]

        if attempt.task.done() or loop.is_closed():
            forget(None)
        else:
            # Keep the attempt until its task has ended, because `close` waits for the task.
            attempt.is_over = True
            attempt.task.add_done_callback(forget)
            attempt.task.cancel()

    async def _connect(self, attempt: _Attempt) -> Session:
        session = None
        try:
            for wait in delays(_MAX_RETRY_INTERVAL_S):
                try:
                    if session is None:
                        attempt.server = self._server()
                        session = self._make(attempt.server)
                    await session.open(self._model, self.session.info if self.session is not None else None)
                    with self._lock:
                        if attempt.is_over:
                            raise errors.ProducerClosed(CLOSED)
                        for loop, old in list(self.by_loop.items()):
                            if old.closed or loop.is_closed():
                                self.by_loop.pop(loop, None)
                        self.by_loop[session.loop] = self.session = session
                    return session
                except (errors.UnknownModel, errors.ServerError) as error:
                    # Wait and try again if no worker serves the model yet, or if the server is starting.
                    is_absent, cause = isinstance(error, errors.UnknownModel), error.__cause__
                    is_starting = attempt.server is not None and cause is not None and attempt.server.is_not_now(cause)
                    if not self._waits or not (is_absent or is_starting or isinstance(error, errors.ServerUnreachable)):
                        raise
                    if type(attempt.absence) is not type(error):
                        served = "a model" if self._model is None else repr(self._model)
                        missing = f"a worker to serve {served}" if is_absent else "the server"
                        limit = f"this waits up to {attempt.timeout_s:g} s ({errors.argument('timeout')})"
                        at_once = errors.argument("when_absent", '"raise"')
                        _log.warning("waiting for %s: %s; %s; %s fails at once", missing, error, limit, at_once)
                    attempt.absence = error
                await asyncio.sleep(wait)
            raise AssertionError("the delays never end")
        except BaseException:
            # If the program closed the loop without cancelling its tasks, no cleanup can run any more.
            if session is not None and not session.loop.is_closed():
                await finish(session.close())
            raise

    def close_soon(self) -> None:
        """Close all sessions, each in its own event loop, without waiting. Any thread may call this."""
        with self._lock:
            sessions, self.by_loop, self.session = self.by_loop, {}, None
            attempts, self._opening = self._opening, {}
            for attempt in attempts.values():
                attempt.is_over = True
        ends: list[tuple[asyncio.AbstractEventLoop, Callable[[], object]]]
        ends = [(loop, attempt.task.cancel) for loop, attempt in attempts.items()]
        ends += [(loop, session.close_soon) for loop, session in sessions.items() if not session.closed]
        for loop, end in ends:
            with suppress(RuntimeError):  # RuntimeError: the loop is closed, and its tasks have ended.
                loop.call_soon_threadsafe(end)

    async def close(self) -> None:
        """Close the session of the running event loop, or the attempt to open it."""
        loop = asyncio.get_running_loop()
        with self._lock:
            session, attempt = self.by_loop.pop(loop, None), self._opening.pop(loop, None)
            if self.session is session:
                self.session = None
            if attempt is not None:
                attempt.is_over = True
        try:
            if attempt is not None:
                await end_tasks([attempt.task])
        finally:
            if session is not None:
                await session.close()
