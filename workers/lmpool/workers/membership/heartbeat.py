"""A worker's heartbeat in Redis while it loads and serves, and the info of the model that it stands for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Mapping
from itertools import chain
from pathlib import Path
from typing import cast

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, RedisError, ResponseError

from lmpool.aio import end_tasks
from lmpool.broker import scripts
from lmpool.broker.readers import info_key, read_alive, read_consumers, read_infos, read_texts
from lmpool.broker.registries import register, register_tokenizer
from lmpool.broker.server import Server
from lmpool.errors import ModelMismatch, ProtocolError
from lmpool.protocol.keys import GROUP, Keys, ModelKeys
from lmpool.protocol.model_info import TRIE_SERVICE, ModelInfo
from lmpool.protocol.tokenizer import PackedTokenizer
from lmpool.vocabulary import Vocabulary
from lmpool.workers.backends.checkpoint import checkpoint_files
from lmpool.workers.execution.contract import BackendSettings
from lmpool.workers.settings import WorkerSettings

_log = logging.getLogger("lmpool.worker")

# Longer than any lease: workers of one model may have different ones.
_MEMBERS_TTL_MS = 2 * 3_600_000
# How long the queue and the dead letters of a model that nobody serves are kept: longer than any request waits.
_QUEUE_TTL_MS = 7 * 24 * 3_600_000
_MAX_SWEPT = 200
_SAY_EVERY_S = 30.0
# Changed files that a heartbeat and the log name; more would fill a line.
_MAX_NAMED_FILES = 3


def new_worker_id() -> str:
    """A name that no other worker has and nobody guesses: host, process, and 8 random bytes in hexadecimal."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(8)}"


class CheckpointWatch:
    """Notices that the files that a model was loaded from change on disk: by size, time of modification and inode.

    Make it before the model is loaded. Files that are added are no change.

    Args:
        backend: settings of the backend.

    Attributes:
        changed: the names of the files that have changed or are gone, as of the last check; "" for none.
    """

    def __init__(self, backend: BackendSettings) -> None:
        self.changed = ""
        self._thread: threading.Thread | None = None
        try:
            files = checkpoint_files(str(getattr(backend, "model", "")), getattr(backend, "gguf_file", None))
            self._loaded = {path: _state_of(path) for path in files}
        except (OSError, RuntimeError):  # RuntimeError: a home that does not exist. Loading says so better.
            self._loaded = {}

    def start_check(self) -> None:
        """Check in a thread, unless a check is running: a network file system may hang, and heartbeats must go on."""
        if self._loaded and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self.check, name="lmpool-files", daemon=True)
            self._thread.start()

    def check(self) -> None:
        """Compare the files with those at the start; log what has changed, once."""
        try:
            names = [path.name for path, state in self._loaded.items() if _state_of(path) != state]
        except OSError:
            return  # The file system is away: nothing is known of the files.
        more = len(names) - _MAX_NAMED_FILES
        changed = ", ".join(names[:_MAX_NAMED_FILES]) + (f" and {more} more" if more > 0 else "")
        if changed and changed != self.changed:
            _log.warning(
                "files of the model have changed since this worker loaded them: %s. It goes on with the weights that "
                "it has loaded; a worker that starts now loads others",
                changed,
            )
        self.changed = changed


def _state_of(path: Path) -> tuple[int, int, int] | None:
    """Size, time of modification in ns and inode of a file; None if it does not exist."""
    try:
        seen = path.stat()
    except FileNotFoundError:
        return None
    return seen.st_size, seen.st_mtime_ns, seen.st_ino


