"""A Redis server with a replica that may lag behind, and a proxy that leads to the replica after a failover."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import redis

from lmpool.embedded import EmbeddedServer
from tests.support.pool import PATIENCE, until_async
from tests.support.servers.proxy import Proxy


def free_port() -> int:
    """An unused port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Replicated:
    """A primary and its replica.

    Args:
        primary: the server whose data the replica copies.
        folder: the folder for the replica's files.
        proxy: forwards connections to the primary, and to the replica after a failover.
    """

    def __init__(self, primary: EmbeddedServer, folder: Path, proxy: Proxy) -> None:
        self._primary = primary
        self._folder = folder
        self._proxy = proxy
        self._port = free_port()
        self._server = EmbeddedServer(memory_bytes=1 << 28, folder=folder)
        self.replica: redis.Redis

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Replicated]:
        """Run the replica while the context is open."""
        with self._server, redis.Redis.from_url(self._server.url, **PATIENCE) as self.replica:
            with redis.Redis.from_url(self._primary.url, **PATIENCE) as primary:
                primary.config_set("port", self._port)
                primary.config_set("repl-diskless-sync-delay", 0)
            await self.follow()
            yield self

    async def follow(self) -> None:
        """Let the replica copy the primary, and wait until it has all data."""
        self.replica.replicaof("127.0.0.1", str(self._port))
        await until_async(self._is_in_sync, "the replica has everything")

    async def _is_in_sync(self) -> bool:
        return bool(self.replica.info("replication").get("master_link_status") == "up")

    def lag(self) -> None:
        """Stop the replication, so that the replica lags behind."""
        self.replica.replicaof("127.0.0.1", "1")

    async def fail_over(self) -> None:
        """Kill the primary, and connect all clients to the replica."""
        os.kill(self._primary.pid, signal.SIGKILL)
        self.replica.replicaof("NO", "ONE")
        self._proxy.redirect(self._folder / "redis.sock")
        self._proxy.cut()
        await asyncio.sleep(0)
