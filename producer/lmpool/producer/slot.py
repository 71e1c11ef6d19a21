"""The sessions of event loops: opened with the first request in each."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from lmpool.errors import DeadlineExceeded
from lmpool.producer.session import Session
from lmpool.producer.within import Within
from lmpool.server import Server


@dataclass(slots=True)
class _Attempt:
    """An attempt to open a session, and how many wait for it."""

    server: Server
    task: asyncio.Task[Session]
    waiting: int = 0


class SessionSlot:
    """Holds a session for each event loop that asks.

    Args:
        server: gives the server to connect to.
        make: makes a session with a server.
        model: what the session is to ask for; None for the only model that is served.
    """

    def __init__(self, server: Callable[[], Server], make: Callable[[Server], Session], model: str | None) -> None:
        self._server = server
        self._make = make
        self._model = model
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

    async def open(self, within: Within) -> Session:
        """The session of the running event loop; concurrent callers share one attempt to open it.

        Raises:
            ServerError, DeadlineExceeded: the server cannot be used, or not in time.
            UnknownModel, AmbiguousModel: there is not exactly the model that was asked for.
        """
        if (session := self.current(within.loop)) is not None:
            return session
        attempt = self._attempt()
        attempt.waiting += 1
        try:
            async with within.limit():
                # Shielded: one caller's deadline or cancellation must not take the connection from the others.
                return await asyncio.shield(attempt.task)
        except DeadlineExceeded:
            raise
        except TimeoutError as error:
            raise attempt.server.explain(error) from error
        finally:
            attempt.waiting -= 1
            if not attempt.waiting:
                # Whoever comes next had better connect anew than wait for a server that does not answer.
                attempt.task.cancel()

    def _attempt(self) -> _Attempt:
        """The attempt that is under way in the running event loop, or a new one."""
        loop = asyncio.get_running_loop()
        attempt = self._opening.get(loop)
        if attempt is None or attempt.task.done() or not attempt.waiting:
            server = self._server()
            attempt = self._opening[loop] = _Attempt(server, loop.create_task(self._connect(server)))
        return attempt

    async def _connect(self, server: Server) -> Session:
        session = self._make(server)
        await session.open(self._model)
        for loop, old in list(self._sessions.items()):
            if old.closed or loop.is_closed():
                self._sessions.pop(loop, None)
                self._opening.pop(loop, None)
        self._sessions[session.loop] = self.session = session
        return session

    def close_soon(self) -> None:
        """End all sessions, each in its own event loop and without waiting; from any thread."""
        sessions, self._sessions, self.session = self._sessions, {}, None
        for loop, session in sessions.items():
            if not session.closed:
                with contextlib.suppress(RuntimeError):  # The loop is closed, and everything in it has ended.
                    loop.call_soon_threadsafe(session.close_soon)

    async def close(self) -> None:
        """End the session of the running loop."""
        loop = asyncio.get_running_loop()
        session = self._sessions.pop(loop, None)
        self._opening.pop(loop, None)
        if self.session is session:
            self.session = None
        if session is not None:
            await session.close()