class Heartbeat:
    """The heartbeat of one worker that serves: a hash that expires a lease after it was last written.

    Args:
        redis: a client for control messages.
        keys: the deployment's key names.
        info: the model that the worker serves.
        worker_id: the worker's name.
        batch: how many prompts it computes at once.
        vocabulary: what the model's tokens stand for, if it is known.
        tokenizer: how text becomes ids of the model, if that is known.
        files: that the model was loaded from, if they are watched.
    """

    def __init__(
        self,
        redis: Redis,
        keys: Keys,
        info: ModelInfo,
        worker_id: str,
        batch: int,
        vocabulary: Vocabulary | None = None,
        tokenizer: PackedTokenizer | None = None,
        files: CheckpointWatch | None = None,
    ) -> None:
        self._files = files
        self._redis = redis
        self._keys = keys
        self._info = info
        self._worker_id = worker_id
        self._batch = batch
        self._vocabulary = vocabulary
        self._tokenizer = tokenizer
        self._started = time.time()
        # Since when others have been seen that serve other weights.
        self._others_since = math.inf

    async def join(self, counters: Mapping[str, str | int | float]) -> None:
        """Publish the model info, or check that it agrees with the one that live workers serve.

        The group of the model's queue must exist.

        Raises:
            ModelMismatch: live workers serve other weights under this name; says which fields differ.
        """
        # Visible first, compared then: of two workers that start together each finds the other, whosever info
        # comes first. The heartbeat comes before the consumer: a consumer without one would be swept.
        await self._write(counters)
        await self._keep_texts()
        while (seen := await self._read_info()) != self._info.pack():
            if await self._put_info(seen):
                return

    async def _put_info(self, seen: bytes) -> bool:
        """Write our info over the one that was seen there; False when that has changed meanwhile.

        Raises:
            ModelMismatch: the one seen is that of live workers, which serve other weights.
        """
        differences = _differences(self._info, seen)
        if differences and (others := [worker async for worker, _ in self._serving(_fingerprint(seen))]):
            raise self._mismatch(f"by {', '.join(others)} ", differences)
        swap = [self._info.name, seen, self._info.pack()]
        return bool(await scripts.SWAP(self._redis, [info_key(self._keys, self._info.name)], swap))

    async def _read_info(self) -> bytes:
        """What stands in Redis as the info of the model, b"" for nothing."""
        name = self._info.name
        infos = await read_infos(self._redis, self._keys, [name])
        seen = infos.get(name.encode(), b"")
        if isinstance(seen, bytes):
            return seen
        # Too large to be an info, or to be sent back and forth.
        await self._redis.hdel(info_key(self._keys, name), name)
        return b""

    async def send(self, counters: Mapping[str, str | int | float]) -> int:
        """Write the heartbeat with the worker's counters, and the model's info if it was lost.

        Returns:
            how many jobs the worker's lane has, waiting and held.

        Raises:
            ModelMismatch: others have served other weights under this name for a lease, for this worker seemed to be
                gone. An info that no live worker stands for is somebody's junk, or that of workers that have gone: it
                is replaced.
        """
        lane = await self._write(counters)
        seen = await self._read_info()
        # The info of another worker of these weights may have another lease: it stays.
        if not seen or _differences(self._info, seen):
            await self._replace_info(seen)
        else:
            self._others_since = math.inf
        await self._keep_texts()
        return lane

    async def _replace_info(self, seen: bytes) -> None:
        """Write our info over that of workers that may have gone: a failover shows them for a lease after their end.

        Raises:
            ModelMismatch: they have been there for a lease.
        """
        now = time.monotonic()
        try:
            await self._put_info(seen)
        except ModelMismatch:
            self._others_since = min(self._others_since, now)
            if now - self._others_since > self._info.lease_s:
                raise
        else:
            self._others_since = math.inf

    async def sweep(self) -> int:
        """Remove what workers that are gone have left: consumers that hold nothing, and infos of other models.

        One worker of each model, drawn by chance, checks the infos and the lengths of all lanes.
        Trie workers check no infos: their Redis user has no rights on the keys of models.

        Returns:
            how many live workers serve the model.
        """
        alive = await read_alive(self._redis, self._model)
        is_checker = random.random() * max(1, alive.serving) < 1
        await self._drop(is_checker=is_checker)
        if is_checker and self._info.name != TRIE_SERVICE:
            await self._sweep_infos()
        return alive.serving

    async def _sweep_infos(self) -> None:
        infos = await read_infos(self._redis, self._keys)
        for name, seen in infos.items():
            model = name.decode("utf-8", "replace")
            try:
                if isinstance(seen, int):  # Too large to be an info.
                    await self._redis.hdel(info_key(self._keys, model), name)
                elif model != self._info.name and await self._is_abandoned(model):
                    await self._forget(model, seen, name)
            except NoPermissionError:
                continue  # A model that this worker's user has no part in: its own workers see to it.

    async def _is_abandoned(self, model: str) -> bool:
        # While prompts wait, the info stays: a worker that starts again will serve them.
        alive = await read_alive(self._redis, self._keys.model(model))
        return not alive.serving and not await self._queued(model)

    async def leave(self, *, for_good: bool = True) -> None:
        """Deregister: the worker, its consumer if that holds nothing, and the info when nobody else serves the model.

        Args:
            for_good: False for a worker that failed: who waits is to find the model, and its adapters, when a worker
                starts again.
        """
        await self._redis.delete(self._heartbeat)
        await self._drop(self._worker_id)
        if not for_good:
            return
        seen = await self._read_info()
        # By its fingerprint: the info may be that of another worker, with another lease.
        if _fingerprint(seen) == self._info.service_fingerprint:
            async for _ in self._serving(self._info.service_fingerprint):
                return
            await self._forget(self._info.name, seen)

    async def _drop(self, *worker_ids: str, is_checker: bool = False) -> None:
        """Drop the consumers of workers whose deadline has passed, and of these; see `sweep`."""
        keys = self._model
        swept = [keys.jobs, keys.workers, keys.capacity, keys.virtual_time]
        args = [GROUP, _MAX_SWEPT, _MEMBERS_TTL_MS, int(is_checker), *worker_ids]
        _, has_unknown, moved = await scripts.REMOVE_GONE(self._redis, swept, args)
        while moved:
            _, _, moved = await scripts.REMOVE_GONE(self._redis, swept, args)
        if has_unknown:
            consumers, lease_ms = await read_consumers(self._redis, keys), int(self._info.lease_s * 1000)
            for at in range(0, len(consumers), scripts.MAX_AT_ONCE):
                part = consumers[at : at + scripts.MAX_AT_ONCE]
                await scripts.ADD_DEADLINES(self._redis, [keys.workers], [lease_ms, _MEMBERS_TTL_MS, *part])

    async def _forget(self, model: str, seen: bytes | str, field: bytes | None = None) -> None:
        """Remove a model that nobody serves any more; somebody who begins to serve it now writes down what is lost.

        What waits in its queue, and its dead letters, stay for a week.

        Args:
            model: its name.
            seen: its info.
            field: what the info stands under, if that is no UTF-8.
        """
        if await scripts.SWAP(self._redis, [info_key(self._keys, model)], [field or model, seen, b""]):
            keys = self._keys.model(model)
            await self._redis.delete(keys.adapters)
            await scripts.EXPIRE_QUEUE(self._redis, [*keys.queue, *await self._lanes(keys)], [_QUEUE_TTL_MS])

    async def _lanes(self, keys: ModelKeys) -> list[bytes]:
        """The lanes of a model's workers; those that are gone stay consumers as long as their lanes have something."""
        return [keys.lane(worker) for worker in await read_consumers(self._redis, keys)]

    async def _keep_texts(self) -> None:
        """Have vocabulary and tokenizer in the pool as long as workers serve them, so that clients need no copies."""
        if self._vocabulary is not None:
            await register(self._redis, self._keys, self._vocabulary)
        if self._tokenizer is not None:
            await register_tokenizer(self._redis, self._keys, self._tokenizer)

    @property
    def _heartbeat(self) -> bytes:
        return self._keys.worker(self._worker_id)

    async def _write(self, counters: Mapping[str, str | int | float]) -> int:
        """Write the heartbeat, and register how many prompts this worker computes at once; see `send`."""
        fields: dict[str, str | int | float] = {
            "model": self._info.name,
            "backend": self._info.backend,
            "fingerprint": self._info.service_fingerprint,
            "started": self._started,
            "lease_s": self._info.lease_s,
            **counters,
        }
        if self._files is not None:
            fields["changed_files"] = self._files.changed
            self._files.start_check()
        lease_ms, keys = int(self._info.lease_s * 1000), self._model
        await scripts.HEARTBEAT(self._redis, [self._heartbeat], [lease_ms, *chain.from_iterable(fields.items())])
        batch = 0 if counters.get("state") == "draining" else self._batch
        args = [self._worker_id, lease_ms, _MEMBERS_TTL_MS, GROUP, batch]
        registered = [keys.workers, keys.jobs, keys.capacity, keys.lanes, keys.lane(self._worker_id)]
        return int(await scripts.REGISTER(self._redis, registered, args))

    def _mismatch(self, by: str, differences: list[str]) -> ModelMismatch:
        return ModelMismatch(
            f"the model {self._info.name!r} is served {by}with another fingerprint "
            f"({'; '.join(differences)}): serve these weights under another --name, or stop those first"
        )

    @property
    def _model(self) -> ModelKeys:
        return self._keys.model(self._info.name)

    async def _serving(self, fingerprint: str = "") -> AsyncIterator[tuple[str, str]]:
        """Other live workers of this model, with their fingerprints.

        Args:
            fingerprint: only those that serve these weights; "" stands for any but ours.
        """
        for worker_id in (await read_alive(self._redis, self._model, names=True)).names:
            if worker_id == self._worker_id:
                continue
            theirs = (await self._fields_of(worker_id, "fingerprint")).get("fingerprint")
            is_wanted = theirs == fingerprint if fingerprint else theirs != self._info.service_fingerprint
            if theirs is not None and is_wanted:
                yield worker_id, theirs

    async def _fields_of(self, worker_id: str, *fields: str) -> dict[str, str]:
        """Some fields of a worker's heartbeat; none where there is no heartbeat."""
        try:
            return await read_texts(self._redis, self._keys.worker(worker_id), fields)
        except ProtocolError as error:
            # One key that holds something else must not keep this worker from all others.
            _log.warning("the worker %r is left out: %s", worker_id, error)
            return {}

    async def _queued(self, model: str) -> int:
        try:
            keys = self._keys.model(model)
            streams = [keys.jobs, *await self._lanes(keys)]
            return sum([await self._redis.xlen(stream) for stream in streams]) + await self._redis.zcard(keys.backlog)
        except NoPermissionError:
            raise
        except ResponseError:
            return 0  # Something else than a queue.


