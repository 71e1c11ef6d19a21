"""A row link that opens itself: one connection, made when it is first needed and again when it broke."""

from __future__ import annotations

import asyncio

from redis.exceptions import NoScriptError, RedisError, ResponseError

from lmpool.errors import LMPoolError
from lmpool.rowlink import RowLink
from lmpool.server import Server


class Line:
    """Opens a row link on demand.

    Args:
        server: where to.
        max_bulk: largest value in bytes that is accepted.
    """

    def __init__(self, server: Server, max_bulk: int = 64 * 1024) -> None:
        self._server = server
        self._max_bulk = max_bulk
        self._link: RowLink | None = None
        self._opening = asyncio.Lock()

    async def open(self) -> RowLink:
        """The open link.

        Raises:
            ServerUnreachable, AuthenticationFailed: it cannot be opened.
        """
        if self._link is None or self._link.closed:
            async with self._opening:
                if self._link is None or self._link.closed:
                    self._link = await self._server.row_link(self._max_bulk)
        return self._link

    async def call(self, *arguments: bytes | str | int) -> bytes | int | None:
        """Run one command whose reply is not an array.

        Raises:
            NoScriptError: the server does not know the script.
            ServerError: the server refuses, or cannot be used.
        """
        link = await self.open()
        try:
            return await link.call(*arguments)
        except (RedisError, OSError, LMPoolError) as error:
            if isinstance(error, ResponseError) and str(error).startswith("NOSCRIPT"):
                raise NoScriptError(str(error)) from error
            raise self._server.explain(error) from error

    def close(self) -> None:
        """Close the link; what is under way fails."""
        if self._link is not None:
            self._link.close()
