"""A worker's heartbeat in Redis while it loads and serves, and the info of its model."""

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
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import cast

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, RedisError, ResponseError

from lmpool.aio import end_tasks
from lmpool.broker import scripts
from lmpool.broker.registries import register, register_tokenizer
from lmpool.broker.scripts import info_key, read_alive, read_consumers, read_infos, read_texts
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

# Lifetime in ms of the lists of workers: longer than any lease, because workers may have different leases.
_MEMBERS_TTL_MS = 2 * 3_600_000
# Lifetime in ms of the queue and the dead letters of a model without workers: longer than any request waits.
_QUEUE_TTL_MS = 7 * 24 * 3_600_000
# Max ended workers removed in one call of the server.
_MAX_SWEPT = 200
# Seconds between two log lines while a model loads.
_SAY_EVERY_S = 30.0
# Max changed files that a heartbeat and the log name; more would fill a line.
_MAX_NAMED_FILES = 3


def new_worker_id() -> str:
    """A unique id that cannot be guessed: host, process, and 8 random bytes in hexadecimal."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(8)}"


class CheckpointWatch:
    """Detects changes of the files of a loaded model: by size, time of modification and inode.

    Make it before the model is loaded. Added files are not a change.

    Args:
        backend: settings of the backend.

    Attributes:
        changed: names of the files that have changed or disappeared, at the last check; "" for none.
    """

    def __init__(self, backend: BackendSettings) -> None:
        self.changed = ""
        self._thread: threading.Thread | None = None
        try:
            files = checkpoint_files(str(getattr(backend, "model", "")), getattr(backend, "gguf_file", None))
            self._loaded = {path: _state_of(path) for path in files}
        except (OSError, RuntimeError):  # RuntimeError: a home folder that does not exist. Loading reports it better.
            self._loaded = {}

    def start_check(self) -> None:
        """Check in a thread, unless a check is running: a network file system may hang, and heartbeats must go on."""
        if self._loaded and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self.check, name="lmpool-files", daemon=True)
            self._thread.start()

    def check(self) -> None:
        """Compare the files with their state at the start; log each change once."""
        try:
            names = [path.name for path, state in self._loaded.items() if _state_of(path) != state]
        except OSError:
            return  # The file system is not available now.
        more = len(names) - _MAX_NAMED_FILES
        changed = ", ".join(names[:_MAX_NAMED_FILES]) + (f" and {more} more" if more > 0 else "")
        if changed and changed != self.changed:
            _log.warning(
                "files of the model have changed since this worker loaded them: %s. It continues with the weights that "
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


@dataclass(eq=False)
class Heartbeat:
    """The heartbeat of one serving worker: a hash that expires one lease after it was last written.

    Attributes:
        redis: a client for rare commands.
        keys: the deployment's keys.
        info: info of the model that the worker serves.
        worker_id: id of the worker.
        batch: prompts that it computes at once.
        vocabulary: the model's vocabulary, if known.
        tokenizer: the model's tokenizer, if known.
        files: files of the model, if they are watched.
    """

    redis: Redis
    keys: Keys
    info: ModelInfo
    worker_id: str
    batch: int
    vocabulary: Vocabulary | None = None
    tokenizer: PackedTokenizer | None = None
    files: CheckpointWatch | None = None

    def __post_init__(self) -> None:
        self._model = self.keys.model(self.info.name)
        self._heartbeat = self.keys.worker(self.worker_id)
        self._started = time.time()
        # Monotonic time since which workers with other weights have been seen.
        self._others_since = math.inf

    async def join(self, counters: Mapping[str, str | int | float]) -> None:
        """Register the worker and publish the model info. The group of the model's queue must exist.

        Raises:
            ModelMismatch: live workers serve other weights under this name; the message names the fields.
        """
        # Register first, then compare: of two workers that start together each finds the other. The heartbeat is
        # written before the consumer exists: consumers without one are removed.
        await self._write(counters)
        await self._keep_texts()
        while (seen := await self._read_info()) != self.info.pack():
            if await self._put_info(seen):
                return

    async def _put_info(self, seen: bytes) -> bool:
        """Replace the info that was `seen` by ours; False if another worker has replaced it meanwhile.

        Raises:
            ModelMismatch: live workers serve the weights of `seen`, which are others.
        """
        differences = _differences(self.info, seen)
        if differences and (others := [worker async for worker, _ in self._serving(_fingerprint(seen))]):
            raise self._mismatch(f"by {', '.join(others)} ", differences)
        swap = [self.info.name, seen, self.info.pack()]
        return bool(await scripts.SWAP(self.redis, [info_key(self.keys, self.info.name)], swap))

    async def _read_info(self) -> bytes:
        """The info of the model in Redis; b"" for none."""
        name = self.info.name
        infos = await read_infos(self.redis, self.keys, [name])
        seen = infos.get(name.encode(), b"")
        if isinstance(seen, bytes):
            return seen
        # Too large for an info.
        await self.redis.hdel(info_key(self.keys, name), name)
        return b""

    async def send(self, counters: Mapping[str, str | int | float]) -> int:
        """Write the heartbeat with the worker's counters, and the model's info if it was lost.

        Returns:
            number of jobs in the worker's lane, waiting and held.

        Raises:
            ModelMismatch: other workers have served other weights under this name for a lease, because this worker was
                silent. An info without live workers is replaced.
        """
        lane = await self._write(counters)
        seen = await self._read_info()
        # Another worker with these weights may have another lease: its info stays.
        if not seen or _differences(self.info, seen):
            await self._replace_info(seen)
        else:
            self._others_since = math.inf
        await self._keep_texts()
        return lane

    async def _replace_info(self, seen: bytes) -> None:
        """Replace the info of workers that may have ended: after a failover they look alive for a lease.

        Raises:
            ModelMismatch: they have been alive for a lease.
        """
        now = time.monotonic()
        try:
            await self._put_info(seen)
        except ModelMismatch:
            self._others_since = min(self._others_since, now)
            if now - self._others_since > self.info.lease_s:
                raise
        else:
            self._others_since = math.inf

    async def sweep(self) -> int:
        """Remove consumers of ended workers that hold nothing, and infos of models without workers.

        One worker of each model, drawn at random, checks the infos and the lengths of all lanes. Trie workers check no
        infos: their Redis user has no rights on the keys of models.

        Returns:
            number of live workers of the model.
        """
        alive = await read_alive(self.redis, self._model)
        is_checker = random.random() * max(1, alive.serving) < 1
        await self._drop(is_checker=is_checker)
        if is_checker and self.info.name != TRIE_SERVICE:
            await self._sweep_infos()
        return alive.serving

    async def _sweep_infos(self) -> None:
        infos = await read_infos(self.redis, self.keys)
        for name, seen in infos.items():
            model = name.decode("utf-8", "replace")
            try:
                if isinstance(seen, int):  # Too large for an info.
                    await self.redis.hdel(info_key(self.keys, model), name)
                elif model != self.info.name and await self._is_abandoned(model):
                    await self._forget(model, seen, name)
            except NoPermissionError:
                continue  # This worker's Redis user has no rights on the model; its own workers check it.

    async def _is_abandoned(self, model: str) -> bool:
        # The info stays while prompts wait: a worker that starts will serve them.
        alive = await read_alive(self.redis, self.keys.model(model))
        return not alive.serving and not await self._queued(model)

    async def leave(self, *, for_good: bool = True) -> None:
        """Deregister the worker, its consumer if that holds nothing, and the info if no other worker serves the model.

        Args:
            for_good: False for a worker that failed: the info and the adapters stay for the next worker.
        """
        await self.redis.delete(self._heartbeat)
        await self._drop(self.worker_id)
        if not for_good:
            return
        seen = await self._read_info()
        # Compare fingerprints: the info may be that of another worker, with another lease.
        if _fingerprint(seen) == self.info.service_fingerprint:
            async for _ in self._serving(self.info.service_fingerprint):
                return
            await self._forget(self.info.name, seen)

    async def _drop(self, *worker_ids: str, is_checker: bool = False) -> None:
        """Drop the consumers of workers whose deadline has passed, and of `worker_ids`; see `sweep`."""
        keys = self._model
        swept = [keys.jobs, keys.workers, keys.capacity, keys.virtual_time]
        args = [GROUP, _MAX_SWEPT, _MEMBERS_TTL_MS, int(is_checker), *worker_ids]
        _, has_unknown, moved = await scripts.REMOVE_GONE(self.redis, swept, args)
        while moved:
            _, _, moved = await scripts.REMOVE_GONE(self.redis, swept, args)
        if has_unknown:
            consumers, lease_ms = await read_consumers(self.redis, keys), int(self.info.lease_s * 1000)
            for at in range(0, len(consumers), scripts.MAX_AT_ONCE):
                part = consumers[at : at + scripts.MAX_AT_ONCE]
                await scripts.ADD_DEADLINES(self.redis, [keys.workers], [lease_ms, _MEMBERS_TTL_MS, *part])

    async def _forget(self, model: str, seen: bytes | str, field: bytes | None = None) -> None:
        """Remove a model that no worker serves; its queue and its dead letters stay for a week.

        Args:
            model: its name.
            seen: its info.
            field: the field of the info, if that is not UTF-8.
        """
        if await scripts.SWAP(self.redis, [info_key(self.keys, model)], [field or model, seen, b""]):
            keys = self.keys.model(model)
            await self.redis.delete(keys.adapters)
            for key in (*keys.queue, *await self._lanes(keys)):
                await self.redis.pexpire(key, _QUEUE_TTL_MS)  # A worker that returns keeps it (`keep_queue.lua`).

    async def _lanes(self, keys: ModelKeys) -> list[bytes]:
        """The lanes of a model's workers. Ended workers stay consumers while their lanes have entries."""
        return [keys.lane(worker) for worker in await read_consumers(self.redis, keys)]

    async def _keep_texts(self) -> None:
        """Keep vocabulary and tokenizer in the pool, so that clients need no copies."""
        if self.vocabulary is not None:
            await register(self.redis, self.keys, self.vocabulary)
        if self.tokenizer is not None:
            await register_tokenizer(self.redis, self.keys, self.tokenizer)

    async def _write(self, counters: Mapping[str, str | int | float]) -> int:
        """Write the heartbeat, and register the number of prompts that this worker computes at once; see `send`."""
        fields: dict[str, str | int | float] = {
            "model": self.info.name,
            "backend": self.info.backend,
            "fingerprint": self.info.service_fingerprint,
            "started": self._started,
            "lease_s": self.info.lease_s,
            **counters,
        }
        if self.files is not None:
            fields["changed_files"] = self.files.changed
            self.files.start_check()
        lease_ms, keys = int(self.info.lease_s * 1000), self._model
        await scripts.HEARTBEAT(self.redis, [self._heartbeat], [lease_ms, *chain.from_iterable(fields.items())])
        batch = 0 if counters.get("state") == "draining" else self.batch
        args = [self.worker_id, lease_ms, _MEMBERS_TTL_MS, GROUP, batch]
        registered = [keys.workers, keys.jobs, keys.capacity, keys.lanes, keys.lane(self.worker_id)]
        return int(await scripts.REGISTER(self.redis, registered, args))

    def _mismatch(self, by: str, differences: list[str]) -> ModelMismatch:
        return ModelMismatch(
            f"the model {self.info.name!r} is served {by}with another fingerprint "
            f"({'; '.join(differences)}): serve these weights under another --name, or stop the other workers first"
        )

    async def _serving(self, fingerprint: str = "") -> AsyncIterator[tuple[str, str]]:
        """Other live workers of this model, with their fingerprints.

        Args:
            fingerprint: only workers with these weights; "" for workers with other weights than ours.
        """
        for worker_id in (await read_alive(self.redis, self._model, names=True)).names:
            if worker_id == self.worker_id:
                continue
            theirs = (await self._fields_of(worker_id, "fingerprint")).get("fingerprint")
            is_wanted = theirs == fingerprint if fingerprint else theirs != self.info.service_fingerprint
            if theirs is not None and is_wanted:
                yield worker_id, theirs

    async def _fields_of(self, worker_id: str, *fields: str) -> dict[str, str]:
        """Some fields of a worker's heartbeat; none without a heartbeat."""
        try:
            return await read_texts(self.redis, self.keys.worker(worker_id), fields)
        except ProtocolError as error:
            # One key of another type must not hide the other workers.
            _log.warning("the worker %r is left out: %s", worker_id, error)
            return {}

    async def _queued(self, model: str) -> int:
        try:
            keys = self.keys.model(model)
            streams = [keys.jobs, *await self._lanes(keys)]
            return sum([await self.redis.xlen(stream) for stream in streams]) + await self.redis.zcard(keys.backlog)
        except NoPermissionError:
            raise
        except ResponseError:
            return 0  # The key is not a stream.


