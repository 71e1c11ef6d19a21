"""The consumer of a model's queue: reads new jobs from the worker's lane (its own stream) and the shared stream."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from contextlib import suppress

from redis.exceptions import RedisError, ResponseError

from lmpool.broker import scripts
from lmpool.broker.connection import CommandConnection
from lmpool.broker.scripts import Entries, entries_by_stream, read_alive_in, read_queue_in
from lmpool.errors import LMPoolError, ProtocolError, ServerError
from lmpool.protocol.keys import GROUP, WAKE_FIELD, ModelKeys
from lmpool.workers.queue.jobs import JobReader, Taken

_log = logging.getLogger("lmpool.worker")

# Max ms by which entry ids may be ahead of the server's clock: an hour, because a clock may be set back.
_MAX_AHEAD_MS = 3_600_000
_MAX_DELAY_DIGITS = 5  # Max digits of the delay in a wake-up, in ms; clients may write to lanes, too.
# Steps that a prompt waits in the lane of its home (the worker that computed a prefix) before another worker steals it.
_PATIENCE_STEPS = 4
_MIN_PATIENCE_S = 0.25  # Min seconds that a prompt waits for its home worker, however short the steps are.
_MAX_PATIENCE_S = 60.0  # Max seconds that a prompt waits for its home worker, however long the steps are.


class Consumer:
    """Reads new jobs of one model. An idle worker that is woken also takes jobs from the lanes of other workers.

    Args:
        reader: reads jobs.
        connection: connection for blocking reads only.

    Attributes:
        woken_ms: if the last read found an entry that wakes this worker, ms after which the worker checks for jobs.
        is_reading: whether a read for jobs is in progress.
        failed_at: monotonic time of the last read or claim that failed; its jobs may have been delivered.
    """

    def __init__(self, reader: JobReader, connection: CommandConnection) -> None:
        self.reader, self.connection = reader, connection
        self.woken_ms: int | None = None
        self.is_reading = False
        self.failed_at = -math.inf
        self._redis, self._worker_id = reader.redis, reader.worker_id
        self._of_lane = b" " + reader.worker_id.encode()

    @property
    def _keys(self) -> ModelKeys:
        """The keys of the partition that the worker serves."""
        return self.reader.keys

    @property
    def _lane(self) -> bytes:
        return self.reader.keys.lane(self._worker_id)

    async def ensure_group(self) -> None:
        """Create the shared stream and its consumer group, which also gets the jobs that are already queued."""
        sent_at = time.time()
        seconds, micros = await self.connection.call(b"TIME")
        self.reader.counters.note_clock(int(seconds) + int(micros) / 1e6, sent_at)
        await self._create_group(self._keys.jobs)
        await self.keep_queue()

    async def open_lane(self) -> None:
        """Create the worker's lane and its group. Register the worker first: other workers remove unknown lanes."""
        await self._create_group(self._lane)

    async def _create_group(self, stream: bytes) -> None:
        try:
            await self._redis.xgroup_create(stream, GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    async def keep_queue(self) -> None:
        """Keep the queue from expiring, and replace streams whose ids are ahead of the clock (`keep_queue.lua`)."""
        for keys in (self._keys.queue, (self._lane,)):
            dropped = await scripts.KEEP_QUEUE(self._redis, keys, [GROUP, _MAX_AHEAD_MS])
            if dropped >= 0:
                text = "the job stream of %r was replaced: an id was in the future; clients send %d prompts again"
                _log.warning(text, self.reader.info.name, dropped)

    async def measure(self, partitions: Sequence[ModelKeys]) -> None:
        """Record the length of the worker's lane, and the model's queue in these partitions, in the counters."""
        counters = self.reader.counters
        counters.lane = await self._redis.xlen(self._lane)
        # While the master of another partition does not answer, the counters keep their values.
        with suppress(RedisError, OSError, LMPoolError):
            queue = await read_queue_in(self._redis, partitions)
            if len(partitions) > 1:
                counters.serving = (await read_alive_in(self._redis, partitions)).serving
            counters.queue = queue

    async def take(self, count: int, block_ms: int) -> Taken:
        """Read up to `count` new jobs per stream, except jobs that no client waits for; block up to `block_ms` ms.

        An entry that is too large for the connection closes it. After a lease, `Leases.claim` (it checks sizes first)
        takes this entry and the entries that were sent along with it.
        """
        command = (b"XREADGROUP", b"GROUP", GROUP, self._worker_id, b"COUNT", count, b"BLOCK", block_ms)
        taken, self.woken_ms, self.is_reading = Taken([], []), None, True
        try:
            reply = await self.connection.call(*command, b"STREAMS", self._lane, self._keys.jobs, b">", b">")
        except (ServerError, ProtocolError) as error:
            if "NOGROUP" not in str(error):
                self.failed_at = time.monotonic()
                raise
            await self.ensure_group()
            await self.open_lane()
            return taken
        finally:
            self.is_reading = False
        try:
            streams = entries_by_stream(reply)
        except ProtocolError as error:
            self.failed_at = time.monotonic()
            self.connection.hang_up(error)
            raise
        for stream, entries in streams.items():
            if stream == self._lane:
                entries = await self._without_wakes(entries)
            wanted = await self.reader.read_wanted(entries, self._of_lane if stream == self._lane else b"")
            taken.prompts.extend(wanted.prompts)
            taken.refused.extend(wanted.refused)
        return taken

    async def _without_wakes(self, entries: Entries) -> Entries:
        """Remove the entries that only wake this worker."""
        wakes = {entry_id: fields[WAKE_FIELD] for entry_id, fields in entries if WAKE_FIELD in fields}
        if not wakes:
            return entries
        delays = [delay for delay in wakes.values() if delay.isdigit() and len(delay) <= _MAX_DELAY_DIGITS]
        self.woken_ms = min(map(int, delays), default=0)
        try:
            await scripts.WAKE(self._redis, [self._keys.jobs], [self._worker_id, *wakes])
        except (RedisError, OSError):
            self.failed_at = time.monotonic()  # The jobs of this read must not be lost. A claim removes these entries.
        return [entry for entry in entries if entry[0] not in wakes]

    async def find_work(self, count: int, step_s: float) -> float:
        """Move prompts from the backlog to the streams, or jobs of another worker's lane to the lane of this worker.

        Args:
            count: max jobs to take from another lane.
            step_s: seconds of a step of this worker, and so probably of the other worker; infinity if unknown.

        Returns:
            seconds after which to check again: 0 if prompts left the backlog, infinity if the worker may wait until it
            is woken.
        """
        patience_s = _PATIENCE_STEPS * step_s if step_s < math.inf else _MIN_PATIENCE_S
        patience_ms = int(1000 * min(_MAX_PATIENCE_S, max(_MIN_PATIENCE_S, patience_s)))
        args = [self._worker_id, count, patience_ms]
        moved_up, stolen, check_again_ms = await scripts.FIND_WORK(self._redis, [self._keys.jobs], args)
        self.reader.counters.stolen += stolen
        return 0.0 if moved_up else check_again_ms / 1000 or math.inf

    async def close_lane(self) -> None:
        """Close this worker's lane: clients add no more entries, and entries not taken move to the shared stream.

        A read of this worker that waits for jobs ends.
        """
        while await scripts.CLOSE_LANE(self._redis, [self._keys.jobs], [self._worker_id]):
            pass
        await self.end_read()

    async def end_read(self) -> None:
        """End the read of this worker that waits for jobs, if there is one."""
        if self.is_reading:
            await scripts.WAKE(self._redis, [self._keys.jobs], [self._worker_id])
