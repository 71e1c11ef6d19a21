"""Shards as jobs of arq: durable, scheduled, retried, done by any number of workers that see the files.

A job is one shard, some seconds to minutes of work; the prompts in it go through the pool's own queue as always. arq
has a job done again whose worker has vanished, so a shard may be computed twice, and comes out the same. Jobs and
results are MessagePack: arq's default, pickle, would run code that others write to the server. A client that may write
jobs chooses their input and output, so a worker checks both (`check_locations`).

A waiting job has no lifetime in the server, which therefore never evicts it (volatile-lru). If a server loses jobs all
the same, `find_jobs` queues them again from what the output folder has (`Submission`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, cast
from weakref import WeakValueDictionary

import msgpack
import msgspec
import numpy as np
from redis.exceptions import RedisError

from lmpool.aio import delays, end_tasks
from lmpool.batch.lines import Index, Source
from lmpool.batch.run import BatchSettings, answer_shard, begin, find_done, open_source
from lmpool.batch.bucket import open_folder
from lmpool.batch.fetch import FILES_VARIABLE, absolute, check_locations, named
from lmpool.batch.folder import Folder, Manifest, Recorder, Submission, digest_of_file, shard_name
from lmpool.broker.replies import is_refusal
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

_log = logging.getLogger("lmpool")
_FUNCTION = "answer_shard"
# Jobs of one transaction or of one read: bounds what one call holds in memory and how long the server is busy.
_MAX_JOBS_PER_CALL = 256
# The result, in arq, of a job that is in the queue and whose definition the server has lost.
_EXPIRED = "job expired"
_LEASE_S = 30.0
_DEFER_S, _MAX_TRIES = 30, 20
_TIMEOUT_S, _KEEP_S = 86_400, 86_400
_REQUEST_S = 3600.0
# After this many seconds without an error of the server the same error is logged again.
_STEADY_S = 30.0


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


def connect(redis: str | Server | None) -> ArqRedis:
    """arq's client of a server.

    Raises:
        SettingsError, ServerUnreachable: as `Server`; a cluster is none that arq can use.
    """
    server = redis if isinstance(redis, Server) else Server(redis)
    if server.is_cluster:
        raise SettingsError("redis: arq cannot use a cluster: give a single server for the jobs")
    return ArqRedis(
        server.client().connection_pool,
        job_serializer=_packed,
        job_deserializer=_unpacked,
        default_queue_name=QUEUE,
    )


def _packed(value: dict[str, Any]) -> bytes:
    return cast(bytes, msgpack.packb(value, default=str))  # Exceptions become their texts.


def _unpacked(data: bytes) -> dict[str, Any]:
    return cast(dict[str, Any], msgpack.unpackb(data, strict_map_key=False))


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
    given = {name: getattr(settings, name) for name in BatchSettings.__slots__}
    # Workers may hold it already, for shards that were queued before.
    with folder.shared() if (await asyncio.to_thread(folder.is_begun)) else folder.locked():
        await asyncio.to_thread(folder.remove_temporary)
        index = await asyncio.to_thread(opened.index, settings.options.shard_lines)
        if index.is_empty:
            raise SettingsError(f"input: {shown(named(source))} is empty: there is nothing to ask")
        await producer.open()
        manifest = await begin(producer, folder, source, index, settings)
        done = {shard.number for shard in manifest.done}
        left = [shard for shard in range(manifest.shards) if shard not in done]
        submission = Submission(manifest.run, source, given, pool)
        if left:
            # The folder may be read by others than the server, where the job has the whole URL.
            kept = msgspec.structs.replace(submission, source=source if named(source) == source else "")
            with folder.explained():
                await asyncio.to_thread(folder.write_submission, kept)
    jobs = await _queue(arq, folder, manifest, index, submission, output, left)
    return Queued(jobs, len(left) - jobs, len(done), manifest.shards)


async def _queue(
    arq: ArqRedis,
    folder: Folder,
    manifest: Manifest,
    index: Index,
    asked: Submission,
    output: str,
    shards: Sequence[int],
) -> int:
    """Queue the jobs of some shards, except jobs that the server has; returns how many are new."""
    size, jobs = manifest.options.shard_lines, 0
    for some in _in_parts(shards):
        now = timestamp_ms()
        # As `ArqRedis.enqueue_job`, of many at once; workers see all of them or none.
        async with arq.pipeline(transaction=True) as pipe:
            for shard in some:
                first = shard * size + 1
                begins, ends = np.searchsorted(index.duplicates, (first, first + size))
                duplicates = index.duplicates[begins:ends].tolist()
                part = {**index._asdict(), "starts": {shard: index.starts[shard]}, "duplicates": duplicates}
                made = ShardJob(asked.source, output, asked.settings, asked.pool, part, shard)
                name = job_name(manifest, folder, shard)
                pipe.delete(result_key_prefix + name, retry_key_prefix + name)  # Of one that has failed.
                data = serialize_job(_FUNCTION, (msgspec.to_builtins(made),), {}, None, now, serializer=_packed)
                # Without a lifetime: the server would evict it while it waits.
                pipe.set(job_key_prefix + name, data, nx=True)
                pipe.zadd(QUEUE, {name: now}, nx=True)
            told = await pipe.execute()
        jobs += sum(map(any, zip(told[1::3], told[2::3], strict=True)))  # Of definition and place in the queue.
    return jobs


def _in_parts(things: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """As many at a time as are sent at once."""
    for begin_at in range(0, len(things), _MAX_JOBS_PER_CALL):
        yield things[begin_at : begin_at + _MAX_JOBS_PER_CALL]


def job_name(manifest: Manifest, folder: Folder, shard: int) -> str:
    """The name of a shard's job: the same for the same run, so that it is not queued twice."""
    run = msgspec.json.encode([folder.location, manifest.run])
    return f"{hashlib.blake2b(run, digest_size=8).hexdigest()}-{shard}"


