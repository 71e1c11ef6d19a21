"""Reading hashes that anybody may have written to: no more of them than there can rightly be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis

from lmpool.broker import scripts
from lmpool.errors import ProtocolError
from lmpool.settings import shown

MOST_FIELD_BYTES = 1024 * 1024
"""Most bytes of a field of a heartbeat: more than the names and refusals of all adapters take."""

_MOST_FIELDS = 4096


async def read_hashes(
    redis: Redis, keys: Sequence[bytes], *, most_bytes: int, fields: Sequence[str] = (), most_fields: int = _MOST_FIELDS
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
    found: list[dict[bytes, bytes | int]] = [{} for _ in keys]
    begin, is_whole = 0, False
    while not is_whole:
        replies: list[Any]
        begin, replies = await scripts.FIELDS(redis, keys, [most_fields, most_bytes, begin, *fields])
        for key, reply, own in zip(keys, replies, found, strict=True):
            if not isinstance(reply, list):
                what = "something else than a hash" if reply < 0 else f"{reply} fields: there can be {most_fields}"
                raise ProtocolError(f"{shown(key)} has {what}; remove it if it is not yours")
            own.update(zip(reply[::2], reply[1::2], strict=True))
        is_whole = not begin
    return found


async def read_texts(redis: Redis, key: bytes, fields: Sequence[str] = ()) -> dict[str, str]:
    """A hash of texts, such as a heartbeat; what is no UTF-8 is replaced, fields that are too large are left out.

    Raises:
        ProtocolError, RedisError, OSError: as `read_hashes`.
    """
    (found,) = await read_hashes(redis, [key], most_bytes=MOST_FIELD_BYTES, fields=fields)
    values = [(name, value) for name, value in found.items() if isinstance(value, bytes)]
    return {name.decode("utf-8", "replace"): value.decode("utf-8", "replace") for name, value in values}
