"""Shards as jobs of arq: durable, scheduled, retried, done by any number of workers that see the files.

A job is one shard, some seconds to minutes of work; the prompts in it go through the pool's own queue as always. arq
has a job done again whose worker has vanished, so a shard may be computed twice, and comes out the same. Jobs and
results are MessagePack: what arq takes by itself, pickle, would run what anybody writes to the server.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, TypeVar

import msgpack
import msgspec
import numpy as np
from redis.exceptions import RedisError

from lmpool.aio import end_tasks, finish
from lmpool.batch.lines import Index, Source
from lmpool.batch.run import BatchSettings, answer_shard, begin, find_done, open_source
from lmpool.batch.storage.bucket import open_folder
from lmpool.batch.storage.fetch import absolute, named
from lmpool.batch.storage.folder import Folder, Manifest, Shard, digest_of_file, shard_name
from lmpool.broker.server import Server
from lmpool.errors import BatchError, BatchRefused, LMPoolError, SettingsError
from lmpool.producer import Producer
from lmpool.settings import shown

try:
    from arq import Retry, Worker, cron, func
    from arq.connections import ArqRedis
    from arq.constants import abort_jobs_ss, in_progress_key_prefix, job_key_prefix, result_key_prefix, retry_key_prefix
    from arq.jobs import deserialize_job_raw, deserialize_result, serialize_job
    from arq.utils import timestamp_ms
except ImportError as error:
    raise SettingsError("batch: its queue needs arq: pip install 'lmpool[bulk]', or use `lmpool batch run`") from error

QUEUE = "arq:lmpool:batch"
"""The queue of arq that jobs go to."""

SCHEDULE_VARIABLE = "LMPOOL_BATCH_SCHEDULE"
"""Names the file of nightly runs for `arq lmpool.batch.WorkerSettings`."""

_FUNCTION = "answer_shard"
_LEASE_S = 30.0
_DEFER_S, _MOST_TRIES = 30, 20
_TIMEOUT_S, _KEEP_S, _EXPIRES_S = 86_400, 86_400, 30 * 86_400
_JOBS_AT_ONCE = 4
_REQUEST_S = 3600.0
_SENT_AT_ONCE = 256
_PAUSES = 9  # Between two writings of a manifest, as often as these have taken.

T = TypeVar("T")


class ShardJob(msgspec.Struct, frozen=True):
    """What a worker needs to answer one shard.

    Attributes:
        source, output: absolute paths, the same for all workers, or URLs.
        settings: fields of `BatchSettings`.
        pool: `model`, `prefix` and `timeout` of the producer. The server is that of the jobs.
        index: fields of `Index` as far as this shard needs them.
        shard: its number.
    """

    source: str
    output: str
    settings: dict[str, Any]
    pool: dict[str, Any]
    index: dict[str, Any]
    shard: int


class Queued(NamedTuple):
    """What a submission has queued.

    Attributes:
        jobs: shards that are queued now.
        there: that were queued or under way already.
        done: that are in place.
        shards: all of them.
    """

    jobs: int
    there: int
    done: int
    shards: int


def connect(redis: str | None) -> ArqRedis:
    """arq's client of a server.

    Raises:
        SettingsError, ServerUnreachable: as `Server`; a cluster is none that arq can use.
    """
    server = Server(redis)
    if server.is_cluster:
        raise SettingsError("redis: arq cannot use a cluster: give a single server for the jobs")
    return ArqRedis(
        server.client().connection_pool,
        job_serializer=_packed,
        job_deserializer=_unpacked,
        default_queue_name=QUEUE,
        expires_extra_ms=1000 * _EXPIRES_S,
    )


def _packed(value: dict[str, Any]) -> bytes:
    data: bytes = msgpack.packb(value, default=str)  # Exceptions become their texts.
    return data


def _unpacked(data: bytes) -> dict[str, Any]:
    values: dict[str, Any] = msgpack.unpackb(data, strict_map_key=False)
    return values


async def submit(
    producer: Producer, arq: ArqRedis, source: str, output: str, settings: BatchSettings, pool: dict[str, Any]
) -> Queued:
    """Queue a job for each shard that is not in place.

    Args:
        producer: to see which model it is.
        arq: the queue.
        source, output, settings: as `run_batch`.
        pool: as `ShardJob`.

    Raises:
        As `run_batch`.
    """
    source, output = absolute(source), absolute(output)
    opened, folder = await asyncio.to_thread(lambda: (open_source(source), open_folder(output)))
    # Workers may hold it already, for shards that were queued before.
    with folder.shared() if (await asyncio.to_thread(folder.is_begun)) else folder.locked():
        index = await asyncio.to_thread(opened.index, settings.options.shard_lines)
        if index.is_empty:
            raise SettingsError(f"input: {shown(named(source))} is empty: there is nothing to ask")
        await producer.open()
        manifest = await begin(producer, folder, source, index, settings)
    given = {name: getattr(settings, name) for name in BatchSettings.__slots__}
    done = {shard.number for shard in manifest.done}
    left = [shard for shard in range(manifest.shards) if shard not in done]
    size, jobs = settings.options.shard_lines, 0
    for some in _in_parts(left):
        now = timestamp_ms()
        # As `ArqRedis.enqueue_job`, of many at once; workers see all of them or none.
        async with arq.pipeline(transaction=True) as pipe:
            for shard in some:
                first = shard * size + 1
                begins, ends = np.searchsorted(index.duplicates, (first, first + size))
                duplicates = index.duplicates[begins:ends].tolist()
                part = {**index._asdict(), "starts": {shard: index.starts[shard]}, "duplicates": duplicates}
                job = msgspec.to_builtins(ShardJob(source, output, given, pool, part, shard))
                name = job_name(manifest, folder, shard)
                pipe.delete(result_key_prefix + name, retry_key_prefix + name)  # Of one that has failed.
                packed = serialize_job(_FUNCTION, (job,), {}, None, now, serializer=_packed)
                pipe.set(job_key_prefix + name, packed, px=1000 * _EXPIRES_S, nx=True)
                pipe.zadd(QUEUE, {name: now}, nx=True)
            told = await pipe.execute()
        jobs += sum(bool(is_new) for is_new in told[1::3])
    return Queued(jobs, len(left) - jobs, len(done), manifest.shards)


def _in_parts(things: Sequence[T]) -> Iterator[Sequence[T]]:
    """As many at a time as are sent at once."""
    for begin_at in range(0, len(things), _SENT_AT_ONCE):
        yield things[begin_at : begin_at + _SENT_AT_ONCE]


def job_name(manifest: Manifest, folder: Folder, shard: int) -> str:
    """The name of a shard's job: the same for the same run, so that it is not queued twice."""
    run = msgspec.json.encode([folder.location, manifest.run])
    return f"{hashlib.blake2b(run, digest_size=8).hexdigest()}-{shard}"


