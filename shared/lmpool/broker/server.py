"""The Redis server of a pool: its address, redis-py's connections to it, the masters of a cluster, and clear errors."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import redis as redis_sync
import redis.asyncio as redis_async
from redis.asyncio import connection as connections
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import RedisClusterException, RedisError

from lmpool.aio import finish, silence_limit
from lmpool.broker import replies
from lmpool.embedded import find, runtime_dir
from lmpool.errors import (
    AuthenticationFailed,
    LMPoolError,
    ProtocolError,
    ServerError,
    ServerUnreachable,
    SettingsError,
    argument,
)

# What callers pass to name a server: a URL, or a client of redis-py.
RedisLike = str | redis_async.Redis | redis_sync.Redis | redis_async.RedisCluster | redis_sync.RedisCluster
Place = tuple[str, int]  # Host and port of a node.
CLUSTER = "+cluster"  # Suffix of the URL scheme of a cluster.
URL_VARIABLE = "LMPOOL_REDIS_URL"
# Seconds without a reply after which a connection counts as broken, until the pool's lease is known.
REPLY_TIMEOUT_S = 15.0

# Options that keep redis-py from sending its name and version: users with few rights may not send them, and the server
# would log each refusal.
_HAS_INFO = "driver_info" in inspect.signature(connections.AbstractConnection.__init__).parameters
UNNAMED: dict[str, Any] = {"driver_info": None} if _HAS_INFO else {"lib_name": None, "lib_version": None}

_ADVICE = ": start one with `lmpool up MODEL`, or set "
_CONNECT_TIMEOUT_S = 5.0  # Seconds to connect and authenticate; a server on the same continent takes far less.
_CLUSTER_TIMEOUT_S = 5.0  # Seconds for one node to report which master serves which slots.
_MAX_NODES = 100  # Max nodes of a cluster that lmpool records, in case the first nodes disappear.
_MAX_CUTS = 20  # Max retries of a TLS connection that a server cuts: on a busy machine, half the cuts lose the reason.
# Connection options of a given redis-py client that lmpool does not copy.
_NOT_TAKEN = ("retry", "retry_on_error", "retry_on_timeout", "decode_responses", "parser_class",
             "socket_timeout", "event_dispatcher", "maint_notifications_config", "himport_registry",
             "maint_notifications_pool_handler", "oss_cluster_maint_notifications_handler",
             "driver_info", "lib_name", "lib_version")  # fmt: skip
# Options that asyncio connections lack: OCSP, and in redis-py 5 encrypted keys. Clients have these options, but empty.
_SYNC_ONLY = ("ssl_password", "ssl_ca_path", "ssl_validate_ocsp", "ssl_validate_ocsp_stapled", "ssl_ocsp_context",
              "ssl_ocsp_expected_cert")  # fmt: skip
# Options of a given cluster client that are copied to the connections to each node.
_OPTIONS = ("username", "password", "credential_provider", "client_name", "protocol", "socket_connect_timeout",
            "socket_keepalive", "socket_keepalive_options")  # fmt: skip
_TRUST = ("ssl_cert_reqs", "ssl_check_hostname")
_SCHEMES = ("redis", "rediss", "unix", f"redis{CLUSTER}", f"rediss{CLUSTER}")
# The parts of an address that may be shown: a host, a numeric port, and a path.
_PLACE = re.compile(r"(\[[0-9a-f:.]*\]?|[^:/]*)(:\d*)?(/.*)?", re.IGNORECASE)
_FILES = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
# redis-py's default for checking the host in a certificate; version 5 does not check the host.
_CHECKS_HOST: bool = inspect.signature(redis_sync.Redis).parameters["ssl_check_hostname"].default


def parse_url(url: str) -> dict[str, Any]:
    """The options of redis-py for the server of a URL."""
    fault = _fault(url)
    if not fault:
        try:
            return dict(connections.parse_url(url))
        except ValueError as error:
            fault = str(error)  # The fault must be in an option. redis-py names the option without its value.
    # Raise outside of the handler: a traceback would show the first error as the cause, with the URL and its password.
    raise SettingsError(f"redis: {mask(url)!r} is not a Redis URL: {fault}")


def _fault(url: str) -> str:
    """The fault of the address in a URL, or "". urllib's own message would repeat the password."""
    scheme, mark, _ = url.partition("://")
    if not mark or scheme.lower() not in _SCHEMES:
        return f"it must begin with redis://, rediss://, unix:// or redis{CLUSTER}://"
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


