"""A session for each event loop that asks, opened with the first request in it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Self, TypeVar

from lmpool.aio import copy_error, delays, end_tasks, ended, outcome
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
from lmpool.producer.client.session import Session, WhenAbsent
from lmpool.producer.deadline import Deadline

T = TypeVar("T")

_log = logging.getLogger("lmpool.producer")

_LOOK_S = 1.0


class CopiedAsItself:
    """Holds connections, so that a copy, deep or not, is the object itself: particles and settings are copied often."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class _Attempt:
    """An attempt to open a session.

    Attributes:
        task: what opens it.
        waiting: how many wait for it.
        server: where; None until that is known.
        lacks: what it waits for, as seen last: a server or a model; None for neither.
        seconds: for how long it is waited for, at most.
        is_over: it was closed, or all who waited for it have gone.
    """

    __slots__ = ("is_over", "lacks", "seconds", "server", "task", "waiting")

    task: asyncio.Task[Session]

    def __init__(self) -> None:
        self.waiting = 0
        self.seconds = 0.0
        self.server: Server | None = None
        self.lacks: LMPoolError | None = None
        self.is_over = False

    def note(self, lacks: LMPoolError, model: str | None) -> None:
        """Take note of what it waits for; logged once, so that nobody takes it for a program that hangs."""
        if type(self.lacks) is not type(lacks):
            served = "serve a model" if model is None else f"serve {model!r}"
            missing = f"a worker to {served}" if isinstance(lacks, UnknownModel) else "the server"
            at_once = argument("when_absent", '"raise"')
            limit = f"this waits up to {self.seconds:g} s ({argument('timeout')}); {at_once} fails at once"
            _log.warning("waiting for %s: %s; %s", missing, lacks, limit)
        self.lacks = lacks

    def deadline_error(self, error: TimeoutError) -> LMPoolError:
        """The exception for a request whose deadline has passed meanwhile."""
        if isinstance(self.lacks, UnknownModel):
            return NoWorker(f"{error}: {self.lacks}")
        if self.lacks is not None:
            return type(self.lacks)(f"{error}: {self.lacks}")
        return DeadlineExceeded(str(error)) if self.server is None else self.server.explain(error)


