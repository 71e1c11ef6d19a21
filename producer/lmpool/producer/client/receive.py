"""Receiving: notifications from the reply stream, and the rows or failures that they announce."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from lmpool import errors
from lmpool.backoff import delays
from lmpool.broker.streams import stream_entries
from lmpool.errors import LMPoolError, ModelMismatch, ProtocolError, WorkerError
from lmpool.producer.client.connections import TROUBLE, Channel
from lmpool.producer.client.requests import Flight, FlightTable, Stage
from lmpool.producer.client.submit import Outbox
from lmpool.protocol.job import Failure, unpack_failure
from lmpool.protocol.prompt import DIGEST_SIZE

_log = logging.getLogger("lmpool.producer")

_LONGEST_ID = len("9999999999999-18446744073709551615")
"""Of an id with a time before the year 2286."""
_XREAD = (b"XREAD", b"COUNT", 1000, b"BLOCK", 1000, b"STREAMS")


class Inbox:
    """Receives for one session.

    Args:
        channel: the connections.
        flights: all flights of the session.
        outbox: where a row that was announced and is gone is asked for again.
        on_other_model: called when the model turns out to have changed.
    """

    def __init__(
        self, channel: Channel, flights: FlightTable, outbox: Outbox, on_other_model: Callable[[], None]
    ) -> None:
        self._channel = channel
        self._flights = flights
        self._outbox = outbox
        self._on_other_model = on_other_model
        self._arrived: list[bytes] = []
        self._has_arrived = asyncio.Event()

    async def read(self) -> None:
        """The one reader of this client's reply stream; never returns."""
        channel = self._channel
        last, distrusted = b"0-0", False
        waits = delays()
        while True:
            try:
                entries = stream_entries(await channel.reader.call(*_XREAD, channel.model.reply, last))
            except TROUBLE as error:
                channel.note(error)
                is_odd = isinstance(error, ProtocolError)
                if is_odd:
                    channel.reader.hang_up(error)
                # Bytes that were lost on the way do that too, but not twice in a row.
                if (is_odd and distrusted) or "WRONGTYPE" in str(error):
                    last = await self._start_over()
                distrusted = is_odd
                await asyncio.sleep(next(waits))
                self._look_for_all()
                continue
            waits, distrusted = delays(), False
            for entry, fields in entries:
                last = entry
                self._on_message(fields)
            if len(last) > _LONGEST_ID:
                last = await self._start_over()
                self._look_for_all()
            # The collectors go first: rows are waited for, the next notification is not.
            await asyncio.sleep(0)

    def _look_for_all(self) -> None:
        """What was announced meanwhile may be lost with the connection: look for every row.

        Looking does not tell of touches, which are submitted again after a while.
        """
        self._announce([one.prompt.digest for one in self._flights if one.is_away and not one.is_touch])

    async def _start_over(self) -> bytes:
        """Drop a reply stream that somebody has spoilt; returns from where to read the next one.

        There may be something too large to be read, something else than a stream, or an entry with an id that no clock
        has come to, behind which the server can add nothing, or nothing that would be seen.
        """
        _log.warning("what is at %r cannot be followed: it is dropped", self._channel.model.reply)
        try:
            await self._channel.redis.unlink(self._channel.model.reply)
        except TROUBLE as error:
            self._channel.note(error)
        return b"0-0"

    async def collect(self) -> None:
        """Fetch the rows that have been announced; what comes meanwhile makes the next fetch; never returns."""
        while True:
            await self._has_arrived.wait()
            digests, self._arrived = self._arrived, []
            self._has_arrived.clear()
            try:
                announced = [flight for digest in digests if (flight := self._flights.get(digest)) is not None]
                await self._channel.settle(digests)
                # Not those that have begun meanwhile: they look for themselves.
                lost = [flight for flight in announced if flight.is_away and self._flights.is_open(flight)]
                if lost:
                    # Announced, but evicted or damaged since: a row is a pure function, so ask again.
                    await self._outbox.submit(lost, again=True)
            except TROUBLE as error:
                self._channel.note(error)

    def _announce(self, digests: list[bytes]) -> None:
        self._arrived += digests
        if self._arrived:
            self._has_arrived.set()

    def _on_message(self, fields: dict[bytes, bytes]) -> None:
        digests = fields.get(b"d", b"")
        failure = fields.get(b"e")
        parts = (digests[at : at + DIGEST_SIZE] for at in range(0, len(digests), DIGEST_SIZE))
        flights = [flight for part in parts if (flight := self._flights.get(part)) is not None]
        if failure is not None:
            for flight in flights:
                self._on_failure(flight, failure)
            return
        if fields.get(b"f") == self._channel.model.fingerprint.encode():
            self._announce([flight.prompt.digest for flight in flights])
        elif flights:
            for flight in flights:
                flight.stage = Stage.UNSENT  # Their jobs are done, for other weights.
            self._on_other_model()

    def _on_failure(self, flight: Flight, packed: bytes) -> None:
        try:
            failure = unpack_failure(packed)
        except ProtocolError as error:
            failure = Failure(WorkerError.__name__, f"a worker failed, and its message does not decode: {error}")
        if failure.kind == ModelMismatch.__name__:
            flight.stage = Stage.UNSENT
            self._on_other_model()
            return
        self._flights.land(flight, _exception(failure.kind, failure.text))


def _exception(kind: str, text: str) -> LMPoolError:
    """The exception that a worker named, as long as it is one of ours."""
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, LMPoolError):
        return found(text)
    return WorkerError(text)
