"""Opens and holds one session for each event loop that makes requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from lmpool.aio import copy_error, delays, end_tasks, ended, finish, outcome
from lmpool.broker.server import Server
from lmpool.errors import (
    AdapterChanged,
    DeadlineExceeded,
    LMPoolError,
    NoWorker,
    ProducerClosed,
    ServerError,
    ServerUnreachable,
    UnknownModel,
    argument,
)
from lmpool.producer.client.connections import CLOSED
from lmpool.producer.client.requests import Deadline
from lmpool.producer.client.session import Session, WhenAbsent

T = TypeVar("T")

_log = logging.getLogger("lmpool.producer")

# Max seconds between two tries to open a session while the server or the model is absent.
_MAX_RETRY_INTERVAL_S = 1.0


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
    absence: LMPoolError | None = None
    is_over: bool = False

    def note_absence(self, error: LMPoolError, model: str | None) -> None:
        """Record the error of a try, and log the first one of its kind."""
        if type(self.absence) is not type(error):
            served = "serve a model" if model is None else f"serve {model!r}"
            missing = f"a worker to {served}" if isinstance(error, UnknownModel) else "the server"
            at_once = argument("when_absent", '"raise"')
            limit = f"this waits up to {self.timeout_s:g} s ({argument('timeout')}); {at_once} fails at once"
            _log.warning("waiting for %s: %s; %s", missing, error, limit)
        self.absence = error

    def deadline_error(self, error: TimeoutError) -> LMPoolError:
        """Return the exception for a caller whose deadline has passed."""
        if isinstance(self.absence, UnknownModel):
            return NoWorker(f"{error}: {self.absence}")
        if self.absence is not None:
            return type(self.absence)(f"{error}: {self.absence}")
        return DeadlineExceeded(str(error)) if self.server is None else self.server.explain(error)

    def may_recover(self, error: LMPoolError) -> bool:
        """Return whether waiting may help: no worker serves the model yet, or the server is starting."""
        if isinstance(error, (UnknownModel, ServerUnreachable)):
            return True
        return self.server is not None and error.__cause__ is not None and self.server.is_not_now(error.__cause__)


class SessionPerLoop:
    """Holds a session for each event loop.

    Args:
        server: returns the server to connect to.
        make: makes a session with a server.
        model: name of the model; None for the only served one.
        when_absent: whether opening waits while the server or the model is absent, or fails.

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

    def current(self, loop: asyncio.AbstractEventLoop) -> Session | None:
        """Return the open session of the event loop `loop`, or None."""
        session = self.by_loop.get(loop)
        return None if session is None or session.closed else session

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
        if (session := self.current(deadline.loop)) is not None:
            return session
        while True:
            part = deadline.bounded()
            try:
                return await self._open(part)
            except NoWorker as error:
                absence = error.__cause__
                if part is deadline or not isinstance(absence, UnknownModel) or not absence.is_loading:
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
        session = self.current(deadline.loop) or await self.open(deadline)
        if isinstance(adapter, str) and not adapter:
            return await ask(session, "")
        waits = delays()
        while True:
            try:
                return await ask(session, await session.adapters.qualified(adapter, deadline))
            except AdapterChanged:
                session.adapters.doubt()
            # The worker may have seen the change before this client can.
            await asyncio.sleep(next(waits))
            session = self.current(deadline.loop) or await self.open(deadline)

    async def _open(self, deadline: Deadline) -> Session:
        attempt = self._attempt(deadline.loop)
        attempt.waiting += 1
        attempt.timeout_s = max(attempt.timeout_s, deadline.seconds)
        try:
            async with deadline.limit():
                await ended(attempt.task)
        except DeadlineExceeded:
            raise
        except TimeoutError as error:
            raise attempt.deadline_error(error) from copy_error(attempt.absence or error)
        finally:
            attempt.waiting -= 1
            if not attempt.waiting:
                self._abandon(attempt, deadline.loop)
        if attempt.is_over:
            raise ProducerClosed(CLOSED)
        return outcome(attempt.task)

    def _attempt(self, loop: asyncio.AbstractEventLoop) -> _Attempt:
        """Return the pending attempt of the running event loop, or a new one."""
        attempt = self._opening.get(loop)
        if attempt is None or attempt.task.done() or attempt.is_over:
            attempt = _Attempt()
            attempt.task = loop.create_task(self._connect(attempt), name="lmpool-connect")
            with self._lock:
                for old in list(self._opening):
                    if old.is_closed():  # Without its tasks having been cancelled.
                        self._opening.pop(old, None)
                self._opening[loop] = attempt
        return attempt

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
                except (UnknownModel, ServerError) as error:
                    if not self._waits or not attempt.may_recover(error):
                        raise
                    attempt.note_absence(error, self._model)
                await asyncio.sleep(wait)
            raise AssertionError("the delays never end")
        except BaseException:
            # If the loop was closed without cancelling its tasks, nothing can run any more.
            if session is not None and not session.loop.is_closed():
                await finish(session.close())
            raise

    def _hold(self, attempt: _Attempt, session: Session) -> None:
        """Keep an open session.

        Raises:
            ProducerClosed: the producer was closed.
        """
        with self._lock:
            if attempt.is_over:
                raise ProducerClosed(CLOSED)
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
            with contextlib.suppress(RuntimeError):  # The loop is closed, so its tasks have ended.
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
