"""Compute shards as jobs of arq, which are durable, scheduled and retried, on workers that see the same files.

A job is one shard, seconds to minutes of work; its prompts go through the pool's queue. When a worker is killed, arq
runs its jobs again: a shard may be computed twice, with the same result. Jobs and results are MessagePack: pickle, the
default of arq, would run code that a client wrote to the server. A client that may write jobs chooses their input and
output, so workers check both (`check_locations`).

A waiting job has no TTL, so a server with the policy volatile-lru does not evict it. If a server still loses jobs,
`find_jobs` queues these jobs again with the arguments of `submit`, which the output folder stores (`Submission`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, tzinfo
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any
from zoneinfo import ZoneInfo

import msgpack
import msgspec
import numpy as np
from redis.exceptions import RedisError

from lmpool.aio import await_beside, delays
from lmpool.batch.fetch import FILES_VARIABLE, check_locations
from lmpool.batch.folder import MANIFEST, SUBMISSION, Folder, Manifest, digest_of_file, open_folder
from lmpool.batch.lines import Index, open_source
from lmpool.batch.run import BatchSettings, Pool, Progress, Run, begin, counted
from lmpool.broker.bucket import named
from lmpool.broker.replies import is_refusal
from lmpool.broker.server import Server
from lmpool.errors import BatchError, BatchRefused, LMPoolError, SettingsError
from lmpool.producer import Producer

try:
    from arq import Retry, Worker, cron, func
    from arq.connections import ArqRedis
    from arq.constants import abort_jobs_ss, in_progress_key_prefix, job_key_prefix, result_key_prefix, retry_key_prefix
    from arq.jobs import deserialize_result, serialize_job
    from arq.utils import timestamp_ms
except ImportError as error:
    raise SettingsError("batch: its queue needs arq: pip install 'lmpool[bulk]', or use `lmpool batch run`") from error

QUEUE = "arq:lmpool:batch"  # Redis key of arq's queue for jobs of `lmpool batch`.
SCHEDULE_VARIABLE = "LMPOOL_BATCH_SCHEDULE"  # Environment variable: file of nightly runs for workers that `arq` starts.

_log = logging.getLogger("lmpool")
_FUNCTION, _NIGHTLY = "answer_shard", "nightly-"  # arq's name of the jobs of shards, and its prefix for nightly runs.
_MAX_JOBS_PER_CALL = 256  # Max jobs in one transaction or read, to bound the time for which the server is busy.
_EXPIRED = "job expired"  # The result that arq writes if the server lost the definition of a queued job.
_LEASE_S = 30.0  # Seconds until another worker takes over a job: long enough for a network interruption.
_DEFER_S, _MAX_TRIES = 30, 20  # Seconds between two tries of a job (arq: 60 for nightly runs), and max tries of a job.
# Max seconds of a job, and seconds for which arq keeps a job's result for `status`: a day, more than any shard takes.
_DAY_S = 86_400
_MAX_PAUSE_S = 10.0  # Max seconds between tries to reach a stopped server; each try writes a line to the log.

# The encoding of jobs and results: an exception is encoded as its text.
_packed = partial(msgpack.packb, default=str)
_unpacked = partial(msgpack.unpackb, strict_map_key=False)


class Submission(msgspec.Struct, frozen=True):
    """The arguments that all jobs of a run share; `source` is a URL, or an absolute path that all workers see."""

    source: str
    settings: BatchSettings
    pool: Pool


class ShardJob(Submission, frozen=True):
    """The arguments of a job: `output` is a URL or an absolute path; `index` has only the entries of this shard."""

    output: str
    index: dict[str, Any]
    shard: int


def connect(server: Server, client: Any = None) -> ArqRedis:
    """The client of arq for a server; SettingsError for a cluster, which arq cannot use."""
    if server.is_cluster:
        raise SettingsError("redis: arq cannot use a cluster. Give a single server for the jobs")
    pool = (client or server.client()).connection_pool
    return ArqRedis(pool, job_serializer=_packed, job_deserializer=_unpacked, default_queue_name=QUEUE)


@asynccontextmanager
async def connected(redis: str | None) -> AsyncIterator[ArqRedis]:
    """Open arq's client for a command, and close it after the block; the client's errors become lmpool's exceptions."""
    server = Server(redis)
    async with server.connected() as client:
        yield connect(server, client)


