"""Renews leases of jobs, claims jobs of silent workers, and makes jobs dead letters after too many deliveries."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any

from redis.exceptions import RedisError

from lmpool.broker import scripts
from lmpool.errors import ProtocolError, WorkerError
from lmpool.protocol.job import MAX_JOB_BYTES
from lmpool.protocol.keys import GROUP, LIFETIME_FIELD, PRIORITY_FIELD, SINCE_FIELD, ModelKeys
from lmpool.workers.queue.jobs import JobReader, Taken, dead_entry

_log = logging.getLogger("lmpool.worker")

# Max bytes of the jobs in one claim, because the worker has them in memory before it checks them.
_MAX_CLAIMED_BYTES = 512 * 1024
# Lifetime in ms of the cursor that workers share when they search for expired leases: an hour.
_CURSOR_TTL_MS = 3_600_000


class Leases:
    """Renews and releases the leases of one worker's entries, and claims entries of other workers.

    Args:
        reader: reads jobs.
        max_deliveries: deliveries after which a job is given up.
    """

    def __init__(self, reader: JobReader, max_deliveries: int) -> None:
        self._reader, self._max_deliveries = reader, max_deliveries
        self._redis, self._worker_id = reader.redis, reader.worker_id
        self._lease_ms = int(reader.info.lease_s * 1000)

    @property
    def _keys(self) -> ModelKeys:
        """The keys of the partition that the worker serves."""
        return self._reader.keys

    async def renew(self, entry_ids: Sequence[bytes]) -> None:
        """Renew the leases of entries that this worker holds."""
        for at in range(0, len(entry_ids), scripts.MAX_AT_ONCE):
            part = entry_ids[at : at + scripts.MAX_AT_ONCE]
            await scripts.RENEW(self._redis, [self._keys.jobs], [GROUP, self._worker_id, *part])

    async def claim(self, count: int, in_flight: Collection[bytes]) -> tuple[Taken, bool, float]:
        """Take over up to `count` jobs whose leases expired, except entries that this worker has in flight.

        Returns:
            the jobs; whether a job must run alone in this worker (the returned job, or a job that waits until a worker
            holds no other jobs); the number of claims that check the rest of the held entries, or infinity if this
            claim found jobs, also if no client waits for these jobs: more jobs may follow.
        """
        args = [GROUP, self._worker_id, self._lease_ms, self._max_deliveries, count, int(not in_flight)]
        args += [MAX_JOB_BYTES, _MAX_CLAIMED_BYTES, _CURSOR_TTL_MS, *in_flight]
        keys = [self._keys.jobs, self._keys.claim_cursor]
        alone, entries, further = await scripts.CLAIM_EXPIRED(self._redis, keys, args)
        taken = Taken([], [])
        for entry_id, data, deliveries, *values in entries:
            read = Taken([], [])
            if isinstance(data, bytes):
                named = zip((LIFETIME_FIELD, SINCE_FIELD, PRIORITY_FIELD), values, strict=True)
                entry = self._reader.read(read, entry_id, data, {name: value for name, value in named if value})
            else:  # The job is too large: `data` is its size in bytes.
                error = ProtocolError(f"a job of {data} bytes is over the limit of {MAX_JOB_BYTES}")
                read.refused.append(entry := dead_entry(entry_id, bytes(16), error))
            if deliveries >= self._max_deliveries:
                reason: Any = None
                with suppress(RedisError, OSError):  # Go on without the reason: the claimed jobs must not be lost.
                    reason = await self._redis.hget(self._keys.reasons, entry_id)
                why = "its workers crashed or hung while they held it"
                if reason is not None:
                    why = f"the last worker that held it ended: {reason.decode('utf-8', 'replace')}"
                text = f"given up after {deliveries} deliveries: {why}"
                _log.warning("a prompt is %s; see `lmpool dead list`", text)
                read = Taken([], [dead_entry(entry_id, entry.digest, WorkerError(text))])
            taken.prompts.extend(read.prompts)
            taken.refused.extend(read.refused)
        taken = await self._reader.still_wanted(taken)
        if jobs := len(taken.prompts) + len(taken.refused):
            self._reader.counters.claimed += jobs
            _log.info("claimed %d prompts of workers whose leases expired", jobs)
        return taken, bool(alone), math.inf if entries else int(further)

    async def release_all(self, reason: str, in_flight: Iterable[bytes]) -> int:
        """Release all entries that this worker still holds, for other workers; return their number.

        The entries keep their delivery counts. Clients receive `reason` if a job is given up later. `in_flight`: ids
        of entries that this worker holds, which may be in lanes (streams) of other workers.
        """
        lanes = [self._worker_id.encode(), *(entry.partition(b" ")[2] for entry in in_flight)]
        return await scripts.release_jobs(self._redis, self._keys, self._worker_id, lanes, self._max_deliveries, reason)
