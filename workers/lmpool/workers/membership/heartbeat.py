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
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from lmpool.aio import end_tasks
from lmpool.broker import scripts
from lmpool.broker.connection import reply_timeout
from lmpool.broker.registries import register
from lmpool.broker.server import Server
from lmpool.errors import ModelMismatch, ProtocolError
from lmpool.protocol.keys import GROUP, Keys, ModelKeys
from lmpool.protocol.model_info import TRIE_SERVICE, ModelInfo, partitions_in
from lmpool.protocol.tokenizer import PackedTokenizer
from lmpool.protocol.version import split_name
from lmpool.vocabulary import Vocabulary
from lmpool.workers.backends.checkpoint import checkpoint_files
from lmpool.workers.execution.contract import BackendSettings
from lmpool.workers.settings import WorkerSettings

_log = logging.getLogger("lmpool.worker")

_MEMBERS_TTL_MS = 2 * 3_600_000  # Lifetime in ms of the lists of workers, longer than the lease of any worker.
_QUEUE_TTL_MS = 7 * 24 * 3_600_000  # Ms that the queue of a model without workers lives, longer than any request waits.
_OLD_TTL_MS = 3_600_000  # The same for a version of the weights that clients do not use any more.
_MAX_SWEPT = 200  # Max ended workers that one call of the server removes.
LOG_EVERY_S = 30.0  # Seconds between two log lines while a model loads.
_MAX_NAMED_FILES = 3  # Max changed files that a heartbeat and the log name; more would fill a line.
_REGISTER_BEATS = 16  # Heartbeats after which a worker writes its registration again: about four leases.
_COMPLETE_LEASES = 4  # Leases after which a worker that has the turn makes a complete check.
_COMPLETE = 3  # Reply of keep_alive.lua for a turn with a complete check.


class Beat(NamedTuple):
    """The result of a heartbeat."""

    workers: int  # Number of workers of the model that take jobs.
    has_turn: bool  # This worker must claim the jobs of silent workers, and remove dead workers.
    is_complete: bool  # This worker must also check the queue, the model's info and the infos of other models.
    server_time: float  # Seconds since the epoch by the server's clock.


def new_worker_id() -> str:
    """A unique id that cannot be guessed: host, process, and 8 random bytes in hexadecimal."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(8)}"


class CheckpointWatch:
    """Detects changes of the files of a loaded model: by size, time of modification and inode.

    Make this object before the model is loaded. A file that is added later does not count as a change.
    """

    def __init__(self, backend: BackendSettings) -> None:
        self.changed = ""  # Names of the files that have changed or disappeared, at the last check.
        self._thread: threading.Thread | None = None
        self._loaded: dict[Path, tuple[int, int, int] | None] = {}
        # Ignore missing files and an unknown ~user (RuntimeError): the load of the model reports these errors better.
        with contextlib.suppress(OSError, RuntimeError):
            files = checkpoint_files(str(getattr(backend, "model", "")), getattr(backend, "gguf_file", None))
            self._loaded = {path: _state_of(path) for path in files}

    def start_check(self) -> None:
        """Check in a thread, unless a check is running: a network file system may hang, and heartbeats must go on."""
        if self._loaded and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self.check, name="lmpool-files", daemon=True)
            self._thread.start()

    def check(self) -> None:
        """Compare the model's files with their state before the model was loaded; log each change once."""
        try:
            names = [path.name for path, state in self._loaded.items() if _state_of(path) != state]
        except OSError:
            return  # Give up this check: the file system is not available now.
        more = f" and {len(names) - _MAX_NAMED_FILES} more" if len(names) > _MAX_NAMED_FILES else ""
        changed = ", ".join(names[:_MAX_NAMED_FILES]) + more
        if changed not in ("", self.changed):
            text = "It continues with the weights that it has loaded; a worker that starts now loads others"
            _log.warning("files of the model have changed since this worker loaded them: %s. %s", changed, text)
        self.changed = changed


