"""The Redis server of a pool: from a URL, a client or nothing at all to connections and clear errors."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from copy import copy
from typing import Any, cast

import redis as redis_sync
import redis.asyncio as redis_async
from redis.asyncio import connection as connections
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from lmpool.broker import address, replies
from lmpool.broker.address import CLUSTER, Cluster, Place, client_settings, cluster_nodes, mask, parse_url
from lmpool.broker.connection_classes import UNNAMED, connection_class
from lmpool.embedded import find, runtime_dir
from lmpool.errors import AuthenticationFailed, LMPoolError, ServerError, ServerUnreachable, SettingsError, argument

RedisLike = str | redis_async.Redis | redis_sync.Redis | redis_async.RedisCluster | redis_sync.RedisCluster
"""What names a server: a URL, or a client of redis-py."""

URL_VARIABLE = "LMPOOL_REDIS_URL"
REPLY_TIMEOUT_S = 15.0
"""Seconds after which a server that is silent counts as gone, where the pool's lease is not known."""

# Where no server is named and none runs.
_ADVICE = ": start one with `lmpool up MODEL`, or set "
_CONNECT_TIMEOUT_S = 5.0
# Options of a client's own connections that are not taken over.
_NOT_TAKEN = ("retry", "retry_on_error", "retry_on_timeout", "decode_responses", "parser_class",
             "socket_timeout", "event_dispatcher", "maint_notifications_config", "himport_registry",
             "maint_notifications_pool_handler", "oss_cluster_maint_notifications_handler")  # fmt: skip
# How redis-py names itself.
_OWN_NAME = ("driver_info", "lib_name", "lib_version")
# asyncio connections cannot check OCSP, nor, in redis-py 5, read an encrypted key. A client that asks for it is
# refused; one that does not has these all the same.
_SYNC_ONLY = ("ssl_password", "ssl_ca_path", "ssl_validate_ocsp", "ssl_validate_ocsp_stapled", "ssl_ocsp_context",
              "ssl_ocsp_expected_cert")  # fmt: skip