def cluster_nodes(url: str) -> tuple[list[Place], str]:
    """The nodes in the URL of a cluster, and the URL of the first node; no nodes if the URL names no cluster."""
    scheme, mark, rest = url.partition("://")
    if not scheme.lower().endswith(CLUSTER) or scheme.lower() not in _SCHEMES:
        return [], url
    place, *tail = re.split("([/?#].*)", rest, maxsplit=1)
    user, at, hosts = place.rpartition("@")
    urls = [f"{scheme[: -len(CLUSTER)]}{mark}{user}{at}{host}{''.join(tail)}" for host in hosts.split(",")]
    parsed = [parse_url(node_url) for node_url in urls]
    if any(options.get("db") for options in parsed):
        raise SettingsError(f"redis: {mask(url)!r}: a cluster has one database only, number 0")
    return [(options.get("host", "localhost"), options.get("port", 6379)) for options in parsed], urls[0]


def mask(url: str) -> str:
    """A URL without user, password and options, and without any text that could be part of a password."""
    scheme, mark, rest = url.partition("://")
    if not scheme.replace("+", "").isalnum():
        scheme, mark, rest = "", "", url
    place, *options = re.split("[?#]", rest, maxsplit=1)
    if options and "@" in options[0]:
        return f"{scheme}{mark}…"  # The password may extend to the end of the URL.
    _, at, place = place.rpartition("@")
    if not _PLACE.fullmatch(place):
        place = place.partition(":")[0] + ":…"
    return f"{scheme}{mark}{'…@' if at else ''}{place}{'?…' if options else ''}"


class _Cancellable(connections.AbstractConnection):
    """A connection of redis-py that loses no cancellation, and that is closed if opening it fails or is cancelled.

    redis-py limits the time of sending by `asyncio.wait_for`, which before Python 3.12 can lose a cancellation
    (https://github.com/python/cpython/issues/86296). The limits of redis-py also expire when the program itself blocked
    the event loop. This class sets its own limits, and redis-py sets no limit where it finds None.
    """

    async def connect(self) -> None:
        # A TLS server that refuses a client sends the reason and closes the connection. If the client has already sent
        # more data, its system discards the reason: then connect again.
        cuts_left = _MAX_CUTS if _is_of_tls(type(self)) else 0
        try:
            async with self._limit("socket_connect_timeout", "Timeout connecting to server"):
                while True:
                    try:
                        return await super().connect()  # type: ignore[no-untyped-call,no-any-return]
                    except redis_sync.ConnectionError as error:
                        if not (cuts_left and re.search(replies.CUT, str(error))):
                            raise
                    cuts_left -= 1
                    await self.disconnect(nowait=True)
        except BaseException:
            # redis-py would keep a connection that the server has not accepted.
            await self.disconnect(nowait=True)
            raise

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        # Connect and check here, outside of the limit for sending: both have limits of their own.
        if not self.is_connected:
            await self.connect()
        if check_health:
            await self.check_health()  # type: ignore[no-untyped-call]
        async with self._limit("socket_timeout", "Timeout writing to socket"):
            await super().send_packed_command(command, check_health=False)

    async def read_response(self, *args: Any, **options: Any) -> Any:
        async with self._limit("socket_timeout", "Timeout reading from the server"):
            return await super().read_response(*args, **options)

    @asynccontextmanager
    async def _limit(self, name: str, text: str) -> AsyncIterator[None]:
        """Apply one of redis-py's time limits; raise its TimeoutError if the server is silent for longer."""
        limit = getattr(self, name)
        setattr(self, name, None)
        try:
            async with silence_limit(limit) as timer:
                yield
        except TimeoutError:
            if not timer.expired():
                raise
            raise redis_sync.TimeoutError(text) from None
        finally:
            if getattr(self, name) is None:  # redis-py changes the limit when a server announces that it moves.
                setattr(self, name, limit)


