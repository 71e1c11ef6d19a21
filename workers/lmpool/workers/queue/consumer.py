"""Consuming a model's queue: new jobs, those of workers that fell silent, and the jobs that are in flight here."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from lmpool.broker import scripts
from lmpool.broker.connection import CommandConnection
from lmpool.broker.readers import Entries, Fields, entries_by_stream, read_queue
from lmpool.errors import (
    ProtocolError,
    ServerError,
    WorkerError,
)
from lmpool.protocol.job import MAX_JOB_BYTES, Failure, Job, unpack_job
from lmpool.protocol.keys import (
    BULK,
    GROUP,
    HOME_FIELD,
    JOB_FIELD,
    LIFETIME_FIELD,
    PRIORITY_FIELD,
    SINCE_FIELD,
    ModelKeys,
)
from lmpool.protocol.model_info import LIMITS, ModelInfo
from lmpool.protocol.prompt import decode_ids, digest_of, query_digest
from lmpool.protocol.query import (
    FreshQuery,
    GenerateQuery,
    HeadQuery,
    PickQuery,
    PositionsQuery,
    Query,
    TrieQuery,
    unpack_query,
)
from lmpool.workers.execution.contract import BackendJob
from lmpool.workers.metrics.counters import Counters
from lmpool.workers.metrics.tracing import JobTrace, JobTraces
from lmpool.workers.queue.refusal import refusal

STALE_S = 1.0
"""Seconds after which it is worth a check whether a client still waits for a job."""

_log = logging.getLogger("lmpool.worker")

_MAX_MS_DIGITS = 15
_EVER_MS = 10**_MAX_MS_DIGITS
# A server's clock that is set back by less leaves the queue alone.
_MAX_AHEAD_MS = 3_600_000
_MAX_CLAIMED_BYTES = 512 * 1024
_CURSOR_TTL_MS = 3_600_000
_LONG_SILENT_MS = int(LIMITS["lease_s"][1] * 1000)
_REASONS_TTL_MS = 3_600_000
_MAX_REASONS = 1000
_MAX_REASON_TEXT = 500
_UNKNOWN_DIGEST = bytes(16)
# For how long what is at its home waits there before another worker takes it, which computes it from the beginning.
_MIN_PATIENCE_S = 0.25
_MAX_PATIENCE_S = 60.0
_PATIENT_STEPS = 4


class InFlightJob(msgspec.Struct, eq=False, gc=False):
    """One job of the queue that this worker holds, from taking its entry to ending it.

    Attributes:
        entry_id: its id in the shared stream; of a lane a space and the worker whose it is follow.
        digest: what is waited for: of the prompt, or of the query about it; 16 zero bytes when it does not decode.
        backend_job: what the backend is to compute, or None when the job cannot be served.
        overwrite: the stored row is damaged and must be replaced.
        query: what is wanted instead of the row and made from it.
        failure: why it ends without a row or an answer; None as long as nothing has failed.
        is_dead: it goes to the dead letters when it ends.
        fields: what else its entry says, of a job that can be served.
        since: monotonic time when the worker took it.
        checked_at: monotonic time of the last check whether a client waits for it; 0 before the first.
        host: whose shared memory its first client reads (`Job.host`).
        trace: its part of the trace that its client has named; None for none.
    """

    entry_id: bytes
    digest: bytes
    backend_job: BackendJob | None = None
    overwrite: bool = False
    query: TrieQuery | PickQuery | None = None
    failure: Failure | None = None
    is_dead: bool = False
    fields: Fields = msgspec.field(default_factory=dict)
    since: float = msgspec.field(default_factory=time.monotonic)
    checked_at: float = 0.0
    host: bytes = b""
    trace: JobTrace | None = None

    def failing(self, failure: Failure) -> InFlightJob:
        """The job, which is now to end with a failure."""
        self.failure = failure
        return self


JobsByDigest = Mapping[bytes, Mapping[bytes, InFlightJob]]
"""Digest -> entry id -> job; the digest is that of the prompt that is computed, or of what is waited for."""


class InFlightJobs:
    """All jobs that a worker holds, by prompt: the backend has a prompt once, however many jobs ask for it.

    Attributes:
        damaged: digests of those prompts whose rows in the cache cannot be read, so that new ones must replace them.
    """

    def __init__(self) -> None:
        self._prompts: dict[bytes, dict[bytes, InFlightJob]] = {}
        self.damaged: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._prompts)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._prompts

    def __getitem__(self, digest: bytes) -> Mapping[bytes, InFlightJob]:
        return self._prompts[digest]

    def add(self, job: InFlightJob, backend_job: BackendJob) -> bool:
        """Hold a job; True when its prompt is a new one."""
        jobs = self._prompts.get(backend_job.digest)
        if jobs is None:
            self._prompts[backend_job.digest] = {job.entry_id: job}
            return True
        jobs[job.entry_id] = job
        return False

    def entry_ids(self) -> list[bytes]:
        """The stream entries of all jobs."""
        return [entry_id for jobs in self._prompts.values() for entry_id in jobs]

    def by_prompt(self, digests: Iterable[bytes]) -> dict[bytes, dict[bytes, InFlightJob]]:
        """A copy of the jobs that ask for some prompts now; those of prompts that are not held are left out."""
        return {digest: self._prompts[digest].copy() for digest in digests if digest in self._prompts}

    def backend_job(self, digest: bytes) -> BackendJob:
        """What the backend is to compute for a prompt that is held."""
        backend_jobs = [job.backend_job for job in self._prompts[digest].values()]
        # It yields to others only as long as all do that ask for it.
        backend_job = next((job for job in backend_jobs if job is not None and not job.bulk), backend_jobs[0])
        assert backend_job is not None
        return backend_job

    def adapters_of(self, digests: Iterable[bytes]) -> set[str]:
        """The adapters that some prompts name; prompts that are not held are left out."""
        return {self.backend_job(digest).adapter for digest in digests if digest in self._prompts}

    def wants_row(self, digest: bytes) -> bool:
        """Whether some job wants the row of a prompt itself, rather than the answer to a query about it."""
        return any(job.query is None for job in self._prompts[digest].values())

    def mark_damaged(self, digest: bytes) -> None:
        """Have a new row replace the one that the cache has of a prompt, if it is held still."""
        if digest in self._prompts:
            self.damaged.add(digest)

    def remove(self, digest: bytes, entry_ids: Iterable[bytes]) -> bool:
        """Let go of jobs; True when none is left that asks for the prompt."""
        jobs = self._prompts[digest]
        for entry_id in entry_ids:
            jobs.pop(entry_id, None)
        if jobs:
            return False
        del self._prompts[digest]
        self.damaged.discard(digest)
        return True

    def release(self, ended: Mapping[bytes, Iterable[bytes]]) -> list[bytes]:
        """Let go of jobs that have ended; returns the digests of prompts that were asked for again meanwhile.

        Args:
            ended: digest of the prompt -> entry ids of the jobs. Prompts that are not held any more are left out: the
                backend broke meanwhile, or nobody waits for them.
        """
        return [
            digest
            for digest, entry_ids in ended.items()
            if digest in self._prompts and not self.remove(digest, entry_ids)
        ]


class UnwantedJobs:
    """Finds jobs that nobody waits for any more, and removes them.

    Args:
        redis: a client for what is rare.
        keys: the model's keys.
        counters: forget what they know of jobs that are removed.
    """

    def __init__(self, redis: Redis, keys: ModelKeys, counters: Counters) -> None:
        self._redis = redis
        self._keys = keys
        self._counters = counters

    async def remove(self, jobs: Sequence[InFlightJob]) -> set[bytes]:
        """Remove those of some jobs that nobody waits for; none of them when the server cannot tell.

        Returns:
            the entry ids of those that were removed.
        """
        removed: set[bytes] = set()
        for at in range(0, len(jobs), scripts.MAX_AT_ONCE):
            part = jobs[at : at + scripts.MAX_AT_ONCE]
            keys = [self._keys.jobs, *(self._keys.waiting + job.digest for job in part)]
            args = [value for job in part for value in (job.entry_id, _until_ms(job))]
            try:
                numbers = await scripts.DROP_UNWANTED(self._redis, keys, args)
            except (RedisError, OSError):
                break
            removed |= {part[number - 1].entry_id for number in numbers}
        for entry_id in removed:
            self._counters.queued_ms.pop(entry_id, None)
        return removed


class Claimed(NamedTuple):
    """Jobs taken over from silent workers.

    Attributes:
        jobs: the jobs.
        alone: it is one job that must run with no other beside it; when there is none, such a job waits
            for a worker that holds nothing.
        further: how many more claims are this worker's share of a walk through all that workers hold.
    """

    jobs: list[InFlightJob]
    alone: bool
    further: int = 0


class Consumer:
    """Reads the queue of one model: the worker's own lane, the shared stream, and with nothing to do others' lanes.

    Args:
        redis: a client for what is rare.
        reader: a connection for blocking reads, used by nothing else.
        keys: the model's keys.
        info: the model's info.
        worker_id: the name of this consumer.
        max_deliveries: deliveries after which a job is given up.
        unwanted: removes what nobody waits for.
        counters: are told since when jobs have waited.
        traces: begins the traces of jobs; None where they are not traced.

    Attributes:
        is_alone: no other worker serves the model, as far as is known: there are no others' lanes.
    """

    def __init__(
        self,
        redis: Redis,
        reader: CommandConnection,
        keys: ModelKeys,
        info: ModelInfo,
        worker_id: str,
        max_deliveries: int,
        unwanted: UnwantedJobs,
        counters: Counters,
        traces: JobTraces | None = None,
    ) -> None:
        self._traces = traces
        self._redis = redis
        self._reader = reader
        self._keys = keys
        self._info = info
        self._fingerprint, self._is_trie = info.fingerprint, info.is_trie
        self._worker_id = worker_id
        self._lane, self._of_lane = keys.lane(worker_id), b" " + worker_id.encode()
        self._max_deliveries = max_deliveries
        self._unwanted = unwanted
        self._counters = counters
        self.is_alone = False
        # By how much the server's clock is ahead of this machine's.
        self._ahead_s = 0.0

    async def ensure_group(self) -> None:
        """Create the shared stream and its group, from the beginning: jobs queued before it must be seen."""
        seconds, micros = await self._reader.call(b"TIME")
        self._ahead_s = int(seconds) + int(micros) / 1e6 - time.time()
        await self._create_group(self._keys.jobs)
        await self.keep_queue()

    async def open_lane(self) -> None:
        """Create the worker's lane and its group, once the worker is known: others remove lanes of those that go."""
        await self._create_group(self._lane)

    async def _create_group(self, stream: bytes) -> None:
        try:
            await self._redis.xgroup_create(stream, GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    async def keep_queue(self) -> None:
        """Have the queue not expire, and replace streams whose ids have run ahead of the clock (`keep_queue.lua`)."""
        for keys in (self._keys.queue, (self._lane,)):
            dropped = await scripts.KEEP_QUEUE(self._redis, keys, [GROUP, _MAX_AHEAD_MS])
            if dropped >= 0:
                _log.warning(
                    "the job stream of %r was replaced: somebody has added an entry with an id of their own; "
                    "%d prompts were dropped, and clients ask for them again after a lease",
                    self._info.name,
                    dropped,
                )

    async def measure(self) -> None:
        """Tell the counters how long the queue is."""
        asked_at = time.time()
        self._counters.note_queue(await read_queue(self._redis, self._keys), asked_at)

    async def take(self, count: int, block_ms: int) -> list[InFlightJob]:
        """Take new jobs that somebody waits for, up to `count` of each stream; waits up to `block_ms` for the first.

        Entries that are too large for the connection end it; once their lease has passed they come by way of `claim`,
        which looks at sizes first, and so do those that were sent along with them.
        """
        command = (b"XREADGROUP", b"GROUP", GROUP, self._worker_id, b"COUNT", count, b"BLOCK", block_ms)
        try:
            reply = await self._reader.call(*command, b"STREAMS", self._lane, self._keys.jobs, b">", b">")
        except ServerError as error:
            if "NOGROUP" not in str(error):
                raise
            await self.ensure_group()
            await self.open_lane()
            return []
        try:
            streams = entries_by_stream(reply)
        except ProtocolError as error:
            self._reader.hang_up(error)
            raise
        jobs = []
        for stream, entries in streams.items():
            if stream == self._lane:
                entries = [(entry_id + self._of_lane, fields) for entry_id, fields in entries]
            jobs += await self._still_wanted(self._read_entries(entries))
        return jobs

    def _read_entries(self, entries: Entries) -> list[InFlightJob]:
        """The jobs of entries of one stream."""
        decoded = [(entry_id, _decoded(fields.pop(JOB_FIELD, b"")), fields) for entry_id, fields in entries]
        are_valid = self._are_valid([job.ids for _, job, _ in decoded if isinstance(job, Job)])
        jobs = []
        for entry_id, job, fields in decoded:
            jobs.append(self._read(entry_id, job, fields, is_valid=are_valid))
            if self._traces is not None:
                self._trace(jobs[-1], job, fields)
            if SINCE_FIELD in fields and _milliseconds(since := fields[SINCE_FIELD]) < _EVER_MS:
                self._counters.queued_ms[entry_id] = since
            if HOME_FIELD in fields:
                self._counters.homed += fields[HOME_FIELD] == self._of_lane[1:]
        return jobs

    def _trace(self, job: InFlightJob, message: Job | ProtocolError, fields: Fields) -> None:
        if self._traces is not None and isinstance(message, Job):
            job.trace = self._traces.taken(message, _since_ms(job.entry_id, fields) - 1000 * self._ahead_s)

    def _are_valid(self, prompts: list[bytes]) -> bool:
        """Whether all prompts are within the limits of the model, seen at a fraction of the time of one by one."""
        most = 4 * self._info.max_prompt_tokens
        if not prompts or not all(0 < len(ids) <= most and len(ids) % 4 == 0 for ids in prompts):
            return False
        return int(decode_ids(b"".join(prompts)).max()) < self._info.vocab_size

    async def refill(self) -> None:
        """Have the backlog move up: what usually does so, the end of a job, need not come to an idle worker."""
        while await scripts.REFILL(self._redis, [self._keys.jobs], []):
            pass

    async def steal(self, count: int, step_s: float) -> None:
        """Have jobs of another worker's lane moved to that of this one, which has nothing to do.

        Args:
            count: how many at most.
            step_s: how long a step takes here, and so most likely there.
        """
        # Before its first step a worker does not know.
        patience_s = _MIN_PATIENCE_S if step_s == math.inf else max(_MIN_PATIENCE_S, _PATIENT_STEPS * step_s)
        patience_ms = int(1000 * min(_MAX_PATIENCE_S, patience_s))
        stolen = int(await scripts.STEAL(self._redis, [self._keys.jobs], [self._worker_id, count, patience_ms]))
        self.is_alone = stolen < 0
        self._counters.stolen += max(0, stolen)

    async def close_lane(self) -> None:
        """Give what lies in this worker's lane, and was not taken, to others; nothing more is placed there."""
        while await scripts.CLOSE_LANE(self._redis, [self._keys.jobs], [self._worker_id]):
            pass

    async def _still_wanted(self, jobs: list[InFlightJob]) -> list[InFlightJob]:
        """Those jobs that a client waits for; the others are removed. Jobs that are new are not checked."""
        before = (time.time() + self._ahead_s - STALE_S) * 1000
        if not jobs or _queued_ms(jobs[0].entry_id) >= before:
            return jobs  # Entries come in the order of their ages.
        stale = [job for job in jobs if job.backend_job is not None and _queued_ms(job.entry_id) < before]
        removed = await self._unwanted.remove(stale)
        return [job for job in jobs if job.entry_id not in removed]

    async def claim(self, count: int, in_flight: Collection[bytes]) -> Claimed:
        """Take over jobs whose lease has passed.

        Args:
            count: how many jobs at most.
            in_flight: the entries that this worker is at work on: none of these.
        """
        reply = await scripts.CLAIM_EXPIRED(
            self._redis,
            [self._keys.jobs, self._keys.claim_cursor],
            [
                GROUP,
                self._worker_id,
                int(self._info.lease_s * 1000),
                self._max_deliveries,
                count,
                int(not in_flight),
                MAX_JOB_BYTES,
                _MAX_CLAIMED_BYTES,
                _CURSOR_TTL_MS,
                *in_flight,
            ],
        )
        alone, entries, further = reply
        jobs = []
        for entry_id, data, deliveries, lifetime, since, priority in entries:
            if isinstance(data, bytes):
                told = ((LIFETIME_FIELD, lifetime), (SINCE_FIELD, since), (PRIORITY_FIELD, priority))
                fields = {name: value for name, value in told if value}
                job = self._read(entry_id, message := _decoded(data), fields)
                self._trace(job, message, fields)
            else:  # Its size.
                text = f"a job of {data} bytes is over the limit of {MAX_JOB_BYTES}"
                job = _dead(entry_id, _UNKNOWN_DIGEST, Failure(ProtocolError.__name__, text))
            if deliveries >= self._max_deliveries:
                text = f"given up after {deliveries} deliveries: {await self._reason(entry_id)}"
                job = _dead(entry_id, job.digest, Failure(WorkerError.__name__, text))
                _log.warning("a prompt is %s; see `lmpool dead list`", text)
            jobs.append(job)
        return Claimed(await self._still_wanted(jobs), bool(alone), int(further))

    async def _reason(self, entry_id: bytes) -> str:
        """Why the last worker that held a job ended."""
        try:
            reason = cast(bytes | None, await self._redis.hget(self._keys.reasons, entry_id))
        except (RedisError, OSError):
            reason = None  # The jobs have been taken: they must not be forgotten for want of a reason.
        if reason is None:
            return "its workers died or hung while they held it"
        return f"the last worker that held it ended: {reason.decode('utf-8', 'replace')}"

    async def renew(self, entry_ids: Sequence[bytes]) -> None:
        """Keep the leases of entries that this worker holds."""
        for at in range(0, len(entry_ids), scripts.MAX_AT_ONCE):
            part = entry_ids[at : at + scripts.MAX_AT_ONCE]
            await scripts.RENEW(self._redis, [self._keys.jobs], [GROUP, self._worker_id, *part])

    async def hand_back(self, reason: str, in_flight: Iterable[bytes]) -> int:
        """Give all that this worker still holds to others at once; returns how many jobs that were.

        Their deliveries stay counted.

        Args:
            reason: why this worker ends; clients hear of it if a job is given up.
            in_flight: the entries that it is at work on: some may be of the lanes of others.
        """
        await self.close_lane()
        # As long as any lease may be: workers of one model may have different ones.
        head = [GROUP, self._worker_id, _LONG_SILENT_MS, scripts.MAX_AT_ONCE]
        tail = [self._max_deliveries, reason[:_MAX_REASON_TEXT], _REASONS_TTL_MS, _MAX_REASONS]
        count = 0
        for of_lane in {b"", self._of_lane, *(b"".join(entry.partition(b" ")[1:]) for entry in in_flight)}:
            keys, begin = [self._keys.lane(of_lane[1:]) if of_lane else self._keys.jobs, self._keys.reasons], b"-"
            while begin:
                handed, begin = await scripts.RELEASE(self._redis, keys, [*head, begin, *tail, of_lane])
                count += handed
        return count

    def _read(
        self, entry_id: bytes, job: Job | ProtocolError, fields: Fields, *, is_valid: bool = False
    ) -> InFlightJob:
        """Check one job in the one place where this is done for all backends.

        Args:
            entry_id: its id in the stream.
            job: as decoded, or why it does not decode.
            fields: what else the entry says.
            is_valid: its prompt is known to be within the limits of the model.
        """
        if isinstance(job, ProtocolError):
            return _dead(entry_id, _UNKNOWN_DIGEST, Failure(type(job).__name__, str(job)))
        prompt, is_bulk = digest_of(job.ids, job.adapter), fields.get(PRIORITY_FIELD) == BULK
        if is_valid and not (job.query or job.adapter or self._is_trie) and job.fingerprint == self._fingerprint:
            backend_job = BackendJob(prompt, job.ids, bulk=True) if is_bulk else BackendJob(prompt, job.ids)
            return InFlightJob(entry_id, prompt, backend_job, job.overwrite, fields=fields, host=job.host)
        digest = query_digest(prompt, job.query) if job.query else prompt
        try:
            query = unpack_query(job.query) if job.query else None
        except ProtocolError as error:
            return _dead(entry_id, digest, Failure(type(error).__name__, str(error)))
        failure = refusal(job, query, self._info)
        if failure is not None:
            return InFlightJob(entry_id, digest, failure=failure)
        backend_job, query = self._backend_job(job, prompt, digest, query)
        backend_job = backend_job._replace(bulk=True) if is_bulk else backend_job
        return InFlightJob(entry_id, digest, backend_job, job.overwrite, query, fields=fields, host=job.host)

    def _backend_job(
        self, job: Job, prompt: bytes, digest: bytes, query: Query | None
    ) -> tuple[BackendJob, TrieQuery | PickQuery | None]:
        """What the backend is to compute, and the query that is then answered from the row."""
        if isinstance(query, PositionsQuery):
            return BackendJob(digest, job.ids, job.adapter, positions=query), None
        if isinstance(query, GenerateQuery):
            return BackendJob(digest, job.ids, job.adapter, generate=query), None
        if isinstance(query, HeadQuery):
            return BackendJob(digest, job.ids, head=query), None
        if isinstance(query, FreshQuery):
            return BackendJob(digest, job.ids, job.adapter, fresh=True), None
        # A trie worker computes the very thing that is asked for; others the row that it is made from.
        return BackendJob(digest if self._is_trie else prompt, job.ids, job.adapter), query


def _decoded(data: bytes) -> Job | ProtocolError:
    """A job, or why the bytes are none (an error is a value here)."""
    try:
        return unpack_job(data)
    except ProtocolError as error:
        return error


def _dead(entry_id: bytes, digest: bytes, failure: Failure) -> InFlightJob:
    """A job that no worker can read."""
    return InFlightJob(entry_id, digest, failure=failure, is_dead=True)


def _milliseconds(value: bytes) -> int:
    """What a field of an entry says; for ever when it holds no milliseconds."""
    return int(value) if value.isdigit() and len(value) <= _MAX_MS_DIGITS else _EVER_MS


def _queued_ms(entry_id: bytes) -> int:
    """When an entry was added to the stream, in ms since 1970, by the server's clock."""
    return int(entry_id.partition(b"-")[0])


def _since_ms(entry_id: bytes, fields: Fields) -> int:
    """When a job was queued, which may have been in the backlog, in ms since 1970, by the server's clock."""
    return _milliseconds(fields[SINCE_FIELD]) if SINCE_FIELD in fields else _queued_ms(entry_id)


def _until_ms(job: InFlightJob) -> int:
    """Until when a client was to wait for a job, in ms since 1970; for ever when the entry does not say."""
    # Behind the lifetime stands the digest, where the job may go back.
    lifetime_ms = _milliseconds(job.fields.get(LIFETIME_FIELD, b"").partition(b" ")[0])
    return _since_ms(job.entry_id, job.fields) + lifetime_ms
