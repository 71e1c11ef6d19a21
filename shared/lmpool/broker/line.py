"""Links that open themselves: made when first needed, and again when they broke."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from redis.exceptions import NoScriptError, RedisError, ResponseError

from lmpool.broker.link import Argument, CommandLink, Link
from lmpool.broker.server import REPLY_TIMEOUT_S, Server
from lmpool.errors import LMPoolError, ProtocolError, ServerUnreachable
from lmpool.rows.connection import Bulk, RowLink, fresh_bulk
from lmpool.settings import shown

L = TypeVar("L", bound=Link)

_LEAST_REPLY_TIMEOUT_S = 2.0
_MOST_REPLY_TIMEOUT_S = 30.0


def reply_timeout(lease_s: float) -> float:
    """Seconds after which a server that is silent counts as gone, in a pool whose workers have such a lease.

    A lease: who waits longer for a reply that never comes holds up what others have taken over already. Blocking
    reads take up to a second.
    """
    return min(_MOST_REPLY_TIMEOUT_S, max(_LEAST_REPLY_TIMEOUT_S, lease_s))


class Line(Generic[L]):
    """Opens a link on demand.

    Args:
        server: where to, and what explains errors.
        connect: opens a link.

    Attributes:
        reply_timeout_s: seconds of silence after which the link counts as broken and is opened anew; may be changed at
            any time.
    """

    def __init__(self, server: Server, connect: Callable[[], Awaitable[L]]) -> None:
        self.reply_timeout_s = REPLY_TIMEOUT_S
        self._server = server
        self._connect = connect
        self._link: L | None = None
        self._opening = asyncio.Lock()
        self._queued = 0
        self._closed = False
        # Reply that is awaited -> on which link, and until which loop time; and one timer for all of them.
        self._awaited: dict[asyncio.Future[Any], tuple[L, float]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._looks_at = 0.0

    async def open(self) -> L:
        """The open link.

        Raises:
            ServerUnreachable, AuthenticationFailed: it cannot be opened.
        """
        # Behind those who wait even when the link is there by now, so that commands go in the order of asking.
        if self._link is None or self._link.closed or self._queued:
            self._queued += 1
            try:
                async with self._opening:
                    if self._closed:
                        raise ServerUnreachable(f"the connection to {self._server} was closed on our side")
                    if self._link is None or self._link.closed:
                        link = await self._connect()
                        if self._closed:
                            link.close()
                        self._link = link
            finally:
                self._queued -= 1
        return self._link

    async def wait_for(self, link: L, reply: asyncio.Future[Any]) -> Any:
        """The reply, or ServerError; a server that is silent for `reply_timeout_s` counts as gone."""
        # A timer for each would cost more than the command itself.
        until = asyncio.get_running_loop().time() + self.reply_timeout_s
        self._awaited[reply] = link, until
        if self._timer is None or until < self._looks_at:
            self._look_at(until)
        try:
            return await reply
        except (RedisError, OSError, LMPoolError) as error:
            if isinstance(error, ResponseError) and str(error).startswith("NOSCRIPT"):
                raise NoScriptError(str(error)) from error
            if isinstance(error, ResponseError):
                self.check(link, error)
            raise self._server.explain(error) from error
        finally:
            del self._awaited[reply]

    def distrust(self, reply: object) -> ProtocolError:
        """A reply cannot be that of its command, so no later one can be either: closes the link; returns why."""
        error = ProtocolError(f"{self._server} sent a reply that does not fit the command: {shown(reply)}")
        self.hang_up(error)
        return error

    def hang_up(self, reason: Exception) -> None:
        """Close the link, to open another when it is needed next."""
        if self._link is not None:
            self._link.close(reason)

    def check(self, link: L, error: ResponseError) -> bool:
        """Whether an answer means to ask again, on another connection: then this one is closed."""
        if found := self._server.is_not_now(error):
            link.close(self._server.explain(error))
        return found

    def _look_at(self, when: float) -> None:
        """Look at a loop time whether a reply is late, instead of at a later one."""
        if self._timer is not None:
            self._timer.cancel()
        self._looks_at = when
        self._timer = asyncio.get_running_loop().call_at(when, self._look)

    def _look(self) -> None:
        """Give up links whose replies are late; look again when the next one may be."""
        self._timer = None
        awaited = [one for reply, one in self._awaited.items() if not reply.done()]
        for link, until in awaited:
            if until <= self._looks_at:
                link.close(ServerUnreachable(f"{self._server} has not answered for {self.reply_timeout_s:g} s"))
        if later := [until for _, until in awaited if until > self._looks_at]:
            self._look_at(min(later))

    def close(self) -> None:
        """Close the link for good; what is under way fails."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._link is not None:
            self._link.close()


