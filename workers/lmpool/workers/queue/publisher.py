"""Publishing: rows to the cache, and one script that ends the jobs and tells the clients, with small rows."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from redis.exceptions import RedisError, ResponseError

from lmpool.aio import delays
from lmpool.broker import scripts
from lmpool.broker.replies import sentence
from lmpool.broker.server import Server
from lmpool.errors import LMPoolError, ProtocolError, ServerError
from lmpool.protocol.job import Failure
from lmpool.protocol.keys import GROUP, REPLY_CAP, REPLY_TTL_MS, ModelKeys
from lmpool.protocol.row import Block, RowBlock
from lmpool.rows.cache import RowCache
from lmpool.rows.segment import SegmentWriter
from lmpool.rows.shared_memory import NOT_SHARED, Shared, place_of
from lmpool.settings import shown
from lmpool.workers.metrics.counters import Counters
from lmpool.workers.queue.consumer import InFlightJob, JobsByDigest, UnwantedJobs

T = TypeVar("T")

_log = logging.getLogger("lmpool.worker")

_DEAD_CAP = 10_000
_MARK_MS = 10_000
_FRUITLESS_TRIES = 6
_FEWER = 4


class Carried(NamedTuple):
    """What notifications carry of rows, beside their digests.

    Attributes:
        parts: digest -> what is carried: places in shared memory, or what is stored too: references, or small rows and
            answers, encoded.
        host: of whose shared memory they are places or references; b"" for rows and answers.
        store_ms: for how many ms `finish.lua` is to store them; 0 for places.
    """

    parts: Mapping[bytes, bytes]
    host: bytes = b""
    store_ms: int = 0


_NOTHING = Carried({})


class Publisher:
    """Publishes for one model.

    Args:
        server: to explain errors.
        rows: the cache.
        keys: the model's keys.
        fingerprint: the model's fingerprint, told to clients with each digest.
        worker_id: the consumer that holds the jobs.
        unwanted: removes what nobody waits for.
        counters: counts what is published.
        segment: where rows lie that clients on this host wait for.
    """

    def __init__(
        self,
        server: Server,
        rows: RowCache,
        keys: ModelKeys,
        fingerprint: str,
        worker_id: str,
        unwanted: UnwantedJobs,
        counters: Counters,
        segment: SegmentWriter,
    ) -> None:
        self._server = server
        self._rows = rows
        self._segment = segment
        self._keys = keys
        self._fingerprint = fingerprint
        self._worker_id = worker_id
        self._unwanted = unwanted
        self._counters = counters

    async def publish(self, block: Block, jobs: JobsByDigest, overwrite: Collection[bytes]) -> None:
        """Store a block and end the jobs that asked for it; tries until the server takes them.

        Jobs fail whose rows the server refuses, or evicts again and again as soon as they are stored.

        Args:
            block: the rows, or the answers to queries.
            jobs: the jobs that wait for each of them.
            overwrite: digests whose stored rows must be replaced.
        """
        began = time.monotonic()
        whole = self._to_store_whole(jobs) if isinstance(block, RowBlock) else set()
        if gone := await self._store(block, jobs, {*overwrite, *whole}, began, whole):
            await self._store_again(block, jobs, overwrite, gone, began)

    def _to_store_whole(self, jobs: JobsByDigest) -> set[bytes]:
        """The prompts that a client waits for who does not read this worker's shared memory."""
        host = self._segment.host
        if not host:
            return set()
        return {digest for digest, group in jobs.items() if any(job.host != host for job in group.values())}

    async def _store(
        self,
        block: Block,
        jobs: JobsByDigest,
        overwrite: Collection[bytes],
        began: float,
        whole: Collection[bytes] | None = None,
    ) -> list[bytes]:
        """Store rows and end their jobs; returns the digests of rows that are gone again, whose jobs are left.

        Args:
            block: the rows.
            jobs: see `publish`.
            overwrite: see `publish`.
            began: monotonic time when the rows were ready.
            whole: digests of rows that are not to lie in shared memory; None for all of them.
        """
        ending = [job for digest in block.digests if digest in jobs for job in jobs[digest].values()]
        shared = NOT_SHARED
        if whole is not None and isinstance(block, RowBlock):
            shared = self._segment.write(block, whole, overwrite)
            self._counters.shared += len(shared.references)
            self._counters.exported += len(whole)
        storing = self.retry(partial(self._attempt, block, ending, overwrite, shared))
        if shared.replaced and (stale := set(shared.replaced).difference(block.digests)):
            # Sent before the rest, and not waited for by it.
            _, (refused, left, elsewhere) = await asyncio.gather(self._drop_references(stale), storing)
        else:
            refused, left, elsewhere = await storing
        self._count(block, ending, [*left, *elsewhere], began)
        if elsewhere:
            # Somebody on another host has joined.
            digests = list(dict.fromkeys(job.digest for job in elsewhere))
            part = block.select([block.digests.index(digest) for digest in digests])
            by_digest = {digest: {job.entry_id: job for job in elsewhere if job.digest == digest} for digest in digests}
            left += await self._store_left(part, by_digest, began)
        if not (refused or left):
            return []
        if refused:
            self._counters.refused += len(refused)
            reason = sentence(ResponseError(next(iter(refused.values()))), "it")
            _log.warning("the server refused %d rows: %s", len(refused), reason)
            failure = Failure(ServerError.__name__, f"the server refused the row: {reason}")
            await self.fail([job.failing(failure) for job in left if job.digest in refused])
        return list(dict.fromkeys(job.digest for job in left if job.digest not in refused))

    async def _drop_references(self, stale: Collection[bytes]) -> None:
        """Remove references to rows that are not there any more; those that stay are seen to be stale."""
        try:
            await self._rows.drop(self._rows.keys_of(stale))
        except (RedisError, OSError, LMPoolError) as error:
            _log.debug("%d stale references stay: %s", len(stale), self._server.explain(error))

    async def _store_again(
        self, block: Block, jobs: JobsByDigest, overwrite: Collection[bytes], gone: list[bytes], began: float
    ) -> None:
        """Store those rows again that were evicted at once, as long as they are waited for and some of them stay.

        Fewer at a time, so that clients can fetch some before the next ones come.
        """
        numbers = {digest: number for number, digest in enumerate(block.digests)}
        missing, at_once, fruitless, waits = gone, len(gone), 0, delays()
        while gone:
            self._counters.evicted += len(gone)
            _log.warning("%d rows were evicted as soon as they were stored: give the server memory", len(gone))
            if fruitless == _FRUITLESS_TRIES:
                failure = Failure(ServerError.__name__, _evicted_text(block))
                await self.fail([job.failing(failure) for digest in missing for job in jobs[digest].values()])
                return
            await asyncio.sleep(next(waits))
            jobs = await self.still_wanted({digest: jobs[digest] for digest in missing})
            missing, gone = list(jobs), []
            at_once = max(1, at_once // _FEWER)
            while missing and not gone:
                part, missing = missing[:at_once], missing[at_once:]
                gone = await self._store(block.select([numbers[digest] for digest in part]), jobs, overwrite, began)
                missing += gone
                if len(gone) < len(part):
                    fruitless, waits = 0, delays()
            fruitless += 1

    async def still_wanted(self, jobs: JobsByDigest) -> JobsByDigest:
        """Those jobs that a client waits for; the others are removed."""
        removed = await self._unwanted.remove([job for group in jobs.values() for job in group.values()])
        left: dict[bytes, dict[bytes, InFlightJob]] = {}
        for digest, group in jobs.items():
            if wanted := {entry_id: job for entry_id, job in group.items() if entry_id not in removed}:
                left[digest] = wanted
        return left

    def _count(self, block: Block, ending: Sequence[InFlightJob], left: Collection[InFlightJob], began: float) -> None:
        outcome = "row" if isinstance(block, RowBlock) else "answer"
        ended = [job.entry_id for job in ending]
        if left:
            still = {job.entry_id for job in left}
            ended = [entry_id for entry_id in ended if entry_id not in still]
        if ended or not left:
            self._counters.published(outcome, ended, time.monotonic() - began)

    async def _store_left(self, block: Block, jobs: JobsByDigest, began: float) -> list[InFlightJob]:
        """Store rows themselves where there are references, and end their jobs; returns those that have no row."""
        self._counters.exported += len(jobs)
        self._segment.note_stored(block.digests)
        gone = await self._store(block, jobs, block.digests, began)
        return [job for digest in gone for job in jobs[digest].values()]

    async def _attempt(
        self, block: Block, jobs: Sequence[InFlightJob], overwrite: Collection[bytes], shared: Shared
    ) -> tuple[dict[bytes, str], list[InFlightJob], list[InFlightJob]]:
        """Store the block and end the jobs.

        Returns:
            the rows that were refused, the jobs that have no row, and those that a client on another host waits for.
        """
        left, elsewhere = list[InFlightJob](), list[InFlightJob]()
        # What is not sent as a reference.
        sent = len(block.digests) - len(shared.references)
        self._counters.published_bytes += block.nbytes * sent // max(1, len(block.digests))
        carried = self._to_carry(block, jobs, overwrite, shared)
        if carried is not None:
            jobs, elsewhere = await self._end(jobs, self._rows.queue, carried)
            if not jobs:
                return {}, [], elsewhere
            # By themselves: then the server says why it refuses them.
            numbers = {digest: number for number, digest in enumerate(block.digests)}
            block = block.select([numbers[digest] for digest in dict.fromkeys(job.digest for job in jobs)])
        places = {digest: place_of(shared.references.get(digest)) for digest in block.digests}
        carried = Carried(places, shared.host) if shared.references else _NOTHING

        async def end(call: scripts.Call, refused: Collection[bytes]) -> None:
            left.extend(job for job in jobs if job.digest in refused)
            stored = [job for job in jobs if job.digest not in refused] if refused else jobs
            without_row, without_reader = await self._end(stored, call, carried)
            left.extend(without_row)
            elsewhere.extend(without_reader)

        # Sent together, not one after the other: the script itself looks whether the rows are there.
        refused = await self._rows.put(block, overwrite, then=end, shared=shared)
        return refused, left, elsewhere

    def _to_carry(
        self, block: Block, jobs: Sequence[InFlightJob], overwrite: Collection[bytes], shared: Shared
    ) -> Carried | None:
        """What the script that ends the jobs is to store, since it is sent to it anyhow; None for nothing."""
        # What nobody waits for any more would not be stored.
        if overwrite or not self._rows.is_seen or {job.digest for job in jobs} != set(block.digests):
            return None
        if shared.references:
            is_all = len(shared.references) == len(block.digests)
            return Carried(shared.references, shared.host, self._rows.ttl_ms(block)) if is_all else None
        values = block.small_values()
        parts = None if values is None else dict(zip(block.digests, values, strict=True))
        return None if parts is None else Carried(parts, store_ms=self._rows.ttl_ms(block))

    async def fail(self, jobs: Sequence[InFlightJob]) -> None:
        """End jobs that have failed, each with its `failure`; tries until the server has done it."""
        self._counters.failed((job.failure, job.is_dead) for job in jobs)
        for job in jobs:
            self._counters.queued_ms.pop(job.entry_id, None)
        await self.retry(partial(self._end, jobs, self._rows.queue))

    async def _end(
        self, jobs: Sequence[InFlightJob], call: scripts.Call, carried: Carried = _NOTHING
    ) -> tuple[list[InFlightJob], list[InFlightJob]]:
        """End jobs; returns those whose rows are not there, and those whose references a client cannot read.

        Args:
            jobs: which.
            call: calls scripts.
            carried: what notifications carry of their rows.
        """
        left: list[InFlightJob] = []
        elsewhere: list[InFlightJob] = []
        parts = [jobs[at : at + scripts.MAX_AT_ONCE] for at in range(0, len(jobs), scripts.MAX_AT_ONCE)]
        while parts:
            part = parts.pop(0)
            keys = [self._keys.jobs, self._keys.dead]
            keys += [self._keys.waiting + job.digest for job in part]
            if self._rows.is_seen:
                keys += self._rows.keys_of(job.digest for job in part)
            mark_ms = 0 if self._rows.is_seen else _MARK_MS
            args: list[bytes | str | int] = [GROUP, self._fingerprint, REPLY_CAP, REPLY_TTL_MS, _DEAD_CAP]
            args += (self._worker_id, mark_ms, len(part), carried.host, carried.store_ms)
            args += [job.entry_id for job in part]
            if carried.parts:
                values = [carried.parts[job.digest] for job in part]
                args += values if carried.store_ms else [b"".join(values)]
            for number, job in enumerate(part, 1):
                if job.failure is not None:
                    args += (number, job.failure.pack(), int(job.is_dead))
            outcome = await scripts.FINISH.on(call, keys, args)
            if not isinstance(outcome, bytes):
                raise ProtocolError(f"the server's reply does not fit the script that ends jobs: {shown(outcome)}")
            told, *numbers = outcome.split()
            left += [part[int(number) - 1] for number in numbers if number.isdigit()]
            elsewhere += [part[int(number[1:]) - 1] for number in numbers if number.startswith(b"@")]
            if unfinished := [part[int(number) - 1] for number in numbers if number.startswith(b"+")]:
                if len(unfinished) == len(part) and told == b"0":
                    raise ProtocolError(f"the server tells none of the clients that wait for {len(part)} jobs")
                parts.insert(0, unfinished)
        return left, elsewhere

    async def retry(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Try until the server answers. Repeating is harmless: the first stored row stays the row."""
        waits = delays()
        while True:
            try:
                return await attempt()
            except (RedisError, OSError, LMPoolError) as error:
                self._counters.server_errors += 1
                _log.warning("will try again: %s", self._server.explain(error))
                await asyncio.sleep(next(waits))


def _evicted_text(block: Block) -> str:
    """Why jobs fail whose rows the server evicts, and what to do."""
    # One that is stored, and one that is fetched.
    more = max(1, math.ceil(2 * block.nbytes / 1e6))
    return (
        f"the server has evicted the row as soon as it was stored, {_FRUITLESS_TRIES} times: its memory is full. "
        f"{len(block.digests)} that are stored together take {block.nbytes / 1e6:.1f} MB: give the server at least "
        f"{more} MB more (maxmemory), or run the worker with a smaller --max-batch"
    )