async def submit(producer: Producer, arq: ArqRedis, submission: Submission, output: str) -> dict[str, int]:
    """Queue a job for each shard that is not done. Return counts: new jobs, older jobs, done shards and all shards."""
    source, folder = await asyncio.to_thread(lambda: (open_source(submission.source), open_folder(output)))
    submission = msgspec.structs.replace(submission, source=source.location)
    # Share the folder's lock if the run has begun: workers may hold the lock for shards that were queued earlier.
    with folder.shared() if MANIFEST in await asyncio.to_thread(folder.listed) else folder.locked():
        index, manifest = await begin(producer, folder, source, submission.settings)
        done = {shard.number for shard in manifest.done}
        left = [shard for shard in range(manifest.shards) if shard not in done]
        if left:
            # Users without access to the server may read the folder, so do not write a URL with secrets to it.
            is_secret = named(source.location) != source.location
            kept = msgspec.structs.replace(submission, source="") if is_secret else submission
            with folder.explained():
                await asyncio.to_thread(folder.write, SUBMISSION, [msgspec.json.encode(kept)])
    jobs = await _queue(arq, folder, manifest, index, submission, left)
    return {"jobs": jobs, "there": len(left) - jobs, "done": len(done), "shards": manifest.shards}


async def _queue(
    arq: ArqRedis, folder: Folder, manifest: Manifest, index: Index, submission: Submission, shards: Sequence[int]
) -> int:
    """Queue the jobs of some shards, except jobs that the server already has. Return the number of new jobs."""
    size, jobs, shared = manifest.options.shard_lines, 0, msgspec.to_builtins(submission)
    for some in _in_parts(shards):
        now = timestamp_ms()
        # Queue many jobs as `ArqRedis.enqueue_job` does, but without a TTL: the server could evict a job with a TTL.
        async with arq.pipeline(transaction=True) as pipe:
            for shard in some:
                first = shard * size + 1
                begins, ends = np.searchsorted(index.duplicates, (first, first + size))
                duplicates = index.duplicates[begins:ends].tolist()
                part = {**index._asdict(), "starts": {shard: index.starts[shard]}, "duplicates": duplicates}
                job = {**shared, "output": folder.url, "index": part, "shard": shard}
                name = job_name(folder, manifest, shard)
                pipe.delete(result_key_prefix + name, retry_key_prefix + name)  # Remove the data of a failed job.
                pipe.zrem(abort_jobs_ss, name)  # Remove the cancellation of a job whose worker was killed.
                data = serialize_job(_FUNCTION, (job,), {}, None, now, serializer=_packed)
                pipe.set(job_key_prefix + name, data, nx=True)
                pipe.zadd(QUEUE, {name: now}, nx=True)
            replies = await pipe.execute()
        # A job counts as new if the server had no definition or no queue entry of this job.
        jobs += sum(map(any, zip(replies[2::4], replies[3::4], strict=True)))
    return jobs


