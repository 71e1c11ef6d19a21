"""Reads and checks the jobs in stream entries, and removes jobs that no client waits for any more."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from lmpool.broker import scripts
from lmpool.broker.scripts import Entries, Fields
from lmpool.errors import (
    InvalidPrompt,
    ModelMismatch,
    PromptTooLong,
    ProtocolError,
    SourceMissing,
    TokenOutOfRange,
    UnknownAdapter,
)
from lmpool.protocol import keys as key_names
from lmpool.protocol import query as queries
from lmpool.protocol.adapter import is_qualified
from lmpool.protocol.job import (
    DIGEST_SIZE,
    MAX_JOB_BYTES,
    Failure,
    Job,
    check_encoded,
    decode_ids,
    digest_of,
    query_digest,
    unpack_job,
)
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.row import width_of
from lmpool.settings import shown
from lmpool.workers.execution.in_flight import InFlightPrompt, StreamEntry
from lmpool.workers.metrics.counters import WorkerCounters
from lmpool.workers.metrics.tracing import JobTraces

STALE_S = 1.0
"""Min age of an entry, in seconds, for the worker to check whether a client still waits for it."""

# Errors for which a worker refuses a job.
_REFUSALS = (InvalidPrompt, ModelMismatch, ProtocolError, SourceMissing, UnknownAdapter)
_MAX_MS_DIGITS = 15  # Max digits of a number of milliseconds in an entry; a longer number counts as infinite.
_INFINITE_MS = 10**_MAX_MS_DIGITS


class _FirstFields(msgspec.Struct, array_like=True):
    """The fields of a `Job` that its digest depends on, of any wire version that keeps their order."""

    version: int
    ids: bytes
    adapter: str
    fingerprint: str
    overwrite: bool = False
    query: bytes = b""


_FIRST_FIELDS = msgspec.msgpack.Decoder(_FirstFields)


class _Undecodable(NamedTuple):
    """A job that cannot be decoded."""

    error: ProtocolError
    digest: bytes  # The digest for which its clients wait, if the job is of another wire version; zeros if unknown.


class Taken(NamedTuple):
    """The jobs of some stream entries: prompts to compute, and entries that this worker cannot serve."""

    prompts: list[InFlightPrompt]
    refused: list[StreamEntry]

    def __bool__(self) -> bool:
        return bool(self.prompts or self.refused)


@dataclass(eq=False)
class JobReader:
    """Reads and checks the jobs of one model, and removes jobs that no client waits for."""

    redis: Redis  # Client for commands that do not block.
    keys: key_names.ModelKeys  # Keys of the partition that the worker serves; `PartitionMover` replaces them.
    info: ModelInfo
    worker_id: str  # Name of the worker and of its consumer in the consumer group.
    counters: WorkerCounters  # Counters of queueing times and jobs, and the server's clock.
    traces: JobTraces | None = None  # Spans of jobs; None without tracing.

    def __post_init__(self) -> None:
        self.fingerprint, self._is_trie = self.info.fingerprint, self.info.is_trie
        self._home = self.worker_id.encode()

    async def read_wanted(self, entries: Entries, of_lane: bytes = b"") -> Taken:
        """Read entries of one stream, except entries that no client waits for; append `of_lane` to the entry ids."""
        taken, counters = Taken([], []), self.counters
        jobs = [_decode(fields.pop(key_names.JOB_FIELD, b"")) for _, fields in entries]
        prompts = [job.ids for job in jobs if isinstance(job, Job)]
        max_bytes = 4 * self.info.max_prompt_tokens
        # Check all prompts at once, which is much faster than one check per prompt.
        are_valid = all(0 < len(ids) <= max_bytes and len(ids) % 4 == 0 for ids in prompts) and bool(prompts)
        are_valid = are_valid and int(decode_ids(b"".join(prompts)).max()) < self.info.vocab_size
        for (entry_id, fields), job in zip(entries, jobs, strict=True):
            self._add(taken, entry_id + of_lane, job, fields, is_valid=are_valid)
            if key_names.SINCE_FIELD in fields and _milliseconds(since := fields[key_names.SINCE_FIELD]) < _INFINITE_MS:
                counters.queued_ms[entry_id + of_lane] = since
            if key_names.HOME_FIELD in fields:
                counters.homed += fields[key_names.HOME_FIELD] == self._home
        return await self.still_wanted(taken)

    def read(self, taken: Taken, entry_id: bytes, data: bytes, fields: Fields) -> StreamEntry:
        """Read one entry, add its job to `taken`, and return the entry."""
        return self._add(taken, entry_id, _decode(data), fields)

    def _add(
        self, taken: Taken, entry_id: bytes, job: Job | _Undecodable, fields: Fields, *, is_valid: bool = False
    ) -> StreamEntry:
        """Add a job, or the error of its decoding, to `taken`; `is_valid`: the prompt is within the model's limits."""
        if isinstance(job, _Undecodable):
            taken.refused.append(entry := dead_entry(entry_id, job.digest, job.error))
            return entry
        digest, is_bulk = digest_of(job.ids, job.adapter), fields.get(key_names.PRIORITY_FIELD) == key_names.BULK
        entry = StreamEntry(entry_id, digest, job.overwrite, fields=fields, host=job.host, socket=job.socket)
        if self.traces is not None:
            entry.trace = self.traces.taken(job, _since_ms(entry) - 1000 * self.counters.clock_ahead_s)
        if is_valid and not (job.query or job.adapter or self._is_trie) and job.fingerprint == self.fingerprint:
            taken.prompts.append(InFlightPrompt(digest, job.ids, bulk=is_bulk, entries={entry_id: entry}))
            return entry
        if job.query:
            entry.digest = query_digest(digest, job.query)
        entry.is_dead = True
        try:
            query = queries.unpack_query(job.query) if job.query else None
            entry.is_dead = False  # Only a job that cannot be decoded becomes a dead letter.
            _check_job(job, query, self.info)
        except _REFUSALS as error:
            entry.failure = _failure(error)
            taken.refused.append(entry)
            return entry
        prompt = InFlightPrompt(digest, job.ids, job.adapter, bulk=is_bulk, entries={entry_id: entry})
        prompt.has_query = query is not None
        taken.prompts.append(prompt)
        # The backend answers the kinds of queries listed here (a trie backend all); other queries need only the row.
        match query:
            case queries.PositionsQuery():
                prompt.positions = query
            case queries.GenerateQuery():
                prompt.generate = query
            case queries.HeadQuery():
                prompt.head = query
                if not query.is_of_adapter:
                    prompt.adapter = ""
            case queries.FreshQuery():
                prompt.fresh = True
            case _:
                entry.query = query
                if not self._is_trie:
                    return entry
        prompt.digest = entry.digest
        return entry

    async def still_wanted(self, taken: Taken) -> Taken:
        """Leave out prompts that no client waits for, if older than `STALE_S`. All entries must be of one stream."""
        before = (time.time() + self.counters.clock_ahead_s - STALE_S) * 1000
        entries = [entry for prompt in taken.prompts for entry in prompt.entries.values()]
        # Check nothing if even the first entry, which is the oldest, is younger than `STALE_S`.
        if not entries or _added_ms(entries[0].id) >= before:
            return taken
        removed = await self.remove_unwanted([entry for entry in entries if _added_ms(entry.id) < before])
        return taken._replace(prompts=[prompt for prompt in taken.prompts if removed.isdisjoint(prompt.entries)])

    async def remove_unwanted(self, entries: Sequence[StreamEntry]) -> set[bytes]:
        """Remove the entries that no client waits for; return their ids. Stop early if the server cannot be used."""
        removed: set[bytes] = set()
        for at in range(0, len(entries), scripts.MAX_AT_ONCE):
            part = entries[at : at + scripts.MAX_AT_ONCE]
            keys = [self.keys.jobs, *(self.keys.waiting + entry.digest for entry in part)]
            args: list[bytes | int] = []
            for entry in part:
                # Cut off the digest, which follows the lifetime in entries that may return to the backlog.
                lifetime_ms = _milliseconds(entry.fields.get(key_names.LIFETIME_FIELD, b"").partition(b" ")[0])
                args += (entry.id, _since_ms(entry) + lifetime_ms)  # Entry's id; time until which its client waits.
            try:
                numbers = await scripts.DROP_UNWANTED(self.redis, keys, args)
            except (RedisError, OSError):
                break
            removed |= {part[number - 1].id for number in numbers}
        for entry_id in removed:
            self.counters.queued_ms.pop(entry_id, None)
        return removed


