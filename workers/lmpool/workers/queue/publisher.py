"""Publishing: stores rows in the cache, ends their stream entries, and notifies the clients."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from redis.exceptions import RedisError, ResponseError

from lmpool.aio import delays
from lmpool.broker import scripts
from lmpool.broker.replies import sentence
from lmpool.broker.server import Server
from lmpool.errors import LMPoolError, ModelMismatch, ProtocolError, ServerError
from lmpool.protocol.job import Failure
from lmpool.protocol.keys import GROUP, REPLY_CAP, REPLY_TTL_MS
from lmpool.protocol.row import Block, RowBlock, small_values
from lmpool.rows.cache import RowCache
from lmpool.rows.datagram import MAX_ROWS, DatagramSender, RowsReady
from lmpool.rows.segment import SegmentWriter
from lmpool.rows.shared_memory import NOT_SHARED, Shared, is_shared, place_of
from lmpool.settings import shown
from lmpool.workers.execution.in_flight import EntriesByDigest, StreamEntry
from lmpool.workers.queue.jobs import JobReader

T = TypeVar("T")
Digests = Collection[bytes]

_log = logging.getLogger("lmpool.worker")

_DEAD_CAP = 10_000  # Max dead letters of a model; beyond this number, the oldest dead letters are dropped.
_MAX_PAUSE_S = 2.0  # Max seconds between two tries to use a server that does not answer.
# Lifetime in ms of the mark that a prompt has ended; in a Redis cluster, scripts cannot check whether a row is stored.
_MARK_MS = 10_000
_MAX_FRUITLESS_TRIES = 6  # Max tries in a row, each without progress, to store rows that a full server evicts at once.
_EVICTION_BACKOFF = 4  # Factor by which fewer rows are stored at once after an eviction.


class Carried(NamedTuple):
    """Data that notifications carry next to the digests of rows."""

    # Digest -> the row's place in shared memory, or data that `finish.lua` also stores: a reference to shared memory,
    # or a small encoded row.
    parts: Mapping[bytes, bytes]
    # Token of the host with the shared memory, then the address of the worker's row server, if it has one; b"" if the
    # data are rows or answers.
    host: bytes = b""
    store_ms: int = 0  # Lifetime in ms with which `finish.lua` stores the data; 0: no storing.


_NOTHING = Carried({})


class Publisher:
    """Publishes rows, answers and failures of one model: in the cache, and in a segment for clients on this host.

    Attributes:
        jobs_in_lanes: number of jobs in the lanes (streams) of all workers, when jobs of this worker last ended.
    """

    def __init__(self, server: Server, rows: RowCache, segment: SegmentWriter, reader: JobReader) -> None:
        self.server, self.rows, self.segment, self.reader = server, rows, segment, reader
        self.counters, self.jobs_in_lanes = reader.counters, 0
        self.datagrams = DatagramSender()

    async def publish(self, block: Block, entries: EntriesByDigest, overwrite: Digests) -> None:
        """Store rows or answers and end the entries that wait for them; retry until the server accepts the block.

        A row without an entry is kept in shared memory only, with a reference in Redis: no client requests this row,
        but clients may request it later. Rows that are too small for shared memory are stored like other rows.

        Entries fail if the server refuses their rows, or evicts them again and again as soon as they are stored.
        `overwrite`: digests whose stored rows must be replaced.
        """
        began = time.monotonic()
        memory = Shared({}, (), self.segment.host, self.segment.address)
        # Store rows whole in Redis for clients that do not read this worker's shared memory.
        whole = set()
        if memory.host and isinstance(block, RowBlock):
            readable = memory.is_readable
            whole = {
                digest for digest, waiting in entries.items() if not all(readable(entry.host) for entry in waiting)
            }
        if not overwrite:
            self.notify_early(block, entries)
        if gone := await self._store(block, entries, {*overwrite, *whole}, began, whole):
            await self._store_again(block, entries, overwrite, gone, began)

    def notify_early(self, block: Block, entries: EntriesByDigest) -> None:
        """Send datagrams to clients on this host that wait for few rows, before the rows are stored in Redis.

        Any thread may call this method. Each entry is notified once: the server's message follows in any case.
        """
        if sum(map(len, entries.values())) > MAX_ROWS:
            return
        # Leave out entries whose queries are answered from a row: these clients do not wait for the row itself.
        direct = [each for digest, waiting in entries.items() for each in waiting if each.digest == digest]
        near = [entry for entry in direct if self.datagrams.reaches(entry.socket)]
        if not near:
            return
        host, rows = self.segment.host, dict[bytes, bytes]()
        if host and isinstance(block, RowBlock):
            readable = Shared({}, (), host, self.segment.address).is_readable
            rows = self.segment.write_rows(block, {each.digest for each in direct if not readable(each.host)}, ())
        are_places = bool(rows)
        if not are_places and (values := small_values(block)) is not None:
            rows = dict(zip(block.digests, values, strict=True))
        by_client: dict[bytes, dict[bytes, bytes]] = defaultdict(dict)
        for entry in near:
            if (value := rows.get(entry.digest)) is not None:
                by_client[entry.socket][entry.digest] = place_of(value) if are_places else value
                entry.socket = b""
        worker, fingerprint = self.reader.worker_id.encode(), self.reader.fingerprint
        for client, values_of in by_client.items():
            self.datagrams.send(client, RowsReady(fingerprint, worker, values_of, are_places))

    async def _store(
        self, block: Block, entries: EntriesByDigest, overwrite: Digests, began: float, whole: Digests | None = None
    ) -> list[bytes]:
        """Store rows and end their entries; return digests of rows that were evicted at once, whose entries remain.

        `began`: monotonic time when the rows were ready. `whole`: digests of rows that must not go to shared memory;
        None if no row goes to shared memory. Other parameters: see `publish`.
        """
        ending = [entry for digest in block.digests for entry in entries.get(digest, ())]
        shared = NOT_SHARED
        if whole is not None and isinstance(block, RowBlock):
            shared = self.segment.write(block, whole, overwrite)
            self.counters.shared += len(shared.references)
            self.counters.exported += len(whole)
        stale = set(shared.replaced).difference(block.digests)
        if isinstance(block, RowBlock) and is_shared(block.numbers.shape[1]):
            unwanted = {digest for digest in block.digests if not entries.get(digest)}.difference(shared.references)
            if unwanted:
                stale |= unwanted.intersection(overwrite)  # Damaged rows.
                block = block.select([at for at, digest in enumerate(block.digests) if digest not in unwanted])
        if not block.digests:
            if stale:
                await self._drop_references(stale)
            return []
        storing = self.retry(partial(self._attempt, block, ending, overwrite, shared))
        if stale:
            # Send the removal of references first; storing does not wait for its reply.
            _, (refused, left, elsewhere) = await asyncio.gather(self._drop_references(stale), storing)
        else:
            refused, left, elsewhere = await storing
        still = {entry.id for entry in (*left, *elsewhere)}
        ended = [entry.id for entry in ending if entry.id not in still]
        if ended or not still:
            outcome = "row" if isinstance(block, RowBlock) else "answer"
            self.counters.published(outcome, ended, time.monotonic() - began)
        if elsewhere:  # Replace references by the rows themselves, for clients on other hosts.
            by_digest: dict[bytes, list[StreamEntry]] = defaultdict(list)
            for entry in elsewhere:
                by_digest[entry.digest].append(entry)
            part = block.select([block.digests.index(digest) for digest in by_digest])
            self.counters.exported += len(by_digest)
            self.segment.note_stored(part.digests)
            gone = await self._store(part, by_digest, part.digests, began)
            left += [entry for digest in gone for entry in by_digest[digest]]
        if refused:
            self.counters.refused += len(refused)
            reason = sentence(ResponseError(next(iter(refused.values()))), "it")
            _log.warning("the server refused %d rows: %s", len(refused), reason)
            failure = Failure(ServerError.__name__, f"the server refused the row: {reason}")
            await self.fail([entry.failing(failure) for entry in left if entry.digest in refused])
        return list(dict.fromkeys(entry.digest for entry in left if entry.digest not in refused))

    async def _drop_references(self, stale: Digests) -> None:
        """Remove references to rows that were overwritten in shared memory. If that fails, clients detect it."""
        try:
            await self.rows.drop(self.rows.keys_of(stale))
        except (RedisError, OSError, LMPoolError) as error:
            _log.debug("%d stale references stay: %s", len(stale), self.server.explain(error))

    async def _store_again(
        self, block: Block, entries: EntriesByDigest, overwrite: Digests, gone: list[bytes], began: float
    ) -> None:
        """Store evicted rows again, until no client waits for more rows or several tries in succession store no row.

        Each try stores fewer rows at a time, so that clients can fetch these rows before the next rows arrive.
        """
        numbers = {digest: number for number, digest in enumerate(block.digests)}
        missing, at_once, fruitless, waits = gone, len(gone), 0, delays()
        while gone:
            self.counters.evicted += len(gone)
            _log.warning("the server evicted %d rows as soon as they were stored: give it more memory", len(gone))
            if fruitless == _MAX_FRUITLESS_TRIES:
                # Ask for memory of two blocks: the stored block, and the block that clients fetch at that time.
                more = max(1, math.ceil(2 * block.nbytes / 1e6))
                text = (
                    f"the server has evicted the row as soon as it was stored, {fruitless} times: its memory is full. "
                    f"{len(block.digests)} rows that are stored together take {block.nbytes / 1e6:.1f} MB: give the "
                    f"server at least {more} MB more (maxmemory), or start the worker with a smaller --max-batch"
                )
                failure = Failure(ServerError.__name__, text)
                await self.fail([entry.failing(failure) for digest in missing for entry in entries[digest]])
                return
            await asyncio.sleep(next(waits))
            entries = await self.still_wanted({digest: entries[digest] for digest in missing})
            missing, gone = list(entries), []
            at_once = max(1, at_once // _EVICTION_BACKOFF)
            while missing and not gone:
                part, missing = missing[:at_once], missing[at_once:]
                gone = await self._store(block.select([numbers[digest] for digest in part]), entries, overwrite, began)
                missing += gone
                if len(gone) < len(part):
                    fruitless, waits = 0, delays()
            fruitless += 1

    async def still_wanted(self, entries: EntriesByDigest) -> EntriesByDigest:
        """Remove entries that no client waits for from the queue; return the other entries."""
        removed = await self.reader.remove_unwanted([entry for waiting in entries.values() for entry in waiting])
        left = {digest: [entry for entry in waiting if entry.id not in removed] for digest, waiting in entries.items()}
        return {digest: waiting for digest, waiting in left.items() if waiting}

    async def _attempt(
        self, block: Block, entries: Sequence[StreamEntry], overwrite: Digests, shared: Shared
    ) -> tuple[dict[bytes, str], list[StreamEntry], list[StreamEntry]]:
        """Store the block and end the entries, once.

        Returns:
            digest -> reason for each refused row; entries whose row is not stored; entries of clients on other hosts.
        """
        left, elsewhere = list[StreamEntry](), list[StreamEntry]()
        not_shared = len(block.digests) - len(shared.references)
        self.counters.published_bytes += block.nbytes * not_shared // max(1, len(block.digests))
        # Let the script store the rows if each row has an entry, and all rows are small or in shared memory.
        parts: Mapping[bytes, bytes] | None = None
        if not overwrite and self.rows.is_seen and {entry.digest for entry in entries} == set(block.digests):
            parts = shared.references
            if not parts and (values := small_values(block)) is not None:
                parts = dict(zip(block.digests, values, strict=True))
        if parts is not None and len(parts) == len(block.digests):
            host = shared.host + shared.address if shared.references else b""
            carried = Carried(parts, host, self.rows.ttl_ms(block))
            entries, elsewhere = await self._end(entries, self.rows.queue, carried)
            if not entries:
                return {}, [], elsewhere
            # Use plain commands for rows that the script could not store: then the server reports why it refuses them.
            numbers = {digest: number for number, digest in enumerate(block.digests)}
            block = block.select([numbers[digest] for digest in dict.fromkeys(entry.digest for entry in entries)])
        places = {digest: place_of(shared.references.get(digest)) for digest in block.digests}
        carried = Carried(places, shared.host + shared.address) if shared.references else _NOTHING

        async def end(call: scripts.Call, refused: Digests) -> None:
            left.extend(entry for entry in entries if entry.digest in refused)
            stored = [entry for entry in entries if entry.digest not in refused] if refused else entries
            without_row, without_reader = await self._end(stored, call, carried)
            left.extend(without_row)
            elsewhere.extend(without_reader)

        # Send the rows and the script together: the script itself checks whether the rows are stored.
        refused = await self.rows.put(block, overwrite, then=end, shared=shared)
        return refused, left, elsewhere

    async def fail(self, entries: Sequence[StreamEntry]) -> None:
        """End entries, each with its `failure`; retry until the server has ended them."""
        self.counters.failed((entry.failure, entry.is_dead) for entry in entries)
        for entry in entries:
            self.counters.queued_ms.pop(entry.id, None)
        await self.retry(partial(self._end, entries, self.rows.queue))

    async def _end(
        self, entries: Sequence[StreamEntry], call: scripts.Call, carried: Carried = _NOTHING
    ) -> tuple[list[StreamEntry], list[StreamEntry]]:
        """End entries by a script, which `call` runs.

        Returns:
            the entries whose rows are not stored; the entries of clients that cannot read the references to rows.
        """
        left, elsewhere = list[StreamEntry](), list[StreamEntry]()
        parts = [entries[at : at + scripts.MAX_AT_ONCE] for at in range(0, len(entries), scripts.MAX_AT_ONCE)]
        while parts:
            part = parts.pop(0)
            model = self.reader.keys
            keys = [model.jobs, model.dead, *(model.waiting + entry.digest for entry in part)]
            keys += self.rows.keys_of(entry.digest for entry in part) if self.rows.is_seen else ()
            mark_ms = 0 if self.rows.is_seen else _MARK_MS
            args: list[bytes | str | int] = [
                GROUP, self.reader.fingerprint, REPLY_CAP, REPLY_TTL_MS, _DEAD_CAP, self.reader.worker_id, mark_ms,
                len(part), carried.host, carried.store_ms,
            ]  # fmt: skip
            args += [entry.id for entry in part]
            if carried.parts:
                values = [carried.parts[entry.digest] for entry in part]
                args += values if carried.store_ms else [b"".join(values)]
            for number, entry in enumerate(part, 1):
                if entry.failure is not None:
                    args += (number, entry.failure.pack(), int(entry.is_dead))
            outcome = await scripts.FINISH.on(call, keys, args)
            if not isinstance(outcome, bytes):
                raise ProtocolError(f"the reply of finish.lua is not a string: {shown(outcome)}")
            notified, *numbers = outcome.split()
            self.jobs_in_lanes = next((int(number[1:]) for number in numbers if number.startswith(b"=")), 0)
            left += [part[int(number) - 1] for number in numbers if number.isdigit()]
            elsewhere += [part[int(number[1:]) - 1] for number in numbers if number.startswith(b"@")]
            if unfinished := [part[int(number) - 1] for number in numbers if number.startswith(b"+")]:
                if len(unfinished) == len(part) and notified == b"0":
                    raise ProtocolError(f"finish.lua notified no client of {len(part)} jobs")
                parts.insert(0, unfinished)
        return left, elsewhere

    async def retry(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Retry until the server answers. A repeated command is harmless: the row that was stored first stays."""
        waits = delays(min(_MAX_PAUSE_S, self.reader.info.lease_s / 5))  # Short: heartbeats must not be late.
        while True:
            try:
                return await attempt()
            except ModelMismatch:
                raise
            except (RedisError, OSError, LMPoolError) as error:
                self.counters.server_errors += 1
                _log.warning("will try again: %s", self.server.explain(error))
                await self.server.reconnect(self.reader.redis, error)
                await asyncio.sleep(next(waits))