async def _answer_shard(context: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The job: answer one shard, put it into place, and write that down; or tell why it is of no use any more."""
    job = msgspec.convert(given, ShardJob, strict=False)
    renewing = asyncio.create_task(_keep_lease(context["redis"], context["job_id"], context["lease_s"]))
    try:
        return await _answer(context, job)
    except LMPoolError as error:
        is_ours = isinstance(error, BatchRefused) or (isinstance(error, BatchError) and error.may_pass)
        is_final = isinstance(error, (SettingsError, BatchError)) and not is_ours
        # No worker, no server, another model: the right ones may come. The last try tells why; arq would not.
        if is_final or context["job_try"] >= _MOST_TRIES:
            raise
        raise Retry(defer=_DEFER_S) from error
    finally:
        await end_tasks([renewing])


async def _answer(context: dict[str, Any], job: ShardJob) -> dict[str, Any]:
    # Where the output has been removed, or is another run's by now, nobody waits for this.
    unique = f".{os.getpid()}-{context['job_id']}"
    folder = await asyncio.to_thread(open_folder, job.output, unique)
    manifest = await asyncio.to_thread(folder.read_manifest)
    if manifest is None or job_name(manifest, folder, job.shard) != context["job_id"]:
        return {"left": "the output is gone" if manifest is None else "the output is of another run now"}
    settings = BatchSettings(**job.settings)
    index = Index(**{**job.index, "duplicates": np.array(job.index["duplicates"], np.int64)})
    async with context["reading"]:  # Jobs that begin together fetch and digest one input once.
        source = await asyncio.to_thread(_same_source, job.source, index)
    producer = await _producer_of(context, job.pool)
    name = shard_name(job.shard, manifest.options.format)
    with folder.shared():
        shards = []  # If it is done, a worker was killed before the manifest listed it.
        if not await asyncio.to_thread(folder.is_done, job.shard, name):
            shards = [await answer_shard(producer, folder, manifest, source, index, settings, job.shard)]
        recorder = context["recorders"].setdefault(f"{job.output} {manifest.run}", Recorder())
        await recorder.record(folder, shards)
    return {"done": [msgspec.to_builtins(shard) for shard in shards]}


def _same_source(location: str, index: Index) -> Source:
    """The input, if it is still what was submitted.

    Raises:
        BatchError: it is another one.
    """
    source = open_source(location)
    status = source.path.stat()
    state = (str(source.path), status.st_size, status.st_mtime_ns, status.st_ino)
    if status.st_size == index.size:
        digest = _digests.get(state) or digest_of_file(source.path)
        _digests[state] = digest
        if digest == index.digest:
            return source
        now = f"has the digest {digest} and had {index.digest}"
    else:
        now = f"has {status.st_size} bytes and had {index.size}"
    raise BatchError(f"{named(location)} {now} when this was submitted: submit it again")


# Path, size, time and number of a file -> its digest.
_digests: dict[tuple[str, int, int, int], str] = {}


class Recorder:
    """Has the manifest of a folder list the shards that this process makes, several at once.

    To write one takes the longer the more shards it lists; so it is done for a tenth of the time at most.
    """

    def __init__(self) -> None:
        self._waiting: list[Shard] = []
        self._writing = asyncio.Lock()
        self._begun = self._done = 0
        self._pause_s = 0.0

    async def record(self, folder: Folder, shards: list[Shard]) -> None:
        """Return when the manifest lists some shards that are in place.

        Raises:
            BatchError: it cannot be written.
        """
        self._waiting += shards
        before = self._begun
        async with self._writing:
            if self._done > before:  # One that has begun since had these too.
                return
            await asyncio.sleep(self._pause_s)
            some, began = list(self._waiting), monotonic()
            self._begun += 1
            await finish(asyncio.to_thread(folder.record, some, find_done))
            self._waiting = [shard for shard in self._waiting if shard not in some]
            self._done = self._begun
            self._pause_s = _PAUSES * (monotonic() - began)


async def _producer_of(context: dict[str, Any], pool: dict[str, Any]) -> Producer:
    """The producer of this process for a model."""
    producers: dict[str, Producer] = context.setdefault("producers", {})
    key = msgpack.packb(pool).hex()
    if key not in producers:
        options = {"cache_bytes": 0, "keep_answers": False, "when_absent": "raise", "priority": "bulk"}
        producers[key] = Producer(redis=context["url"], **{**pool, **options})
    await producers[key].open()
    return producers[key]


async def _keep_lease(redis: ArqRedis, job: str, lease_s: float) -> None:
    """Have others take a job over soon after this process has vanished; by itself arq waits until the job's timeout."""
    while True:
        with suppress(RedisError, OSError):  # Where it lapses, another worker makes the same shard.
            await redis.psetex(in_progress_key_prefix + job, int(1000 * lease_s), b"1")
        await asyncio.sleep(lease_s / 3)


async def _shorten_leases(redis: ArqRedis, lease_s: float) -> None:
    """Free jobs whose worker has vanished before it could make arq's mark, which stays for a day, a lease of its own.

    Who is alive renews it long before it lapses, whoever has shortened it.
    """
    most_ms = int(1000 * lease_s)
    while True:
        with suppress(RedisError, OSError):
            jobs = [name for name in await redis.zrange(QUEUE, 0, -1) if not name.startswith(b"cron:")]
            for some in _in_parts([in_progress_key_prefix.encode() + name for name in jobs]):
                async with redis.pipeline(transaction=False) as pipe:
                    for key in some:
                        pipe.pttl(key)
                    lefts = await pipe.execute()
                    for key, left_ms in zip(some, lefts, strict=True):
                        if left_ms > most_ms:
                            pipe.pexpire(key, most_ms)
                    await pipe.execute()
        await asyncio.sleep(lease_s)


async def _open(context: dict[str, Any]) -> None:
    """What a worker begins with."""
    shortening = asyncio.create_task(_shorten_leases(context["redis"], context["lease_s"]))
    context.update(producers={}, recorders={}, reading=asyncio.Lock(), shortening=shortening)


async def _close(context: dict[str, Any]) -> None:
    """What a worker ends with."""
    await end_tasks([context["shortening"]])
    for producer in context["producers"].values():
        await producer.close()


class Nightly(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of a schedule: a run that is submitted every day.

    Attributes:
        at: hour and minute, "02:30", in the worker's time zone (`ARQ_TIMEZONE`, UTC by default).
        source: the input.
        output: the folder; `{date}` in it becomes the day, such as 2026-11-25.
        what, start, format, shard_lines, adapter, concurrency: as `BatchSettings`.
        model, prefix: of the pool.
    """

    at: str
    source: str
    output: str
    what: str
    start: int = 0
    format: str | None = None
    shard_lines: int = 0
    adapter: str = ""
    concurrency: int = 512
    model: str | None = None
    prefix: str = "lmpool"

    @property
    def settings(self) -> BatchSettings:
        """What is asked."""
        return BatchSettings(**{name: getattr(self, name) for name in BatchSettings.__slots__})


def read_schedule(path: Path) -> list[Nightly]:
    """The entries of a TOML file, each a table `[[run]]`.

    Raises:
        SettingsError: it cannot be read, or is none.
    """
    try:
        entries = msgspec.convert(tomllib.loads(path.read_text("utf-8")), dict[str, list[Nightly]])["run"]
        for entry in entries:
            datetime.strptime(entry.at, "%H:%M")
            _ = entry.settings
    except (OSError, ValueError, KeyError, msgspec.ValidationError) as error:
        raise SettingsError(f"schedule: {path} is no list of runs: {error}") from error
    return entries


def _nightly(entry: Nightly, number: int) -> Any:
    """The cron job of an entry."""

    async def submit_run(context: dict[str, Any]) -> dict[str, int]:
        pool = {"model": entry.model, "prefix": entry.prefix, "timeout": _REQUEST_S}
        producer = await _producer_of(context, pool)
        output = entry.output.replace("{date}", datetime.now().date().isoformat())
        queued = await submit(producer, context["redis"], entry.source, output, entry.settings, pool)
        return queued._asdict()

    at = datetime.strptime(entry.at, "%H:%M")
    return cron(submit_run, name=f"nightly-{number}", hour=at.hour, minute=at.minute, max_tries=5)


def worker_options(
    redis: str | None, schedule: Path | None = None, jobs: int = _JOBS_AT_ONCE, lease_s: float = _LEASE_S
) -> dict[str, Any]:
    """The options of arq's `Worker`, for its command too.

    Args:
        redis: URL of the server of pool and jobs; None as for `Producer`.
        schedule: a file for `read_schedule`.
        jobs: shards at once.
        lease_s: seconds after which a shard is another worker's when this one has vanished.
    """
    entries = read_schedule(schedule) if schedule is not None else []
    return {
        "functions": [func(_answer_shard, name=_FUNCTION)],
        "cron_jobs": [_nightly(entry, number) for number, entry in enumerate(entries)],
        "redis_pool": connect(redis),
        "queue_name": QUEUE,
        "on_startup": _open,
        "on_shutdown": _close,
        "max_jobs": jobs,
        "job_timeout": _TIMEOUT_S,
        "keep_result": _KEEP_S,
        "max_tries": _MOST_TRIES,
        "health_check_interval": 10,
        "allow_abort_jobs": True,
        "job_serializer": _packed,
        "job_deserializer": _unpacked,
        "ctx": {"url": redis, "lease_s": lease_s},
    }


def worker_settings() -> type[Any]:
    """What `arq lmpool.batch.WorkerSettings` takes: server and schedule are those of the environment."""
    schedule = os.environ.get(SCHEDULE_VARIABLE)
    return type("WorkerSettings", (), worker_options(None, Path(schedule) if schedule else None))


def work(redis: str | None, schedule: Path | None, jobs: int, lease_s: float, *, burst: bool) -> None:
    """Be a worker, until SIGTERM or Ctrl-C; with `burst` until nothing is queued."""
    Worker(**worker_options(redis, schedule, jobs, lease_s), burst=burst).run()


async def count_jobs(arq: ArqRedis, folder: Folder, manifest: Manifest, left: Sequence[int]) -> dict[str, Any]:
    """What has become of the jobs of some shards: how many are queued, under way, and which have failed why."""
    states = {"queued": 0, "under_way": 0}
    failed: dict[int, str] = {}
    for some in _in_parts(left):
        names = [job_name(manifest, folder, shard) for shard in some]
        async with arq.pipeline(transaction=True) as pipe:  # As `arq.jobs.Job.status`, of many at once.
            for name in names:
                pipe.get(result_key_prefix + name)
                pipe.exists(in_progress_key_prefix + name)
                pipe.zscore(QUEUE, name)
            told = await pipe.execute()
        for shard, result, is_under_way, score in zip(some, told[::3], told[1::3], told[2::3], strict=True):
            if result is not None:
                value = deserialize_result(result, deserializer=_unpacked).result
                failed[shard] = (
                    value.get("left", "it is gone") if isinstance(value, dict) else str(value) or "cancelled"
                )
            elif is_under_way:
                states["under_way"] += 1
            elif score is not None:
                states["queued"] += 1
    return {**states, "failed": failed}


async def cancel(arq: ArqRedis, output: str) -> int:
    """Take the jobs of a folder out of the queue, and have those under way stop; returns how many.

    They are found by the folder that they name, which may be gone.
    """
    output, cancelled = absolute(output), 0
    for some in _in_parts([name.decode() for name in await arq.zrange(QUEUE, 0, -1)]):
        packed = await arq.mget([job_key_prefix + name for name in some])
        ours = [name for name, job in zip(some, packed, strict=True) if job is not None and _output_of(job) == output]
        if not ours:
            continue
        async with arq.pipeline(transaction=True) as pipe:
            for name in ours:
                pipe.exists(in_progress_key_prefix + name)
            are_under_way = await pipe.execute()
            for name, is_under_way in zip(ours, are_under_way, strict=True):
                if is_under_way:
                    # As `Job.abort` tells its worker, which then waits for the job's end, one after another.
                    pipe.zadd(abort_jobs_ss, {name: timestamp_ms()})
                else:
                    pipe.zrem(QUEUE, name)
                    pipe.delete(job_key_prefix + name)
            await pipe.execute()
        cancelled += len(ours)
    return cancelled


def _output_of(packed: bytes) -> str | None:
    """The output of a job; None of one that is another function's."""
    job = deserialize_job_raw(packed, deserializer=_unpacked)
    return job[1][0]["output"] if job[0] == _FUNCTION else None
