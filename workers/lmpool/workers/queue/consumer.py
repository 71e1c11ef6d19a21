"""Taking jobs from a model's queue: new ones, and those of workers that fell silent; and the jobs that are held."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from lmpool.broker import scripts
from lmpool.broker.connection import CommandConnection
from lmpool.broker.readers import Fields, read_queue, stream_entries
from lmpool.errors import (
    InvalidPrompt,
    ModelMismatch,
    ProtocolError,
    ServerError,
    SourceMissing,
    UnknownAdapter,
    WorkerError,
)
from lmpool.protocol.adapter import is_qualified
from lmpool.protocol.job import MAX_JOB_BYTES, Failure, Job, unpack_job
from lmpool.protocol.keys import GROUP, JOB_FIELD, LIFETIME_FIELD, SINCE_FIELD, ModelKeys
from lmpool.protocol.model_info import LIMITS, ModelInfo
from lmpool.protocol.prompt import check_encoded, decode_ids, digest_of, query_digest
from lmpool.protocol.query import FreshQuery, PickQuery, Query, ScoreQuery, TopQuery, TrieQuery, unpack_query
from lmpool.settings import shown
from lmpool.workers.backend.contract import BackendJob
from lmpool.workers.metrics.counters import Counters

STALE_S = 1.0
"""Seconds after which it is worth a look whether somebody still waits for a job."""

_MOST_MS_DIGITS = 15
EVER_MS = 10**_MOST_MS_DIGITS


class Doubtful(NamedTuple):
    """A job that a worker holds and that its clients may have left.

    Attributes:
        entry: its id in the stream.
        digest: what is waited for.
        fields: what its entry says.
    """

    entry: bytes
    digest: bytes
    fields: Fields


class Unwanted:
    """Finds jobs that nobody waits for, and removes them.

    Args:
        redis: a client for what is rare.
        keys: the model's keys.
        counters: forget what they know of jobs that are removed.
    """

    def __init__(self, redis: Redis, keys: ModelKeys, counters: Counters) -> None:
        self._redis = redis
        self._keys = keys
        self._counters = counters

    async def remove(self, jobs: Sequence[Doubtful]) -> set[bytes]:
        """Remove those that nobody waits for; returns their entries. When the server cannot tell, none is removed."""
        removed: set[bytes] = set()
        for at in range(0, len(jobs), scripts.MOST_AT_ONCE):
            part = jobs[at : at + scripts.MOST_AT_ONCE]
            keys = [self._keys.jobs, *(self._keys.waiting + one.digest for one in part)]
            args = [value for one in part for value in (one.entry, _until_ms(one.entry, one.fields))]
            try:
                numbers = await scripts.ABANDONED(self._redis, keys, args)
            except (RedisError, OSError):
                break
            removed |= {part[number - 1].entry for number in numbers}
        for entry in removed:
            self._counters.queued_ms.pop(entry, None)
        return removed


def milliseconds(value: bytes) -> int:
    """What an entry tells; for ever when these are none."""
    return int(value) if value.isdigit() and len(value) <= _MOST_MS_DIGITS else EVER_MS


def queued_ms(entry: bytes) -> int:
    """When an entry was added to the stream, in ms since 1970, by the server's clock."""
    return int(entry.partition(b"-")[0])


def _until_ms(entry: bytes, fields: Fields) -> int:
    """Until when somebody waited for a job when it was queued, in ms since 1970; for ever when its entry tells none."""
    since = milliseconds(fields[SINCE_FIELD]) if SINCE_FIELD in fields else queued_ms(entry)
    # Behind it stands the digest, where the job may go back.
    return since + milliseconds(fields.get(LIFETIME_FIELD, b"").partition(b" ")[0])


_log = logging.getLogger("lmpool.worker")

# A server's clock that is set back by less leaves the queue alone.
_MOST_AHEAD_MS = 3_600_000
_MOST_CLAIMED_BYTES = 512 * 1024
_CURSOR_TTL_MS = 3_600_000
_LONG_SILENT_MS = int(LIMITS["lease_s"][1] * 1000)
_REASONS_TTL_MS = 3_600_000
_MOST_REASONS = 1000
_MOST_REASON_TEXT = 500
_NO_FIELDS: Fields = {}