@cache
def connection_class(kind: type) -> type[connections.AbstractConnection]:
    """The class of connections that replaces `kind`, a class of redis-py for asyncio or for threads."""
    if issubclass(kind, _Cancellable):
        return kind
    for known, ours in (
        (redis_sync.UnixDomainSocketConnection, connections.UnixDomainSocketConnection),
        (redis_sync.SSLConnection, connections.SSLConnection),
        (redis_sync.Connection, connections.Connection),
        (connections.AbstractConnection, kind),
    ):
        if issubclass(kind, known):
            return type(kind.__name__, (_Cancellable, ours), {})
    raise SettingsError(f"redis: lmpool cannot use a client whose connections are of the type {kind.__name__}")


class _ClusterClient(redis_async.RedisCluster):
    """A cluster client that raises ConnectionError for errors about the whole cluster: redis-py's class for these
    errors shares no base class with its other errors.
    """

    async def initialize(self, *args: Any, **kwargs: Any) -> redis_async.RedisCluster:
        with _connection_errors():
            return await super().initialize(*args, **kwargs)

    async def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        with _connection_errors():
            return await super().execute_command(*args, **kwargs)

    async def aclose(self) -> None:
        # redis-py's `aclose` does nothing unless `initialize` has succeeded, and a second cancellation interrupts the
        # cleanup of `initialize`.
        await super().aclose()
        for nodes in ("nodes_cache", "startup_nodes"):
            await self.nodes_manager.aclose(nodes)


@contextmanager
def _connection_errors() -> Iterator[None]:
    try:
        yield
    except RedisClusterException as error:
        raise redis_sync.ConnectionError(f"the cluster cannot be used: {error}") from error


