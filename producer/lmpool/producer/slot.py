"""The session of the running event loop: opened with the first request, and anew in a new loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lmpool.producer.session import Session
from lmpool.server import Server


class SessionSlot:
    """Holds one session at a time.

    Args:
        server: gives the server to connect to.
        make: makes a session with a server.
        model: what the session is to ask for; None for the only model that is served.
    """

    def __init__(self, server: Callable[[], Server], make: Callable[[Server], Session], model: str | None) -> None:
        self._server = server
        self._make = make
        self._model = model
        self._opening: asyncio.Task[Session] | None = None
        self.session: Session | None = None

    def current(self) -> Session | None:
        """The session of the running event loop, if it is open."""
        session = self.session
        if session is None or session.closed or session.loop is not asyncio.get_running_loop():
            return None
        return session

    @property
    def is_open(self) -> bool:
        """Whether there is an open session, of whichever loop."""
        return self.session is not None and not self.session.closed

    async def open(self, seconds: float) -> Session:
        """The session of the running event loop; concurrent callers share one attempt to open it.

        Raises:
            ServerError: the server cannot be used.
            UnknownModel, AmbiguousModel: there is not exactly the model that was asked for.
        """
        if (session := self.current()) is not None:
            return session
        loop = asyncio.get_running_loop()
        if self._opening is None or self._opening.get_loop() is not loop or self._opening.done():
            self._opening = loop.create_task(self._connect(seconds))
        # Shielded: one caller's cancellation must not take the connection from the others.
        return await asyncio.shield(self._opening)

    async def _connect(self, seconds: float) -> Session:
        server = self._server()
        session = self._make(server)
        try:
            async with asyncio.timeout(seconds):
                await session.open(self._model)
        except TimeoutError as error:
            raise server.explain(TimeoutError(f"no answer within {seconds:g} s")) from error
        self.session = session
        return session

    async def close(self) -> None:
        """End the session, if it is one of the running loop."""
        session, self.session = self.session, None
        if session is not None and session.loop is asyncio.get_running_loop():
            await session.close()
