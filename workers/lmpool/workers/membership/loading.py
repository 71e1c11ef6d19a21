"""A worker that loads its model: nobody's consumer yet, but people who wait for it want to see it."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from itertools import chain
from typing import cast

from redis.exceptions import RedisError

from lmpool.broker import scripts
from lmpool.broker.server import Server
from lmpool.protocol.keys import Keys
from lmpool.tasks import end_tasks
from lmpool.workers.settings import WorkerSettings

_log = logging.getLogger("lmpool.worker")

_MOST_SWEPT = 200
_SAY_EVERY_S = 30.0


class Loading:
    """Shows in Redis that a worker loads a model, while the context is open.

    Args:
        server: the pool's Redis.
        settings: of the worker.
        worker_id: its name.
        model: what it will serve.
        say_every_s: seconds between two lines of the log that say that it loads still.
    """

    def __init__(
        self,
        server: Server,
        settings: WorkerSettings,
        worker_id: str,
        model: str,
        *,
        say_every_s: float = _SAY_EVERY_S,
    ) -> None:
        self._server = server
        self._keys = Keys(settings.prefix)
        self._model = self._keys.model(model)
        self._settings = settings
        self._say_every_s = say_every_s
        self._worker_id = worker_id
        self._fields = {"model": model, "state": "loading", "started": time.time(), "lease_s": settings.lease_s}

    async def __aenter__(self) -> None:
        _log.info("loading %r", self._fields["model"])
        self._redis = self._server.client()
        self._beating = asyncio.create_task(self._beat(), name="loading")

    async def __aexit__(self, *error: object) -> None:
        await end_tasks([self._beating])
        try:
            await self._redis.hdel(self._keys.loading(), self._worker_id)
            await self._redis.zrem(self._model.loading, self._worker_id)
            # The heartbeat stays when all went well: the worker goes on with it.
            if error[0] is not None:
                await self._redis.delete(self._keys.worker(self._worker_id))
        except (RedisError, OSError) as trouble:
            # Both expire. What comes next needs the server too, and says so better.
            _log.warning("cannot say that the model is loaded: %s", self._server.explain(trouble))
        finally:
            await self._redis.aclose()

    async def _beat(self) -> None:
        began = said = time.monotonic()
        while True:
            if (now := time.monotonic()) - said >= self._say_every_s:
                said = now
                _log.info("still loading %r after %.0f s", self._fields["model"], now - began)
            try:
                await self._show()
                await self._sweep()
            except (RedisError, OSError) as trouble:
                _log.warning("will try again: %s", self._server.explain(trouble))
            await asyncio.sleep(self._settings.heartbeat_s)

    async def _show(self) -> None:
        lease_ms = int(self._settings.lease_s * 1000)
        heartbeat, loading = self._keys.worker(self._worker_id), self._keys.loading()
        await scripts.BEAT(self._redis, [heartbeat], [lease_ms, *chain.from_iterable(self._fields.items())])
        await scripts.BEAT(self._redis, [loading], [lease_ms, self._worker_id, self._fields["model"]])
        await scripts.REGISTER(self._redis, [self._model.loading], [self._worker_id, lease_ms, lease_ms])

    async def _sweep(self) -> None:
        """Remove some of those that were killed while they loaded; of all that load, one looks, whichever it is."""
        loading = self._keys.loading()
        if random.random() * await self._redis.hlen(loading) >= 1:
            return
        for name in cast(list[bytes], await self._redis.hrandfield(loading, _MOST_SWEPT) or []):
            # What is no UTF-8 names no worker.
            if not await self._redis.exists(self._keys.worker(name.decode("utf-8", "replace"))):
                await self._redis.hdel(loading, name)
