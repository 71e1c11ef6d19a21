"""Links that open themselves: made when first needed, and again when they broke."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import numpy as np
from redis.exceptions import NoScriptError, RedisError, ResponseError

from lmpool.errors import LMPoolError, ServerUnreachable
from lmpool.link import Argument, CommandLink, Link
from lmpool.rowlink import Bulk, RowLink, fresh_bulk
from lmpool.server import Server

L = TypeVar("L", bound=Link)

_REPLY_TIMEOUT_S = 30.0


class Line(Generic[L]):
    """Opens a link on demand.

    Args:
        server: where to, and what explains errors.
        connect: opens a link.
    """

    def __init__(self, server: Server, connect: Callable[[], Awaitable[L]]) -> None:
        self._server = server
        self._connect = connect
        self._link: L | None = None
        self._opening = asyncio.Lock()
        self._closed = False

    async def open(self) -> L:
        """The open link.

        Raises:
            ServerUnreachable, AuthenticationFailed: it cannot be opened.
        """
        if self._link is None or self._link.closed:
            async with self._opening:
                if self._closed:
                    raise ServerUnreachable(f"the connection to {self._server} was closed on our side")
                if self._link is None or self._link.closed:
                    link = await self._connect()
                    if self._closed:
                        link.close()
                    self._link = link
        return self._link

    async def wait_for(self, link: L, reply: asyncio.Future[Any]) -> Any:
        """The reply, or ServerError; a server that is silent for half a minute counts as gone."""
        timer = asyncio.get_running_loop().call_later(_REPLY_TIMEOUT_S, self._give_up, link)
        try:
            return await reply
        except (RedisError, OSError, LMPoolError) as error:
            if isinstance(error, ResponseError) and str(error).startswith("NOSCRIPT"):
                raise NoScriptError(str(error)) from error
            raise self._server.explain(error) from error
        finally:
            timer.cancel()

    def _give_up(self, link: L) -> None:
        link.close(ServerUnreachable(f"{self._server} has not answered for {_REPLY_TIMEOUT_S:g} s"))

    def close(self) -> None:
        """Close the link for good; what is under way fails."""
        self._closed = True
        if self._link is not None:
            self._link.close()


class CommandLine(Line[CommandLink]):
    """A line for any commands.

    Args:
        server: where to.
    """

    def __init__(self, server: Server) -> None:
        super().__init__(server, server.command_link)

    async def call(self, *arguments: Argument) -> Any:
        """Run a command.

        Raises:
            NoScriptError: the server does not know the script.
            ServerError: the server refuses, or cannot be used.
        """
        link = await self.open()
        return await self.wait_for(link, link.call(arguments))


class RowLine(Line[RowLink]):
    """A line for rows, and for scripts that must find them.

    Args:
        server: where to.
        max_bulk: largest value in bytes that is accepted.
        allocate: gives the array that a value is received into.
    """

    def __init__(self, server: Server, max_bulk: int, allocate: Callable[[int], Bulk] = fresh_bulk) -> None:
        super().__init__(server, lambda: server.row_link(self._max_bulk, allocate))
        self._max_bulk = max_bulk

    @property
    def max_bulk(self) -> int:
        """Largest value in bytes that is accepted."""
        return self._max_bulk

    def allow(self, size: int) -> None:
        """Accept values of up to `size` bytes from now on, if that is more than until now."""
        if size > self._max_bulk:
            self._max_bulk = size
            if self._link is not None:
                self._link.max_bulk = size

    async def call(self, *arguments: Argument) -> Any:
        """Run a command whose reply is not an array.

        Raises:
            NoScriptError: the server does not know the script.
            ServerError: the server refuses, or cannot be used.
        """
        return await self.call_on(await self.open(), *arguments)

    async def call_on(self, link: RowLink, *arguments: Argument) -> Any:
        """Run a command on this very link: behind what was sent there, or not at all."""
        (reply,) = await self.wait_for(link, link.call(arguments))
        if isinstance(reply, ResponseError):
            raise NoScriptError(str(reply)) if str(reply).startswith("NOSCRIPT") else self._server.explain(reply)
        return reply.tobytes() if isinstance(reply, np.ndarray) else reply
