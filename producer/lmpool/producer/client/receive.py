"""Wait for requested rows until their deadlines; read the client's reply stream, and decode the rows in messages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from redis.exceptions import NoPermissionError

from lmpool import errors
from lmpool.aio import delays
from lmpool.broker.scripts import entries_by_stream
from lmpool.broker.server import Server
from lmpool.producer.client import requests as pending
from lmpool.producer.client.discovery import TROUBLE, Connections, Discovery, Liveness
from lmpool.producer.client.partitions import Partition
from lmpool.producer.client.submit import Submitter
from lmpool.protocol.job import DIGEST_SIZE, Failure, Prompt, encode_prompt, unpack_failure
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.query import SentWeights
from lmpool.protocol.row import Encoding, Row, decode_alike, decode_entries, encoded_size, split_rows
from lmpool.rows.cache import Found, read_values
from lmpool.rows.datagram import RowsReady
from lmpool.rows.shared_memory import PLACE_SIZE, RowMemory

_log = logging.getLogger("lmpool.producer")

# Max bytes of a stream id with a time before the year 2286. No server's clock produces a longer id.
_MAX_ID_BYTES = len("9999999999999-18446744073709551615")
# The command that reads up to 1,000 messages of the reply stream, without the ms for which it blocks.
_XREAD = (b"XREAD", b"COUNT", 1000, b"BLOCK")
# Max and min seconds for which a read of the reply stream blocks; in between, a third of a lease.
_MAX_BLOCK_S, _MIN_BLOCK_S = 5.0, 1.0
_TRIM_INTERVAL = 16  # Number of messages read between two trims of the reply stream, because each trim costs a command.
_YIELDED_TICKS = 4  # Event-loop ticks to yield after a read, so that callers can submit their next prompt.
# Seconds to pause after messages about rows that datagrams had brought, while fewer than this number of requests are
# pending: one command then reads the messages of several such requests. A lost datagram costs this time.
_PAUSE_S, _FEW_REQUESTS = 0.001, 2
_ROWS_PER_TICK = 8  # Max rows that a batch reads from shared memory before it yields to the event loop.
# Max lookups of single rows in shared memory per event-loop tick, so that other tasks get their turn.
_MAX_LOOKUPS_PER_TICK = 4
# Max rows from which one script call reads up to 128 entries each: the call blocks the server for a few ms.
_MAX_ROWS_AT_ONCE = 32


class Requester:
    """Requests rows from one model's workers, in one event loop; the subclass `Session` opens and closes connections.

    Attributes:
        loop: the event loop.
        info: the model info that was read last. A plain attribute is faster than a property for each request.
        first_queries: digest of a prompt without a home -> a future that ends with the first query about its row.
    """

    info: ModelInfo

    def __init__(self, server: Server, settings: pending.SessionSettings) -> None:
        self._settings = settings
        is_bulk = settings.priority == "bulk"
        self._connections = connections = Connections(server, settings.keys, is_bulk=is_bulk, is_direct=settings.direct)
        self._discovery = Discovery(connections.redis, settings.keys)
        self._liveness = Liveness(connections, self._discovery)
        self.loop = connections.loop
        self._cache: pending.RowLRU = settings.counters.cache
        self._stats = settings.counters.stats
        self._segments = connections.segments
        self._segments.counts = settings.counters.shared
        if connections.direct is not None:
            connections.direct.counts = settings.counters.shared
        self._requests = pending.PendingRequests(settings.counters)
        waits = settings.when_full == "wait"
        self._submitter = Submitter(connections, self._requests, waits=waits, traces=settings.traces)
        self.entries = EntryReader(connections)
        self._deadlines = pending.DeadlineTimers(
            self.loop, lambda waiter: self._expire(waiter.request, waiter, waiter.seconds)
        )
        self._batch_memory = RowMemory()
        self._lookups_left = _MAX_LOOKUPS_PER_TICK
        self.first_queries: dict[bytes, asyncio.Future[None]] = {}

    def encode(self, ids: Any, adapter: str = "") -> Prompt:
        """Check a prompt against the model's limits and encode it; `adapter` is "name@digest" or ""."""
        info = self.info
        return encode_prompt(ids, vocab_size=info.vocab_size, max_tokens=info.max_prompt_tokens, adapter=adapter)

    def has_place_for(self, prompt: Prompt) -> bool:
        """Return whether all requests for a prompt go to one worker: the only worker, or the home of the prompt."""
        homes = self._submitter.homes
        return not homes.has_choice or bool(homes.find(prompt)[0])

    def is_pending(self, prompt: Prompt) -> bool:
        """Return whether this session waits for the row, or the result, of a prompt."""
        return self._requests.get(prompt.digest) is not None

    def cached(self, prompt: Prompt) -> Row | None:
        """Return a prompt's row from the producer's own memory or from shared memory, and count the request.

        This checks shared memory at most four times per event-loop tick, and never while requests are pending, because
        the prompt would overtake these requests. Otherwise, the submitter checks shared memory for the prompt.
        """
        row = self._kept(prompt)
        if row is not None:
            self._stats.requests += 1
            self._stats.local_hits += 1
        elif self._lookups_left and not len(self._requests) and self._segments.has_any:
            if self._lookups_left == _MAX_LOOKUPS_PER_TICK:
                self.loop.call_soon(setattr, self, "_lookups_left", _MAX_LOOKUPS_PER_TICK)
            self._lookups_left -= 1
            began = self.loop.time()
            row = self._segments.find(prompt.digest, self.info.vocab_size)
            if row is not None:
                if self._requests.owns_cache:
                    self._cache.put(prompt.digest, row, is_shared=True)
                self.count_hits(began)
        return row

    def _kept(self, prompt: Prompt) -> Row | None:
        """Return a prompt's row from the producer's own memory, if this memory has rows of this session's weights."""
        return self._cache.get(prompt.digest) if self._requests.owns_cache else None

    def count_hits(self, began: float, count: int = 1) -> None:
        """Count requests that began at the loop time `began` and were served from the pool's cache just now."""
        self._stats.requests += count
        self._stats.cache_hits += count
        self._settings.counters.seconds["cache_hits"].observe(self.loop.time() - began, count)

    async def answer(
        self,
        prompt: Prompt,
        deadline: pending.Deadline,
        *,
        warm: bool = False,
        private: bool = False,
        damaged: bool = False,
        whole: bool = False,
        weights: SentWeights | None = None,
    ) -> Row:
        """Request a row, or the result of the prompt's query. `PendingRequest` describes `warm`, `whole` and others.

        With `warm`, the returned row is empty. A `private` result is removed from the cache once it has been read.
        `weights` must not change until the result arrives, and make the request private.
        """
        self._connections.check_open()
        waiter = self.begin(prompt, deadline.end, deadline.seconds, warm=warm)
        request = waiter.request
        if weights is not None:
            request.weights_name, request.weights = weights.name, weights
        is_kept = not prompt.query or self._settings.keep_answers
        request.is_private = private or weights is not None or not is_kept
        request.damaged = request.damaged or damaged
        request.whole = request.whole or whole
        try:
            return await waiter.future
        finally:
            self.end(waiter)

    def begin(self, prompt: Prompt, until: float, seconds: float, *, warm: bool = False) -> pending.SingleWaiter:
        """Start to wait for a row. The caller awaits the waiter's future, and then always calls `end`."""
        waiter = pending.SingleWaiter(self.loop, seconds)
        waiter.request = self._add(prompt, waiter, until, warm)
        self._deadlines.add(waiter, until)
        return waiter

    def end(self, waiter: pending.SingleWaiter) -> None:
        """Stop waiting for a row; cancels the request if it has no other waiter."""
        self._deadlines.remove(waiter)
        request = waiter.request
        if request.waiters:
            self._remove_waiter(request, waiter)
        # A private result stays in the pool's cache until its last waiter has read it.
        if request.is_private and self._requests.get(request.prompt.digest) is None:
            self._submitter.discard([request])

    def _add(self, prompt: Prompt, waiter: pending.Waiter, until: float, warm: bool = False) -> pending.PendingRequest:
        self._stats.requests += 1
        request, is_new = self._requests.add(prompt, waiter, until, warm)
        if is_new:
            self._submitter.add(request)
        if self._settings.traces is not None:
            self._settings.traces.note(request, is_new)
        return request

    def _remove_waiter(self, request: pending.PendingRequest, waiter: pending.Waiter, why: str = "cancelled") -> None:
        if waiter in request.waiters and self._requests.remove_waiter(request, waiter, why):
            self._submitter.cancel(request)

    async def answer_all(self, prompts: Sequence[Prompt], deadline: pending.Deadline) -> NDArray[np.float32]:
        """Request the rows of several prompts: float32 (n, V). The first failure cancels the other requests."""
        vocab_size, is_sharing = self.info.vocab_size, bool(prompts) and self._segments.has_any
        if is_sharing:
            # Reuse memory: copying rows from shared memory is faster than getting new pages from the operating system.
            memory = self._batch_memory.take_writeable(4 * len(prompts) * vocab_size)
            rows = memory.view(np.float32).reshape(len(prompts), vocab_size)
        else:
            rows = np.empty((len(prompts), vocab_size), np.float32)
        began, copied = self.loop.time(), set[int]()
        for index, prompt in enumerate(prompts if is_sharing else ()):
            if self._kept(prompt) is None and self._segments.find(prompt.digest, vocab_size, rows[index]) is not None:
                copied.add(index)
            if index % _ROWS_PER_TICK == _ROWS_PER_TICK - 1:
                await asyncio.sleep(0)
        self._connections.check_open()  # The session may have ended while this call yielded to the event loop.
        self.count_hits(began, len(copied))
        batch, waits = pending.BatchWaiter(self.loop, rows), list[tuple[pending.PendingRequest, pending.Waiter]]()
        for index, prompt in enumerate(prompts):
            waiter: pending.Waiter = partial(batch.put, index)
            if index in copied:
                batch.count()
            elif (row := self._kept(prompt)) is not None:
                self._stats.requests += 1
                self._stats.local_hits += 1
                waiter(row)
            else:
                waits.append((self._add(prompt, waiter, deadline.end), waiter))

        def expire() -> None:
            for request, waiter in waits:
                self._expire(request, waiter, deadline.seconds)

        timer = self.loop.call_at(deadline.end, expire)
        try:
            await batch.future
        finally:
            timer.cancel()
            for request, waiter in waits:
                if request.waiters:
                    self._remove_waiter(request, waiter)
        return rows

    def _expire(self, request: pending.PendingRequest, waiter: pending.Waiter, timeout_s: float) -> None:
        """End a wait at its deadline, with an error that says why the request has no row yet."""
        if waiter not in request.waiters:
            return
        connections, text = self._connections, f"no row within {timeout_s:g} s"
        error: errors.LMPoolError
        if connections.trouble is not None:
            error = type(connections.trouble)(f"{text}: {connections.trouble}")
        elif request.is_refused or (self._submitter.is_full and request.stage is not pending.Stage.WAITING):
            error = errors.QueueFull(f"{text}: {connections.describe_full_queue()}")
        elif request.lost:  # Report evicted rows first: a server that evicts rows may evict heartbeats too.
            info, length = self.info, request.prompt.length
            size = encoded_size(length or info.vocab_size, Encoding.F32 if length else info.row_encoding)
            text += ": the row was gone from the server before it could be fetched"
            text += f", {request.lost} times" if request.lost > 1 else ""
            full = f"its memory is full, and it evicts rows of {size / 1e6:.3g} MB: raise maxmemory or request less"
            error = errors.DeadlineExceeded(f"{text}. Either {full}. Or it restarted, or another client deletes rows")
        else:
            error = self._liveness.deadline_error(text)
        self._remove_waiter(request, waiter, type(error).__name__)
        waiter(error)