def _in_parts(things: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for begins in range(0, len(things), _MAX_JOBS_PER_CALL):
        yield things[begins : begins + _MAX_JOBS_PER_CALL]


def job_name(folder: Folder, manifest: Manifest, shard: int) -> str:
    """The name of a shard's job: one job for each shard of a run in a folder."""
    return f"{_prefix(folder)}{manifest.run}-{shard}"


def _prefix(folder: Folder) -> str:
    """Return the prefix with which the names of all jobs of a folder begin."""
    return f"{hashlib.blake2b(folder.location.encode(), digest_size=8).hexdigest()}-"


async def _answer_shard(context: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Run a job: compute one shard, or return why the shard is not needed any more."""
    job = msgspec.convert(given, ShardJob, strict=False)
    check_locations(context["files"], job.source, job.output)
    return await _run_or_retry(context, _answer(context, job))


async def _run_or_retry(context: dict[str, Any], work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """Await the work of a job while the job's lease is renewed; raise Retry after an error that may pass."""
    try:
        return await await_beside(work, [_renew(context)])
    except LMPoolError as error:
        # Retry after errors that may pass, such as a missing worker or server, but not after wrong settings or files.
        may_pass = isinstance(error, BatchRefused) or getattr(error, "may_pass", not isinstance(error, SettingsError))
        if not may_pass or context["job_try"] >= _MAX_TRIES:
            raise
        raise Retry(defer=_DEFER_S) from error


async def _answer(context: dict[str, Any], job: ShardJob) -> dict[str, Any]:
    folder = await asyncio.to_thread(open_folder, job.output)
    manifest = await asyncio.to_thread(folder.read_manifest)
    if manifest is None or job_name(folder, manifest, job.shard) != context["job_id"]:
        return {"left": "the output is gone" if manifest is None else "the output now belongs to another run"}
    if job.settings.options != manifest.options or not 0 <= job.shard < manifest.shards:
        raise SettingsError(f"job {context['job_id']} does not fit the manifest of {folder.location}. Submit it again")
    index = Index(**{**job.index, "duplicates": np.array(job.index["duplicates"], np.int64)})
    async with context["reading"]:  # Under this lock, jobs that begin together fetch and digest their input once.
        source = await asyncio.to_thread(open_source, job.source)
        digest = await asyncio.to_thread(_digest, source.path, source.state)
    if digest != index.digest:
        changed = f"has the digest {digest} and had {index.digest} when it was submitted"
        raise BatchError(f"{named(job.source)} {changed}. Submit it again")
    producer = await _producer_of(context, job.pool)
    with folder.shared():
        await asyncio.to_thread(folder.check_run, manifest)  # Another run may have begun before this job had the lock.
        # Check whether the shard is done: a worker may have been killed after the shard, before the end of the job.
        if not await asyncio.to_thread(folder.done, manifest, job.shard):
            await Run(producer, folder, manifest, source, index, job.settings, Progress()).run_shards([job.shard])
        with folder.explained():
            await asyncio.to_thread(folder.sum_up, manifest)
    return {"done": job.shard}


@lru_cache(maxsize=64)  # Max inputs per worker whose digests are cached.
def _digest(path: Path, state: tuple[int, ...]) -> str:
    """The digest of a file, computed once for each state of the file."""
    return digest_of_file(path)


async def _producer_of(context: dict[str, Any], pool: Pool) -> Producer:
    """The producer of this process for a pool."""
    producers: dict[Pool, Producer] = context["producers"]
    if pool not in producers:
        producers[pool] = pool.producer(context["url"], "raise")
    await producers[pool].open()
    return producers[pool]


async def _renew(context: dict[str, Any]) -> None:
    """Renew the lease of a job: the key that marks the job as in progress. arq would set the key once, for a day."""
    lease_s = context["lease_s"]
    while True:
        with suppress(RedisError, OSError):  # At worst the lease expires, and another worker also computes the shard.
            await context["redis"].psetex(in_progress_key_prefix + context["job_id"], int(1000 * lease_s), b"1")
        await asyncio.sleep(lease_s / 3)


async def _close(context: dict[str, Any]) -> None:
    for producer in context["producers"].values():
        await producer.close()


class Nightly(BatchSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry of a schedule: a run that is submitted every day.

    Attributes:
        at: hour and minute, "02:30", in the worker's time zone (`ARQ_TIMEZONE`, UTC by default).
        source: path or URL of the input.
        output: the output folder; `{date}` in its name becomes the scheduled day, such as 2026-11-25.
        model, prefix: the model, and the prefix of the pool's keys.
    """

    at: Annotated[str, msgspec.Meta(pattern=r"^([01]?[0-9]|2[0-3]):[0-5]?[0-9]$")]
    source: str
    output: str
    model: str | None = None
    prefix: str = "lmpool"


class _Schedule(msgspec.Struct):
    run: list[Nightly]


def read_schedule(path: Path) -> list[Nightly]:
    """Read the schedule in a TOML file, in which each entry is a table `[[run]]`."""
    try:
        return msgspec.toml.decode(path.read_bytes(), type=_Schedule).run
    except (OSError, ValueError) as error:
        raise SettingsError(f"schedule: {path} is not a list of runs: {error}") from error


def _zone() -> tzinfo:
    """The time zone of schedules. arq itself uses `ARQ_TIMEZONE` only to show times."""
    name = os.environ.get("ARQ_TIMEZONE")
    try:
        return ZoneInfo(name) if name else UTC
    except (OSError, ValueError, KeyError) as error:
        raise SettingsError(f"ARQ_TIMEZONE: {name!r} is not a time zone, such as Europe/Paris") from error


def _nightly(entry: Nightly) -> Any:
    """The cron job of one entry of a schedule; its name is the same in all schedules that have the entry."""

    async def submit_run(context: dict[str, Any]) -> dict[str, Any]:
        return await _run_or_retry(context, _submit_entry(context, entry))

    hour, minute = map(int, entry.at.split(":"))
    digest = hashlib.blake2b(msgspec.json.encode(entry), digest_size=8).hexdigest()
    return cron(submit_run, name=_NIGHTLY + digest, hour=hour, minute=minute, max_tries=_MAX_TRIES)


async def _submit_entry(context: dict[str, Any], entry: Nightly) -> dict[str, Any]:
    # A job's id ends with its scheduled time in milliseconds. A later try may begin on the next day.
    day = datetime.fromtimestamp(int(context["job_id"].rpartition(":")[2]) / 1000, _zone()).date()
    pool, output = Pool(entry.model, entry.prefix), entry.output.replace("{date}", day.isoformat())
    submission = Submission(entry.source, msgspec.convert(entry, BatchSettings, from_attributes=True), pool)
    return await submit(await _producer_of(context, pool), context["redis"], submission, output)


def worker_options(
    redis: str | None, schedule: Path | None = None, jobs: int = 4, lease_s: float = _LEASE_S, files: Path | None = None
) -> dict[str, Any]:
    """The options of arq's `Worker`."""
    entries = read_schedule(schedule) if schedule is not None else []
    root, server, reading = (files or Path()).absolute(), Server(redis), asyncio.Lock()
    for entry in entries:
        check_locations(root, entry.source, entry.output)
    return {
        "functions": [func(_answer_shard, name=_FUNCTION)],
        "cron_jobs": list(map(_nightly, entries)),
        "timezone": _zone(),
        "redis_pool": connect(server),
        "queue_name": QUEUE,
        "on_shutdown": _close,
        "max_jobs": jobs,
        "job_timeout": _DAY_S,
        "keep_result": _DAY_S,
        "max_tries": _MAX_TRIES,
        "health_check_interval": 10,
        "allow_abort_jobs": True,
        "job_serializer": _packed,
        "job_deserializer": _unpacked,
        "ctx": {"url": redis, "server": server, "lease_s": lease_s, "files": root, "producers": {}, "reading": reading},
    }


def worker_settings() -> type[Any]:
    """The settings for `arq lmpool.batch.WorkerSettings`, from the environment."""
    schedule, files = (os.environ.get(name) for name in (SCHEDULE_VARIABLE, FILES_VARIABLE))
    options = worker_options(None, Path(schedule) if schedule else None, files=Path(files) if files else None)
    return type("WorkerSettings", (), options)


class BatchWorker(Worker):  # type: ignore[misc]  # arq has no types here.
    """arq's worker, which survives a restart of its server and does not start a job twice."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # Lifetime of the key that marks a job as in progress; `_renew` renews the key.
        self.in_progress_timeout_s = self.ctx["lease_s"]

    async def main(self) -> None:
        """Run jobs. If the server cannot be reached, try again until the server answers."""
        for pause in delays(_MAX_PAUSE_S):
            try:
                await super().main()
                return
            except (RedisError, OSError) as error:
                explained = self.ctx["server"].explain(error)
                if is_refusal(error):
                    raise explained from error
                _log.warning("%s: trying again until it answers", explained)
            await asyncio.sleep(pause)

    async def start_jobs(self, job_ids: list[bytes]) -> None:
        """Start jobs, except jobs that this worker runs already, and runs of other schedules that have not expired."""
        for job_id in job_ids:
            name, function = job_id.decode(), job_id.decode().partition(":")[0]
            is_others = function.startswith(_NIGHTLY) and function not in self.functions
            if name in self.tasks or (is_others and await self.pool.exists(job_key_prefix + name)):
                continue
            try:
                await super().start_jobs([job_id])
            except (RedisError, OSError):
                self._release_sem_dec_counter_on_complete()  # Release the slot that arq took for the job.
                raise

    async def close(self) -> None:
        """Close the worker, also if the server cannot be reached."""
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        self.tasks.clear()
        with suppress(RedisError, OSError):
            await super().close()
        await _close(self.ctx)


async def find_jobs(
    redis: str | None, folder: Folder, manifest: Manifest, shards: Sequence[int]
) -> tuple[dict[str, Any], str]:
    """Count the "queued" and "under_way" jobs, list the errors of "failed" jobs, and queue lost jobs again.

    The returned text is a note about jobs that the server lost; "" for none.
    """
    queued, under_way, failed, lost, note = 0, 0, dict[int, str](), list[int](), ""
    async with connected(redis) as arq:
        for some in _in_parts(shards):
            async with arq.pipeline(transaction=True) as pipe:  # Read jobs' states as `arq.jobs.Job.status` does.
                for name in (job_name(folder, manifest, shard) for shard in some):
                    pipe.get(result_key_prefix + name)
                    pipe.exists(in_progress_key_prefix + name)
                    pipe.zscore(QUEUE, name)
                    pipe.exists(job_key_prefix + name)
                replies = await pipe.execute()
            columns = (replies[at::4] for at in range(4))
            for shard, result, is_under_way, score, is_defined in zip(some, *columns, strict=True):
                value = None if result is None else deserialize_result(result, deserializer=_unpacked).result
                if isinstance(value, dict):
                    failed[shard] = value.get("left", "it is gone")
                elif value is not None and value != _EXPIRED:
                    failed[shard] = str(value) or "cancelled"
                elif is_under_way:
                    under_way += 1
                elif score is not None and is_defined:
                    queued += 1
                else:
                    lost.append(shard)
        with folder.explained():
            if lost or failed:  # Shards may be done that were not when the caller listed them.
                done = await asyncio.to_thread(folder.done, manifest)
                lost = [shard for shard in lost if shard not in done]
                failed = {shard: reason for shard, reason in failed.items() if shard not in done}
            # Queue no job again if `jobs.json` is empty: `cancel` has emptied the file.
            data = await asyncio.to_thread(folder.read, SUBMISSION) if lost else None
        if lost and data:
            note = f"the server lost {counted(len(lost), 'job')}"
            try:
                submission = msgspec.json.decode(data, type=Submission)
                if not submission.source:
                    raise BatchError("the URL of the input has a secret in it, which only the jobs had")
                with folder.shared():
                    source = await asyncio.to_thread(open_source, submission.source)
                    index = await asyncio.to_thread(source.index, manifest.options.shard_lines)
                    if index.digest != manifest.input.digest:
                        raise BatchError(f"{submission.source} has changed since it was submitted")
                    queued += await _queue(arq, folder, manifest, index, submission, lost)
                note += ": queued again"
            except LMPoolError as error:
                note += f", which cannot be queued again: {error}. Submit the input again"
    return {"queued": queued, "under_way": under_way, "failed": failed}, note


async def cancel(redis: str | None, output: str) -> int:
    """Remove a folder's queued jobs and stop its running jobs; return their number. The folder need not exist."""
    folder = await asyncio.to_thread(open_folder, output)
    prefix = _prefix(folder).encode()
    async with connected(redis) as arq:
        ours = [name.decode() for name in await arq.zrange(QUEUE, 0, -1) if name.startswith(prefix)]
        for some in _in_parts(ours):
            are_under_way = await arq.mget([in_progress_key_prefix + name for name in some])
            async with arq.pipeline(transaction=True) as pipe:
                for name, mark in zip(some, are_under_way, strict=True):
                    if mark is not None:  # Do as `Job.abort`, but do not wait for the job's end.
                        pipe.zadd(abort_jobs_ss, {name: timestamp_ms()})
                    else:
                        pipe.zrem(QUEUE, name)
                        pipe.delete(job_key_prefix + name)
                await pipe.execute()
    if SUBMISSION in await asyncio.to_thread(folder.listed):
        with suppress(BatchRefused), folder.explained(), folder.shared():  # `find_jobs` refuses the same folders.
            await asyncio.to_thread(folder.write, SUBMISSION, [])
    return len(ours)
