"""Readers of streams, hashes and queues on the server, which anybody may have written to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from lmpool.broker import scripts
from lmpool.errors import ProtocolError
from lmpool.protocol.keys import GROUP, Keys, ModelKeys
from lmpool.protocol.model_info import LIMITS, MAX_INFO_BYTES, TRIE_SERVICE
from lmpool.settings import shown

Fields = dict[bytes, bytes]
"""The fields of an entry of a stream."""

MAX_FIELD_BYTES = 1024 * 1024
"""Most bytes of a field of a heartbeat: more than the names and refusals of all adapters take."""

MAX_WORKERS = 4000
"""Most workers of a model that are told apart; more are counted."""

_BYTES = {bytes}
_MAX_FIELDS = 4096
# What a server says where there is no stream, no group of it, or something else: nobody has served the model yet.
_NO_QUEUE = ("no such key", "NOGROUP", "WRONGTYPE")
_LONGEST_LANE = 1e9
_LONGEST_LEASE_MS = int(LIMITS["lease_s"][1] * 1000)


Entries = list[tuple[bytes, Fields]]
"""Entries of a stream: id, fields."""


def stream_entries(reply: Any) -> Entries:
    """The entries of a read of one stream.

    Raises:
        ProtocolError: as `entries_by_stream`.
    """
    return next(iter(entries_by_stream(reply).values()), [])


def entries_by_stream(reply: Any) -> dict[bytes, Entries]:
    """Key of a stream -> its entries, of a read of one or several. RESP2 and RESP3 nest them differently.

    Raises:
        ProtocolError: it is no such reply, as when bytes of it were lost on the way.
    """
    found: dict[bytes, Entries] = {}
    try:
        for key, entries in reply.items() if isinstance(reply, dict) else reply or ():
            found[key] = of_stream = []
            for entry, fields in entries:
                # An entry that was deleted while it was pending has no fields.
                if fields is None:
                    continue
                if type(entry) is not bytes or set(map(type, fields)) != _BYTES:
                    raise TypeError
                of_stream.append((entry, dict(zip(fields[::2], fields[1::2], strict=True))))
    except (TypeError, ValueError, LookupError) as error:
        raise ProtocolError(f"no reply to a read of a stream: {shown(reply)}") from error
    return found


async def read_hashes(
    redis: Redis, keys: Sequence[bytes], *, most_bytes: int, fields: Sequence[str] = (), most_fields: int = _MAX_FIELDS
) -> list[dict[bytes, bytes | int]]:
    """Read hashes; at one instant, unless there are more than a thousand fields or a megabyte in them.

    Args:
        redis: a client for control messages.
        keys: the hashes, all in one cluster slot.
        most_bytes: most bytes of a value; of one that is larger its size is told instead.
        fields: which fields; none for all of them.
        most_fields: most fields of a hash that is read whole.

    Returns:
        per hash the fields that are there; empty where there is none. Fields whose names are over 1 KiB are left out.

    Raises:
        ProtocolError: there is something else than a hash, or one of too many fields.
        RedisError, OSError: the server cannot be used.
    """
    hashes: list[dict[bytes, bytes | int]] = [{} for _ in keys]
    begin, is_whole = 0, False
    while not is_whole:
        replies: list[Any]
        begin, replies = await scripts.FIELDS(redis, keys, [most_fields, most_bytes, begin, *fields])
        for key, reply, values in zip(keys, replies, hashes, strict=True):
            if not isinstance(reply, list):
                content = "something else than a hash" if reply < 0 else f"{reply} fields: there can be {most_fields}"
                raise ProtocolError(f"{shown(key)} has {content}; remove it if it is not yours")
            values.update(zip(reply[::2], reply[1::2], strict=True))
        is_whole = not begin
    return hashes


def info_key(keys: Keys, model: str) -> bytes:
    """The hash that has the info of a model."""
    return keys.trie_models() if model == TRIE_SERVICE else keys.models()


async def read_infos(redis: Redis, keys: Keys, names: Sequence[str] = ()) -> dict[bytes, bytes | int]:
    """Read the encoded infos of models.

    Args:
        redis: a client for control messages.
        keys: the pool's key names.
        names: of these models; none for all of them.

    Returns:
        model name -> encoded info, or the size in bytes of one over `MAX_INFO_BYTES`.

    Raises:
        ProtocolError, RedisError, OSError: as `read_hashes`.
    """
    wanted: dict[bytes, list[str]] = {}
    for name in names:
        wanted.setdefault(info_key(keys, name), []).append(name)
    infos: dict[bytes, bytes | int] = {}
    for key, fields in (wanted or {keys.models(): [], keys.trie_models(): [TRIE_SERVICE]}).items():
        (found,) = await read_hashes(redis, [key], most_bytes=MAX_INFO_BYTES, fields=fields)
        infos.update(found)
    return infos


async def read_texts(redis: Redis, key: bytes, fields: Sequence[str] = ()) -> dict[str, str]:
    """A hash of texts, such as a heartbeat; what is no UTF-8 is replaced, fields that are too large are left out.

    Raises:
        ProtocolError, RedisError, OSError: as `read_hashes`.
    """
    (values,) = await read_hashes(redis, [key], most_bytes=MAX_FIELD_BYTES, fields=fields)
    texts = [(name, value) for name, value in values.items() if isinstance(value, bytes)]
    return {name.decode("utf-8", "replace"): value.decode("utf-8", "replace") for name, value in texts}


class QueueState(NamedTuple):
    """A model's queue at one moment.

    Attributes:
        depth: prompts that wait or are being computed.
        age_s: seconds since the oldest of them was queued; 0 when there is none.
        dead: jobs that were given up.
        server_time: seconds since the epoch by the server's clock.
    """

    depth: int
    age_s: float
    dead: int
    server_time: float


def drain_seconds(queue: QueueState, answers_per_s: float) -> float:
    """Seconds that a queue takes to drain, if nothing is added.

    Args:
        queue: its state.
        answers_per_s: of all its workers together; 0 where that is not known yet: then as long as the oldest of its
            prompts has waited already.
    """
    return queue.depth / answers_per_s if answers_per_s > 0 else queue.age_s


async def read_queue(redis: Redis, keys: ModelKeys) -> QueueState:
    """Look at the queue of a model; one that nobody has ever served is empty.

    Raises:
        RedisError, OSError: the server cannot be used.
    """
    depth, age_ms, dead, now_ms = await scripts.SURVEY(redis, [keys.jobs, keys.dead], [])
    return QueueState(int(depth), int(age_ms) / 1000, int(dead), int(now_ms) / 1000)


class Alive(NamedTuple):
    """The workers of a model that are alive at one moment.

    Attributes:
        serving: how many serve it.
        loading: how many load it.
        names: the ids of those that serve it, `MAX_WORKERS` at most; none where they were not asked for.
    """

    serving: int
    loading: int
    names: tuple[str, ...]


async def read_alive(redis: Redis, keys: ModelKeys, *, names: bool = False) -> Alive:
    """Count the workers of a model, in a time that does not depend on how many there are.

    Args:
        redis: a client for control messages.
        keys: the model's keys.
        names: tell their ids too.

    Raises:
        RedisError, OSError: the server cannot be used.
    """
    args = [_LONGEST_LEASE_MS, MAX_WORKERS if names else 0]
    serving, loading, workers = await scripts.ALIVE(redis, [keys.workers, keys.loading], args)
    return Alive(int(serving), int(loading), tuple(sorted(name.decode("utf-8", "replace") for name in workers)))


async def read_lanes(redis: Redis, keys: ModelKeys) -> dict[str, int]:
    """How many jobs the lane of each worker has, waiting and held: the longest first, `MAX_WORKERS` at most.

    Raises:
        RedisError, OSError: the server cannot be used.
    """
    try:
        # One more: the sum of all stands among them.
        lanes: Any = await redis.zrevrange(keys.lanes, 0, MAX_WORKERS, withscores=True)
    except ResponseError as error:
        if not str(error).startswith(_NO_QUEUE):
            raise
        return {}
    # Clients write there too: a length need not be one.
    lengths = [(worker, int(min(max(0.0, length), _LONGEST_LANE))) for worker, length in lanes if worker]
    return {worker.decode("utf-8", "replace"): length for worker, length in lengths}


async def read_consumers(redis: Redis, keys: ModelKeys) -> list[bytes]:
    """The workers that a model's queue knows, whether they are alive or not: its consumers, and who has a lane.

    Raises:
        RedisError, OSError: the server cannot be used.
    """
    try:
        consumers = await redis.xinfo_consumers(keys.jobs, GROUP)
        lanes = await redis.zrange(keys.lanes, 0, MAX_WORKERS)
    except ResponseError as error:
        if not str(error).removeprefix("ERR ").startswith(_NO_QUEUE):
            raise
        return []
    return list(dict.fromkeys([consumer["name"] for consumer in consumers] + [worker for worker in lanes if worker]))
