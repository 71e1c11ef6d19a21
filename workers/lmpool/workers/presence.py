"""A worker's presence in Redis: the model card it stands for, its heartbeat and counters, its leave."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Mapping
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import ResponseError

from lmpool import scripts
from lmpool.card import ModelCard
from lmpool.errors import ModelMismatch, ProtocolError
from lmpool.keys import GROUP, Keys
from lmpool.registry import register
from lmpool.vocab import Vocabulary


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
        vocabulary: what the model's tokens stand for, if it is known.
    """

    def __init__(
        self, redis: Redis, keys: Keys, card: ModelCard, worker_id: str, vocabulary: Vocabulary | None = None
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._card = card
        self._worker_id = worker_id
        self._vocabulary = vocabulary
        self._started = time.time()

    async def join(self, counters: Mapping[str, str | int | float]) -> None:
        """Publish the model card, or check that it agrees with the one that live workers serve.

        The group of the model's queue must exist.

        Raises:
            ModelMismatch: live workers serve other weights under this name; says which fields differ.
        """
        # Visible first, compared then: of two workers that start together each finds the other, whosever card
        # comes first. Heartbeat before consumer: a consumer without one would be swept.
        pipe = self._beating(counters)
        pipe.xgroup_createconsumer(self._jobs, GROUP, self._worker_id)
        await pipe.execute()
        await self._keep_vocabulary()
        ours, name = self._card.pack(), self._card.name
        while True:
            seen = _bytes(await self._redis.hget(self._keys.models(), name))
            if seen == ours:
                return
            differences = _differences(self._card, seen)
            if differences and (others := await self._servers(_fingerprint(seen))):
                raise self._mismatch(f"by {', '.join(others)} ", differences)
            if await scripts.SWAP(self._redis, [self._keys.models()], [name, seen, ours]):
                return

    async def beat(self, counters: Mapping[str, str | int | float]) -> None:
        """Show a sign of life with the worker's counters, and mend the card if it was lost.

        Raises:
            ModelMismatch: others serve other weights under this name by now, for this worker seemed to be gone.
        """
        pipe = self._beating(counters)
        pipe.hsetnx(self._keys.models(), self._card.name, self._card.pack())
        pipe.hget(self._keys.models(), self._card.name)
        *_, seen = await pipe.execute()
        if differences := _differences(self._card, _bytes(seen)):
            raise self._mismatch("", differences)
        await self._keep_vocabulary()

    async def sweep(self) -> None:
        """Remove what workers that are gone have left: consumers that hold nothing, and cards of other models."""
        live = await self._live_workers(self._card.name)
        gone = [name for name in await self._consumers(self._card.name) if name not in live and name != self._worker_id]
        if gone:  # One with jobs stays, so that they can be claimed.
            await scripts.SWEEP(self._redis, [self._jobs], [GROUP, *gone])
        for name, seen in (await self._redis.hgetall(self._keys.models())).items():
            model = _bytes(name).decode("utf-8", "replace")
            if model == self._card.name or await self._live_workers(model):
                continue
            # While prompts wait, the card stays: a worker that starts again will serve them.
            if not await self._redis.xlen(self._keys.model(model).jobs):
                await self._forget(model, seen)

    async def others(self, field: str) -> dict[str, str]:
        """What the other live workers of the model that take jobs tell: worker id -> a field of theirs, or ""."""
        told = {}
        for name in await self._servers(self._card.fingerprint):
            state, value = await self._redis.hmget(self._keys.worker(name), ["state", field])
            if state is not None and state != b"draining":
                told[name] = _bytes(value).decode("utf-8", "replace")
        return told

    async def leave(self) -> None:
        """Deregister: the worker, its consumer, and the card when nobody else serves the model."""
        await self._redis.delete(self._heartbeat)
        if self._worker_id in await self._consumers(self._card.name):
            await scripts.SWEEP(self._redis, [self._jobs], [GROUP, self._worker_id])
        seen = _bytes(await self._redis.hget(self._keys.models(), self._card.name))
        # By its fingerprint: the card may be that of another worker, with another lease.
        if _fingerprint(seen) == self._card.fingerprint and not await self._servers(self._card.fingerprint):
            await self._forget(self._card.name, seen)

    async def _forget(self, model: str, seen: bytes | str) -> None:
        """Remove a model that nobody serves any more; somebody who begins to serve it now writes down what is lost."""
        if await scripts.SWAP(self._redis, [self._keys.models()], [model, seen, b""]):
            keys = self._keys.model(model)
            await self._redis.delete(keys.adapters, keys.offers)

    async def _keep_vocabulary(self) -> None:
        """Have the vocabulary in the pool as long as workers serve it, so that clients need no tokenizer."""
        if self._vocabulary is not None:
            await register(self._redis, self._keys, self._vocabulary)

    @property
    def _heartbeat(self) -> bytes:
        return self._keys.worker(self._worker_id)

    def _beating(self, counters: Mapping[str, str | int | float]) -> Pipeline:
        """Commands that show a sign of life, to be sent with others."""
        fields: dict[Any, str | int | float] = {
            "model": self._card.name,
            "backend": self._card.backend,
            "fingerprint": self._card.fingerprint,
            "started": self._started,
            "lease_s": self._card.lease_s,
            **counters,
        }
        pipe = self._redis.pipeline(transaction=False)
        pipe.hset(self._heartbeat, mapping=fields)
        pipe.pexpire(self._heartbeat, int(self._card.lease_s * 1000))
        return pipe

    def _mismatch(self, by: str, differences: list[str]) -> ModelMismatch:
        return ModelMismatch(
            f"the model {self._card.name!r} is served {by}with another fingerprint "
            f"({'; '.join(differences)}): serve these weights under another --name, or stop those first"
        )

    @property
    def _jobs(self) -> bytes:
        return self._keys.model(self._card.name).jobs

    async def _servers(self, fingerprint: str) -> list[str]:
        """Other live workers that serve this model with a fingerprint; "" stands for any but ours."""
        live = await self._live_workers(self._card.name)
        return [
            name
            for name, theirs in live.items()
            if name != self._worker_id and (theirs == fingerprint if fingerprint else theirs != self._card.fingerprint)
        ]

    async def _live_workers(self, model: str) -> dict[str, str]:
        """Who serves a model: worker id -> fingerprint."""
        live = {}
        for name in await self._consumers(model):
            fingerprint = await self._redis.hget(self._keys.worker(name), "fingerprint")
            if fingerprint is not None:
                live[name] = _bytes(fingerprint).decode("utf-8", "replace")
        return live

    async def _consumers(self, model: str) -> list[str]:
        """The workers that have joined a model's queue, gone or not."""
        try:
            found = await self._redis.xinfo_consumers(self._keys.model(model).jobs, GROUP)
        except ResponseError:
            return []  # No such stream or group: nobody has served this model yet.
        return [_bytes(consumer["name"]).decode() for consumer in found]


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


def _fingerprint(seen: bytes) -> str:
    """The fingerprint of a card, "" when it does not decode."""
    try:
        return ModelCard.unpack(seen).fingerprint
    except ProtocolError:
        return ""
