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
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import msgspec
import numpy as np
from redis.exceptions import RedisError

from lmpool.aio import end_tasks
from lmpool.batch.folder import Folder, Manifest, Shard
from lmpool.batch.lines import Index
from lmpool.batch.run import BatchSettings, answer_shard, begin, find_done, open_source
from lmpool.broker.server import Server
from lmpool.errors import BatchError, BatchRefused, LMPoolError, SettingsError
from lmpool.producer import Producer
from lmpool.settings import shown

try:
    from arq import Retry, Worker, cron, func
    from arq.connections import ArqRedis
    from arq.constants import abort_jobs_ss, in_progress_key_prefix, job_key_prefix, result_key_prefix, retry_key_prefix
    from arq.jobs import Job
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
_WAITING = ("queued", "deferred")


class ShardJob(msgspec.Struct, frozen=True):
    """What a worker needs to answer one shard.

    Attributes:
        source, output: absolute paths, the same for all workers.
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
    producer: Producer, arq: ArqRedis, source: Path, output: Path, settings: BatchSettings, pool: dict[str, Any]
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
    source, output = await asyncio.to_thread(lambda: (source.absolute(), output.absolute()))
    opened, folder = open_source(source), Folder(output)
    # Workers may hold it already, for shards that were queued before.
    with folder.shared() if (await asyncio.to_thread(folder.is_begun)) else folder.locked():
        index = await asyncio.to_thread(opened.index, settings.options.shard_lines)
        if index.is_empty:
            raise SettingsError(f"input: {shown(str(source))} is empty: there is nothing to ask")
        await producer.open()
        manifest = await begin(producer, folder, source, index, settings)
    given = {name: getattr(settings, name) for name in BatchSettings.__slots__}
    done = {shard.number for shard in manifest.done}
    size, jobs, there = settings.options.shard_lines, 0, 0
    for shard in range(manifest.shards):
        if shard in done:
            continue
        first = shard * size + 1
        duplicates = index.duplicates[(index.duplicates >= first) & (index.duplicates < first + size)].tolist()
        part = {**index._asdict(), "starts": {shard: index.starts[shard]}, "duplicates": duplicates}
        job = ShardJob(str(source), str(folder.path), given, pool, part, shard)
        name = job_name(manifest, folder.path, shard)
        await arq.delete(result_key_prefix + name, retry_key_prefix + name)  # Of one that has failed.
        queued = await arq.enqueue_job(_FUNCTION, msgspec.to_builtins(job), _job_id=name)
        jobs, there = (jobs, there + 1) if queued is None else (jobs + 1, there)
    return Queued(jobs, there, len(done), manifest.shards)


def job_name(manifest: Manifest, folder: Path, shard: int) -> str:
    """The name of a shard's job: the same for the same run, so that it is not queued twice."""
    run = msgspec.json.encode([str(folder), manifest.input, manifest.model.fingerprint, manifest.options])
    return f"{hashlib.blake2b(run, digest_size=8).hexdigest()}-{shard}"


async def _answer_shard(context: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The job: answer one shard, put it into place, and write that down."""
    job = msgspec.convert(given, ShardJob, strict=False)
    renewing = asyncio.create_task(_keep_lease(context["redis"], context["job_id"], context["lease_s"]))
    try:
        shard = await _answer(context, job)
    except LMPoolError as error:
        is_final = isinstance(error, (SettingsError, BatchError)) and not isinstance(error, BatchRefused)
        # No worker, no server, another model: the right ones may come. The last try tells why; arq would not.
        if is_final or context["job_try"] >= _MOST_TRIES:
            raise
        raise Retry(defer=_DEFER_S) from error
    finally:
        await end_tasks([renewing])
    return msgspec.to_builtins(shard)  # type: ignore[no-any-return]


async def _answer(context: dict[str, Any], job: ShardJob) -> Shard:
    path = Path(job.source)
    folder, source = Folder(Path(job.output), f".{os.getpid()}-{context['job_id']}"), open_source(path)
    settings = BatchSettings(**job.settings)
    index = Index(**{**job.index, "duplicates": np.array(job.index["duplicates"], np.int64)})
    if (size := (await asyncio.to_thread(path.stat)).st_size) != index.size:
        raise BatchError(f"{path} has {size} bytes and had {index.size} when this was submitted: submit it again")
    producer = await _producer_of(context, job.pool)
    with folder.shared():
        manifest = folder.read_manifest()
        if manifest is None:
            raise BatchError(f"{folder.path} has no manifest any more: submit it again")
        if job_name(manifest, folder.path, job.shard) != context["job_id"]:
            raise BatchError(f"{folder.path} is of another run now than when this was submitted: it is left alone")
        shard = None  # If it is there, a worker was killed before it wrote that down.
        if job.shard not in folder.shards():
            shard = await answer_shard(producer, folder, manifest, source, index, settings, job.shard)
        return await asyncio.to_thread(folder.record, job.shard, shard, find_done)


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


async def _open(context: dict[str, Any]) -> None:
    """What a worker begins with."""
    context.setdefault("producers", {})


async def _close(context: dict[str, Any]) -> None:
    """What a worker ends with."""
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
        output = Path(entry.output.replace("{date}", datetime.now().date().isoformat()))
        queued = await submit(producer, context["redis"], Path(entry.source), output, entry.settings, pool)
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


async def count_jobs(arq: ArqRedis, output: Path) -> dict[str, Any]:
    """How far the shards of a folder are: how many there are, are done, queued, under way, and have failed why.

    Raises:
        BatchError: it is no output folder.
    """
    folder, manifest = await asyncio.to_thread(_manifest_of, output)
    done = set(folder.shards())
    states = {"queued": 0, "under_way": 0}
    failed: dict[int, str] = {}
    for shard in set(range(manifest.shards)) - done:
        job = Job(job_name(manifest, folder.path, shard), arq, QUEUE, _unpacked)
        status = (await job.status()).value
        if status == "in_progress":
            states["under_way"] += 1
        elif status in _WAITING:
            states["queued"] += 1
        elif (found := await job.result_info()) is not None:
            failed[shard] = str(found.result) or "cancelled"
    return {"shards": manifest.shards, "done": len(done), **states, "failed": failed}


async def cancel(arq: ArqRedis, output: Path) -> int:
    """Take the jobs of a folder out of the queue, and have those under way stop; returns how many.

    Raises:
        BatchError: it is no output folder.
    """
    folder, manifest = await asyncio.to_thread(_manifest_of, output)
    cancelled = 0
    for shard in range(manifest.shards):
        name = job_name(manifest, folder.path, shard)
        job = Job(name, arq, QUEUE, _unpacked)
        status = (await job.status()).value
        if status in _WAITING:
            cancelled += int(await arq.zrem(QUEUE, name))
            await arq.delete(job_key_prefix + name)
        elif status == "in_progress":
            # As `Job.abort` tells its worker, which then waits for the job's end, one after another.
            await arq.zadd(abort_jobs_ss, {name: timestamp_ms()})
            cancelled += 1
    return cancelled


def _manifest_of(output: Path) -> tuple[Folder, Manifest]:
    folder = Folder(output.absolute())
    manifest = folder.read_manifest()
    if manifest is None:
        raise BatchError(f"{output} is no output of `lmpool batch`: it has no manifest.json")
    return folder, manifest
