"""The Redis server of a pool: from a URL, a client or nothing at all to connections and clear errors."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import redis as redis_sync
import redis.asyncio as redis_async
from redis.asyncio import connection as connections
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, AuthorizationError, NoPermissionError, RedisError

from lmpool import tls
from lmpool.errors import AuthenticationFailed, LMPoolError, ServerError, ServerUnreachable, SettingsError
from lmpool.link import CommandLink
from lmpool.rowlink import Bulk, RowLink, fresh_bulk
from lmpool.runtime_folder import find, runtime_dir

URL_VARIABLE = "LMPOOL_REDIS_URL"

_CONNECT_TIMEOUT_S = 5.0
_SCHEMES = ("redis", "rediss", "unix")
# What may be told of an address: a host with a port that is a number, and a path.
_PLACE = re.compile(r"(\[[0-9a-f:.]*\]?|[^:/]*)(:\d*)?(/.*)?", re.IGNORECASE)
# The last is how Redis 7.0 tells of what a script was refused.
_REFUSED = ("NOAUTH", "WRONGPASS", "NOPERM", "The user executing the script can't")
_REFUSALS = (AuthenticationError, AuthorizationError, NoPermissionError)
# What a client's own connections may carry that ours must not.
_NOT_OURS = ("retry", "retry_on_error", "retry_on_timeout", "decode_responses", "parser_class",
             "socket_timeout", "event_dispatcher", "maint_notifications_config", "himport_registry",
             "maint_notifications_pool_handler", "oss_cluster_maint_notifications_handler")  # fmt: skip
# redis-py tells a server its own name and version, for which users with few rights have none; the log of refusals is
# to show what matters.
_OWN_NAME = ("driver_info", "lib_name", "lib_version")
_UNNAMED: dict[str, Any] = (
    {"driver_info": None}
    if "driver_info" in inspect.signature(connections.AbstractConnection.__init__).parameters
    else {"lib_name": None, "lib_version": None}
)
# asyncio connections cannot check OCSP, nor, in redis-py 5, read an encrypted key. A client that asks for it is
# refused; one that does not has these all the same.
_SYNC_ONLY = ("ssl_password", "ssl_ca_path", "ssl_validate_ocsp", "ssl_validate_ocsp_stapled", "ssl_ocsp_context",
              "ssl_ocsp_expected_cert")  # fmt: skip


class Server:
    """Where a pool's Redis is and how to connect to it. Holds no connection itself.

    Args:
        redis: URL (`redis://`, `rediss://`, `unix://`), a redis-py client whose settings are taken over
            (the client itself is not used), or None for `LMPOOL_REDIS_URL` and then this user's
            embedded server.

    Raises:
        SettingsError: `redis` is malformed.
        ServerUnreachable: nothing was named and no embedded server runs.
    """

    def __init__(self, redis: str | redis_async.Redis | redis_sync.Redis | None = None) -> None:
        if isinstance(redis, (redis_async.Redis, redis_sync.Redis)):
            taken = redis.connection_pool.connection_kwargs
            kwargs = {name: value for name, value in taken.items() if value or name not in _SYNC_ONLY}
            self._class = _async_class(redis.connection_pool.connection_class)
        else:
            url = redis if redis is not None else os.environ.get(URL_VARIABLE) or _embedded_url()
            kwargs = _parse(url)
            self._class = kwargs.pop("connection_class", connections.Connection)
            if self._is_tls:
                tls.check_host(kwargs)
        for name in (*_NOT_OURS, *_OWN_NAME):
            kwargs.pop(name, None)
        kwargs.setdefault("socket_connect_timeout", _CONNECT_TIMEOUT_S)
        if kwargs.get("protocol") is None:  # A client has None for redis-py's own default.
            kwargs["protocol"] = 2
        self._kwargs: dict[str, Any] = kwargs
        tls.check_files(kwargs)
        self._connection()

    def __str__(self) -> str:
        """The address, without user or password."""
        if path := self._kwargs.get("path"):
            return f"unix://{path}"
        scheme = "rediss" if self._is_tls else "redis"
        return f"{scheme}://{self._kwargs.get('host', 'localhost')}:{self._kwargs.get('port', 6379)}"

    def __repr__(self) -> str:
        return f"Server({str(self)!r})"

    @property
    def _is_tls(self) -> bool:
        return issubclass(self._class, connections.SSLConnection)

    def client(self, *, reply_timeout_s: float = 30.0) -> redis_async.Redis:
        """A client for control messages. It does not retry: retrying is its user's decision."""
        pool = connections.ConnectionPool(
            connection_class=self._class,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=reply_timeout_s,
            **self._kwargs,
            **_UNNAMED,
        )
        return redis_async.Redis.from_pool(pool)

    async def row_link(self, max_bulk: int, allocate: Callable[[int], Bulk] = fresh_bulk) -> RowLink:
        """A new connection for rows; see `RowLink` for the arguments.

        Raises:
            ServerUnreachable, AuthenticationFailed: the connection cannot be opened.
        """
        return RowLink(await self._open(), max_bulk, allocate)

    async def command_link(self) -> CommandLink:
        """A new connection for any commands.

        Raises:
            ServerUnreachable, AuthenticationFailed: the connection cannot be opened.
        """
        return CommandLink(await self._open())

    async def _open(self) -> connections.AbstractConnection:
        connection = self._connection()
        try:
            await connection.connect()  # type: ignore[no-untyped-call]
        except (RedisError, OSError) as error:
            raise self.explain(error) from error
        return connection

    def _connection(self) -> connections.AbstractConnection:
        try:
            return self._class(retry=Retry(NoBackoff(), 0), socket_timeout=None, **self._kwargs, **_UNNAMED)
        except (TypeError, ValueError, RedisError) as error:
            raise SettingsError(f"redis: an option of {self} is not known or malformed: {error}") from error

    def explain(self, error: BaseException) -> LMPoolError:
        """The exception of our tree for one of redis-py's or the system's."""
        if isinstance(error, LMPoolError):
            return error
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        if text.removeprefix("ERR ").startswith(_REFUSED) or any(isinstance(one, _REFUSALS) for one in _chain(error)):
            return AuthenticationFailed(f"{self} refuses this user, password or command: {text}")
        if why := tls.refusal(_chain(error)):
            return AuthenticationFailed(f"{self} refuses this client: {why}")
        if self._is_tls and (why := tls.fault(_chain(error), has_certificate=bool(self._kwargs.get("ssl_certfile")))):
            return ServerUnreachable(f"no TLS connection with {self}: {why}")
        if isinstance(error, (OSError, redis_sync.ConnectionError, redis_sync.TimeoutError, TimeoutError)):
            return ServerUnreachable(f"no Redis server answers at {self}: {text}")
        return ServerError(f"{self} answered with an error: {text}")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception and those that led to it: redis-py may wrap a refusal in a lost connection."""
    one: BaseException | None = error
    while one is not None:
        yield one
        one = one.__cause__ or one.__context__


def _parse(url: str) -> dict[str, Any]:
    fault = _fault(url)
    if not fault:
        try:
            return dict(connections.parse_url(url))
        except ValueError as error:
            fault = str(error)  # Of a good address only an option can be bad: redis-py tells its name, not its value.
    # Outside of any handler: a traceback must not repeat the URL as a cause.
    raise SettingsError(f"redis: {mask(url)!r} is not a Redis URL: {fault}")


def _fault(url: str) -> str:
    """What is wrong with the address in a URL, in our words: urllib's repeat the password. "" when it is good."""
    scheme, mark, _ = url.partition("://")
    if not mark or scheme.lower() not in _SCHEMES:
        return "it must begin with redis://, rediss:// or unix://"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return "its host or port is malformed (in a password, percent-encode : / ? # [ ] @)"
    if parts.fragment:
        return "a # must be written as %23"
    if parts.scheme == "unix":
        return "" if parts.path else "the path of the socket is missing"
    database = parts.path.strip("/")
    return "" if not database or database.isdecimal() else "after the host comes the number of a database"


