"""The heartbeats of many workers, read with few round trips and without scripts."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from lmpool.protocol.keys import Keys

_log = logging.getLogger("lmpool.producer")

# Max heartbeats per round trip: about 140 KB of replies, which the server sends between the calls of other clients.
_CHUNK = 200


class WorkerInfo(NamedTuple):
    """A live worker: its id, the fields of its heartbeat, and the heartbeat's age in seconds (None without a lease)."""

    worker_id: str
    fields: Mapping[str, str]
    silent_s: float | None


async def read_heartbeats(redis: Redis, keys: Keys, names: Iterable[str]) -> list[WorkerInfo]:
    """Return the workers in `names` whose heartbeats have not expired and contain the name of a model, by their ids.

    A heartbeat key that another program has overwritten is logged and left out: it must not hide the other workers.
    """
    workers, ordered = [], sorted(set(names))
    for at in range(0, len(ordered), _CHUNK):
        chunk = ordered[at : at + _CHUNK]
        async with redis.pipeline(transaction=False) as pipe:
            for name in chunk:
                # HGETALL costs the server less than HMGET: a heartbeat is one block of memory with about 30 fields.
                pipe.hgetall(keys.worker(name))
                pipe.pttl(keys.worker(name))
            replies: Sequence[Any] = await pipe.execute(raise_on_error=False)
        for name, beat, left_ms in zip(chunk, replies[::2], replies[1::2], strict=True):
            if isinstance(beat, ResponseError) and str(beat).startswith("WRONGTYPE"):
                _log.warning("the worker %r is left out: the key of its heartbeat holds no hash, remove the key", name)
            elif isinstance(beat, Exception):
                raise beat
            elif b"model" in beat:
                fields = {key.decode("utf-8", "replace"): text.decode("utf-8", "replace") for key, text in beat.items()}
                workers.append(WorkerInfo(name, fields, _silent_s(fields, left_ms)))
    return workers


def _silent_s(fields: Mapping[str, str], left_ms: int) -> float | None:
    # A heartbeat lives for a lease.
    with suppress(KeyError, ValueError):
        return max(0.0, float(fields["lease_s"]) - max(0, left_ms) / 1000)
    return None
