"""Replies of XREAD: read when they are whole, refused when bytes of them were lost."""

from __future__ import annotations

import pytest
from redis.exceptions import ResponseError

from lmpool.broker.readers import stream_entries
from lmpool.errors import ProtocolError

ENTRY = [b"1-0", [b"m", b"job"]]


@pytest.mark.parametrize("reply", [[[b"jobs", [ENTRY]]], {b"jobs": [ENTRY]}])
def test_both_protocols_are_read(reply: object) -> None:
    assert stream_entries(reply) == [(b"1-0", {b"m": b"job"})]


@pytest.mark.parametrize("reply", [None, [], [[b"jobs", []]], [[b"jobs", [[b"1-0", None]]]]])
def test_nothing_new_and_deleted_entries_are_no_entries(reply: object) -> None:
    assert stream_entries(reply) == []


@pytest.mark.parametrize(
    "reply",
    [7, b"x", [b"jobs"], [[b"jobs"]], [[b"jobs", ResponseError("0")]], [[b"jobs", [b"1-0"]]], [[b"jobs", 5]],
     [[b"jobs", [[b"1-0", [b"m"]]]]], [[b"jobs", [[b"1-0", [b"m", ResponseError("0")]]]]],
     [[b"jobs", [[7, [b"m", b"job"]]]]], [[b"jobs", [[b"1-0", 7]]]], {b"jobs": 7}],
)  # fmt: skip
def test_what_is_no_such_reply_is_refused(reply: object) -> None:
    with pytest.raises(ProtocolError, match="no reply to a read of a stream"):
        stream_entries(reply)
