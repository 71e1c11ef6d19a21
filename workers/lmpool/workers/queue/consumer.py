"""The consumer of a model's queue: reads new jobs from the worker's lane (its own stream) and the shared stream."""

from __future__ import annotations

import logging
import math
import time

from redis.exceptions import ResponseError

from lmpool.broker import scripts
from lmpool.broker.connection import CommandConnection
from lmpool.broker.scripts import entries_by_stream, read_queue
from lmpool.errors import ProtocolError, ServerError
from lmpool.protocol.keys import GROUP
from lmpool.workers.queue.jobs import JobReader, Taken

_log = logging.getLogger("lmpool.worker")

# Max ms by which entry ids may be ahead of the server's clock: an hour, because a clock may be set back.
_MAX_AHEAD_MS = 3_600_000
# Steps that a prompt waits in the lane of its home (the worker that computed a prefix) before another worker steals it.
_PATIENCE_STEPS = 4
_MIN_PATIENCE_S = 0.25  # Min seconds that a prompt waits for its home worker, however short the steps are.
_MAX_PATIENCE_S = 60.0  # Max seconds that a prompt waits for its home worker, however long the steps are.


class Consumer:
    """Reads new jobs of one model. An idle worker also takes jobs from the lanes of other workers.

    Args:
        reader: reads jobs.
        connection: connection for blocking reads only.

    Attributes:
        is_alone: whether no other worker served the model at the last `steal`, so that there were no other lanes.
    """

    def __init__(self, reader: JobReader, connection: CommandConnection) -> None:
        self.reader, self.connection, self.is_alone = reader, connection, False
        self._redis, self._keys, self._worker_id = reader.redis, reader.keys, reader.worker_id
        self._lane, self._of_lane = reader.keys.lane(reader.worker_id), b" " + reader.worker_id.encode()

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

    async def measure(self) -> None:
        """Record the length of the queue in the counters."""
        sent_at = time.time()
        self.reader.counters.note_queue(await read_queue(self._redis, self._keys), sent_at)

    async def take(self, count: int, block_ms: int) -> Taken:
        """Read up to `count` new jobs per stream, except jobs that no client waits for; block up to `block_ms` ms.

        An entry that is too large for the connection closes it. After a lease, `Leases.claim` (it checks sizes first)
        takes this entry and the entries that were sent along with it.
        """
        command = (b"XREADGROUP", b"GROUP", GROUP, self._worker_id, b"COUNT", count, b"BLOCK", block_ms)
        taken = Taken([], [])
        try:
            reply = await self.connection.call(*command, b"STREAMS", self._lane, self._keys.jobs, b">", b">")
        except ServerError as error:
            if "NOGROUP" not in str(error):
                raise
            await self.ensure_group()
            await self.open_lane()
            return taken
        try:
            streams = entries_by_stream(reply)
        except ProtocolError as error:
            self.connection.hang_up(error)
            raise
        for stream, entries in streams.items():
            wanted = await self.reader.read_wanted(entries, self._of_lane if stream == self._lane else b"")
            taken.prompts.extend(wanted.prompts)
            taken.refused.extend(wanted.refused)
        return taken

    async def refill(self) -> None:
        """Move jobs from the backlog to the streams. The end of a job does this too, but an idle worker ends no job."""
        while await scripts.REFILL(self._redis, [self._keys.jobs], []):
            pass

    async def steal(self, count: int, step_s: float) -> None:
        """Move up to `count` jobs from another worker's lane to the lane of this worker, which is idle.

        `step_s`: seconds of a step of this worker, and so probably of the other worker; infinity if unknown.
        """
        patience_s = _PATIENCE_STEPS * step_s if step_s < math.inf else _MIN_PATIENCE_S
        patience_ms = int(1000 * min(_MAX_PATIENCE_S, max(_MIN_PATIENCE_S, patience_s)))
        stolen = int(await scripts.STEAL(self._redis, [self._keys.jobs], [self._worker_id, count, patience_ms]))
        self.is_alone = stolen < 0
        self.reader.counters.stolen += max(0, stolen)

    async def close_lane(self) -> None:
        """Close this worker's lane: clients add no more entries, and entries not taken move to the shared stream."""
        while await scripts.CLOSE_LANE(self._redis, [self._keys.jobs], [self._worker_id]):
            pass
