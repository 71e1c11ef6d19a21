"""The sessions of a producer, one per event loop: each opens, watches the model and the workers, and closes."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, TypeVar

from redis.exceptions import RedisError

from lmpool import errors
from lmpool.aio import copy_error, delays, end_tasks, ended, finish, outcome, silence_limit
from lmpool.broker.connection import reply_timeout
from lmpool.broker.server import Server
from lmpool.producer.client.adapters import Adapters
from lmpool.producer.client.discovery import CLOSED, TROUBLE, Vocabularies
from lmpool.producer.client.receive import Receiver, Requester, SessionSettings
from lmpool.producer.client.requests import ALONE_S, ENDLESS_S, Deadline, PendingRequest, Stage
from lmpool.protocol.model_info import ModelInfo

T = TypeVar("T")

WhenFull = Literal["wait", "raise"]
"""Whether requests wait while the queue is full, or fail."""
WhenAbsent = Literal["wait", "raise"]
"""Whether opening and requests wait while no worker serves the model, or fail."""
Priority = Literal["interactive", "bulk"]
"""Whether a client's queued prompts share the workers' time, or come after those of interactive clients."""

_log = logging.getLogger("lmpool.producer")

# Tasks that fetch announced rows: one fetches while the other waits for the server.
_COLLECTORS = 2
# Seconds between two checks of the model, its workers, and requests without a reply.
_WATCH_S = 1.0
# Max requests checked per interval, so that a check does not occupy the server.
_MAX_RECHECKED = 2000
# Max seconds for the commands that remove this client from the server when the session closes.
_GOODBYE_S = 1.0
# Max workers per interval whose presence is checked, chosen at random.
_MAX_WORKERS_CHECKED = 32
# Max seconds between two tries to open a session while the server or the model is absent.
_MAX_RETRY_INTERVAL_S = 1.0


class Session(Requester):
    """Requests rows from one model's workers, in one event loop.

    Attributes:
        closed: whether the session has ended.
        vocabularies: the vocabularies, tokenizers and token sets of the pool.
        adapters: the adapters of the model.
        fetching_head: held while one caller fetches the model's head, which can take a gigabyte.
    """

    def __init__(self, server: Server, settings: SessionSettings) -> None:
        super().__init__(server, settings)
        self.closed = False
        self._waits_when_absent = settings.when_absent == "wait"
        self._receiver = Receiver(self._connections, self._requests, self._submitter, self._follow_model)
        self.vocabularies = Vocabularies(self._connections, settings.keys)
        self.adapters = Adapters(self._connections)
        self.fetching_head = asyncio.Lock()
        self._supervisor: asyncio.Task[None] | None = None
        self._is_following = self._has_logged_absence = False
        self._alone_since: float | None = None
        self._next_recheck = 0

    # Opening and closing

    async def open(self, model: str | None) -> None:
        """Connect and read the model info. After a failure the caller may try again.

        Raises:
            ServerError: the server cannot be used.
            UnknownModel, AmbiguousModel: the model is not served, or `model` is None and several models are.
        """
        try:
            try:
                info = await self._discovery.info(model)
            except errors.UnknownModel as error:
                if not error.is_loading:
                    # A server that refuses writes has also refused the worker's info. Then that is the error.
                    await self._connections.check_writes(model or "")
                if model and self._waits_when_absent:
                    await self._discovery.want(model)
                raise
            await self._liveness.start(info.name)
        except errors.LMPoolError:
            raise
        except (RedisError, OSError) as error:
            raise self._connections.explain(error) from error
        self._submitter.homes.has_choice = self._liveness.count > 1
        self._adopt(info)
        self._supervisor = self.loop.create_task(self._supervise(), name="lmpool-producer")
        # Start the task now: a task that is cancelled before its first step does not run its `finally`.
        await asyncio.sleep(0)
        await self._connections.scan_segments()

    async def _supervise(self) -> None:
        """Run the background tasks until cancelled, by `close` or by the end of `asyncio.run`."""
        parts = [self._receiver.read(), self._watch(), self._connections.follow_segments()]
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
            # If the loop was closed without cancelling its tasks, nothing can run any more.
            if not self.loop.is_closed():
                await self._shut_down()

    async def _shut_down(self) -> None:
        await self._connections.end_tasks()
        try:
            async with asyncio.timeout(_GOODBYE_S):
                await self._submitter.cancel_all()
                await self._connections.redis.unlink(self._connections.model.reply)
        except (*TROUBLE, TimeoutError):
            pass  # The keys expire.
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

    # The watch

    async def _watch(self) -> None:
        """Check every second, because notifications can be lost: the model, its workers, and late requests."""
        while True:
            await asyncio.sleep(_WATCH_S)
            absence = None
            try:
                # redis-py's client was opened with a longer timeout, before the lease was known.
                async with silence_limit(reply_timeout(self.info.lease_s)):
                    await self._reload_info()
                    await self.adapters.renew()
                    if self._requests:
                        absence = await self._liveness.check(self.loop.time())
                    else:
                        self._liveness.pause()
                    if absence is not None and not self._waits_when_absent:
                        self._give_up(list(self._requests), absence)
                    elif absence is not None and not self._has_logged_absence:
                        _log.warning("%s; requests wait until their deadlines", absence)
                    self._has_logged_absence = absence is not None
                    homes = self._submitter.homes
                    homes.has_choice = self._liveness.count > 1
                    # Forget the homes of workers that have left; a few workers at a time.
                    known = random.sample(list(homes.workers), min(len(homes.workers), _MAX_WORKERS_CHECKED))
                    homes.forget(await self._discovery.gone(self.info.name, known))
                if self._requests:
                    await self._recheck()
                # Requests that cannot be sent clear the trouble themselves: only their connection may be broken.
                if not self._submitter.is_retrying:
                    self._connections.trouble = None
            except TROUBLE as error:
                self._liveness.pause()  # The workers could not be read, so they are not missing.
                self._connections.note(error)
                await self._connections.reconnect(error)
            self._end_endless(absence or self._connections.trouble)

    async def _recheck(self) -> None:
        """Fetch rows whose notifications were lost; submit requests again that had no reply for a lease."""
        now, lease_s = self.loop.time(), self.info.lease_s
        waiting = (request for request in self._requests if request.stage is Stage.WAITING)
        late = [request for request in waiting if now - request.since > _WATCH_S]
        # Continue after the last portion, so that slow requests at the front do not hide the others.
        at = self._next_recheck if self._next_recheck < len(late) else 0
        late = late[at : at + _MAX_RECHECKED]
        self._next_recheck = at + len(late)
        await self._submitter.fetch([request.prompt.digest for request in late])
        pending = filter(self._requests.is_open, late)
        # Only the script can check whether the row of a warming request is cached.
        silent = [request for request in pending if request.warm or now - request.since > lease_s]
        if silent:
            await self._submitter.submit(silent, again=True)

    def _end_endless(self, why: errors.LMPoolError | None) -> None:
        """End requests without a deadline when this reason has lasted for `ALONE_S`."""
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

    # The model

    def _adopt(self, info: ModelInfo) -> None:
        """Use a model, or the same model with other weights."""
        self._connections.adopt(info)
        self._requests.restart(info.fingerprint)
        self._submitter.homes.clear()
        self._settings.counters.model = info.name
        self.info = info

    def _renew(self, info: ModelInfo) -> None:
        """Use a newer info of the same weights."""
        self._connections.model = replace(self._connections.model, info=info)
        self.info = info

    def _follow_model(self) -> None:
        """Read the info of the changed model and send all requests again."""

        async def reload() -> None:
            try:
                with self._connections.noting():
                    await self._reload_info()
            finally:
                self._is_following = False

        if not self._is_following:
            self._is_following = True
            self._connections.spawn(reload())
        self._submitter.retry_soon()

    async def _reload_info(self) -> None:
        info = await self._discovery.find(self.info.name)
        if info is None:
            return  # No worker serves at the moment; requests wait for the next one.
        if info.fingerprint == self.info.fingerprint:
            self._renew(info)
            return
        _log.info("the model %r has changed: sending %d prompts again", info.name, len(self._requests))
        self._adopt(info)
        self._submitter.retry_soon()
        await self._connections.scan_segments()


class CopiedAsItself:
    """Base of classes that hold connections: a copy or deep copy of the object is the object itself."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