def _state_of(path: Path) -> tuple[int, int, int] | None:
    """Size, time of modification in ns and inode of a file; None if it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        seen = path.stat()
        return seen.st_size, seen.st_mtime_ns, seen.st_ino
    return None


@dataclass(eq=False)
class Heartbeat:
    """The heartbeat of one serving worker: a hash that expires one lease after it was last written."""

    redis: Redis
    keys: Keys
    info: ModelInfo
    worker_id: str
    batch: int  # Number of prompts that the worker computes at once.
    vocabulary: Vocabulary | None = None
    tokenizer: PackedTokenizer | None = None
    files: CheckpointWatch | None = None

    def __post_init__(self) -> None:
        self.partition = 0  # Number of the partition of the model's queue that the worker serves.
        self._heartbeat = self.keys.worker(self.worker_id)
        self._started = time.time()
        self._beats = 0
        self._others_since = math.inf  # Monotonic time when workers with other weights were first found.

    async def join(self, counters: Mapping[str, str | int | float]) -> None:
        """Register the worker and publish the model info. The consumer group of the model's queue must exist.

        Raises:
            ModelMismatch: live workers serve other weights under this name; the message names the differences.
        """
        # Register before comparing infos, so that two workers that start together find each other. Write the
        # heartbeat before the consumer exists: other workers remove consumers without a heartbeat.
        await scripts.HEARTBEAT(self.redis, [self._heartbeat], self._fields(counters))
        await self._register(self.batch)
        await self._keep_texts()
        while (seen := await self.read_info()) != self.info.pack():
            self._adopt_partitions(seen)
            if await self._put_info(seen):
                return

    async def send(self, counters: Mapping[str, str | int | float], *, takes_turns: bool) -> Beat:
        """Write the heartbeat with the worker's counters. A worker that the server has lost registers again.

        `takes_turns`: whether this worker may get the turn to check for lost jobs and workers.
        """
        self._beats += 1
        lease_ms, keys = int(self.info.lease_s * 1000), self._model
        # A turn lasts a little less than the interval of heartbeats, so that a worker alone gets every turn.
        args = [self.worker_id, lease_ms, GROUP, lease_ms * 9 // 40 if takes_turns else 0, _COMPLETE_LEASES * lease_ms]
        kept = [keys.workers, keys.turn, keys.complete_turn, keys.jobs, keys.capacity]
        fields = self._fields(counters)
        # Write the heartbeat second: its master may be down while the master of the queue is not.
        calls = (scripts.KEEP_ALIVE, kept, args), (scripts.HEARTBEAT, [self._heartbeat], fields)
        (count, turn, now_ms), added = await scripts.run_in_order(self.redis, *calls)
        is_lost, is_draining = added == len(fields) // 2 or not count, counters.get("state") == "draining"
        # Register at times even if nothing is lost: another client may have written a wrong length of the lane.
        if is_lost or is_draining or self._beats % _REGISTER_BEATS == 0:
            # Another worker that has ended may have claimed jobs in the lane.
            turn = max(turn, 2) if await self._register(0 if is_draining else self.batch) else turn
        is_complete = is_lost or turn == _COMPLETE or self._others_since < math.inf
        return Beat(max(1, count), turn > 1 or is_complete, is_complete, now_ms / 1000)

    async def keep_info(self) -> None:
        """Write the model's info again if it was lost, and keep its vocabulary and tokenizer.

        Raises:
            ModelMismatch: while this worker was silent, other workers began to serve other weights under this name,
                and they still serve after a lease. The info of workers that have ended is replaced.
        """
        seen = await self.read_info()
        try:
            # Do not replace the info of another worker with the same weights, even if its lease is different.
            if not seen or _compare(self.info, seen)[0] or self._adopt_partitions(seen):
                await self._put_info(seen)
            self._others_since = math.inf
        except ModelMismatch:
            # Raise only after a lease: after a failover of Redis, workers that have ended look alive for a lease.
            now = time.monotonic()
            self._others_since = min(self._others_since, now)
            if now - self._others_since > self.info.lease_s:
                raise
        await self._keep_texts()  # Do this last: storing a vocabulary of megabytes may fail for minutes.

    @property
    def _model(self) -> ModelKeys:
        """The keys of the partition that the worker serves."""
        return self.keys.model(self.info.name, self.partition)

    def _adopt_partitions(self, seen: bytes) -> bool:
        """Add the partitions of the info `seen` to this worker's info; return whether this worker has more."""
        theirs, ours = partitions_in(seen), self.info.partitions
        if seen and theirs != ours:
            # Clients may already use the partitions of `seen`: they stay, in their order.
            more = [number for number in ours if number not in theirs][: max(0, len(ours) - len(theirs))]
            self.info = replace(self.info, partitions=(*theirs, *more))
        return self.info.partitions != theirs

    async def read_info(self) -> bytes:
        """The info of the model in Redis; b"" if there is none."""
        seen = (await scripts.read_infos(self.redis, self.keys, self.info.name)).get(self.info.name.encode(), b"")
        if isinstance(seen, bytes):
            return seen
        await self.redis.hdel(scripts.info_key(self.keys, self.info.name), self.info.name)  # The value was too large.
        return b""

    async def _put_info(self, seen: bytes) -> bool:
        """Replace the info `seen` in Redis by this worker's info; False if another worker has replaced it before."""
        differences, other = _compare(self.info, seen)
        if differences and (others := await self._serving(other, seen)):
            theirs = f"served by {', '.join(others)} with another fingerprint ({'; '.join(differences)})"
            advice = "serve these weights under another --name, or stop the other workers first"
            raise ModelMismatch(f"the model {self.info.name!r} is {theirs}: {advice}")
        name = self.info.name
        return bool(await scripts.SWAP(self.redis, [scripts.info_key(self.keys, name)], [name, seen, self.info.pack()]))

    async def _serving(self, info: ModelInfo | None, seen: bytes) -> list[str]:
        """Other live workers with the weights of `info`; for None, all that do not serve this worker's weights."""
        workers = []
        partitions = self._partitions_of(self.info.name, seen, *self.info.partitions, self.partition)
        for worker_id in (await scripts.read_alive_in(self.redis, partitions, names=True)).names:
            try:
                fields = await scripts.read_texts(self.redis, self.keys.worker(worker_id), ["fingerprint"])
            except ProtocolError as error:  # A key of a wrong type must not hide other workers.
                _log.warning("the worker %r is left out: %s", worker_id, error)
                continue
            if (theirs := fields.get("fingerprint")) is None or worker_id == self.worker_id:
                continue
            if info.is_served_by(theirs) if info is not None else not self.info.is_served_by(theirs):
                workers.append(worker_id)
        return workers

    def _partitions_of(self, model: str, seen: bytes, *more: int) -> list[ModelKeys]:
        """The keys of the partitions that the info `seen` of a model names, and of more partitions."""
        return [self.keys.model(model, number) for number in dict.fromkeys([*partitions_in(seen), *more])]

    async def sweep(self, *, is_complete: bool) -> None:
        """Remove ended workers that hold no entries from the consumer group.

        With `is_complete`, also check the lengths of all workers' lanes (streams), and remove infos of models without
        workers. Trie workers check no infos: their Redis user has no rights on the keys of models.
        """
        await self._drop(is_checker=is_complete)
        infos = await scripts.read_infos(self.redis, self.keys) if is_complete and not self.info.is_trie else {}
        for name, seen in infos.items():
            model = name.decode("utf-8", "replace")
            try:
                if isinstance(seen, int):  # `seen` is the size of a value too large for an info.
                    await self.redis.hdel(scripts.info_key(self.keys, model), name)
                    continue
                partitions = self._partitions_of(model, seen)
                if model == self.info.name or (await scripts.read_alive_in(self.redis, partitions)).serving:
                    continue
                # Keep the info while prompts wait: a worker that starts will serve them, unless their version is old.
                if await self._is_old(model) or not (await scripts.read_queue_in(self.redis, partitions)).depth:
                    await self._forget(model, seen, name)
            except (ResponseError, ProtocolError):
                continue  # No rights on the model, or a key of a wrong type: leave the info to the model's own workers.

    async def leave(self, *, for_good: bool = True) -> None:
        """Deregister the worker.

        Remove the worker's consumer if it holds no entries, and the info if no other worker serves the model.
        `for_good` is False after a failure: then the info and the adapters stay for the next worker. The queue gets a
        lifetime if other workers have removed the info.
        """
        await self.redis.delete(self._heartbeat)
        await self._drop(self.worker_id)
        seen = await self.read_info()
        differences, other = _compare(self.info, seen)
        # Compare fingerprints, not infos: another worker with a different lease may have written the info.
        is_last = for_good and other is not None and not differences and not await self._serving(other, seen)
        # After this worker's lease had expired, another worker may have removed the info. If this worker has removed
        # the lifetime of the queue since, the queue needs a lifetime again.
        if is_last or not seen:
            await self._forget(self.info.name, seen, b"", *self.info.partitions, self.partition)

    async def register(self) -> None:
        """Register the worker in the partition that it serves now."""
        await self._register(self.batch)

    async def adopt_partitions(self) -> None:
        """Add the partitions that other workers have added to the model's info."""
        self._adopt_partitions(await self.read_info())

    async def leave_partition(self, number: int) -> None:
        """Deregister the worker from a partition, and keep its heartbeat."""
        await self._drop(self.worker_id, keys=self.keys.model(self.info.name, number))

    async def _drop(self, *worker_ids: str, is_checker: bool = False, keys: ModelKeys | None = None) -> None:
        """Drop the consumers of workers whose deadline has passed, and of `worker_ids`; see `sweep`."""
        keys = keys or self._model
        swept = [keys.jobs, keys.workers, keys.capacity, keys.virtual_time]
        args = [GROUP, _MAX_SWEPT, _MEMBERS_TTL_MS, int(is_checker), *worker_ids]
        has_unknown, moved = False, 1
        while moved:
            _, has_unknown, moved = await scripts.REMOVE_GONE(self.redis, swept, args)
        if has_unknown:
            consumers, lease_ms = await scripts.read_consumers(self.redis, keys), int(self.info.lease_s * 1000)
            for at in range(0, len(consumers), scripts.MAX_AT_ONCE):
                part = consumers[at : at + scripts.MAX_AT_ONCE]
                await scripts.ADD_DEADLINES(self.redis, [keys.workers], [lease_ms, _MEMBERS_TTL_MS, *part])

    async def _forget(self, model: str, seen: bytes, field: bytes = b"", *more: int) -> None:
        """Remove a model that no worker serves, unless a worker loads one of its versions.

        Its queue and its dead letters stay for a week, or for an hour if clients use a later version of its weights.

        `seen`: the info of the model; `field`: the raw name of the model in the hash of infos, if it is not UTF-8;
        `more`: partitions in addition to those of the info.
        """
        # A worker may be loading another version of this model: keep the info and the adapters for this worker.
        loading = await scripts.read_texts(self.redis, self.keys.loading())
        if split_name(model)[0] in {split_name(name)[0] for name in loading.values()}:
            return
        ttl_ms, queue = _OLD_TTL_MS if await self._is_old(model) else _QUEUE_TTL_MS, list[bytes]()
        partitions = self._partitions_of(model, seen, *more)
        for keys in partitions:
            # Include the lanes of ended workers: an ended worker stays a consumer while its lane has entries.
            queue += [*keys.queue, *[keys.lane(worker) for worker in await scripts.read_consumers(self.redis, keys)]]
        # Set the lifetimes first: if this worker crashes before it removes the info, another worker repeats all steps.
        for key in queue:
            await self.redis.pexpire(key, ttl_ms)
        has_workers = (await scripts.read_alive_in(self.redis, partitions)).serving > 0
        infos = scripts.info_key(self.keys, model)
        if has_workers or not await scripts.SWAP(self.redis, [infos], [field or model, seen, b""]):
            # A worker has joined since the caller's check, or another worker has removed the info first.
            for key in queue if has_workers or await self.redis.hstrlen(infos, field or model) else ():
                await self.redis.persist(key)
        elif not self.info.is_trie:  # Trie workers may not read infos of models.
            base, served = split_name(model)[0], await scripts.read_infos(self.redis, self.keys)
            # The versions of a model share its adapters.
            if base not in {split_name(name.decode("utf-8", "replace"))[0] for name in served}:
                await self.redis.delete(self.keys.model(base).adapters)

    async def _is_old(self, model: str) -> bool:
        """Whether clients use a later version of a model's weights than the one with the name `model`."""
        base, number = split_name(model)
        if base == TRIE_SERVICE:
            return False  # Trie workers have no versions, and their Redis user may not read infos of models.
        return (number or 0) < await scripts.read_pointer(self.redis, self.keys, base)

    def _fields(self, counters: Mapping[str, str | int | float]) -> list[str | int | float]:
        """The arguments of heartbeat.lua: the lease in ms, and the names and values of the fields."""
        info = self.info
        fields: dict[str, str | int | float] = {
            "model": info.name,
            "backend": info.backend,
            "fingerprint": info.service_fingerprint,
            "started": self._started,
            "lease_s": info.lease_s,
            **counters,
        }
        if self.files is not None:
            fields["changed_files"] = self.files.changed
            self.files.start_check()
        return [int(info.lease_s * 1000), *chain.from_iterable(fields.items())]

    async def _register(self, batch: int) -> int:
        """Register the number of prompts that this worker computes at once (0: it takes no jobs).

        Returns the number of jobs in the worker's lane, waiting and held.
        """
        keys = self._model
        args = [self.worker_id, int(self.info.lease_s * 1000), _MEMBERS_TTL_MS, GROUP, batch]
        registered = [keys.workers, keys.jobs, keys.capacity, keys.lanes, keys.lane(self.worker_id)]
        return int(await scripts.REGISTER(self.redis, registered, args))

    async def _keep_texts(self) -> None:
        """Keep the model's vocabulary and tokenizer stored in Redis, so that clients need no copies."""
        for value in (self.vocabulary, self.tokenizer):
            if value is not None:
                await register(self.redis, self.keys, value)