def mask(url: str) -> str:
    """A URL without user, password and options; what cannot be told from a password is left out too."""
    scheme, mark, rest = url.partition("://")
    if not scheme.isalnum():
        scheme, mark, rest = "", "", url
    place, *options = re.split("[?#]", rest, maxsplit=1)
    if options and "@" in options[0]:
        return f"{scheme}{mark}…"  # The password may reach up to there.
    _, at, place = place.rpartition("@")
    if not _PLACE.fullmatch(place):
        place = place.partition(":")[0] + ":…"
    return f"{scheme}{mark}{'…@' if at else ''}{place}{'?…' if options else ''}"


def _embedded_url() -> str:
    url = find()
    if url is None:
        raise ServerUnreachable(
            f"no Redis server was named and none of yours runs in {runtime_dir()}: "
            f"start one with `lmpool up MODEL`, or set redis= or {URL_VARIABLE}"
        )
    return url


def _async_class(kind: type) -> type[connections.AbstractConnection]:
    """The asyncio connection class that corresponds to a client's own."""
    if issubclass(kind, connections.AbstractConnection):
        return kind
    if issubclass(kind, redis_sync.UnixDomainSocketConnection):
        return connections.UnixDomainSocketConnection
    if issubclass(kind, redis_sync.SSLConnection):
        return connections.SSLConnection
    if issubclass(kind, redis_sync.Connection):
        return connections.Connection
    raise SettingsError(f"redis: a client with connections of the type {kind.__name__} cannot be used here")
