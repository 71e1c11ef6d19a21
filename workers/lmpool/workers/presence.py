"""A worker's presence in Redis: the model card it stands for, its heartbeat and counters, its leave."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Mapping
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from lmpool import scripts
from lmpool.card import ModelCard
from lmpool.errors import ModelMismatch, ProtocolError
from lmpool.keys import GROUP, Keys


def new_worker_id() -> str:
    """A name that no other worker has: host, process, and four random characters."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"


class Presence:
    """Keeps one worker visible.

    Args:
        redis: a client for control messages.
        keys: the deployment's key names.
        card: the model that the worker serves.
        worker_id: the worker's name.
    """

    def __init__(self, redis: Redis, keys: Keys, card: ModelCard, worker_id: str) -> None:
        self._redis = redis
        self._keys = keys
        self._card = card
        self._worker_id = worker_id
        self._started = time.time()

    async def join(self) -> None:
        """Publish the model card, or check that it agrees with the one that live workers serve.

        Raises:
            ModelMismatch: live workers serve other weights under this name; says which fields differ.
        """
        ours, name = self._card.pack(), self._card.name
        while True:
            seen = _bytes(await self._redis.hget(self._keys.models(), name))
            if seen == ours:
                return
            differences = _differences(self._card, seen)
            if differences and (others := await self._live_workers()):
                raise ModelMismatch(
                    f"the model {name!r} is served by {', '.join(others)} with another fingerprint "
                    f"({'; '.join(differences)}): serve these weights under another --name, or stop those first"
                )
            if await scripts.SWAP(self._redis, [self._keys.models()], [name, seen, ours]):
                return

    async def beat(self, counters: Mapping[str, str | int | float]) -> None:
        """Show a sign of life with the worker's counters, and mend the card if it was lost."""
        key = self._keys.worker(self._worker_id)
        fields: dict[Any, str | int | float] = {
            "model": self._card.name,
            "backend": self._card.backend,
            "fingerprint": self._card.fingerprint,
            "started": self._started,
            **counters,
        }
        pipe = self._redis.pipeline(transaction=False)
        pipe.hset(key, mapping=fields)
        pipe.pexpire(key, int(self._card.lease_s * 1000))
        pipe.hsetnx(self._keys.models(), self._card.name, self._card.pack())
        await pipe.execute()

    async def sweep(self) -> None:
        """Remove consumers of workers that are gone and hold nothing; one with jobs keeps them claimable."""
        for name, pending in (await self._consumers()).items():
            idle = name != self._worker_id and pending == 0
            if idle and not await self._redis.exists(self._keys.worker(name)):
                await self._redis.xgroup_delconsumer(self._jobs, GROUP, name)

    async def leave(self) -> None:
        """Deregister: the worker, its consumer, and the card when nobody else serves the model."""
        await self._redis.delete(self._keys.worker(self._worker_id))
        if (await self._consumers()).get(self._worker_id) == 0:
            await self._redis.xgroup_delconsumer(self._jobs, GROUP, self._worker_id)
        if not await self._live_workers():
            await scripts.SWAP(self._redis, [self._keys.models()], [self._card.name, self._card.pack(), b""])

    @property
    def _jobs(self) -> bytes:
        return self._keys.model(self._card.name).jobs

    async def _live_workers(self) -> list[str]:
        names = await self._consumers()
        return [name for name in names if name != self._worker_id and await self._redis.exists(self._keys.worker(name))]

    async def _consumers(self) -> dict[str, int]:
        """Who has read this model's queue: worker id -> jobs that it holds."""
        try:
            found = await self._redis.xinfo_consumers(self._jobs, GROUP)
        except ResponseError:
            return {}  # No such stream or group: nobody has served this model yet.
        return {_bytes(consumer["name"]).decode(): int(consumer["pending"]) for consumer in found}


def _bytes(value: object) -> bytes:
    """A reply as bytes; redis-py types it as bytes or text, for the clients that decode."""
    return value if isinstance(value, bytes) else b""


def _differences(card: ModelCard, seen: bytes) -> list[str]:
    if not seen:
        return []
    try:
        return card.differences(ModelCard.unpack(seen))
    except ProtocolError as error:
        return [f"its card does not decode: {error}"]
