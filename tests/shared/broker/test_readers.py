"""Functions that read Redis replies: complete replies are read, damaged replies refused, lengths of lanes limited."""

from __future__ import annotations

import pytest
from redis.exceptions import ResponseError

from lmpool.broker.scripts import entries_by_stream, read_lanes
from lmpool.broker.server import Server
from lmpool.errors import ProtocolError
from tests.support.pool import Pool

ENTRY = [b"1-0", [b"m", b"job"]]


@pytest.mark.parametrize("reply", [[[b"jobs", [ENTRY]]], {b"jobs": [ENTRY]}])
def test_both_protocols_are_read(reply: object) -> None:
    assert entries_by_stream(reply) == {b"jobs": [(b"1-0", {b"m": b"job"})]}


@pytest.mark.parametrize("reply", [None, [], [[b"jobs", []]], [[b"jobs", [[b"1-0", None]]]]])
def test_empty_replies_and_deleted_entries_give_no_entries(reply: object) -> None:
    assert not any(entries_by_stream(reply).values())


@pytest.mark.parametrize(
    "reply",
    [7, b"x", [b"jobs"], [[b"jobs"]], [[b"jobs", ResponseError("0")]], [[b"jobs", [b"1-0"]]], [[b"jobs", 5]],
     [[b"jobs", [[b"1-0", [b"m"]]]]], [[b"jobs", [[b"1-0", [b"m", ResponseError("0")]]]]],
     [[b"jobs", [[7, [b"m", b"job"]]]]], [[b"jobs", [[b"1-0", 7]]]], {b"jobs": 7}],
)  # fmt: skip
def test_other_replies_are_refused(reply: object) -> None:
    with pytest.raises(ProtocolError, match="no reply to a read of a stream"):
        entries_by_stream(reply)


async def test_lanes_are_read_by_worker_and_their_lengths_are_limited(pool: Pool) -> None:
    keys = pool.keys.model("syn")
    async with Server(pool.url).client() as redis:
        assert await read_lanes(redis, keys) == {}
        await redis.zadd(keys.lanes, {"": 12, "a": 3, "b": 9, "c": 0, "less": -5, "more": "inf"})
        lanes = await read_lanes(redis, keys)
        assert list(lanes.items())[:4] == [("more", 10**9), ("b", 9), ("a", 3), ("c", 0)]
        assert lanes["less"] == 0
        assert "" not in lanes
        await redis.delete(keys.lanes)
        await redis.set(keys.lanes, "no sorted set")
        assert await read_lanes(redis, keys) == {}