def _differences(info: ModelInfo, seen: bytes) -> list[str]:
    if not seen:
        return []
    try:
        return info.differences(ModelInfo.unpack(seen))
    except ProtocolError as error:
        return [f"its info does not decode: {error}"]


def _fingerprint(seen: bytes) -> str:
    """The fingerprint in the heartbeats of workers with this info; "" if it does not decode."""
    try:
        return ModelInfo.unpack(seen).service_fingerprint
    except ProtocolError:
        return ""


class Loading:
    """Registers in Redis that a worker loads a model, while the context is open.

    Args:
        server: the pool's Redis.
        settings: the worker's settings.
        worker_id: id of the worker.
        model: name of the model.
        say_every_s: seconds between two log lines while it loads.
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
        with contextlib.suppress(RedisError, OSError):  # The heartbeats need the server too, and log its errors.
            await self._tell_of_others()
        self._sending = asyncio.create_task(self._send_heartbeats(), name="loading")

    async def __aexit__(self, *error: object) -> None:
        await end_tasks([self._sending])
        try:
            await self._redis.hdel(self._keys.loading(), self._worker_id)
            await self._redis.zrem(self._model.loading, self._worker_id)
            # After a success the worker continues with this heartbeat.
            if error[0] is not None:
                await self._redis.delete(self._keys.worker(self._worker_id))
        except (RedisError, OSError) as failure:
            # Both expire. The next command reports the error better.
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
        """Log that other workers serve the model already: the user may not have meant to add one."""
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
        """Remove some workers that were killed while they loaded. One loading worker does so, drawn at random."""
        loading = self._keys.loading()
        if random.random() * await self._redis.hlen(loading) >= 1:
            return
        for worker_id in cast(list[bytes], await self._redis.hrandfield(loading, _MAX_SWEPT) or []):
            # A name that is not UTF-8 is not that of a worker.
            if not await self._redis.exists(self._keys.worker(worker_id.decode("utf-8", "replace"))):
                await self._redis.hdel(loading, worker_id)