def _compare(info: ModelInfo, seen: bytes) -> tuple[list[str], ModelInfo | None]:
    """The differences between `info` and the info `seen` in Redis, and the decoded `seen` (None if unreadable)."""
    try:
        other = ModelInfo.unpack(seen)
        return info.differences(other), other
    except ProtocolError as error:
        return [f"its info does not decode: {error}"] * bool(seen), None


@contextlib.asynccontextmanager
async def loading(server: Server, settings: WorkerSettings, worker_id: str, model: str) -> AsyncIterator[None]:
    """Register in Redis that a worker loads a model, while the context is open; log every `LOG_EVERY_S` seconds."""
    _log.info("loading %r", model)
    # Wait a quarter of a lease for a reply, so that a heartbeat without a reply is sent again before the lease expires.
    redis, keys = server.client(reply_timeout_s=reply_timeout(settings.heartbeat_s)), Keys(settings.prefix)
    with contextlib.suppress(RedisError, OSError):  # The heartbeats below log errors of the server.
        if count := (await scripts.read_alive(redis, keys.model(model))).serving:
            others = "1 worker serves" if count == 1 else f"{count} workers serve"
            _log.info("%s %r already: this one is added", others, model)

    async def send_heartbeats() -> None:
        began, started = time.monotonic(), time.time()
        log_at = began + LOG_EVERY_S
        while True:
            if (now := time.monotonic()) >= log_at:
                log_at = now + LOG_EVERY_S
                _log.info("still loading %r after %.0f s", model, now - began)
            try:
                await send_loading(redis, settings, worker_id, model, started)
            except (RedisError, OSError) as error:
                _log.warning("will try again: %s", server.explain(error))
            await asyncio.sleep(settings.heartbeat_s)

    sending = asyncio.create_task(send_heartbeats(), name="loading")
    is_loaded = False
    try:
        yield
        is_loaded = True
    finally:
        await end_tasks([sending])
        try:
            await redis.hdel(keys.loading(), worker_id)
            await redis.zrem(keys.model(model).loading, worker_id)
            if not is_loaded:  # Keep the heartbeat of a worker that has loaded its model.
                await redis.delete(keys.worker(worker_id))
        except (RedisError, OSError) as failure:
            # Only log the error: both keys expire, and the worker's next command raises a better error.
            _log.warning("cannot say that the model is loaded: %s", server.explain(failure))
        finally:
            await redis.aclose()


async def send_loading(redis: Redis, settings: WorkerSettings, worker_id: str, model: str, started: float) -> None:
    """Write the heartbeat of a loading worker. One of the loading workers, drawn at random, removes ended workers."""
    keys, lease_ms = Keys(settings.prefix), int(settings.lease_s * 1000)
    loading = keys.loading()
    fields = {"model": model, "state": "loading", "started": started, "lease_s": settings.lease_s}
    await scripts.HEARTBEAT(redis, [keys.worker(worker_id)], [lease_ms, *chain.from_iterable(fields.items())])
    await scripts.HEARTBEAT(redis, [loading], [lease_ms, worker_id, model])
    await scripts.REGISTER(redis, [keys.model(model).loading], [worker_id, lease_ms, lease_ms])
    if random.random() * await redis.hlen(loading) < 1:
        for other in cast(list[bytes], await redis.hrandfield(loading, _MAX_SWEPT) or []):
            # Decoding loses nothing: the name of a worker is always UTF-8.
            if not await redis.exists(keys.worker(other.decode("utf-8", "replace"))):
                await redis.hdel(loading, other)