def dead_entry(entry_id: bytes, digest: bytes, error: Exception) -> StreamEntry:
    """Make an entry that no worker can serve, and that becomes a dead letter when it ends."""
    return StreamEntry(entry_id, digest, failure=_failure(error), is_dead=True)


def _failure(error: Exception) -> Failure:
    return Failure(type(error).__name__, str(error))


def _decode(data: bytes) -> Job | _Undecodable:
    try:
        return unpack_job(data)
    except ProtocolError as error:
        digest = bytes(DIGEST_SIZE)
        # Clients of another release wait for the digest of the job, and would submit the job again and again.
        with suppress(ValueError, RecursionError):
            job = _FIRST_FIELDS.decode(data[:MAX_JOB_BYTES])
            digest = digest_of(job.ids, job.adapter)
            digest = query_digest(digest, job.query) if job.query else digest
        return _Undecodable(error, digest)


def _check_job(job: Job, query: queries.Query | None, info: ModelInfo) -> None:
    """Raise one of `_REFUSALS` for a job that this model's workers cannot do; clients that know the info send none."""
    if job.fingerprint != info.fingerprint:
        text = f"its fingerprint is {info.fingerprint}, not {job.fingerprint}"
        raise ModelMismatch(f"the model {info.name!r} has changed: {text}")
    if info.is_trie:
        if not isinstance(query, queries.TrieQuery):
            wanted = "a row" if query is None else "something other than values of a trie"
            raise ProtocolError(f"a trie worker received a request for {wanted}")
        return
    check_encoded(job.ids, vocab_size=info.vocab_size, max_tokens=info.max_prompt_tokens)
    # Check only the form of the name; the adapter is looked up when the backend gets the prompt.
    if job.adapter and not is_qualified(job.adapter):
        raise UnknownAdapter(f"{shown(job.adapter)} is not the name of an adapter: a job names it as name@revision")
    length, vocab_size = len(job.ids) // 4, info.vocab_size
    match query:
        case queries.TopQuery() if query.k > vocab_size:
            raise ProtocolError(f"k is {query.k}, and a row has {vocab_size} entries")
        case queries.EntriesQuery():
            ids = query.target_ids
            if len(ids) > vocab_size:
                raise ProtocolError(f"{len(ids)} targets, and a row has {vocab_size} entries")
            if (largest := int(ids.max())) >= vocab_size:  # The model has changed since the client checked the targets.
                raise TokenOutOfRange(f"targets: token id {largest} is out of range: this model's V is {vocab_size}")
        case queries.GenerateQuery() if length + query.most - 1 > info.max_prompt_tokens:
            limit = f"the model accepts at most {info.max_prompt_tokens} in all"
            raise PromptTooLong(f"{query.most} tokens after a prompt of {length} tokens: {limit}")
        case queries.HeadQuery():
            if not info.hidden:
                raise SourceMissing("this worker does not return the model's head")
            is_inside = query.part != "weights" or (query.count > 0 and query.first + query.count <= vocab_size)
            numbers = query.numbers(vocab_size, width_of(info.hidden, info.dtype))
            if not is_inside or not numbers:
                raise ProtocolError(f"{query.count} rows of the head from {query.first} on: it has {vocab_size}")
            if numbers > queries.MAX_ANSWER and query.part != "bias":
                raise ProtocolError(f"{numbers} numbers of the head in one answer: at most {queries.MAX_ANSWER}")
            if query.is_of_adapter and not job.adapter:
                raise ProtocolError("a query for a part of an adapter's head names no adapter")
        case queries.PositionsQuery():
            if not info.positions:
                advice = "request the rows of all prefixes"
                raise SourceMissing(f"this worker does not answer for several positions: {advice}")
            if query.values == "hidden" and (not info.hidden or query.size != width_of(info.hidden, info.dtype)):
                raise SourceMissing("this worker does not return hidden states of that size")
            count, max_positions = len(query.span(length)), query.most_positions(vocab_size)
            if not count:
                raise ProtocolError(f"positions from {query.start} on, of a prompt of {length} tokens")
            if count > max_positions:
                raise ProtocolError(f"{count} positions in one job: at most {max_positions} for these values")
            targets = query.target_ids
            if query.each and len(targets) != count:
                raise ProtocolError(f"targets for {len(targets)} of {count} positions")
            if query.choices:
                raise ProtocolError("a query for positions names its choices, which only workers do")
            largest = max(query.top - 1, int(targets.max(initial=0, where=(targets != queries.NO_TOKEN))))
            if largest >= vocab_size:
                raise ProtocolError(f"entry {largest} of rows that have {vocab_size}")


# Functions for times of entries, in ms since 1970 by the server's clock


def _milliseconds(value: bytes) -> int:
    """Read a field with a number of milliseconds; infinite if the field holds no such number."""
    return int(value) if value.isdigit() and len(value) <= _MAX_MS_DIGITS else _INFINITE_MS


def _added_ms(entry_id: bytes) -> int:
    """Time when an entry was added to its stream."""
    return int(entry_id.partition(b"-")[0])


def _since_ms(entry: StreamEntry) -> int:
    """Time when a job was queued; it may have waited in the backlog before it was added to the stream."""
    since = entry.fields.get(key_names.SINCE_FIELD)
    return _added_ms(entry.id) if since is None else _milliseconds(since)