class CommandLine(Line[CommandLink]):
    """A line for any commands.

    Args:
        server: where to.
        key: the line goes to who has this key, which commands must be about; b"" where there is no cluster.

    Attributes:
        key: as above; counts from the next time that the line opens.
    """

    def __init__(self, server: Server, key: bytes = b"") -> None:
        super().__init__(server, self._connect_to_key)
        self.key = key

    async def _connect_to_key(self) -> CommandLink:
        return await (await self._server.at(self.key)).command_link()

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

    async def get_ranges(self, keys: Sequence[bytes], most: Sequence[int]) -> list[object]:
        """The first bytes of values that may be of any size, or what the server says of one (an error is a value here).

        Args:
            keys: whose values; what is not there is empty.
            most: how many bytes of each, no more than `max_bulk`.

        Raises:
            ServerError: the server cannot be used.
        """
        link = await self.open()
        replies = [link.call((b"GETRANGE", key, 0, size - 1)) for key, size in zip(keys, most, strict=True)]
        values = [value for reply in replies for value in await self.wait_for(link, reply)]
        for value in values:
            if isinstance(value, ResponseError) and self.check(link, value):
                raise self._server.explain(value)
        return values

    async def call_on(self, link: RowLink, *arguments: Argument) -> Any:
        """Run a command on this very link: behind what was sent there, or not at all."""
        (reply,) = await self.wait_for(link, link.call(arguments))
        if isinstance(reply, ResponseError):
            self.check(link, reply)
            raise NoScriptError(str(reply)) if str(reply).startswith("NOSCRIPT") else self._server.explain(reply)
        return reply.tobytes() if isinstance(reply, np.ndarray) else reply


class RowLines:
    """Lines for rows: one, or one to each master of a cluster.

    Args:
        server: where to.
        max_bulk: largest value in bytes that is accepted.
        reply_timeout_s: as `Line.reply_timeout_s`.
    """

    def __init__(self, server: Server, max_bulk: int, reply_timeout_s: float = REPLY_TIMEOUT_S) -> None:
        self._server = server
        self._reply_timeout_s = reply_timeout_s
        self._max_bulk = max_bulk
        self._lines: dict[Server, RowLine] = {}

    async def of(self, keys: Sequence[bytes]) -> list[tuple[RowLine, list[int]]]:
        """Which line goes to which of some keys, by their numbers.

        Raises:
            ServerError: the cluster does not say.
        """
        parts: dict[Server, list[int]] = {}
        for number, key in enumerate(keys):
            parts.setdefault(await self._server.at(key), []).append(number)
        return [(self._to(server), numbers) for server, numbers in parts.items()]

    def allow(self, size: int) -> None:
        """Accept values of up to `size` bytes from now on, if that is more than until now."""
        self._max_bulk = max(self._max_bulk, size)
        for line in self._lines.values():
            line.allow(size)

    def _to(self, server: Server) -> RowLine:
        line = self._lines.get(server)
        if line is None:
            line = self._lines[server] = RowLine(server, self._max_bulk)
            line.reply_timeout_s = self._reply_timeout_s
        return line

    def close(self) -> None:
        """Close all lines."""
        for line in self._lines.values():
            line.close()