class Server:
    """Where a pool's Redis is and how to connect to it. Holds no connection itself.

    Args:
        redis: URL (`redis://`, `rediss://`, `unix://`; of a cluster `redis+cluster://` or `rediss+cluster://` with one
            node or several, with commas between), a redis-py client whose settings are taken over (the client itself is
            not used), or None for `LMPOOL_REDIS_URL` and then this user's embedded server.

    Raises:
        SettingsError: `redis` is malformed.
        ServerUnreachable: nothing was named and no embedded server runs.
    """

    def __init__(self, redis: RedisLike | None = None) -> None:
        nodes: list[Place] = []
        if isinstance(redis, (redis_async.RedisCluster, redis_sync.RedisCluster)):
            nodes, kwargs, is_tls = client_settings(redis)
            kind: type = connections.SSLConnection if is_tls else connections.Connection
        elif isinstance(redis, (redis_async.Redis, redis_sync.Redis)):
            taken = redis.connection_pool.connection_kwargs
            kwargs = {name: value for name, value in taken.items() if value or name not in _SYNC_ONLY}
            kind = redis.connection_pool.connection_class
        else:
            url = redis if redis is not None else os.environ.get(URL_VARIABLE) or _embedded_url()
            nodes, url = cluster_nodes(url)
            kwargs = parse_url(url)
            kind = kwargs.pop("connection_class", connections.Connection)
        self._class = connection_class(kind)
        if self._is_tls:
            address.check_host(kwargs, of_client=redis is not None and not isinstance(redis, str))
        for name in (*_NOT_TAKEN, *_OWN_NAME):
            kwargs.pop(name, None)
        if kwargs.get("socket_connect_timeout") is None:  # So it is in a client of redis-py 5.3.
            kwargs["socket_connect_timeout"] = _CONNECT_TIMEOUT_S
        if kwargs.get("protocol") is None:  # A client has None for redis-py's own default.
            kwargs["protocol"] = 2
        self._kwargs: dict[str, Any] = kwargs
        self.is_node = False
        self._nodes: dict[Place, Server] = {}
        self._cluster: Cluster | None = None
        address.check_files(kwargs)
        if nodes:
            for name in ("host", "port", "db", "path"):
                kwargs.pop(name, None)
            self._cluster = Cluster(nodes, kwargs, is_tls=self._is_tls)
        self._connection()

    def __str__(self) -> str:
        """The address, without user or password."""
        if path := self._kwargs.get("path"):
            return f"unix://{path}"
        if self.is_cluster:
            return f"{self._scheme}{CLUSTER}://{self._cluster}"
        return f"{self._scheme}://{self._kwargs.get('host', 'localhost')}:{self._kwargs.get('port', 6379)}"

    def __repr__(self) -> str:
        return f"Server({str(self)!r})"

    @property
    def is_cluster(self) -> bool:
        """Whether keys are on several masters."""
        return self._cluster is not None and not self.is_node

    @property
    def _is_tls(self) -> bool:
        return issubclass(self._class, connections.SSLConnection)

    @property
    def _scheme(self) -> str:
        return "rediss" if self._is_tls else "redis"

    async def at(self, key: bytes) -> Server:
        """The server that has a key: this one, or one master of the cluster; equal places give the same object.

        Raises:
            ServerError: the cluster does not say.
        """
        if self._cluster is None or self.is_node:
            return self
        try:
            place = await self._cluster.place(key)
        except (RedisError, OSError) as error:
            raise self.explain(error) from error
        node = self._nodes.get(place)
        if node is None:
            node = self._nodes[place] = copy(self)
            node.is_node = True
            node._kwargs = {**self._kwargs, "host": place[0], "port": place[1]}
        return node

    def is_not_now(self, error: BaseException) -> bool:
        """Whether a server's answer means to ask again, on a new connection; then places are looked up anew too."""
        is_not_now = replies.is_not_now(error)
        if is_not_now:
            self.forget_places()
        return is_not_now

    async def reconnect(self, client: redis_async.Redis, error: BaseException) -> None:
        """Have a client open new connections after an answer that means so: the address may be another's by now."""
        if self.is_not_now(error) and not self.is_cluster:
            with suppress(RedisError, OSError):
                await client.connection_pool.disconnect(inuse_connections=False)

    def forget_places(self) -> None:
        """Look up anew which master has which keys, if this is a cluster."""
        if self._cluster is not None:
            self._cluster.forget()

    def client(self, *, reply_timeout_s: float = REPLY_TIMEOUT_S) -> redis_async.Redis:
        """A client for control messages. It does not retry: retrying is its user's decision."""
        if self._cluster is not None and self.is_cluster:
            # It has the methods of Redis, but is no subclass of it.
            return cast(redis_async.Redis, self._cluster.client(reply_timeout_s))
        pool = connections.ConnectionPool(
            connection_class=self._class,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=reply_timeout_s,
            **self._kwargs,
            **UNNAMED,
        )
        return redis_async.Redis.from_pool(pool)

    async def open(self) -> connections.AbstractConnection:
        """A new connection of redis-py, which has greeted the server.

        Raises:
            ServerUnreachable, AuthenticationFailed: it cannot be opened.
        """
        connection = self._connection()
        try:
            await connection.connect()  # type: ignore[no-untyped-call]
        except (RedisError, OSError) as error:
            self.forget_places()  # Another may have taken its place.
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
        """The exception of our tree for one of redis-py's or the system's."""
        if isinstance(error, LMPoolError):
            return error
        text, meaning, links = replies.words(error), replies.meaning(error), list(replies.chain(error))
        if replies.is_refusal(error):
            hint = "; is this the prefix of its pool, and a user for this part of it?" if " key" in text else ""
            return AuthenticationFailed(f"{self} {meaning or 'refuses this user, password or command'} ({text}){hint}")
        if why := address.refusal(links):
            return AuthenticationFailed(f"{self} refuses this client: {why}")
        if self._is_tls and (why := address.fault(links, has_certificate=bool(self._kwargs.get("ssl_certfile")))):
            return ServerUnreachable(f"no TLS connection with {self}: {why}")
        if "DB index is out of range" in text or text == "Invalid Database":
            return ServerError(f"{self} has no database {self._kwargs.get('db')}: `databases` in its settings")
        if "Cluster mode is not enabled" in text:
            return ServerError(f"{self} is no Redis Cluster: name it as {self._scheme}://HOST:PORT")
        if replies.code_of(error) in ("MOVED", "CROSSSLOT") and not self.is_cluster and not self.is_node:
            return ServerError(
                f"{self} is one node of a Redis Cluster: name it as {self._scheme}{CLUSTER}://HOST:PORT ({text})"
            )
        is_lost = isinstance(error, (OSError, redis_sync.ConnectionError, redis_sync.TimeoutError, TimeoutError))
        if meaning:
            return (ServerUnreachable if is_lost else ServerError)(f"{self} {meaning} ({text})")
        if is_lost:
            # A server without TLS says nothing to whoever greets it so. "reading": on a connection that was there.
            is_mute = self._is_tls and "Timeout" in type(error).__name__ and "reading" not in text
            why = replies.loss(error)
            return ServerUnreachable(
                f"no Redis server answers at {self}: {f'{why} ({text})' if why else text}"
                f"{'; is it a port with TLS?' if is_mute else ''}"
            )
        return ServerError(f"{self} answered with an error: {text}")


def where(redis: RedisLike | None) -> str:
    """Where a named server is, without password; nothing but the environment is read.

    Args:
        redis: as `Server` takes it, good or not.
    """
    if isinstance(redis, (redis_async.RedisCluster, redis_sync.RedisCluster)):
        nodes, _, is_tls = client_settings(redis)
        return f"{'rediss' if is_tls else 'redis'}{CLUSTER}://{','.join(f'{host}:{port}' for host, port in nodes)}"
    if isinstance(redis, (redis_async.Redis, redis_sync.Redis)):
        taken = redis.connection_pool.connection_kwargs
        if path := taken.get("path"):
            return f"unix://{path}"
        kind = redis.connection_pool.connection_class
        is_tls = issubclass(kind, (connections.SSLConnection, redis_sync.SSLConnection))
        place = f"{taken.get('host', 'localhost')}:{taken.get('port', 6379)}"
        return f"{'rediss' if is_tls else 'redis'}://{place}"
    url = os.environ.get(URL_VARIABLE) if redis is None else redis
    return mask(url) if url else "your embedded server"


def _embedded_url() -> str:
    url = find()
    if url is None:
        text = f"no Redis server was named and none of yours runs in {runtime_dir()}"
        raise ServerUnreachable(f"{text}{_ADVICE}{argument('redis')} or {URL_VARIABLE}")
    return url


def without_advice(error: Exception) -> str:
    """What an error says of a server that there is not, for those who cannot do what programs can."""
    return str(error).partition(_ADVICE)[0]
