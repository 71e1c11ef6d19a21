"""Leases of stream entries: renewed while a worker holds them, claimed after they expired, released at its end."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from lmpool.broker import scripts
from lmpool.errors import ProtocolError, WorkerError
from lmpool.protocol.job import MAX_JOB_BYTES
from lmpool.protocol.keys import GROUP, LIFETIME_FIELD, PRIORITY_FIELD, SINCE_FIELD, ModelKeys
from lmpool.protocol.model_info import LIMITS, ModelInfo
from lmpool.workers.queue.jobs import JobReader, Taken, UnwantedEntries, dead_entry

_log = logging.getLogger("lmpool.worker")

# Max bytes of the jobs in one claim: they are in memory before the worker has checked them.
_MAX_CLAIMED_BYTES = 512 * 1024
# Lifetime in ms of the cursor that workers share when they search for expired leases: an hour.
_CURSOR_TTL_MS = 3_600_000
# The longest lease of any worker, in ms: workers of one model may have different leases.
_MAX_LEASE_MS = int(LIMITS["lease_s"][1] * 1000)
_REASONS_TTL_MS = 3_600_000  # Lifetime of the reasons why workers released entries, for dead letters of the next hour.
_MAX_REASONS = 1000  # Max reasons kept per model.
_MAX_REASON_TEXT = 500  # Max characters of a reason.


class Claimed(NamedTuple):
    """Jobs of workers whose leases expired.

    Attributes:
        taken: the jobs.
        alone: `taken` is one job that must run alone in this worker. Without one: a job must run alone, and waits
            for a worker that holds nothing.
        further: number of further claims that are this worker's share of the search through all held entries.
    """

    taken: Taken
    alone: bool
    further: int = 0


@dataclass(eq=False)
class Leases:
    """The leases of one worker's entries, and the expired ones of other workers.

    Args:
        redis: a client for rare commands.
        keys: the model's keys.
        info: the model's info.
        worker_id: id of the worker, and its name in the consumer group.
        max_deliveries: deliveries after which a job is given up.
        reader: reads jobs.
        unwanted: removes entries that no client waits for.
    """

    redis: Redis
    keys: ModelKeys
    info: ModelInfo
    worker_id: str
    max_deliveries: int
    reader: JobReader
    unwanted: UnwantedEntries

    def __post_init__(self) -> None:
        self._lease_ms = int(self.info.lease_s * 1000)

    async def renew(self, entry_ids: Sequence[bytes]) -> None:
        """Renew the leases of entries that this worker holds."""
        for at in range(0, len(entry_ids), scripts.MAX_AT_ONCE):
            part = entry_ids[at : at + scripts.MAX_AT_ONCE]
            await scripts.RENEW(self.redis, [self.keys.jobs], [GROUP, self.worker_id, *part])

    async def claim(self, count: int, in_flight: Collection[bytes]) -> Claimed:
        """Take over up to `count` jobs whose leases expired, except the entries in flight here."""
        args = [GROUP, self.worker_id, self._lease_ms, self.max_deliveries, count, int(not in_flight)]
        args += [MAX_JOB_BYTES, _MAX_CLAIMED_BYTES, _CURSOR_TTL_MS, *in_flight]
        reply = await scripts.CLAIM_EXPIRED(self.redis, [self.keys.jobs, self.keys.claim_cursor], args)
        alone, entries, further = reply
        taken = Taken([], [])
        for entry_id, data, deliveries, lifetime, since, priority in entries:
            read = Taken([], [])
            if isinstance(data, bytes):
                given = ((LIFETIME_FIELD, lifetime), (SINCE_FIELD, since), (PRIORITY_FIELD, priority))
                entry = self.reader.read(read, entry_id, data, {name: value for name, value in given if value})
            else:  # The size of a job that is too large.
                error = ProtocolError(f"a job of {data} bytes is over the limit of {MAX_JOB_BYTES}")
                read.refused.append(entry := dead_entry(entry_id, bytes(16), error))
            if deliveries >= self.max_deliveries:
                text = f"given up after {deliveries} deliveries: {await self._reason(entry_id)}"
                _log.warning("a prompt is %s; see `lmpool dead list`", text)
                read = Taken([], [dead_entry(entry_id, entry.digest, WorkerError(text))])
            taken.prompts.extend(read.prompts)
            taken.refused.extend(read.refused)
        return Claimed(await self.unwanted.still_wanted(taken), bool(alone), int(further))

    async def _reason(self, entry_id: bytes) -> str:
        """Why the last worker that held an entry ended."""
        try:
            reason = cast(bytes | None, await self.redis.hget(self.keys.reasons, entry_id))
        except (RedisError, OSError):
            reason = None  # The jobs are claimed already: a missing reason must not lose them.
        if reason is None:
            return "its workers crashed or hung while they held it"
        return f"the last worker that held it ended: {reason.decode('utf-8', 'replace')}"

    async def release_all(self, reason: str, in_flight: Iterable[bytes]) -> int:
        """Release all entries that this worker still holds, for other workers; their deliveries stay counted.

        Args:
            reason: why this worker ends; clients receive it if a job is given up.
            in_flight: the entries in flight here: some may be of lanes of other workers.

        Returns:
            the number of released jobs.
        """
        own_lane = b" " + self.worker_id.encode()
        head = [GROUP, self.worker_id, _MAX_LEASE_MS, scripts.MAX_AT_ONCE]
        tail = [self.max_deliveries, reason[:_MAX_REASON_TEXT], _REASONS_TTL_MS, _MAX_REASONS]
        count = 0
        for of_lane in {b"", own_lane, *(b"".join(entry.partition(b" ")[1:]) for entry in in_flight)}:
            keys, begin = [self.keys.lane(of_lane[1:]) if of_lane else self.keys.jobs, self.keys.reasons], b"-"
            while begin:
                released, begin = await scripts.RELEASE(self.redis, keys, [*head, begin, *tail, of_lane])
                count += released
        return count
