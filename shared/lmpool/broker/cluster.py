"""A Redis Cluster: which of its masters has a key."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import redis.cluster as redis_sync
from redis import exceptions
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import SSLConnection as AsyncSSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.connection import SSLConnection
from redis.crc import key_slot
from redis.exceptions import RedisClusterException

from lmpool.errors import ServerUnreachable

Place = tuple[str, int]
"""Host and port of a node."""

# What a client's own options may hold that connections to any node take.
_OPTIONS = ("username", "password", "credential_provider", "client_name", "protocol", "socket_connect_timeout",
            "socket_keepalive", "socket_keepalive_options")  # fmt: skip
_TRUST = ("ssl_cert_reqs", "ssl_check_hostname")
_WITH_TLS = (AsyncSSLConnection, SSLConnection)

_MOST_NODES = 100

# No CLIENT SETINFO, which users with few rights may not send: see `lmpool.broker.server`.
_UNNAMED: dict[str, Any] = (
    {"driver_info": None}
    if "driver_info" in inspect.signature(RedisCluster.__init__).parameters
    else {"lib_name": None, "lib_version": None}
)


def client_settings(client: RedisCluster | redis_sync.RedisCluster) -> tuple[list[Place], dict[str, Any], bool]:
    """The nodes that a cluster client was told of, the options of its connections, and whether they speak TLS."""
    nodes = [(str(node.host), int(node.port)) for node in client.nodes_manager.startup_nodes.values()]
    given = client.connection_kwargs if isinstance(client, RedisCluster) else client.nodes_manager.connection_kwargs
    # The options about trust say something by being off, too.
    options = {
        name: value
        for name, value in given.items()
        if (value and (name in _OPTIONS or name.startswith("ssl_"))) or name in _TRUST
    }
    kind = given.get("connection_class")
    is_tls = bool(given.get("ssl")) or (isinstance(kind, type) and issubclass(kind, _WITH_TLS))
    return nodes, options, is_tls


class _Client(RedisCluster):
    """A client whose errors are all redis-py's: those about the whole cluster are of no class that others have."""

    async def initialize(self, *args: Any, **kwargs: Any) -> RedisCluster:
        """Find the nodes."""
        try:
            return await super().initialize(*args, **kwargs)
        except RedisClusterException as error:
            raise exceptions.ConnectionError(f"the cluster cannot be used: {error}") from error

    async def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command on the master that has its key."""
        try:
            return await super().execute_command(*args, **kwargs)
        except RedisClusterException as error:
            raise exceptions.ConnectionError(f"the cluster cannot be used: {error}") from error


class Cluster:
    """Knows which master serves which slot, and reads it anew when it has been told that this has changed.

    Args:
        nodes: some nodes, of which one must answer.
        options: of the connections to them, as redis-py calls them.
        is_tls: whether they speak TLS.
    """

    def __init__(self, nodes: Sequence[Place], options: Mapping[str, Any], *, is_tls: bool) -> None:
        self.nodes = list(nodes)
        self._options = {**options, "ssl": True} if is_tls else dict(options)
        self._places: dict[int, Place] | None = None
        self._forgotten = 0
        self._reading = asyncio.Lock()

    def client(self, reply_timeout_s: float) -> RedisCluster:
        """A client for control messages: of any keys, and following those that move."""
        return _Client(
            startup_nodes=[ClusterNode(host, port) for host, port in self.nodes],
            retry=Retry(NoBackoff(), 0),
            socket_timeout=reply_timeout_s,
            **_UNNAMED,
            **self._options,
        )

    async def place(self, key: bytes) -> Place:
        """The master that serves a key.

        Raises:
            ServerUnreachable: nobody does at present.
            RedisError, OSError: no node answers.
        """
        places = self._places
        if places is None:
            async with self._reading:
                places = self._places
                if places is None:
                    asked = self._forgotten
                    places = await self._read()
                    if asked == self._forgotten:  # Else somebody has been told meanwhile that they have changed.
                        self._places = places
        slot = key_slot(key)
        place = places.get(slot)
        if place is None:
            self.forget()
            raise ServerUnreachable(f"no master of the cluster at {self} serves slot {slot} at present")
        return place

    async def _read(self) -> dict[int, Place]:
        client = self.client(5.0)
        try:
            await client.initialize()
            served = {
                slot: (str(nodes[0].host), int(nodes[0].port))
                for slot, nodes in client.nodes_manager.slots_cache.items()
            }
        finally:
            await client.aclose()
        # Those that were named at first may be gone one day.
        self.nodes = list(dict.fromkeys([*served.values(), *self.nodes]))[:_MOST_NODES]
        return served

    def forget(self) -> None:
        """Read the places anew when they are needed next."""
        self._places = None
        self._forgotten += 1

    def __str__(self) -> str:
        host, port = self.nodes[0]
        return f"{host}:{port}"
