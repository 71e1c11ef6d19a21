"""Adapters that have ended a worker as it loaded them: noted before the load, so that the others need not find out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

from redis.asyncio import Redis

from lmpool.broker import scripts
from lmpool.errors import SettingsError
from lmpool.protocol.keys import Keys
from lmpool.workers.settings import WorkerSettings

_LEAST_MEMORY_S = 600.0
_MOST_WORKERS = 4096
# One may have been ended by something else just then.
_ENOUGH = 2


class AdapterTrials:
    """The loads of one worker, as others see them.

    Args:
        redis: a client for control messages.
        keys: the deployment's key names.
        model: what the worker serves.
        worker_id: the worker's name.
        settings: of the worker.
    """

    def __init__(self, redis: Redis, keys: Keys, model: str, worker_id: str, settings: WorkerSettings) -> None:
        self._redis = redis
        self._keys = keys
        self._model = keys.model(model)
        self._worker_id = worker_id
        self._lease_ms = int(settings.lease_s * 1000)
        # Longer than some loads that hang take until their workers end.
        self._memory_ms = int(1000 * max(_LEAST_MEMORY_S, 4 * settings.step_timeout_s))
        self._noted = b""

    @asynccontextmanager
    async def offered(self, nonce: str, *, is_first: bool) -> AsyncIterator[bool]:
        """Around the load of an adapter that is offered; False when another worker tries it first: then it must wait.

        Args:
            nonce: names the offer.
            is_first: no worker has loaded it yet: then one tries it before the others do.

        Raises:
            SettingsError: a worker has not survived it.
        """
        key = self._model.trying(nonce)
        if (old := await self._begin(key, "alone" if is_first else "any")) is not None:
            if gone := await self._gone(old):
                raise SettingsError(
                    f"adapters: the worker {gone[0]} ended or fell silent while it loaded it, so no other does: look "
                    "at that worker's log, mend the adapter, and add it again"
                )
            if is_first:
                yield False
                return
            await self._begin(key, "anyway")
        async with self._noted_until_told():
            yield True

    @asynccontextmanager
    async def in_service(self, qualified: str) -> AsyncIterator[None]:
        """Around the load of an adapter that is in service ("name@revision").

        What other hosts have seen does not count: they may lack what this one has.

        Raises:
            SettingsError: two workers of this host have not survived it lately.
        """
        key, gone = self._model.trying(qualified), list[str]()
        if (old := await self._begin(key, "any")) is not None:
            gone = [worker for worker in await self._gone(old) if _host(worker) == _host(self._worker_id)]
            if len(gone) >= _ENOUGH:
                raise SettingsError(
                    f"adapters: {qualified!r} is in service, and the workers {', '.join(gone)} of this host ended or "
                    f"fell silent while they loaded it: look at their logs, then mend or remove it; it is tried again "
                    f"{self._memory_ms // 60_000} minutes after the last try"
                )
            await self._begin(key, "anyway")
        async with self._noted_until_told(*gone):
            yield

    async def leave(self, *, is_broken: bool) -> None:
        """The worker ends, over what it loads at present if its backend is broken."""
        if not self._noted:
            return
        if is_broken:
            await self._redis.hset(self._noted, self._worker_id, 0)
        else:
            await self._redis.hdel(self._noted, self._worker_id)

    async def _begin(self, key: bytes, how: Literal["alone", "any", "anyway"]) -> list[str] | None:
        """Note a load; else who should have ended theirs by now."""
        args = [self._worker_id, how, self._lease_ms, self._memory_ms, _MOST_WORKERS]
        is_noted, *old = await scripts.TRIAL(self._redis, [key], args)
        if is_noted:
            self._noted = key
            return None
        return [worker.decode("utf-8", "replace") for worker in old]

    @asynccontextmanager
    async def _noted_until_told(self, *others: str) -> AsyncIterator[None]:
        """Take the note back when the load has ended, not when the worker has; after a success those of others too."""
        key = self._noted
        try:
            yield
        except SettingsError:
            await self._redis.hdel(key, self._worker_id)
            self._noted = b""
            raise
        await self._redis.hdel(key, self._worker_id, *others)
        self._noted = b""

    async def _gone(self, workers: list[str]) -> list[str]:
        return [worker for worker in workers if not await self._redis.exists(self._keys.worker(worker))]


def _host(worker_id: str) -> str:
    """Ids end with the process and random characters."""
    return worker_id.rsplit("-", 2)[0]