class Server:
    """Where a pool's Redis is and how to connect to it. It holds no connection itself.

    Args:
        redis: URL (`redis://`, `rediss://`, `unix://`; for a cluster `redis+cluster://` or `rediss+cluster://` with one
            node or several, separated by commas), a redis-py client whose settings are copied (the client itself is
            not used), or None for `LMPOOL_REDIS_URL` and then this user's embedded server.

    Raises:
        SettingsError: `redis` is malformed.
        ServerUnreachable: `redis` is None, and no embedded server runs.
    """

    def __init__(self, redis: RedisLike | None = None) -> None:
        nodes: list[Place] = []
        is_client = redis is not None and not isinstance(redis, str)
        if isinstance(redis, (redis_async.RedisCluster, redis_sync.RedisCluster)):
            nodes = [(str(node.host), int(node.port)) for node in redis.nodes_manager.startup_nodes.values()]
            given = redis.nodes_manager.connection_kwargs
            if isinstance(redis, redis_async.RedisCluster):
                given = redis.connection_kwargs
            # Keep options about trust (`_TRUST`) even if they are false or None: such a value has a meaning.
            kept = {name for name, value in given.items() if value and (name in _OPTIONS or name.startswith("ssl_"))}
            kwargs = {name: given[name] for name in (kept | set(_TRUST)) & set(given)}
            kind: type = given.get("connection_class") or connections.Connection
            kind = connections.SSLConnection if given.get("ssl") or _is_of_tls(kind) else connections.Connection
        elif isinstance(redis, (redis_async.Redis, redis_sync.Redis)):
            taken = redis.connection_pool.connection_kwargs
            kwargs = {name: value for name, value in taken.items() if value or name not in _SYNC_ONLY}
            kind = redis.connection_pool.connection_class
        else:
            url = redis if redis is not None else os.environ.get(URL_VARIABLE) or find()
            if url is None:
                advice = f"{_ADVICE}{argument('redis')} or {URL_VARIABLE}"
                raise ServerUnreachable(f"no Redis server was named and none of yours runs in {runtime_dir()}{advice}")
            nodes, url = cluster_nodes(url)
            kwargs = parse_url(url)
            kind = kwargs.pop("connection_class", connections.Connection)
        self._class = connection_class(kind)
        self._is_tls = _is_of_tls(self._class)
        self._scheme = "rediss" if self._is_tls else "redis"
        if self._is_tls and kwargs.get("ssl_cert_reqs", "required") not in ("none", None, ssl.CERT_NONE):
            # redis-py 5 does not compare the host with the certificate by default: False need not be the user's choice.
            chosen = kwargs.get("ssl_check_hostname")
            if chosen is None or (is_client and chosen is _CHECKS_HOST is False):
                kwargs["ssl_check_hostname"] = True
        for name in _NOT_TAKEN:
            kwargs.pop(name, None)
        # In a client of redis-py, an option that is None has its default value.
        defaults = {"socket_connect_timeout": _CONNECT_TIMEOUT_S, "protocol": 2}
        kwargs |= {name: default for name, default in defaults.items() if kwargs.get(name) is None}
        self._kwargs: dict[str, Any] = kwargs
        self.is_cluster = bool(nodes)  # Whether keys are on several masters.
        self.is_node = False  # Whether this is one master of a cluster.
        self._cluster = self  # The objects for the cluster's masters are copies, which keep this reference.
        # Known nodes of a cluster, one of which must answer; node -> its server.
        self._nodes, self._servers = nodes, dict[Place, Server]()
        self._places: dict[int, Place] | None = None  # Slot of a cluster -> its master; None if not read yet.
        self._reading = asyncio.Lock()
        for name in _FILES:
            try:
                if path := kwargs.get(name):
                    os.scandir(path).close() if name == "ssl_ca_path" else Path(path).open("rb").close()
            except OSError as error:
                raise SettingsError(f"redis: {name} cannot be read: {path} ({error.strerror})") from None
        for name in ("host", "port", "db", "path") if nodes else ():
            kwargs.pop(name, None)
        self._connection()

    def __str__(self) -> str:
        """The address, without user or password."""
        if path := self._kwargs.get("path"):
            return f"unix://{path}"
        if self.is_cluster:
            return f"{self._scheme}{CLUSTER}://{':'.join(map(str, self._nodes[0]))}"
        return f"{self._scheme}://{self._kwargs.get('host', 'localhost')}:{self._kwargs.get('port', 6379)}"

    def __repr__(self) -> str:
        return f"Server({str(self)!r})"

    async def at(self, key: bytes) -> Server:
        """The server that has a key: this one, or one master of the cluster. Equal addresses give the same object."""
        if not self.is_cluster:
            return self
        if (place := (await self._known_places()).get(key_slot(key))) is None:
            self._cluster._places = None
            raise ServerUnreachable(f"no master of the cluster at {self} serves slot {key_slot(key)} at present")
        return self._node(place)

    async def masters(self) -> list[Server]:
        """The masters of the cluster that serve slots, or this server alone."""
        places = dict.fromkeys((await self._known_places()).values()) if self.is_cluster else {}
        return [self._node(place) for place in places] or [self]

    async def _known_places(self) -> dict[int, Place]:
        if (places := self._places) is None:
            try:
                async with self._reading:
                    places = self._places = self._places or await self._read_places()
            except (RedisError, OSError) as error:
                raise self.explain(error) from error
        return places

    def _node(self, place: Place) -> Server:
        node = self._servers.get(place)
        if node is None:
            node = self._servers[place] = copy(self)
            node.is_cluster, node.is_node = False, True
            node._kwargs = {**self._kwargs, "host": place[0], "port": place[1]}
        return node

    async def _read_places(self) -> dict[int, Place]:
        client = self.client(reply_timeout_s=_CLUSTER_TIMEOUT_S)
        try:
            await client.initialize()
            slots = cast(redis_async.RedisCluster, client).nodes_manager.slots_cache.items()
            served = {slot: (str(nodes[0].host), int(nodes[0].port)) for slot, nodes in slots}
        finally:
            await finish(client.aclose())  # A cancelled `aclose` leaves connections open.
        # Remember the nodes that the cluster reports: the nodes that the user named may disappear.
        self._nodes = list(dict.fromkeys([*served.values(), *self._nodes]))[:_MAX_NODES]
        return served

    def row_server(self, address: bytes, token: bytes, connect_timeout_s: float) -> Server:
        """The row server of a worker, which speaks Redis's protocol; TLS and its certificates are those of this server.

        The certificate need not name the address, which is usually that of a container. Raises `ProtocolError` if the
        address is malformed.
        """
        host, _, port = address.decode("ascii", "replace").rpartition(":")
        if not host or not port.isdecimal():
            raise ProtocolError(f"{address!r:.80} is not the address of a row server")
        other = copy(self)
        kind = connections.SSLConnection if self._is_tls else connections.Connection
        other._class, other.is_cluster, other.is_node, other._cluster = connection_class(kind), False, False, other
        kept = {name: value for name, value in self._kwargs.items() if name.startswith("ssl_")}
        kept |= {"ssl_check_hostname": False} if self._is_tls else {}
        place = {"host": host.strip("[]"), "port": int(port), "password": token.decode("ascii", "replace")}
        other._kwargs = {**kept, **place, "socket_connect_timeout": connect_timeout_s, "protocol": 2}
        return other

    def row_server_tls(self) -> tuple[bool, ssl.SSLContext | None]:
        """Whether a worker's row server must use TLS, because this server does; and its settings for TLS.

        The row server has the certificate with which the worker connects to this server. Without one, the settings are
        None.
        """
        if not self._is_tls or not (certificate := self._kwargs.get("ssl_certfile")):
            return self._is_tls, None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, self._kwargs.get("ssl_keyfile"), self._kwargs.get("ssl_password"))
        return True, context

    def is_not_now(self, error: BaseException) -> bool:
        """Whether the request must be repeated on a new connection after an error; if so, read the slots again."""
        if is_not_now := replies.code_of(error) in replies.NOT_NOW:
            self._cluster._places = None
        return is_not_now

    async def reconnect(self, client: redis_async.Redis, error: BaseException) -> None:
        """Close a client's idle connections after a temporary refusal: the address may belong to another server now."""
        if self.is_not_now(error) and not self.is_cluster:
            with suppress(RedisError, OSError):
                await client.connection_pool.disconnect(inuse_connections=False)

    def client(self, *, reply_timeout_s: float = REPLY_TIMEOUT_S) -> redis_async.Redis:
        """A redis-py client for control messages. The client does not retry; its callers do."""
        if self.is_cluster:
            options = self._kwargs | UNNAMED | ({"ssl": True} if self._is_tls else {})
            nodes = [ClusterNode(host, port) for host, port in self._nodes]
            options |= {"socket_timeout": reply_timeout_s, "retry": Retry(NoBackoff(), 0)}
            client = _ClusterClient(startup_nodes=nodes, **options)
            # The constructor accepts no connection class. Later nodes take the class from `connection_kwargs`.
            client.connection_kwargs["connection_class"] = self._class
            for node in client.nodes_manager.startup_nodes.values():
                node.connection_class = cast(type[connections.Connection], self._class)
            # The cluster client has the methods of Redis, but is no subclass.
            return cast(redis_async.Redis, client)
        options = {"socket_timeout": reply_timeout_s, "retry": Retry(NoBackoff(), 0), **self._kwargs, **UNNAMED}
        return redis_async.Redis.from_pool(connections.ConnectionPool(self._class, **options))

    @asynccontextmanager
    async def connected(self, *, reply_timeout_s: float = REPLY_TIMEOUT_S) -> AsyncIterator[redis_async.Redis]:
        """A `client` that is closed after the block; errors of redis-py and the system become exceptions of lmpool."""
        client = self.client(reply_timeout_s=reply_timeout_s)
        try:
            yield client
        except (RedisError, OSError) as error:
            raise self.explain(error) from error
        finally:
            await finish(client.aclose())

    async def open(self) -> connections.AbstractConnection:
        """Open a connection of redis-py and authenticate."""
        connection = self._connection()
        try:
            await connection.connect()  # type: ignore[no-untyped-call]
        except (RedisError, OSError) as error:
            self._cluster._places = None  # Another node may have become the master.
            raise self.explain(error) from error
        return connection

    def _connection(self) -> connections.AbstractConnection:
        try:
            return self._class(retry=Retry(NoBackoff(), 0), socket_timeout=None, **self._kwargs, **UNNAMED)
        except (TypeError, ValueError, RedisError) as error:
            unknown = re.search("unexpected keyword argument ('[^']*')", str(error))
            why = f"{unknown[1]} is not known" if unknown else str(error)
            raise SettingsError(f"redis: an option of {self} is not known or malformed: {why}") from error

    def explain(self, error: BaseException) -> LMPoolError:
        """The exception of lmpool for an exception of redis-py or of the system."""
        if isinstance(error, LMPoolError):
            return error
        text, meaning = replies.words(error), replies.meaning(error)
        if replies.is_refusal(error):
            hint = "; is this the prefix of its pool, and a user for this part of it?" if " key" in text else ""
            return AuthenticationFailed(f"{self} {meaning or 'refuses this user, password or command'} ({text}){hint}")
        if why := replies.tls_refusal(error):
            return AuthenticationFailed(f"{self} refuses this client: {why}")
        if self._is_tls and (why := replies.tls_fault(error, has_certificate=bool(self._kwargs.get("ssl_certfile")))):
            return ServerUnreachable(f"no TLS connection with {self}: {why}")
        if "DB index is out of range" in text or text == "Invalid Database":
            return ServerError(f"{self} has no database {self._kwargs.get('db')}: `databases` in its settings")
        if "Cluster mode is not enabled" in text:
            return ServerError(f"{self} is no Redis Cluster: name it as {self._scheme}://HOST:PORT")
        if replies.code_of(error) in ("MOVED", "CROSSSLOT") and not self.is_cluster and not self.is_node:
            name = f"{self._scheme}{CLUSTER}://HOST:PORT"
            return ServerError(f"{self} is one node of a Redis Cluster: name it as {name} ({text})")
        is_lost = isinstance(error, (OSError, redis_sync.ConnectionError, redis_sync.TimeoutError))
        if meaning:
            return (ServerUnreachable if is_lost else ServerError)(f"{self} {meaning} ({text})")
        if is_lost:
            # A server without TLS does not answer a TLS greeting. A text with "reading" means an open connection.
            is_mute = self._is_tls and "Timeout" in type(error).__name__ and "reading" not in text
            why = f"{loss} ({text})" if (loss := replies.loss(error)) else text
            return ServerUnreachable(f"no Redis server answers at {self}: {why}{'; is it a port with TLS?' * is_mute}")
        return ServerError(f"{self} answered with an error: {text}")


def _is_of_tls(kind: type) -> bool:
    return issubclass(kind, (connections.SSLConnection, redis_sync.SSLConnection))


def where(redis: RedisLike | None) -> str:
    """The address, without user or password, of the server that `redis` (see `Server`) names, even malformed."""
    if redis is None or isinstance(redis, str):
        url = os.environ.get(URL_VARIABLE) if redis is None else redis
        return mask(url) if url else "your embedded server"
    with suppress(SettingsError):
        return str(Server(redis))
    return f"a client of the type {type(redis).__name__}"


def without_advice(error: Exception) -> str:
    """The text of an error without its advice, for programs that choose their server themselves."""
    return str(error).partition(_ADVICE)[0]