class Receiver:
    """Reads the notifications in the reply stream of one session.

    Attributes:
        messages: number of messages that were read.
    """

    def __init__(
        self,
        connections: Connections,
        requests: pending.PendingRequests,
        submitter: Submitter,
        on_change: Callable[[], None],
    ) -> None:
        self._connections = connections
        self._requests = requests
        self._submitter = submitter
        self._on_change = on_change  # Called when a message says that the model has other weights.
        self.messages = 0
        self._announced: list[pending.PendingRequest] = []
        self._has_announced = asyncio.Event()

    async def read_all(self) -> None:
        """Read this client's reply streams, one in each partition that it uses, forever."""
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self.read(await self._connections.partitions.opened.get()))

    async def read(self, partition: Partition) -> None:
        """Read this client's reply stream in a partition, forever."""
        connections, reader = self._connections, partition.reader
        last, moved, was_damaged, unread = b"0-0", b"0-0", False, 0
        may_follow = True  # Whether the server's user may read the stream `moved`: an older users.acl lacks this right.
        waits, key = delays(), partition.reply
        while True:
            if key != partition.reply:  # Submit pending requests again: they name the old reply key.
                last, moved, key = b"0-0", b"0-0", partition.reply
                self._announce_all(partition)
            try:
                block_s = min(_MAX_BLOCK_S, max(_MIN_BLOCK_S, connections.model.info.lease_s / 3))
                has_moved = partition.keys.moved
                streams = (b"STREAMS", key, has_moved, last, moved) if may_follow else (b"STREAMS", key, last)
                found = entries_by_stream(await reader.call(*_XREAD, int(1000 * block_s), *streams))
                entries, moves = found.get(key, []), found.get(has_moved, [])
            except TROUBLE as error:
                if key != partition.reply:
                    continue
                if may_follow and isinstance(error, NoPermissionError):
                    may_follow = False
                    continue
                connections.note(error)
                is_damaged = isinstance(error, errors.ProtocolError) or reader.ended_within_reply
                if is_damaged:
                    reader.hang_up(error)
                # A lost connection damages one reply. Two damaged replies in a row mean that the stream is damaged.
                if (is_damaged and was_damaged) or "WRONGTYPE" in str(error):
                    last = await self._start_over(partition)
                was_damaged = is_damaged
                await asyncio.sleep(next(waits))
                self._announce_all(partition)
                continue
            waits, was_damaged, was_awaited = delays(), False, False
            if moves:
                moved = moves[-1][0]
                self._on_change()
            for entry_id, fields in entries:
                last = entry_id
                was_awaited = await self._on_message(fields, partition) or was_awaited
            unread += len(entries)
            self.messages += len(entries)
            if unread >= _TRIM_INTERVAL:
                connections.spawn(self._trim(partition, last))
                unread = 0
            if len(last) > _MAX_ID_BYTES:
                last = await self._start_over(partition)
                self._announce_all(partition)
            if entries and not was_awaited and len(self._requests) < _FEW_REQUESTS:
                await asyncio.sleep(_PAUSE_S)
            # Yield so that callers that received rows can submit their next prompts before the next read.
            for _ in range(_YIELDED_TICKS * was_awaited):
                await asyncio.sleep(0)

    async def _trim(self, partition: Partition, last: bytes) -> None:
        """Remove read messages from the reply stream: while it is long, `finish.lua` puts no rows into messages."""
        with suppress(*TROUBLE):
            await partition.commands.call(b"XTRIM", partition.reply, b"MINID", last)

    async def _start_over(self, partition: Partition) -> bytes:
        """Delete a reply stream that cannot be read; returns the id after which to read the new stream.

        Another client may have replaced the stream by a key of another type, or added an entry that is too large, or an
        entry whose id is so large that the server can add no later entry.
        """
        _log.warning("the reply stream %r cannot be read; deleting it", partition.reply)
        with self._connections.noting():
            await self._connections.redis.unlink(partition.reply)
        return b"0-0"

    async def collect(self) -> None:
        """Fetch announced rows, forever; rows that are announced during a fetch are fetched by the next fetch."""
        while True:
            await self._has_announced.wait()
            announced, self._announced = self._announced, []
            self._has_announced.clear()
            try:
                await self._submitter.fetch_announced(announced)
            except TROUBLE as error:
                self._connections.note(error)

    def _announce(self, requests: list[pending.PendingRequest]) -> None:
        if requests:
            self._announced += requests
            self._has_announced.set()

    def _announce_all(self, partition: Partition) -> None:
        """Fetch the rows of all requests in a partition: notifications may have been lost with the connection.

        Requests that only warm the cache need no row; the session submits warming requests again after a lease.
        """
        requests = [request for request in self._requests if request.partition in (None, partition.number)]
        self._announce([request for request in requests if request.in_flight and not request.warm])

    async def _on_message(self, fields: Mapping[bytes, bytes], partition: Partition) -> bool:
        """Resolve requests with the failure or the rows of a message, and announce the rows that must be fetched.

        Returns whether a request waited for the message.
        """
        joined, find = fields.get(b"d", b""), self._requests.get
        digests = [joined[at : at + DIGEST_SIZE] for at in range(0, len(joined), DIGEST_SIZE)]
        requests = [request for digest in digests if (request := find(digest)) is not None]
        partition.count(-len(digests))
        if not requests:
            return False
        if (failure := fields.get(b"e")) is not None:
            self._on_failure(requests, failure)
            return True
        model = self._connections.model
        if fields.get(b"f") != model.fingerprint.encode():
            self._restart(requests)
            return True
        direct = self._connections.direct
        if worker := fields.get(b"w"):
            self._submitter.homes.note([request.prompt for request in requests], worker, partition.number)
        if carried := fields.get(b"v"):
            lengths = {request.prompt.digest: request.prompt.length for request in requests if request.prompt.length}
            count, cut = len(digests), len(carried) // len(digests)
            # All rows of one model have the same size. The results of queries have headers that contain their sizes.
            parts = (
                split_rows(carried, count) if lengths else [carried[cut * at : cut * (at + 1)] for at in range(count)]
            )
            if parts is not None:
                self._requests.resolve_found(digests, read_values(digests, parts, lengths, model.info.vocab_size))
                self._requests.counters.fetched_bytes += len(carried)
        elif (address := fields.get(b"a")) and direct is not None:
            awaited = {request.prompt.digest for request in requests if not request.warm}
            direct.note(address, digests, fields.get(b"s", b""), awaited)
        elif len(places := fields.get(b"s", b"")) == len(joined):
            starts = range(0, len(joined), DIGEST_SIZE)
            place_of = {joined[at : at + DIGEST_SIZE]: places[at : at + PLACE_SIZE] for at in starts}
            segments, vocab_size = self._connections.segments, model.info.vocab_size
            wanted = [request.prompt.digest for request in requests if not request.warm]
            await self._requests.resolve_by(
                wanted, lambda digest: segments.read_at(place_of[digest], digest, vocab_size), "announced"
            )
        elif worker and not requests[0].prompt.query:
            self._connections.want_direct(worker)
        self._announce([request for request in requests if request.waiters])
        return True

    def on_datagram(self, message: RowsReady) -> None:
        """Resolve requests with the rows of a datagram, which are checked like the rows in the server's messages.

        Rows that cannot be read are ignored: the server's message about these rows follows.
        """
        model, segments, rows = self._connections.model, self._connections.segments, dict[bytes, Row]()
        for digest, value in message.rows.items() if message.fingerprint == model.fingerprint else ():
            request = self._requests.get(digest)
            if request is None or not request.may_end_early:
                continue
            row: Found = None
            if not message.are_places:
                lengths = {digest: request.prompt.length} if request.prompt.length else {}
                (row,) = read_values([digest], [value], lengths, model.info.vocab_size)
            elif len(value) == PLACE_SIZE:
                row = segments.read_at(value, digest, model.info.vocab_size)
            if row is not None and not isinstance(row, errors.CorruptRow):
                rows[digest] = row
                request.ended_early, request.origin = True, request.origin or "computed"
                self._submitter.homes.note([request.prompt], message.worker, request.partition or 0)
        self._requests.resolve_found(list(rows), list(rows.values()), are_shared=message.are_places)

    def _restart(self, requests: Sequence[pending.PendingRequest]) -> None:
        """Send requests again whose jobs ended without a row because the model now has other weights."""
        for request in requests:
            request.stage = pending.Stage.UNSENT
        self._on_change()

    def _on_failure(self, requests: Sequence[pending.PendingRequest], packed: bytes) -> None:
        try:
            failure = unpack_failure(packed)
        except errors.ProtocolError as error:
            failure = Failure(errors.WorkerError.__name__, f"a worker failed, and its message does not decode: {error}")
        if failure.kind == errors.ModelMismatch.__name__:
            self._restart(requests)
            return
        kind = getattr(errors, failure.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, errors.LMPoolError)):
            kind = errors.WorkerError
        for request in requests:
            self._requests.resolve(request, kind(failure.text))


