"""Receiving: the notifications in a client's reply stream, and single entries of cached rows."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from lmpool import errors
from lmpool.aio import delays
from lmpool.broker.scripts import stream_entries
from lmpool.errors import CorruptRow, LMPoolError, ModelMismatch, ProtocolError, WorkerError
from lmpool.producer.client.connections import TROUBLE, Connections
from lmpool.producer.client.requests import PendingRequest, PendingRequests, Stage, Tasks
from lmpool.producer.client.submit import Submitter
from lmpool.protocol.job import DIGEST_SIZE, Failure, unpack_failure
from lmpool.protocol.row import Row, decode_alike, decode_entries, entry_ranges, split_rows
from lmpool.rows.cache import read_values
from lmpool.rows.shared_memory import PLACE_SIZE

FoundEntries = Row | CorruptRow | None
"""float32 of shape (k,), None if the row is not in the cache, or why the cached row is damaged."""

_log = logging.getLogger("lmpool.producer")

# Max bytes of a stream id with a time before the year 2286. A longer id is not from a clock.
_MAX_ID_BYTES = len("9999999999999-18446744073709551615")
# Up to 1,000 messages per read, blocking for up to 1,000 ms.
_XREAD = (b"XREAD", b"COUNT", 1000, b"BLOCK", 1000, b"STREAMS")
# Messages between two trims of the stream, each of which is a command.
_TRIM_INTERVAL = 16
# Event-loop ticks to yield after a read, so that callers can submit their next prompt.
_YIELDED_TICKS = 4
# Max rows read by one call of the entries script: while it reads, results of earlier calls are handled here.
_MAX_ROWS_AT_ONCE = 32
# Max entries read by one such call.
_MAX_ENTRIES_AT_ONCE = 2048


class Receiver:
    """Reads the notifications of one session.

    Args:
        connections: the session's connections.
        requests: the session's pending requests.
        tasks: runs background work.
        submitter: fetches announced rows, and records which worker computed them.
        on_other_model: called when a notification shows that the model has changed.
    """

    def __init__(
        self,
        connections: Connections,
        requests: PendingRequests,
        tasks: Tasks,
        submitter: Submitter,
        on_other_model: Callable[[], None],
    ) -> None:
        self._connections = connections
        self._requests = requests
        self._tasks = tasks
        self._submitter = submitter
        self._on_other_model = on_other_model
        self._announced: list[bytes] = []
        self._has_announced = asyncio.Event()

    async def read(self) -> None:
        """Read this client's reply stream, forever."""
        connections = self._connections
        last, was_damaged, unread = b"0-0", False, 0
        waits = delays()
        while True:
            try:
                entries = stream_entries(await connections.reader.call(*_XREAD, connections.model.reply, last))
            except TROUBLE as error:
                connections.note(error)
                is_damaged = isinstance(error, ProtocolError) or connections.reader.ended_within_reply
                if is_damaged:
                    connections.reader.hang_up(error)
                # A lost connection or lost bytes damage one reply. Two in a row mean that the stream is damaged.
                if (is_damaged and was_damaged) or "WRONGTYPE" in str(error):
                    last = await self._start_over()
                was_damaged = is_damaged
                await asyncio.sleep(next(waits))
                self._announce_all()
                continue
            waits, was_damaged = delays(), False
            for entry_id, fields in entries:
                last = entry_id
                if digests := self._on_message(fields):
                    await self._take(digests, fields)
            unread += len(entries)
            if unread >= _TRIM_INTERVAL:
                self._tasks.spawn(self._trim(last))
                unread = 0
            if len(last) > _MAX_ID_BYTES:
                last = await self._start_over()
                self._announce_all()
            # Callers that received rows go first: no request depends on the next notification yet.
            for _ in range(_YIELDED_TICKS):
                await asyncio.sleep(0)

    async def _trim(self, last: bytes) -> None:
        """Remove messages that were read: `finish.lua` sends no rows to a client with many unread messages."""
        connections = self._connections
        with suppress(*TROUBLE):
            await connections.commands.call(b"XTRIM", connections.model.reply, b"MINID", last)

    def _announce_all(self) -> None:
        """Fetch the rows of all requests: notifications may have been lost with the connection.

        Requests that only warm the cache need no row. They are submitted again when they have waited for a lease.
        """
        self._announce([request.prompt.digest for request in self._requests if request.in_flight and not request.warm])

    async def _start_over(self) -> bytes:
        """Delete a reply stream that cannot be read; returns the id to read from.

        Another client may have written an entry that is too large, a key of another type, or an entry with an id so
        large that the server can add no entry after it.
        """
        _log.warning("the reply stream %r cannot be read; deleting it", self._connections.model.reply)
        try:
            await self._connections.redis.unlink(self._connections.model.reply)
        except TROUBLE as error:
            self._connections.note(error)
        return b"0-0"

    async def collect(self) -> None:
        """Fetch announced rows, forever; digests that are announced during a fetch form the next one."""
        while True:
            await self._has_announced.wait()
            digests, self._announced = self._announced, []
            self._has_announced.clear()
            try:
                await self._submitter.fetch_announced(digests)
            except TROUBLE as error:
                self._connections.note(error)

    def _announce(self, digests: list[bytes]) -> None:
        self._announced += digests
        if self._announced:
            self._has_announced.set()

    def _on_message(self, fields: dict[bytes, bytes]) -> list[bytes]:
        """Handle failures; returns the pending prompts whose rows the message announces."""
        digests = fields.get(b"d", b"")
        each = (digests[at : at + DIGEST_SIZE] for at in range(0, len(digests), DIGEST_SIZE))
        requests = [request for digest in each if (request := self._requests.get(digest)) is not None]
        if (failure := fields.get(b"e")) is not None:
            for request in requests:
                self._on_failure(request, failure)
            return []
        if fields.get(b"f") == self._connections.model.fingerprint.encode():
            if worker := fields.get(b"w"):
                self._submitter.homes.note([request.prompt for request in requests], worker)
            return [request.prompt.digest for request in requests]
        if requests:
            for request in requests:
                request.stage = Stage.UNSENT  # The job has ended, for other weights.
            self._on_other_model()
        return []

    async def _take(self, digests: Sequence[bytes], fields: dict[bytes, bytes]) -> None:
        """Read the announced rows from the message or from shared memory; announce the others for fetching.

        Args:
            digests: the pending prompts.
            fields: the message.
        """
        places, all_digests = fields.get(b"s", b""), fields[b"d"]
        if carried := fields.get(b"v"):
            self._announce(self._read_carried(digests, all_digests, carried))
            return
        if len(places) != len(all_digests):
            self._announce(list(digests))
            return
        at = {all_digests[at : at + DIGEST_SIZE]: at for at in range(0, len(all_digests), DIGEST_SIZE)}
        segments, vocab_size = self._connections.segments, self._connections.model.info.vocab_size

        def read(digest: bytes) -> Row | None:
            return segments.read_at(places[at[digest] : at[digest] + PLACE_SIZE], digest, vocab_size)

        left = set(digests)
        wanted = [digest for digest in digests if (request := self._requests.get(digest)) and not request.warm]
        self._requests.is_resolving = True
        try:
            async for found in self._requests.resolve_by(wanted, read):
                left.difference_update(found)
        finally:
            self._requests.is_resolving = False
        self._announce([digest for digest in digests if digest in left])

    def _read_carried(self, digests: Sequence[bytes], all_digests: bytes, carried: bytes) -> list[bytes]:
        """Read the rows and results inside a message; returns the digests of those that must be fetched."""
        count = len(all_digests) // DIGEST_SIZE
        requests = [request for digest in digests if (request := self._requests.get(digest)) and not request.warm]
        lengths = {request.prompt.digest: request.prompt.length for request in requests if request.prompt.length}
        size = len(carried) // count
        # The rows of one model have one size. Results of queries name theirs.
        parts = split_rows(carried, count) if lengths else [carried[size * at : size * (at + 1)] for at in range(count)]
        if parts is None:
            return list(digests)
        each = (all_digests[at : at + DIGEST_SIZE] for at in range(0, DIGEST_SIZE * count, DIGEST_SIZE))
        values = dict(zip(each, parts, strict=True))
        wanted = [request.prompt.digest for request in requests]
        vocab_size = self._connections.model.info.vocab_size
        self._requests.resolve_found(
            wanted, read_values(wanted, [values[digest] for digest in wanted], lengths, vocab_size)
        )
        self._requests.counters.fetched_bytes += len(carried)
        return [digest for digest in digests if self._requests.get(digest) is not None]

    def _on_failure(self, request: PendingRequest, packed: bytes) -> None:
        try:
            failure = unpack_failure(packed)
        except ProtocolError as error:
            failure = Failure(WorkerError.__name__, f"a worker failed, and its message does not decode: {error}")
        if failure.kind == ModelMismatch.__name__:
            request.stage = Stage.UNSENT
            self._on_other_model()
            return
        kind = getattr(errors, failure.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, LMPoolError)):
            kind = WorkerError
        self._requests.resolve(request, kind(failure.text))