def _differences(info: ModelInfo, seen: bytes) -> list[str]:
    if not seen:
        return []
    try:
        return info.differences(ModelInfo.unpack(seen))
    except ProtocolError as error:
        return [f"its info does not decode: {error}"]


def _fingerprint(seen: bytes) -> str:
    """What workers that serve this info have in their heartbeats, "" when it does not decode."""
    try:
        return ModelInfo.unpack(seen).service_fingerprint
    except ProtocolError:
        return ""


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
        with contextlib.suppress(RedisError, OSError):  # The heartbeats need the server too, and say so.
            await self._tell_of_others()
        self._sending = asyncio.create_task(self._send_heartbeats(), name="loading")

    async def __aexit__(self, *error: object) -> None:
        await end_tasks([self._sending])
        try:
            await self._redis.hdel(self._keys.loading(), self._worker_id)
            await self._redis.zrem(self._model.loading, self._worker_id)
            # The heartbeat stays when all went well: the worker goes on with it.
            if error[0] is not None:
                await self._redis.delete(self._keys.worker(self._worker_id))
        except (RedisError, OSError) as failure:
            # Both expire. What comes next needs the server too, and says so better.
            _log.warning("cannot say that the model is loaded: %s", self._server.explain(failure))
        finally:
            await self._redis.aclose()

    async def _send_heartbeats(self) -> None:
        began = said = time.monotonic()
        while True:
            if (now := time.monotonic()) - said >= self._say_every_s:
                said = now
                _log.info("still loading %r after %.0f s", self._fields["model"], now - began)
            try:
                await self._send()
                await self._sweep()
            except (RedisError, OSError) as error:
                _log.warning("will try again: %s", self._server.explain(error))
            await asyncio.sleep(self._settings.heartbeat_s)

    async def _tell_of_others(self) -> None:
        """Say that others serve the model already: who meant to start it once more is not to find out by its speed."""
        if count := (await read_alive(self._redis, self._model)).serving:
            others = "1 worker serves" if count == 1 else f"{count} workers serve"
            _log.info("%s %r already: this one is added", others, self._fields["model"])

    async def _send(self) -> None:
        lease_ms = int(self._settings.lease_s * 1000)
        heartbeat, loading = self._keys.worker(self._worker_id), self._keys.loading()
        await scripts.HEARTBEAT(self._redis, [heartbeat], [lease_ms, *chain.from_iterable(self._fields.items())])
        await scripts.HEARTBEAT(self._redis, [loading], [lease_ms, self._worker_id, self._fields["model"]])
        await scripts.REGISTER(self._redis, [self._model.loading], [self._worker_id, lease_ms, lease_ms])

    async def _sweep(self) -> None:
        """Remove some workers that were killed while they loaded; one of all that load does so, whichever it is."""
        loading = self._keys.loading()
        if random.random() * await self._redis.hlen(loading) >= 1:
            return
        for worker_id in cast(list[bytes], await self._redis.hrandfield(loading, _MAX_SWEPT) or []):
            # What is no UTF-8 names no worker.
            if not await self._redis.exists(self._keys.worker(worker_id.decode("utf-8", "replace"))):
                await self._redis.hdel(loading, worker_id)