class SessionPerLoop:
    """Holds a session for each event loop that asks.

    Args:
        server: gives the server to connect to.
        make: makes a session with a server.
        model: name of the model that the session asks; None for the only one that is served.
        when_absent: what opening does while there is no server or no such model.

    Attributes:
        session: the one that was opened last, of whichever loop; None when there is none.
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
        # Against `close_soon` of another thread: a session that it does not see must see it. Its holder may come here
        # again, when the garbage collector ends what a closed loop has left.
        self._changing = threading.RLock()
        self._opening: dict[asyncio.AbstractEventLoop, _Attempt] = {}
        self._sessions: dict[asyncio.AbstractEventLoop, Session] = {}
        self.session: Session | None = None

    def current(self, loop: asyncio.AbstractEventLoop) -> Session | None:
        """The session of the running event loop `loop`, if it is open."""
        session = self.session
        if session is None or session.loop is not loop:
            session = self._sessions.get(loop)
        return None if session is None or session.closed else session

    @property
    def is_open(self) -> bool:
        """Whether there is an open session, of whichever loop."""
        return any(not session.closed for session in list(self._sessions.values()))

    async def open(self, deadline: Deadline) -> Session:
        """The session of the running event loop; concurrent callers share one attempt to open it.

        Without a deadline this waits as long as a worker loads the model.

        Raises:
            ServerError, DeadlineExceeded: the server cannot be used, or not in time.
            UnknownModel, AmbiguousModel: there is not exactly the model that was asked for.
            NoWorker: nobody has served that model in time, and this waits for somebody who does.
            ProducerClosed: it was closed meanwhile.
        """
        if (session := self.current(deadline.loop)) is not None:
            return session
        while True:
            part = deadline.bounded()
            try:
                return await self._open(part)
            except NoWorker as error:
                lacks = error.__cause__
                if part is deadline or not isinstance(lacks, UnknownModel) or not lacks.is_loading:
                    raise

    async def request(
        self, adapter: object, deadline: Deadline, ask: Callable[[Session, str], Coroutine[Any, Any, T]]
    ) -> T:
        """Ask the model's workers; with an adapter until none says that its weights have changed meanwhile.

        Args:
            adapter: the adapter's name; "" for none.
            deadline: until when.
            ask: asks in a session, with the adapter as jobs name it ("name@revision", or ""); perhaps several times.

        Raises:
            UnknownAdapter: the model has no adapter of that name.
            DeadlineExceeded, ServerError: it changes again and again, or the server cannot be used.
            LMPoolError: whatever else `open` and `ask` end in.
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
            # A worker may have seen the change before the server tells of it to us.
            await asyncio.sleep(next(waits))
            session = self.current(deadline.loop) or await self.open(deadline)

    async def _open(self, deadline: Deadline) -> Session:
        attempt = self._attempt()
        attempt.waiting += 1
        attempt.seconds = max(attempt.seconds, deadline.seconds)
        try:
            async with deadline.limit():
                await ended(attempt.task)
        except DeadlineExceeded:
            raise
        except TimeoutError as error:
            raise attempt.deadline_error(error) from copy_error(attempt.lacks or error)
        finally:
            attempt.waiting -= 1
            if not attempt.waiting:
                self._end(attempt, deadline.loop)
        if attempt.is_over:
            raise ProducerClosed(CLOSED)
        return outcome(attempt.task)

    def _end(self, attempt: _Attempt, loop: asyncio.AbstractEventLoop) -> None:
        """Nobody waits for an attempt any more: forget it as soon as it has ended."""
        if attempt.task.done() or loop.is_closed():
            self._forget(attempt, loop)
        else:
            # Whoever comes next had better connect anew than wait for a server that does not answer.
            attempt.is_over = True
            attempt.task.add_done_callback(lambda _: self._forget(attempt, loop))
            attempt.task.cancel()

    def _forget(self, attempt: _Attempt, loop: asyncio.AbstractEventLoop) -> None:
        with self._changing:
            if self._opening.get(loop) is attempt:
                del self._opening[loop]

    def _attempt(self) -> _Attempt:
        """The attempt that is under way in the running event loop, or a new one."""
        loop = asyncio.get_running_loop()
        attempt = self._opening.get(loop)
        if attempt is None or attempt.task.done() or attempt.is_over:
            attempt = _Attempt()
            attempt.task = loop.create_task(self._connect(attempt), name="lmpool-connect")
            with self._changing:
                for old in list(self._opening):
                    if old.is_closed():  # Without its tasks having been cancelled.
                        self._opening.pop(old, None)
                self._opening[loop] = attempt
        return attempt

    async def _connect(self, attempt: _Attempt) -> Session:
        attempt.server = await self._until_there(attempt, self._find)
        session = self._make(attempt.server)
        try:
            await self._until_there(attempt, partial(session.open, self._model))
            self._hold(attempt, session)
        except BaseException:
            # A loop that was closed without cancelling its tasks can do nothing any more.
            if not session.loop.is_closed():
                await _to_its_end(session.close())
            raise
        return session

    async def _find(self) -> Server:
        return self._server()

    async def _until_there(self, attempt: _Attempt, look: Callable[[], Awaitable[T]]) -> T:
        """What `look` returns; while it finds no server or no model, look again, if the session may wait for them."""
        for wait in delays(_LOOK_S):
            try:
                return await look()
            except (UnknownModel, ServerError) as error:
                if not self._waits or not _may_come(error, attempt.server):
                    raise
                attempt.note(error, self._model)
            await asyncio.sleep(wait)
        raise AssertionError("the waits never end")

    def _hold(self, attempt: _Attempt, session: Session) -> None:
        """Keep an open session for all who ask.

        Raises:
            ProducerClosed: nobody is to ask any more.
        """
        with self._changing:
            if attempt.is_over:
                raise ProducerClosed(CLOSED)
            for loop, old in list(self._sessions.items()):
                if old.closed or loop.is_closed():
                    self._sessions.pop(loop, None)
            self._sessions[session.loop] = self.session = session

    def close_soon(self) -> None:
        """End all sessions, each in its own event loop and without waiting; from any thread."""
        with self._changing:
            sessions, self._sessions, self.session = self._sessions, {}, None
            attempts, self._opening = self._opening, {}
            for attempt in attempts.values():
                attempt.is_over = True
        ends: list[tuple[asyncio.AbstractEventLoop, Callable[[], object]]]
        ends = [(loop, attempt.task.cancel) for loop, attempt in attempts.items()]
        ends += [(loop, session.close_soon) for loop, session in sessions.items() if not session.closed]
        for loop, end in ends:
            with contextlib.suppress(RuntimeError):  # The loop is closed, and everything in it has ended.
                loop.call_soon_threadsafe(end)

    async def close(self) -> None:
        """End the session of the running loop, or the attempt to open it."""
        loop = asyncio.get_running_loop()
        with self._changing:
            session, attempt = self._sessions.pop(loop, None), self._opening.pop(loop, None)
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


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Await something however often that is cancelled: a session that is closed in part stays open until collected."""
    task = asyncio.ensure_future(work)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([task])
    await task


def _may_come(error: LMPoolError, server: Server | None) -> bool:
    """Whether a model or server that is missing now may come: nobody serves the model yet, the server restarts."""
    if isinstance(error, (UnknownModel, ServerUnreachable)):
        return True
    return server is not None and error.__cause__ is not None and server.is_not_now(error.__cause__)
