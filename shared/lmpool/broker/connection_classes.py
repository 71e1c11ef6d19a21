"""redis-py's connections as a pool needs them: they keep no cancellation to themselves, and say why TLS was refused."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import redis as redis_sync
from redis.asyncio import connection as connections

from lmpool.aio import silence_limit
from lmpool.broker import replies
from lmpool.errors import SettingsError

UNNAMED: dict[str, Any] = (
    {"driver_info": None}
    if "driver_info" in inspect.signature(connections.AbstractConnection.__init__).parameters
    else {"lib_name": None, "lib_version": None}
)
"""Options that keep redis-py from telling a server its own name and version: users with few rights may not, and the log
of refusals is to show what matters.
"""

_MAX_CUTS = 2


class _Cancellable(connections.AbstractConnection):
    """Loses no cancellation while it sends, and keeps nothing that was given up half-way.

    redis-py limits the time of sending by `asyncio.wait_for`, which before Python 3.12 loses a cancellation that comes
    together with the result (https://github.com/python/cpython/issues/86296): a deadline would pass unnoticed, or a
    request go on that its caller has given up. Its limits also end what a program keeps waiting that computes in its
    event loop. So all limits are set here: redis-py sets none where it finds None.
    """

    async def connect(self) -> None:
        """Connect and greet the server.

        Raises:
            redis.exceptions.TimeoutError: that took longer than `socket_connect_timeout`.
        """
        limit, self.socket_connect_timeout = self.socket_connect_timeout, None
        try:
            async with _limit(limit, "Timeout connecting to server"):
                await super().connect()  # type: ignore[no-untyped-call]
        except BaseException:
            # redis-py would keep one that was given up before the server has let it in.
            await self.disconnect(nowait=True)
            raise
        finally:
            self.socket_connect_timeout = limit

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        """Send a command.

        Raises:
            redis.exceptions.TimeoutError: that took longer than `socket_timeout`.
        """
        # Each has limits of its own.
        if not self.is_connected:
            await self.connect()
        if check_health:
            await self.check_health()  # type: ignore[no-untyped-call]
        async with self._own_limit("Timeout writing to socket"):
            await super().send_packed_command(command, check_health=False)

    async def read_response(self, disable_decoding: bool = False, timeout: float | None = None, **options: Any) -> Any:
        """Read a reply.

        Raises:
            redis.exceptions.TimeoutError: that took longer than `socket_timeout`, and `timeout` is None.
        """
        if timeout is not None:
            return await super().read_response(disable_decoding, timeout, **options)
        async with self._own_limit("Timeout reading from the server"):
            return await super().read_response(disable_decoding, **options)

    @asynccontextmanager
    async def _own_limit(self, text: str) -> AsyncIterator[None]:
        limit, self.socket_timeout = self.socket_timeout, None
        try:
            async with _limit(limit, text):
                yield
        finally:
            if self.socket_timeout is None:  # A server that is about to move has it changed meanwhile.
                self.socket_timeout = limit


@asynccontextmanager
async def _limit(seconds: float | None, text: str) -> AsyncIterator[None]:
    """Limit how long the server may be silent.

    Raises:
        redis.exceptions.TimeoutError: it was silent for so long.
    """
    try:
        async with silence_limit(seconds) as timer:
            yield
    except TimeoutError:
        if not timer.expired():
            raise
        raise redis_sync.TimeoutError(text) from None


class _Tls(connections.SSLConnection):
    """Asks again when it is cut as it opens: a server that does not let a client in says why and hangs up, and when the
    client has sent more meanwhile, the system forgets what the server said.
    """

    async def connect(self) -> None:
        for _ in range(_MAX_CUTS):
            try:
                return await super().connect()  # type: ignore[no-untyped-call,no-any-return]
            except redis_sync.ConnectionError as error:
                if not replies.was_cut(error):
                    raise
            await self.disconnect(nowait=True)
        return await super().connect()  # type: ignore[no-untyped-call,no-any-return]


@cache
def connection_class(kind: type) -> type[connections.AbstractConnection]:
    """The class of connections for a pool that stands for one of redis-py's, asyncio's or not.

    Raises:
        SettingsError: nothing stands for it.
    """
    if issubclass(kind, _Cancellable):
        return kind
    for known, ours in (
        (redis_sync.UnixDomainSocketConnection, connections.UnixDomainSocketConnection),
        (redis_sync.SSLConnection, connections.SSLConnection),
        (redis_sync.Connection, connections.Connection),
        (connections.AbstractConnection, kind),
    ):
        if issubclass(kind, known):
            base = _Tls if ours is connections.SSLConnection else ours
            return type(kind.__name__, (_Cancellable, base), {})
    raise SettingsError(f"redis: a client with connections of the type {kind.__name__} cannot be used here")