class WantedEntries(NamedTuple):
    """Token ids whose entries in a prompt's row are wanted."""

    digest: bytes
    ids: Sequence[int]


_EntryRead = tuple[WantedEntries, "asyncio.Future[FoundEntries]"]


class EntryReader:
    """Reads entries of cached rows, together for all calls of one event-loop tick."""

    def __init__(self, connections: Connections, tasks: Tasks) -> None:
        self._connections = connections
        self._tasks = tasks
        self._reads: list[_EntryRead] = []
        self._until = math.inf

    def read(self, wanted: WantedEntries, until: float) -> asyncio.Future[FoundEntries]:
        """Read some entries of one row.

        The result is None after the loop time `until`, and when the server cannot be used: the caller then requests the
        row and receives the reason.
        """
        if not self._reads:
            self._tasks.loop.call_soon(self._flush)
        future: asyncio.Future[FoundEntries] = self._tasks.loop.create_future()
        self._reads.append((wanted, future))
        self._until = min(self._until, until)
        return future

    def _flush(self) -> None:
        reads, self._reads = self._reads, []
        until, self._until = self._until, math.inf
        for portion in _entry_portions(reads):
            self._tasks.spawn(self._answer(portion, until))

    async def _answer(self, reads: list[_EntryRead], until: float) -> None:
        results: list[FoundEntries] = [None] * len(reads)
        timer = self._tasks.loop.call_at(until, _resolve, reads, results)
        try:
            results = await self._read([wanted for wanted, _ in reads])
        finally:  # Also when the session ends.
            timer.cancel()
            _resolve(reads, results)

    async def _read(self, wanted: list[WantedEntries]) -> list[FoundEntries]:
        connections = self._connections
        # Read the info only now: the model, and the encoding of its rows, may have changed since the call.
        info = connections.model.info
        encoding = info.row_encoding
        ranges = [entry_ranges(entries.ids, encoding) for entries in wanted]
        try:
            replies = await connections.model.rows.entries([entries.digest for entries in wanted], encoding, ranges)
        except TROUBLE as error:
            connections.note(error)
            return [None] * len(wanted)
        sizes = {len(entries.ids) for entries in wanted}
        if len(sizes) == 1 and (decoded := decode_alike(replies, info.vocab_size, sizes.pop())) is not None:
            return list(decoded)
        pairs = zip(replies, wanted, strict=True)
        return [None if reply is None else _decode(reply, entries, info.vocab_size) for reply, entries in pairs]


def _entry_portions(reads: list[_EntryRead]) -> Iterator[list[_EntryRead]]:
    """Split reads into portions for one script call each, which blocks the server."""
    begin = entries = 0
    for at, (wanted, _) in enumerate(reads):
        more = len(wanted.ids)
        if at > begin and (at - begin == _MAX_ROWS_AT_ONCE or entries + more > _MAX_ENTRIES_AT_ONCE):
            yield reads[begin:at]
            begin, entries = at, 0
        entries += more
    if begin < len(reads):
        yield reads[begin:]


def _resolve(reads: list[_EntryRead], results: list[FoundEntries]) -> None:
    for (_, future), result in zip(reads, results, strict=True):
        if not future.done():  # The caller may have been cancelled.
            future.set_result(result)


def _decode(data: bytes, wanted: WantedEntries, vocab_size: int) -> Row | CorruptRow:
    try:
        return decode_entries(data, vocab_size, len(wanted.ids))
    except ProtocolError as error:
        return CorruptRow(f"the cached row of prompt {wanted.digest.hex()} is damaged: {error}")
