"""Malformed replies break a connection for large values, and all requests that wait for replies fail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio.connection import AbstractConnection

from lmpool.errors import ProtocolError
from lmpool.rows import connection as connection_module
from lmpool.rows.connection import RawRowReceiver
from tests.shared.rows.wire import MAX_BYTES, Commands, Receiver, array, assert_broken, cuts, in_a_loop, plain

BROKEN: dict[str, bytes] = {
    "text": b"hello\r\n",
    "HTTP": b"HTTP/1.1 400 Bad Request\r\n",
    "an integer instead of an array": b":5\r\n",
    "an integer within an array": b"*2\r\n$1\r\na\r\n:5\r\n",
    "a map": b"%1\r\n",
    "a push": b">1\r\n",
    "an empty line": b"\r\n",
    "a size that is no number": b"*2\r\n$abc\r\n",
    "no size": b"*2\r\n$\r\n",
    "an array of no number": b"*x\r\n",
    "too few values": b"*1\r\n",
    "too many values": b"*3\r\n",
    "no array at all": b"*-1\r\n",
    "an array in an array": b"*2\r\n*2\r\n",
    "an endless line": b"-" + b"x" * 70_000,
    "a value that is too large": b"*2\r\n$1000001\r\n",
    "a value of a gigabyte": b"*2\r\n$1073741824\r\n",
    "a value without the end of its line": b"*2\r\n$3\r\nabcXY$3\r\n",
    "a status instead of an array": b"+OK\r\n",
    "a value instead of an array": b"$3\r\nabc\r\n",
    "a null instead of an array": b"_\r\n",
    "a status within an array": b"*2\r\n$1\r\na\r\n+OK\r\n",
    "an error within an array": b"*2\r\n$1\r\na\r\n-ERR\r\n$1\r\nb\r\n",
    "a negative size": b"*2\r\n$-7\r\n",
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("size", [3, 10**9])
async def test_a_reply_that_no_mget_can_have_fails_all_pending_requests(data: bytes, size: int) -> None:
    connection = Receiver()
    replies = [connection.mget(2), connection.mget(2), connection.get()]
    connection.feed(data, iter(lambda: size, 0))
    assert_broken(connection, replies, ProtocolError)


@pytest.mark.parametrize(
    "data", [b"+OK\r\n", b"-ERR no\r\n", b":1\r\n", b"$-1\r\n", b"$3\r\nabc\r\n", b"*1\r\n", b"_\r\n"]
)
@pytest.mark.parametrize("size", [1, 10**9])
async def test_an_unexpected_reply_closes_the_connection(data: bytes, size: int) -> None:
    connection = Receiver()
    connection.feed(data, iter(lambda: size, 0))
    assert_broken(connection, [], ProtocolError)


@pytest.mark.parametrize("data", [b"*1\r\n", b"*-1\r\n", b"+OK\r\n", b":1\r\n", array([b"v"])])
async def test_a_get_has_no_reply_but_a_value(data: bytes) -> None:
    connection = Receiver()
    reply = connection.get()
    connection.feed(data)
    assert_broken(connection, [reply], ProtocolError)


@pytest.mark.parametrize("size", [MAX_BYTES + 1, 2**40])
async def test_a_value_over_the_limit_is_refused_before_memory_is_taken(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = Receiver()
    reply = connection.mget(1)
    taken: list[int] = []
    monkeypatch.setattr(connection_module, "np", SimpleNamespace(empty=lambda size, _: taken.append(size)))
    connection.feed(b"*1\r\n$%d\r\n" % size)
    assert taken == []
    assert_broken(connection, [reply], ProtocolError)
    assert f"{size} bytes" in str(reply.exception())
    assert str(MAX_BYTES) in str(reply.exception())


async def test_a_value_of_exactly_the_limit_is_taken() -> None:
    connection = Receiver(max_bytes=10)
    reply = connection.mget(1)
    connection.feed(array([b"x" * 10]))
    assert plain(reply) == [b"x" * 10]


@pytest.mark.parametrize("are_together", [True, False])
async def test_a_small_value_that_lost_bytes_is_not_completed_with_the_next_reply(are_together: bool) -> None:
    """hiredis does not check the line end of a value. (As many lost bytes as `*1\\r\\n` has are not noticed.)"""
    connection = Commands()
    replies = [connection.raw.call([b"MGET", key]) for key in (b"first", b"second")]
    first = array([b"x" * 100])
    first, second = first[:50] + first[58:], array([b"y" * 100])
    for data in [first + second] if are_together else [first, second]:
        connection.feed(data)
    assert_broken(connection, replies, ProtocolError)


@given(st.binary(min_size=1, max_size=200), cuts)
def test_garbage_raises_no_exception_in_the_event_loop_and_gives_no_wrong_value(data: bytes, sizes: list[int]) -> None:
    async def work() -> None:
        connection = Receiver()
        replies = [connection.mget(2), connection.get()]
        connection.feed(data, sizes)
        if connection.raw.closed:
            assert all(reply.done() for reply in replies)
        connection.raw.close()
        for reply in replies:
            reply.exception()

    in_a_loop(work)


@pytest.mark.parametrize("reason", [None, OSError("cable cut")])
async def test_a_lost_connection_fails_all_pending_requests(reason: Exception | None) -> None:
    connection = Receiver()
    replies = [connection.mget(1), connection.get(), connection.mget(3)]
    connection.feed(b"*1\r\n$100\r\npart of a row")
    connection.raw.connection_lost(reason)
    assert_broken(connection, replies, ConnectionError)
    assert ("cable cut" if reason else "closed") in str(replies[0].exception())


async def test_the_end_of_the_stream_closes_the_transport() -> None:
    # `eof_received` returns a false value, so that the event loop closes the transport and calls `connection_lost`.
    assert not Receiver().raw.eof_received()


async def test_closing_fails_pending_requests_with_the_reason() -> None:
    connection = Receiver()
    reply = connection.mget(1)
    connection.raw.close(OSError("enough"))
    assert_broken(connection, [reply], OSError)
    assert str(reply.exception()) == "enough"


async def test_closing_twice_keeps_the_first_reason() -> None:
    connection = Receiver()
    reply = connection.mget(1)
    connection.raw.close(ProtocolError("first"))
    connection.raw.close(OSError("second"))
    connection.raw.connection_lost(None)
    assert str(reply.exception()) == "first"
    assert connection.transport.calls.count("abort") == 1


async def test_bytes_after_the_close_are_ignored() -> None:
    connection = Receiver()
    reply = connection.mget(1)
    buffer = connection.raw.get_buffer(-1)
    data = array([b"late"])
    buffer[: len(data)] = data
    connection.raw.close()
    connection.raw.buffer_updated(len(data))
    assert isinstance(reply.exception(), ConnectionError)
    assert len(connection.raw.get_buffer(-1)) > 0


async def test_a_closed_connection_fails_every_request_and_sends_nothing() -> None:
    connection = Receiver()
    connection.raw.close()
    for reply in [connection.mget(1), connection.get()]:
        with pytest.raises(ConnectionError, match="closed"):
            await reply
    assert connection.transport.written == b""


async def test_a_connection_that_is_not_open_is_refused() -> None:
    with pytest.raises(ConnectionError, match="not open"):
        RawRowReceiver(cast(AbstractConnection, SimpleNamespace(_writer=None)))