class Taken(NamedTuple):
    """One entry of the queue that this worker now holds.

    Attributes:
        entry: its id in the stream.
        job: what the backend is asked, or None when the entry cannot be served.
        overwrite: the stored row is damaged and must be replaced.
        digest: what is waited for: the prompt, or what is asked of it; 16 zero bytes when it does not decode.
        query: what is wanted instead of the row and made from it.
        failure: why it cannot be served.
        is_dead: it goes to the dead letters.
        fields: what else its entry says, of one that can be served.
    """

    entry: bytes
    digest: bytes
    job: BackendJob | None = None
    overwrite: bool = False
    failure: Failure | None = None
    is_dead: bool = False
    query: TrieQuery | PickQuery | None = None
    fields: Fields = _NO_FIELDS


class Claimed(NamedTuple):
    """Jobs taken over from silent workers.

    Attributes:
        taken: the jobs.
        alone: it is one job that must run with no other beside it; when there is none, such a job waits
            for a worker that holds nothing.
        further: how many more looks are this worker's share of a look at all that workers hold.
    """

    taken: list[Taken]
    alone: bool
    further: int = 0


class Consumer:
    """Reads the queue of one model.

    Args:
        redis: a client for what is rare.
        line: a connection for blocking reads, used by nothing else.
        keys: the model's keys.
        info: the model's info.
        worker_id: the name of this consumer.
        max_deliveries: deliveries after which a job is given up.
        unwanted: removes what nobody waits for.
        counters: are told since when jobs have waited.
    """

    def __init__(
        self,
        redis: Redis,
        line: CommandConnection,
        keys: ModelKeys,
        info: ModelInfo,
        worker_id: str,
        max_deliveries: int,
        unwanted: Unwanted,
        counters: Counters,
    ) -> None:
        self._redis = redis
        self._line = line
        self._keys = keys
        self._info = info
        self._fingerprint, self._is_trie = info.fingerprint, info.is_trie
        self._worker_id = worker_id
        self._max_deliveries = max_deliveries
        self._unwanted = unwanted
        self._counters = counters
        # By how much the server's clock is ahead of this machine's.
        self._ahead_s = 0.0

    async def ensure_group(self) -> None:
        """Create the stream and its group, from the beginning: jobs queued before it must be seen."""
        seconds, micros = await self._line.call(b"TIME")
        self._ahead_s = int(seconds) + int(micros) / 1e6 - time.time()
        try:
            await self._redis.xgroup_create(self._keys.jobs, GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise
        await self.keep_queue()

    async def keep_queue(self) -> None:
        """Have the queue not expire, and replace its stream when ids have run ahead of the clock: see `keep.lua`."""
        dropped = await scripts.KEEP(self._redis, self._keys.queue, [GROUP, _MOST_AHEAD_MS])
        if dropped >= 0:
            _log.warning(
                "the job stream of %r was replaced: somebody has added an entry with an id of their own; "
                "%d prompts were dropped, and clients ask for them again after a lease",
                self._info.name,
                dropped,
            )

    async def measure(self) -> None:
        """Tell the figures how long the queue is."""
        asked_at = time.time()
        self._counters.look_at(await read_queue(self._redis, self._keys), asked_at)

    async def take(self, count: int, block_ms: int) -> list[Taken]:
        """Take up to `count` new jobs that somebody waits for; waits up to `block_ms` for the first.

        Entries that are too large for the connection end it; once their lease has passed they come by way of `claim`,
        which looks at sizes first, and so do those that were sent along with them.
        """
        command = (b"XREADGROUP", b"GROUP", GROUP, self._worker_id, b"COUNT", count, b"BLOCK", block_ms)
        try:
            reply = await self._line.call(*command, b"STREAMS", self._keys.jobs, b">")
        except ServerError as error:
            if "NOGROUP" not in str(error):
                raise
            await self.ensure_group()
            return []
        try:
            entries = stream_entries(reply)
        except ProtocolError as error:
            self._line.hang_up(error)
            raise
        if not entries:
            await self._refill()
            return []
        decoded = [(entry, _decoded(fields.pop(JOB_FIELD, b"")), fields) for entry, fields in entries]
        are_valid = self._are_valid([job.ids for _, job, _ in decoded if isinstance(job, Job)])
        taken = []
        for entry, job, fields in decoded:
            taken.append(self._read(entry, job, fields, is_valid=are_valid))
            if SINCE_FIELD in fields and milliseconds(since := fields[SINCE_FIELD]) < EVER_MS:
                self._counters.queued_ms[entry] = since
        return await self._wanted(taken)

    def _are_valid(self, prompts: list[bytes]) -> bool:
        """Whether all prompts are within the limits of the model, seen at a fraction of the time of one by one."""
        most = 4 * self._info.max_prompt_tokens
        if not prompts or not all(0 < len(ids) <= most and len(ids) % 4 == 0 for ids in prompts):
            return False
        return int(decode_ids(b"".join(prompts)).max()) < self._info.vocab_size

    async def _refill(self) -> None:
        """Have the backlog move up: what usually does so, the end of a job, need not come to an idle worker."""
        while await scripts.REFILL(self._redis, [self._keys.jobs], []):
            pass

    async def _wanted(self, taken: list[Taken]) -> list[Taken]:
        """Those jobs that somebody waits for; the others are removed. Jobs that are new are not looked at."""
        before = (time.time() + self._ahead_s - STALE_S) * 1000
        if not taken or queued_ms(taken[0].entry) >= before:
            return taken  # Entries come in the order of their ages.
        stale = [one for one in taken if one.job is not None and queued_ms(one.entry) < before]
        removed = await self._unwanted.remove([Doubtful(one.entry, one.digest, one.fields) for one in stale])
        return [one for one in taken if one.entry not in removed]

    async def claim(self, count: int, held: Collection[bytes]) -> Claimed:
        """Take over up to `count` jobs whose lease has passed, but none of `held`, which this worker is at work on."""
        reply = await scripts.CLAIM(
            self._redis,
            [self._keys.jobs, self._keys.claim_cursor],
            [
                GROUP,
                self._worker_id,
                int(self._info.lease_s * 1000),
                self._max_deliveries,
                count,
                int(not held),
                MAX_JOB_BYTES,
                _MOST_CLAIMED_BYTES,
                _CURSOR_TTL_MS,
                *held,
            ],
        )
        alone, entries, further = reply
        taken = []
        for entry, data, deliveries, lifetime, since in entries:
            fields = {LIFETIME_FIELD: lifetime, **({SINCE_FIELD: since} if since else {})}
            one = self._read(entry, _decoded(data), fields) if isinstance(data, bytes) else _too_large(entry, data)
            if deliveries >= self._max_deliveries:
                text = f"given up after {deliveries} deliveries: {await self._reason(entry)}"
                one = one._replace(job=None, failure=Failure(WorkerError.__name__, text), is_dead=True)
                _log.warning("a prompt is %s; see `lmpool dead list`", text)
            taken.append(one)
        return Claimed(await self._wanted(taken), bool(alone), int(further))

    async def _reason(self, entry: bytes) -> str:
        """Why the last worker that held a job ended."""
        try:
            reason = cast(bytes | None, await self._redis.hget(self._keys.reasons, entry))
        except (RedisError, OSError):
            reason = None  # The jobs have been taken: they must not be forgotten for want of a reason.
        if reason is None:
            return "its workers died or hung while they held it"
        return f"the last worker that held it ended: {reason.decode('utf-8', 'replace')}"

    async def renew(self, entries: Sequence[bytes]) -> None:
        """Keep the leases of entries that this worker holds."""
        for at in range(0, len(entries), scripts.MOST_AT_ONCE):
            part = entries[at : at + scripts.MOST_AT_ONCE]
            await scripts.RENEW(self._redis, [self._keys.jobs], [GROUP, self._worker_id, *part])

    async def hand_back(self, reason: str) -> int:
        """Give all that this worker still holds to others at once; returns how many jobs that were.

        Their deliveries stay counted.

        Args:
            reason: why this worker ends; clients hear of it if a job is given up.
        """
        # As long as any lease may be: workers of one model may have different ones.
        head = [GROUP, self._worker_id, _LONG_SILENT_MS, scripts.MOST_AT_ONCE]
        tail = [self._max_deliveries, reason[:_MOST_REASON_TEXT], _REASONS_TTL_MS, _MOST_REASONS]
        count, begin = 0, b"-"
        while begin:
            keys = [self._keys.jobs, self._keys.reasons]
            handed, begin = await scripts.RELEASE(self._redis, keys, [*head, begin, *tail])
            count += handed
        return count

    def _read(self, entry: bytes, job: Job | ProtocolError, fields: Fields, *, is_valid: bool = False) -> Taken:
        """Check one job in the one place where this is done for all backends.

        Args:
            entry: its id in the stream.
            job: as decoded, or why it does not decode.
            fields: what else the entry says.
            is_valid: its prompt is known to be within the limits of the model.
        """
        if isinstance(job, ProtocolError):
            return Taken(entry, bytes(16), failure=Failure(type(job).__name__, str(job)), is_dead=True)
        prompt = digest_of(job.ids, job.adapter)
        if is_valid and not (job.query or job.adapter or self._is_trie) and job.fingerprint == self._fingerprint:
            return Taken(entry, prompt, BackendJob(prompt, job.ids), job.overwrite, fields=fields)
        digest = query_digest(prompt, job.query) if job.query else prompt
        try:
            query = unpack_query(job.query) if job.query else None
        except ProtocolError as error:
            return Taken(entry, digest, failure=Failure(type(error).__name__, str(error)), is_dead=True)
        failure = self._refusal(job) or self._query_refusal(job, query)
        if failure is not None:
            return Taken(entry, digest, failure=failure)
        backend_job, query = self._backend_job(job, prompt, digest, query)
        return Taken(entry, digest, backend_job, job.overwrite, query=query, fields=fields)

    def _backend_job(
        self, job: Job, prompt: bytes, digest: bytes, query: Query | None
    ) -> tuple[BackendJob, TrieQuery | PickQuery | None]:
        """What the backend is asked, and what is then made from the row."""
        if isinstance(query, ScoreQuery):
            return BackendJob(digest, job.ids, job.adapter, score_from=query.start), None
        if isinstance(query, FreshQuery):
            return BackendJob(digest, job.ids, job.adapter, fresh=True), None
        # A trie worker computes the very thing that is asked for; others the row that it is made from.
        return BackendJob(digest if self._is_trie else prompt, job.ids, job.adapter), query

    def _refusal(self, job: Job) -> Failure | None:
        info = self._info
        if job.fingerprint != self._fingerprint:
            text = f"the model {info.name!r} has changed: its fingerprint is {self._fingerprint}, not {job.fingerprint}"
            return Failure(ModelMismatch.__name__, text)
        if self._is_trie:
            return None
        try:
            check_encoded(job.ids, vocab_size=info.vocab_size, max_tokens=info.max_prompt_tokens)
        except InvalidPrompt as error:
            return Failure(type(error).__name__, str(error))
        # Whether this worker has it is seen when the backend is to compute it.
        if job.adapter and not is_qualified(job.adapter):
            text = f"{shown(job.adapter)} names no adapter: a job calls one name@revision"
            return Failure(UnknownAdapter.__name__, text)
        return None

    def _query_refusal(self, job: Job, query: Query | None) -> Failure | None:
        info = self._info
        if self._is_trie:
            if isinstance(query, TrieQuery):
                return None
            what = "a row" if query is None else "something else than values of a trie"
            return Failure(ProtocolError.__name__, f"a trie worker was asked for {what}")
        if isinstance(query, TopQuery) and query.k > info.vocab_size:
            text = f"the {query.k} largest entries of a row that has {info.vocab_size}"
            return Failure(ProtocolError.__name__, text)
        if isinstance(query, ScoreQuery):
            if not info.scores:
                return Failure(SourceMissing.__name__, "this worker does not score: ask for the rows of all prefixes")
            if query.start >= len(job.ids) // 4:
                text = f"scores from position {query.start} on, of a prompt of {len(job.ids) // 4} tokens"
                return Failure(ProtocolError.__name__, text)
        return None


def _decoded(data: bytes) -> Job | ProtocolError:
    """A job, or why it is none (an error is a value here)."""
    try:
        return unpack_job(data)
    except ProtocolError as error:
        return error


def _too_large(entry: bytes, size: int) -> Taken:
    text = f"a job of {size} bytes is over the limit of {MAX_JOB_BYTES}"
    return Taken(entry, bytes(16), failure=Failure(ProtocolError.__name__, text), is_dead=True)


EntriesByPrompt = Mapping[bytes, Mapping[bytes, Taken]]
"""Digest of a prompt -> entry of the queue -> what it wants."""


def by_answer(asks: EntriesByPrompt) -> tuple[dict[bytes, dict[bytes, Taken]], set[bytes]]:
    """The entries that want each answer, and the answers that must replace what is stored."""
    entries: dict[bytes, dict[bytes, Taken]] = {}
    overwrite = set()
    for wants in asks.values():
        for entry, wanted in wants.items():
            entries.setdefault(wanted.digest, {})[entry] = wanted
            if wanted.overwrite:
                overwrite.add(wanted.digest)
    return entries, overwrite


def doubtful(asks: EntriesByPrompt) -> list[Doubtful]:
    """The jobs behind some asks, for a look whether somebody still waits for them."""
    wants = (one for ours in asks.values() for one in ours.items())
    return [Doubtful(entry, wanted.digest, wanted.fields) for entry, wanted in wants]


@dataclass(slots=True)
class Held:
    """A prompt that this worker holds.

    Attributes:
        job: what the backend is asked.
        entries: the queue entries that ask for it.
        is_damaged: what the cache has as its row cannot be read.
        since: monotonic time when the worker took it.
        looked_at: monotonic time of the last look whether somebody waits for it; 0 before the first.
    """

    job: BackendJob
    entries: dict[bytes, Taken] = field(default_factory=dict)
    is_damaged: bool = False
    since: float = field(default_factory=time.monotonic)
    looked_at: float = 0.0

    @property
    def is_only_asked(self) -> bool:
        """Whether nobody wants the row itself."""
        return all(wanted.query is not None for wanted in self.entries.values())


class Holdings:
    """All that a worker holds: a prompt is there once, however many entries ask for it."""

    def __init__(self) -> None:
        self._held: dict[bytes, Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Held]:
        return iter(self._held.values())

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._held

    def __getitem__(self, digest: bytes) -> Held:
        return self._held[digest]

    def add(self, taken: Taken, job: BackendJob) -> bool:
        """Hold an entry; True when its prompt is a new one."""
        held = self._held.get(job.digest)
        is_new = held is None
        if held is None:
            held = self._held[job.digest] = Held(job)
        held.entries[taken.entry] = taken
        return is_new

    def all_entries(self) -> list[bytes]:
        """The entries of all that is held."""
        return [entry for held in self._held.values() for entry in held.entries]

    def entries(self, digests: Iterable[bytes]) -> dict[bytes, dict[bytes, Taken]]:
        """What asks for some prompts now: digest of the prompt -> entry -> what it wants."""
        return {digest: dict(self._held[digest].entries) for digest in digests if digest in self._held}

    def forget(self, digest: bytes, entries: Iterable[bytes]) -> bool:
        """Let go of entries that nobody waits for; True when none is left that asks for the prompt."""
        held = self._held[digest]
        for entry in entries:
            held.entries.pop(entry, None)
        if not held.entries:
            del self._held[digest]
        return not held.entries

    def release(self, ended: Mapping[bytes, Iterable[bytes]]) -> list[BackendJob]:
        """Let go of entries that were ended; returns the jobs of prompts that were asked for again meanwhile."""
        again = []
        for digest, entries in ended.items():
            held = self._held.get(digest)
            if held is None:
                continue  # The backend broke meanwhile, or nobody waits for it any more.
            for entry in entries:
                held.entries.pop(entry, None)
            if held.entries:
                again.append(held.job)
            else:
                del self._held[digest]
        return again
