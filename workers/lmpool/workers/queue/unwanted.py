"""Jobs that nobody waits for any more: they are taken off the queue, so that nothing more is done for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from redis.asyncio import Redis
from redis.exceptions import RedisError

from lmpool.broker import scripts
from lmpool.broker.streams import Fields
from lmpool.protocol.keys import LIFETIME_FIELD, SINCE_FIELD, ModelKeys
from lmpool.workers.metrics.counters import Figures

STALE_S = 1.0
"""Seconds after which it is worth a look whether somebody still waits for a job."""

_MOST_MS_DIGITS = 15
EVER_MS = 10**_MOST_MS_DIGITS


class Doubtful(NamedTuple):
    """A job that a worker holds and that its clients may have left.

    Attributes:
        entry: its id in the stream.
        digest: what is waited for.
        fields: what its entry says.
    """

    entry: bytes
    digest: bytes
    fields: Fields


class Unwanted:
    """Finds jobs that nobody waits for, and removes them.

    Args:
        redis: a client for what is rare.
        keys: the model's keys.
        figures: forget what they know of jobs that are removed.
    """

    def __init__(self, redis: Redis, keys: ModelKeys, figures: Figures) -> None:
        self._redis = redis
        self._keys = keys
        self._figures = figures

    async def remove(self, jobs: Sequence[Doubtful]) -> set[bytes]:
        """Remove those that nobody waits for; returns their entries. When the server cannot tell, none is removed."""
        removed: set[bytes] = set()
        for at in range(0, len(jobs), scripts.MOST_AT_ONCE):
            part = jobs[at : at + scripts.MOST_AT_ONCE]
            keys = [self._keys.jobs, *(self._keys.waiting + one.digest for one in part)]
            args = [value for one in part for value in (one.entry, _until_ms(one.entry, one.fields))]
            try:
                numbers = await scripts.UNWANTED(self._redis, keys, args)
            except (RedisError, OSError):
                break
            removed |= {part[number - 1].entry for number in numbers}
        for entry in removed:
            self._figures.queued_ms.pop(entry, None)
        return removed


def milliseconds(value: bytes) -> int:
    """What an entry tells; for ever when these are none."""
    return int(value) if value.isdigit() and len(value) <= _MOST_MS_DIGITS else EVER_MS


def queued_ms(entry: bytes) -> int:
    """When an entry was added to the stream, in ms since 1970, by the server's clock."""
    return int(entry.partition(b"-")[0])


def _until_ms(entry: bytes, fields: Fields) -> int:
    """Until when somebody waited for a job when it was queued, in ms since 1970; for ever when its entry tells none."""
    since = milliseconds(fields[SINCE_FIELD]) if SINCE_FIELD in fields else queued_ms(entry)
    # Behind it stands the digest, where the job may go back.
    return since + milliseconds(fields.get(LIFETIME_FIELD, b"").partition(b" ")[0])
