"""Receiving: the notifications of the reply stream, of rows and failures; and single entries of rows."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from lmpool import errors
from lmpool.aio import delays
from lmpool.broker.scripts import stream_entries
from lmpool.errors import CorruptRow, LMPoolError, ModelMismatch, ProtocolError, WorkerError
from lmpool.producer.client.connections import TROUBLE, Connections, Tasks
from lmpool.producer.client.requests import PendingRequest, PendingRequests, Stage
from lmpool.protocol.job import DIGEST_SIZE, Failure, Prompt, unpack_failure
from lmpool.protocol.row import Row, decode_alike, decode_entries, entry_ranges, split_rows
from lmpool.rows.cache import read_carried
from lmpool.rows.shared_memory import PLACE_SIZE

FoundEntries = Row | CorruptRow | None
"""float32 of shape (k,); None when the row is not in the cache (an error is a value here)."""

_log = logging.getLogger("lmpool.producer")

_LONGEST_ID = len("9999999999999-18446744073709551615")
"""Of an id with a time before the year 2286."""

_XREAD = (b"XREAD", b"COUNT", 1000, b"BLOCK", 1000, b"STREAMS")

_TRIM_AFTER = 16
"""Messages after which those that have been read are removed."""

_TURNS = 4
"""Of the event loop until who has got a row has asked for the next, and that is sent."""

_MAX_ROWS_AT_ONCE = 32
"""Rows whose entries are read together: while the server looks at some, others are answered here."""

_MAX_ENTRIES_AT_ONCE = 2048
"""Entries that are read together."""


class Receiver:
    """Reads the notifications for one session.

    Args:
        connections: the connections.
        requests: all requests of the session.
        tasks: where background work runs.
        fetch: fetches rows that were announced, or asks for them again.
        on_computed: told which worker has computed prompts.
        on_other_model: called when the model turns out to have changed.
    """

    def __init__(
        self,
        connections: Connections,
        requests: PendingRequests,
        tasks: Tasks,
        fetch: Callable[[Sequence[bytes]], Awaitable[None]],
        on_computed: Callable[[Sequence[Prompt], bytes], None],
        on_other_model: Callable[[], None],
    ) -> None:
        self._connections = connections
        self._requests = requests
        self._tasks = tasks
        self._fetch = fetch
        self._on_computed = on_computed
        self._on_other_model = on_other_model
        self._announced: list[bytes] = []
        self._has_announced = asyncio.Event()

    async def read(self) -> None:
        """The one reader of this client's reply stream; never returns."""
        connections = self._connections
        last, distrusted, seen = b"0-0", False, 0
        waits = delays()
        while True:
            try:
                entries = stream_entries(await connections.reader.call(*_XREAD, connections.model.reply, last))
            except TROUBLE as error:
                connections.note(error)
                is_odd = isinstance(error, ProtocolError) or connections.reader.ended_within_reply
                if is_odd:
                    connections.reader.hang_up(error)
                # Bytes that were lost on the way, or a connection that was, do that too, but hardly twice in a row.
                if (is_odd and distrusted) or "WRONGTYPE" in str(error):
                    last = await self._start_over()
                distrusted = is_odd
                await asyncio.sleep(next(waits))
                self._look_for_all()
                continue
            waits, distrusted = delays(), False
            for entry_id, fields in entries:
                last = entry_id
                if digests := self._on_message(fields):
                    await self._take(digests, fields)
            seen += len(entries)
            if seen >= _TRIM_AFTER:
                self._tasks.spawn(self._trim(last))
                seen = 0
            if len(last) > _LONGEST_ID:
                last = await self._start_over()
                self._look_for_all()
            # The collectors go first, and what those ask who have got rows: nobody waits for the next notification yet.
            for _ in range(_TURNS):
                await asyncio.sleep(0)

    async def _trim(self, last: bytes) -> None:
        """Remove messages that have been read: behind many of them, `finish.lua` has none carry rows."""
        connections = self._connections
        with suppress(*TROUBLE):
            await connections.commands.call(b"XTRIM", connections.model.reply, b"MINID", last)

    def _look_for_all(self) -> None:
        """What was announced meanwhile may be lost with the connection: look for every row.

        Looking tells nothing of requests that only warm the cache, which are submitted again after a while.
        """
        self._announce([request.prompt.digest for request in self._requests if request.in_flight and not request.warm])

    async def _start_over(self) -> bytes:
        """Drop a reply stream that somebody has spoilt; returns from where to read the next one.

        There may be an entry too large to be read, or to be received in time. There may be something else than a
        stream, or an entry with an id that no clock has come to, behind which the server can add nothing.
        """
        _log.warning("what is at %r cannot be followed: it is dropped", self._connections.model.reply)
        try:
            await self._connections.redis.unlink(self._connections.model.reply)
        except TROUBLE as error:
            self._connections.note(error)
        return b"0-0"

    async def collect(self) -> None:
        """Fetch the rows that have been announced; what comes meanwhile makes the next fetch; never returns."""
        while True:
            await self._has_announced.wait()
            digests, self._announced = self._announced, []
            self._has_announced.clear()
            try:
                await self._fetch(digests)
            except TROUBLE as error:
                self._connections.note(error)

    def _announce(self, digests: list[bytes]) -> None:
        self._announced += digests
        if self._announced:
            self._has_announced.set()

    def _on_message(self, fields: dict[bytes, bytes]) -> list[bytes]:
        """Returns the prompts whose rows are announced."""
        digests = fields.get(b"d", b"")
        failure = fields.get(b"e")
        each = (digests[at : at + DIGEST_SIZE] for at in range(0, len(digests), DIGEST_SIZE))
        requests = [request for digest in each if (request := self._requests.get(digest)) is not None]
        if failure is not None:
            for request in requests:
                self._on_failure(request, failure)
            return []
        if fields.get(b"f") == self._connections.model.fingerprint.encode():
            if worker := fields.get(b"w"):
                self._on_computed([request.prompt for request in requests], worker)
            return [request.prompt.digest for request in requests]
        if requests:
            for request in requests:
                request.stage = Stage.UNSENT  # Their jobs are done, for other weights.
            self._on_other_model()
        return []

    async def _take(self, digests: Sequence[bytes], fields: dict[bytes, bytes]) -> None:
        """Read the rows that have come along or are in shared memory, and have the others fetched.

        Args:
            digests: of the prompts that are waited for.
            fields: the message that has announced them.
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
        # Requests that warm the cache alone end without the row.
        wanted = [digest for digest in digests if (request := self._requests.get(digest)) and not request.warm]
        self._requests.is_resolving = True
        try:
            async for found in self._requests.resolve_by(wanted, read):
                left.difference_update(found)
        finally:
            self._requests.is_resolving = False
        self._announce([digest for digest in digests if digest in left])

    def _read_carried(self, digests: Sequence[bytes], all_digests: bytes, carried: bytes) -> list[bytes]:
        """Read rows and answers that a message has carried; returns the digests of those that must be fetched."""
        count = len(all_digests) // DIGEST_SIZE
        requests = [request for digest in digests if (request := self._requests.get(digest)) and not request.warm]
        lengths = {request.prompt.digest: request.prompt.length for request in requests if request.prompt.length}
        size = len(carried) // count
        # Rows of one model are mostly of one size; answers tell theirs.
        parts = split_rows(carried, count) if lengths else [carried[size * at : size * (at + 1)] for at in range(count)]
        if parts is None:
            return list(digests)
        each = (all_digests[at : at + DIGEST_SIZE] for at in range(0, DIGEST_SIZE * count, DIGEST_SIZE))
        values = dict(zip(each, parts, strict=True))
        wanted = [request.prompt.digest for request in requests]
        rows = read_carried(
            wanted, [values[digest] for digest in wanted], lengths, self._connections.model.info.vocab_size
        )
        self._requests.resolve_found(wanted, rows)
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
        self._requests.resolve(request, _exception(failure.kind, failure.text))


def _exception(kind: str, text: str) -> LMPoolError:
    """The exception that a worker named, as long as it is one of ours."""
    error = getattr(errors, kind, None)
    if isinstance(error, type) and issubclass(error, LMPoolError):
        return error(text)
    return WorkerError(text)


class WantedEntries(NamedTuple):
    """Entries of one prompt's row.

    Attributes:
        digest: the prompt.
        ids: which entries.
    """

    digest: bytes
    ids: Sequence[int]


_Read = tuple[WantedEntries, "asyncio.Future[FoundEntries]"]


class EntryReader:
    """Reads entries for one session; what is asked for in one tick of the event loop is read together.

    Args:
        connections: the connections.
        tasks: where background work runs.
    """

    def __init__(self, connections: Connections, tasks: Tasks) -> None:
        self._connections = connections
        self._tasks = tasks
        self._reads: list[_Read] = []
        self._until = math.inf

    def read(self, wanted: WantedEntries, until: float) -> asyncio.Future[FoundEntries]:
        """The entries of one row.

        Args:
            wanted: which.
            until: loop time after which the answer is None. So it is when the server cannot be used: who asks for the
                row then is told what the matter is.
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
        for portion in _portions(reads):
            self._tasks.spawn(self._answer(portion, until))

    async def _answer(self, reads: list[_Read], until: float) -> None:
        results: list[FoundEntries] = [None] * len(reads)
        timer = self._tasks.loop.call_at(until, _resolve, reads, results)
        try:
            results = await self._read([wanted for wanted, _ in reads])
        finally:  # The session may end meanwhile.
            timer.cancel()
            _resolve(reads, results)

    async def _read(self, wanted: list[WantedEntries]) -> list[FoundEntries]:
        connections = self._connections
        # Only now: the model may have changed since they were asked for, and its rows' encoding with it.
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


def _portions(reads: list[_Read]) -> Iterator[list[_Read]]:
    """Reads in portions for one call of the script, which serves nobody else meanwhile."""
    begin = entries = 0
    for at, (wanted, _) in enumerate(reads):
        more = len(wanted.ids)
        if at > begin and (at - begin == _MAX_ROWS_AT_ONCE or entries + more > _MAX_ENTRIES_AT_ONCE):
            yield reads[begin:at]
            begin = at
            entries = 0
        entries += more
    if begin < len(reads):
        yield reads[begin:]


def _resolve(reads: list[_Read], results: list[FoundEntries]) -> None:
    for (_, future), result in zip(reads, results, strict=True):
        if not future.done():  # Who asked may have been cancelled.
            future.set_result(result)


def _decode(data: bytes, wanted: WantedEntries, vocab_size: int) -> Row | CorruptRow:
    try:
        return decode_entries(data, vocab_size, len(wanted.ids))
    except ProtocolError as error:
        return CorruptRow(f"the cached row of prompt {wanted.digest.hex()} is damaged: {error}")