class _EntryRead(NamedTuple):
    """A call of `EntryReader.read`, which reads the entries of a prompt's row at some token ids until a loop time."""

    digest: bytes
    ids: Sequence[int]
    until: float
    result: asyncio.Future[Row | None]


class EntryReader:
    """Reads entries of cached rows; all calls of one event-loop tick share script calls."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._reads: list[_EntryRead] = []

    def read(self, digest: bytes, ids: Sequence[int], until: float) -> asyncio.Future[Row | None]:
        """Read some entries of one row.

        The result is None if the row is not in the cache or is damaged, after the loop time `until`, or if the server
        cannot be used. The caller then requests the row, and this request raises the error.
        """
        loop = self._connections.loop
        if not self._reads:
            loop.call_soon(self._flush)
        self._reads.append(_EntryRead(digest, ids, until, loop.create_future()))
        return self._reads[-1].result

    def _flush(self) -> None:
        reads, self._reads = self._reads, []
        for at in range(0, len(reads), _MAX_ROWS_AT_ONCE):
            portion = reads[at : at + _MAX_ROWS_AT_ONCE]
            results: list[Row | None] = [None] * len(portion)
            task = self._connections.spawn(self._answer(portion, results))
            # The end of the session cancels the task. A task that is cancelled before its first step runs no `finally`.
            task.add_done_callback(partial(_resolve, portion, results))

    async def _answer(self, reads: list[_EntryRead], results: list[Row | None]) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout_at(min(read.until for read in reads)):
                with self._connections.noting():
                    await self._read(reads, results)

    async def _read(self, reads: list[_EntryRead], results: list[Row | None]) -> None:
        model = self._connections.model
        # Use the current info: the model, and the encoding of its rows, may have changed since `read` was called.
        encoding, vocab_size = model.info.row_encoding, model.info.vocab_size
        replies = await model.rows.entries([read.digest for read in reads], encoding, [read.ids for read in reads])
        sizes = {len(read.ids) for read in reads}
        if len(sizes) == 1 and (decoded := decode_alike(replies, vocab_size, sizes.pop())) is not None:
            results[:] = decoded
            return
        for at, (read, reply) in enumerate(zip(reads, replies, strict=True)):
            if reply is not None:
                with suppress(errors.ProtocolError):
                    results[at] = decode_entries(reply, vocab_size, len(read.ids))


def _resolve(reads: list[_EntryRead], results: list[Row | None], _: object) -> None:
    for read, result in zip(reads, results, strict=True):
        if not read.result.done():  # The caller may have been cancelled.
            read.result.set_result(result)