async def _answer_shard(context: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The job: answer one shard, put it into place, and write that down; or tell why it is of no use any more."""
    job = msgspec.convert(given, ShardJob, strict=False)
    check_locations(context["files"], job.source, job.output)
    renewing = asyncio.create_task(_keep_lease(context["redis"], context["job_id"], context["lease_s"]))
    try:
        # arq's own worker starts a job twice in one process when the mark of being under way expires or is evicted.
        async with context["at_work"].setdefault(context["job_id"], asyncio.Lock()):
            return await _answer(context, job)
    except LMPoolError as error:
        is_ours = isinstance(error, BatchRefused) or (isinstance(error, BatchError) and error.may_pass)
        is_final = isinstance(error, (SettingsError, BatchError)) and not is_ours
        # No worker, no server, another model: the right ones may come. The last try tells why; arq would not.
        if is_final or context["job_try"] >= _MAX_TRIES:
            raise
        raise Retry(defer=_DEFER_S) from error
    finally:
        await end_tasks([renewing])


async def _answer(context: dict[str, Any], job: ShardJob) -> dict[str, Any]:
    # Where the output has been removed, or is another run's by now, nobody waits for this.
    folder = await asyncio.to_thread(open_folder, job.output)
    manifest = await asyncio.to_thread(folder.read_manifest)
    if manifest is None or job_name(manifest, folder, job.shard) != context["job_id"]:
        return {"left": "the output is gone" if manifest is None else "the output is of another run now"}
    settings = BatchSettings(**job.settings)
    if settings.options != manifest.options or not 0 <= job.shard < manifest.shards:
        raise SettingsError(f"job {context['job_id']} does not fit the manifest of {folder.location}: submit it again")
    index = Index(**{**job.index, "duplicates": np.array(job.index["duplicates"], np.int64)})
    async with context["reading"]:  # Jobs that begin together fetch and digest one input once.
        source = await asyncio.to_thread(_same_source, job.source, index)
    producer, name = await _producer_of(context, job.pool), shard_name(job.shard, manifest.options.format)
    with folder.shared():
        shards = []  # If it is done, a worker was killed before the manifest listed it.
        if not await asyncio.to_thread(folder.is_done, job.shard, name):
            shards = [await answer_shard(producer, folder, manifest, source, index, settings, job.shard)]
        recorder = context["recorders"].setdefault(f"{job.output} {manifest.run}", Recorder())
        await recorder.record(folder, shards, find_done)
    return {"done": [msgspec.to_builtins(shard) for shard in shards]}


def _same_source(location: str, index: Index) -> Source:
    """The input, if it is still what was submitted.

    Raises:
        BatchError: it is another one.
    """
    source = open_source(location)
    status = source.path.stat()
    state = (str(source.path), status.st_size, status.st_mtime_ns, status.st_ino)
    now = f"has {status.st_size} bytes and had {index.size}"
    if status.st_size == index.size:
        digest = _digests[state] = _digests.get(state) or digest_of_file(source.path)
        if digest == index.digest:
            return source
        now = f"has the digest {digest} and had {index.digest}"
    raise BatchError(f"{named(location)} {now} when this was submitted: submit it again")


# Path, size, time and number of a file -> its digest.
_digests: dict[tuple[str, int, int, int], str] = {}


async def _producer_of(context: dict[str, Any], pool: dict[str, Any]) -> Producer:
    """The producer of this process for a model."""
    producers: dict[str, Producer] = context.setdefault("producers", {})
    key = msgpack.packb(pool).hex()
    if key not in producers:
        # Of the job only these: it may not choose another server, for instance.
        given = {name: pool[name] for name in ("model", "prefix", "timeout")}
        options = {"cache_bytes": 0, "keep_answers": False, "when_absent": "raise", "priority": "bulk"}
        producers[key] = Producer(redis=context["url"], **{**given, **options})
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
    """What a worker begins with, once: it may begin again when its server has been away."""
    if "shortening" not in context:
        shortening = asyncio.create_task(_shorten_leases(context["redis"], context["lease_s"]))
        context.update(producers={}, recorders={}, reading=asyncio.Lock(), shortening=shortening)
        context["at_work"] = WeakValueDictionary[str, asyncio.Lock]()


async def _close(context: dict[str, Any]) -> None:
    """What a worker ends with, also one that has never found its server."""
    await end_tasks([context["shortening"]] if "shortening" in context else [])
    for producer in context.get("producers", {}).values():
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
    redis: str | None,
    schedule: Path | None = None,
    jobs: int = 4,
    lease_s: float = _LEASE_S,
    files: Path | None = None,
) -> dict[str, Any]:
    """The options of arq's `Worker`, for its command too.

    Args:
        redis: URL of the server of pool and jobs; None as for `Producer`.
        schedule: a file for `read_schedule`.
        jobs: shards at once.
        lease_s: seconds after which a shard is another worker's when this one has vanished.
        files: the folder below which jobs may read and write files; None for the working directory.

    Raises:
        SettingsError: the URL or the schedule is malformed, or the schedule names files elsewhere.
    """
    entries = read_schedule(schedule) if schedule is not None else []
    root, server = (files or Path()).absolute(), Server(redis)
    for entry in entries:
        check_locations(root, entry.source, entry.output)
    return {
        "functions": [func(_answer_shard, name=_FUNCTION)],
        "cron_jobs": [_nightly(entry, number) for number, entry in enumerate(entries)],
        "redis_pool": connect(server),
        "queue_name": QUEUE,
        "on_startup": _open,
        "on_shutdown": _close,
        "max_jobs": jobs,
        "job_timeout": _TIMEOUT_S,
        "keep_result": _KEEP_S,
        "max_tries": _MAX_TRIES,
        "health_check_interval": 10,
        "allow_abort_jobs": True,
        "job_serializer": _packed,
        "job_deserializer": _unpacked,
        "ctx": {"url": redis, "server": server, "lease_s": lease_s, "files": root},
    }


def worker_settings() -> type[Any]:
    """What `arq lmpool.batch.WorkerSettings` takes: server, schedule and files are those of the environment."""
    schedule, files = (os.environ.get(name) for name in (SCHEDULE_VARIABLE, FILES_VARIABLE))
    options = worker_options(None, Path(schedule) if schedule else None, files=Path(files) if files else None)
    return type("WorkerSettings", (), options)


class BatchWorker(Worker):  # type: ignore[misc]  # arq has no types here.
    """arq's worker, which goes on when its server was away, and starts no job that it is doing already."""

    async def main(self) -> None:
        """Work, until nothing is queued if that was asked for; while the server is away, try again and again.

        Raises:
            AuthenticationFailed: the server refuses this user, or a command.
        """
        server: Server = self.ctx["server"]
        logged, pauses = "", delays()
        while True:
            began = monotonic()
            try:
                await super().main()
                return
            except (RedisError, OSError) as error:
                explained = server.explain(error)
                if is_refusal(error):
                    raise explained from error
                if str(explained) != logged or monotonic() - began > _STEADY_S:
                    _log.warning("%s: trying again until it answers", explained)
                logged = str(explained)
            await asyncio.sleep(next(pauses))

    async def start_jobs(self, job_ids: list[bytes]) -> None:
        """Start jobs that no worker is doing. The mark of a job that this one is doing may have expired."""
        for job_id in job_ids:
            if job_id.decode() in self.tasks:
                continue
            try:
                await super().start_jobs([job_id])
            except (RedisError, OSError):
                # arq has taken a slot for the job, and does not release it when the server fails.
                if self.job_counter > sum(not task.done() for task in self.tasks.values()):
                    self._release_sem_dec_counter_on_complete()
                raise

    async def close(self) -> None:
        """End, also while the server is away."""
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        self.tasks.clear()
        with suppress(RedisError, OSError):
            await super().close()
        await _close(self.ctx)


def work(
    redis: str | None, schedule: Path | None, jobs: int, lease_s: float, files: Path | None, *, burst: bool
) -> None:
    """Be a worker, until SIGTERM or Ctrl-C; with `burst` until nothing is queued."""
    BatchWorker(**worker_options(redis, schedule, jobs, lease_s, files), burst=burst).run()


async def find_jobs(
    arq: ArqRedis, folder: Folder, manifest: Manifest, submission: Submission, output: str, left: Sequence[int]
) -> dict[str, Any]:
    """See what has become of the jobs of some shards, and queue jobs again that the server has lost.

    Returns:
        "queued" and "under_way": how many; "failed": shard -> why; "lost": how many were lost; "why": why these were
        not queued again, "" where they are queued.
    """
    states, missing = await _count(arq, folder, manifest, left)
    suffix, why = manifest.options.format, ""
    # A job that has ended since the folder was read has put its shard into place.
    missing = [n for n in missing if not await asyncio.to_thread(folder.is_done, n, shard_name(n, suffix))]
    missing = [] if submission.is_cancelled else missing
    if missing and not submission.source:
        why = "the URL of the input has a secret in it, which only the jobs had"
    elif missing:
        try:
            source = await asyncio.to_thread(open_source, submission.source)
            index = await asyncio.to_thread(source.index, manifest.options.shard_lines)
            if index.digest != manifest.input.digest:
                raise BatchError(f"{submission.source} has another digest than when it was submitted")
            with folder.shared():  # It refuses a folder of another user, who may have written the submission.
                states["queued"] += await _queue(arq, folder, manifest, index, submission, absolute(output), missing)
        except LMPoolError as error:
            why = str(error)
    return {**states, "lost": len(missing), "why": why}


async def _count(
    arq: ArqRedis, folder: Folder, manifest: Manifest, left: Sequence[int]
) -> tuple[dict[str, Any], list[int]]:
    """The states of the jobs of some shards, and the shards whose jobs the server does not have."""
    states, failed, missing = {"queued": 0, "under_way": 0}, dict[int, str](), list[int]()
    for some in _in_parts(left):
        names = [job_name(manifest, folder, shard) for shard in some]
        async with arq.pipeline(transaction=True) as pipe:  # As `arq.jobs.Job.status`, of many at once.
            for name in names:
                pipe.get(result_key_prefix + name)
                pipe.exists(in_progress_key_prefix + name)
                pipe.zscore(QUEUE, name)
                pipe.exists(job_key_prefix + name)
            told = await pipe.execute()
        for at, shard in enumerate(some):
            result, is_under_way, score, is_there = told[4 * at : 4 * at + 4]
            value = None if result is None else deserialize_result(result, deserializer=_unpacked).result
            if isinstance(value, dict):
                failed[shard] = value.get("left", "it is gone")
            elif value is not None and value != _EXPIRED:
                failed[shard] = str(value) or "cancelled"
            elif is_under_way:
                states["under_way"] += 1
            elif score is not None and is_there:
                states["queued"] += 1
            else:
                missing.append(shard)
    return {**states, "failed": failed}, missing


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
    await asyncio.to_thread(_note_cancelled, output)  # At the end: the folder may be a bucket that is out of reach.
    return cancelled


def _note_cancelled(output: str) -> None:
    """Have `find_jobs` queue nothing again, if the folder is there."""
    # One that is refused, because a run holds it or another user owns it, is refused by `find_jobs` too.
    folder = open_folder(output)
    with suppress(BatchRefused):
        manifest = folder.read_manifest()
        submission = None if manifest is None else folder.read_submission(manifest)
        if submission is not None:
            with folder.explained(), folder.shared():
                folder.write_submission(msgspec.structs.replace(submission, is_cancelled=True))


def _output_of(packed: bytes) -> str | None:
    """The output of a job; None of one that is another function's."""
    job = deserialize_job_raw(packed, deserializer=_unpacked)
    return job[1][0]["output"] if job[0] == _FUNCTION else None