@dataclass(slots=True, eq=False)
class _Attempt:
    """An attempt to open a session, shared by concurrent callers.

    Attributes:
        waiting: number of callers.
        timeout_s: longest timeout of the callers.
        server: None until the server is known.
        absence: the error of the last try while the server or the model is absent.
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
        self,
        server: Callable[[], Server],
        make: Callable[[Server], Session],
        model: str | None,
        when_absent: WhenAbsent = "raise",
    ) -> None:
        self._server = server
        self._make = make
        self._model = model
        self._waits = when_absent == "wait"
        # `close_soon` may run in another thread. Reentrant: the garbage collector may call it while this thread holds
        # the lock.
        self._lock = threading.RLock()
        self._opening: dict[asyncio.AbstractEventLoop, _Attempt] = {}
        self.by_loop: dict[asyncio.AbstractEventLoop, Session] = {}
        self.session: Session | None = None

    @property
    def is_open(self) -> bool:
        """Whether any loop has an open session."""
        return any(not session.closed for session in list(self.by_loop.values()))

    async def open(self, deadline: Deadline) -> Session:
        """Return the session of the running event loop; concurrent callers share one attempt to open it.

        Without a deadline, this waits while a worker loads the model.

        Raises:
            ServerError, DeadlineExceeded: the server cannot be used, or not in time.
            UnknownModel, AmbiguousModel: the model is not served, or no model is named and several are served.
            NoWorker: no worker served the model in time.
            ProducerClosed: the producer was closed.
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

    async def request(
        self, adapter: object, deadline: Deadline, ask: Callable[[Session, str], Coroutine[Any, Any, T]]
    ) -> T:
        """Call `ask` in a session, and again whenever a worker reports that the adapter has changed.

        Args:
            adapter: name of the adapter; "" for none.
            deadline: until when.
            ask: called with the session, and with the adapter as jobs name it: "name@digest", or "".

        Raises:
            UnknownAdapter: the model has no adapter of that name.
            LMPoolError: raised by `open` or `ask`.
        """
        session = await self.open(deadline)
        if isinstance(adapter, str) and not adapter:
            return await ask(session, "")
        for wait in delays():
            try:
                return await ask(session, await session.adapters.qualified(adapter, deadline))
            except errors.AdapterChanged:
                session.adapters.doubt()
            # The worker may have seen the change before this client can.
            await asyncio.sleep(wait)
            session = await self.open(deadline)
        raise AssertionError("the delays never end")

    async def _open(self, deadline: Deadline) -> Session:
        loop = deadline.loop
        attempt = self._opening.get(loop)
        if attempt is None or attempt.task.done() or attempt.is_over:
            attempt = _Attempt()
            attempt.task = loop.create_task(self._connect(attempt), name="lmpool-connect")
            with self._lock:
                for old in list(self._opening):
                    if old.is_closed():  # Without its tasks having been cancelled.
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
                raise  # The deadline had passed before.
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
        """Cancel an attempt without callers. The next caller starts a new one instead of waiting for a dead server."""

        def forget(_: object) -> None:
            with self._lock:
                if self._opening.get(loop) is attempt:
                    del self._opening[loop]

        if attempt.task.done() or loop.is_closed():
            forget(None)
        else:
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
                    await session.open(self._model)
                    self._hold(attempt, session)
                    return session
                except (errors.UnknownModel, errors.ServerError) as error:
                    # Waiting may help: no worker serves the model yet, or the server is starting.
                    is_absent, cause = isinstance(error, errors.UnknownModel), error.__cause__
                    is_starting = attempt.server is not None and cause is not None and attempt.server.is_not_now(cause)
                    if not self._waits or not (is_absent or is_starting or isinstance(error, errors.ServerUnreachable)):
                        raise
                    if type(attempt.absence) is not type(error):
                        served = "a model" if self._model is None else repr(self._model)
                        missing = f"a worker to serve {served}" if is_absent else "the server"
                        limit = f"up to {attempt.timeout_s:g} s ({errors.argument('timeout')})"
                        at_once = errors.argument("when_absent", '"raise"')
                        text = "waiting for %s: %s; this waits %s; %s fails at once"
                        _log.warning(text, missing, error, limit, at_once)
                    attempt.absence = error
                await asyncio.sleep(wait)
            raise AssertionError("the delays never end")
        except BaseException:
            # If the loop was closed without cancelling its tasks, nothing can run any more.
            if session is not None and not session.loop.is_closed():
                await finish(session.close())
            raise

    def _hold(self, attempt: _Attempt, session: Session) -> None:
        """Keep an open session; raises ProducerClosed if the producer was closed."""
        with self._lock:
            if attempt.is_over:
                raise errors.ProducerClosed(CLOSED)
            for loop, old in list(self.by_loop.items()):
                if old.closed or loop.is_closed():
                    self.by_loop.pop(loop, None)
            self.by_loop[session.loop] = self.session = session

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
            with suppress(RuntimeError):  # The loop is closed, so its tasks have ended.
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
