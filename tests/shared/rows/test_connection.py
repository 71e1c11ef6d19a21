"""Raw connections to Redis: replies may be cut at any byte, and commands are sent as the right bytes."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.exceptions import ResponseError

from lmpool.broker.connection import Argument
from lmpool.errors import ProtocolError
from lmpool.rows.connection import RowWrite
from tests.shared.rows.wire import (
    LARGE,
    Commands,
    Receiver,
    Reply,
    array,
    assert_broken,
    bulk,
    cuts,
    in_a_loop,
    nulls,
    plain,
    values,
)

# Large values: replies cut at any byte


@given(values, nulls, cuts)
def test_an_mget_reply_cut_anywhere_gives_its_values(answer: list[bytes | None], null: bytes, sizes: list[int]) -> None:
    async def work() -> None:
        connection = Receiver()
        reply = connection.mget(len(answer))
        connection.feed(array(answer, null), sizes)
        assert plain(reply) == answer
        assert not connection.raw.closed

    in_a_loop(work)


def test_a_small_value_is_bytes_although_a_read_cuts_it() -> None:
    """Small values must be `bytes`, because callers tell references from rows by their type."""

    async def work() -> None:
        connection = Receiver()
        reply = connection.mget(2)
        connection.feed(array([b"reference" * 10, bytes(LARGE)]), [50])
        assert [type(value) for value in await reply] == [bytes, np.ndarray]

    in_a_loop(work)


@given(st.data())
def test_each_pipelined_command_gets_its_own_reply(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(["mget", "get"]), min_size=1, max_size=6))

    async def work() -> None:
        connection, stream = Receiver(), b""
        expected: list[Any] = []
        replies: list[Reply] = []
        for kind in kinds:
            answer: list[Any] = data.draw(values)
            null = data.draw(nulls)
            stream += array(answer, null) if kind == "mget" else bulk(answer[0], null)
            replies.append(connection.mget(len(answer)) if kind == "mget" else connection.get())
            expected.append(answer if kind == "mget" else answer[0])
        connection.feed(stream, data.draw(cuts))
        assert [plain(reply) for reply in replies] == expected

    in_a_loop(work)


@settings(max_examples=30)
@given(st.data())
def test_rows_larger_than_the_window_arrive_whole(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.sampled_from([0, 1, 1023, 1025, 32_768, 65_536, 65_537, LARGE]), min_size=1))
    rows: list[bytes | None] = [np.random.default_rng(i).bytes(size) for i, size in enumerate(sizes)]
    steps = data.draw(st.lists(st.sampled_from([1, 2, 3, 1000, 70_000]), max_size=40))

    async def work() -> None:
        connection = Receiver()
        first, second = connection.mget(len(rows)), connection.mget(1)
        connection.feed(array(rows) + array([b"after"]), steps)
        assert plain(first) == rows
        assert plain(second) == [b"after"]

    in_a_loop(work)


@pytest.mark.parametrize("size", [0, 1, 5, 3000])
async def test_a_reply_may_arrive_byte_by_byte(size: int) -> None:
    connection = Receiver()
    reply = connection.mget(3)
    connection.feed(array([b"x" * size, None, b""]), iter(lambda: 1, 0))
    assert plain(reply) == [b"x" * size, None, b""]


async def test_many_small_values_fill_the_window_many_times() -> None:
    connection = Receiver()
    rows: list[bytes | None] = [bytes([i % 256]) * 300 for i in range(1000)]
    reply = connection.mget(1000)
    connection.feed(array(rows))
    assert plain(reply) == rows


async def test_the_window_is_narrow_after_a_large_value_and_wide_after_small_ones() -> None:
    connection = Receiver()
    connection.mget(1)
    connection.feed(array([bytes(100_000)]))
    narrow = len(connection.raw.get_buffer(-1))
    assert narrow < 100_000, "the start of the next large value would be copied"
    reply = connection.mget(2)
    connection.feed(array([b"one", b"two"]))
    assert plain(reply) == [b"one", b"two"]
    assert len(connection.raw.get_buffer(-1)) > 10 * narrow


async def test_a_value_may_contain_bytes_that_look_like_a_reply() -> None:
    connection = Receiver()
    answer: list[bytes | None] = [b"\r\n", b"-ERR\r\n", b"*2\r\n$-1\r\n", b"$5\r\nhello\r\n"]
    reply = connection.mget(4)
    connection.feed(array(answer), iter(lambda: 2, 0))
    assert plain(reply) == answer


async def test_each_value_has_memory_of_its_own() -> None:
    connection = Receiver()
    first, second = connection.mget(4), connection.mget(1)
    connection.feed(array([b"one", b"one", b"x" * LARGE, b"x" * LARGE]) + array([b"two"]))
    *small, large, other_large = first.result()
    assert [type(value) for value in (*small, *second.result())] == [bytes] * 3
    assert large.dtype == np.uint8
    assert large.shape == (LARGE,)
    assert not np.shares_memory(large, other_large)
    large[:] = 0
    assert other_large.tobytes() == b"x" * LARGE


@pytest.mark.parametrize("step", [1, 7, 70_000, 10**9])
async def test_values_of_all_sizes_may_follow_a_large_one(step: int) -> None:
    connection = Receiver()
    large, other = b"x" * LARGE, b"y" * (LARGE - 1)
    answer: list[bytes | None] = [large, large, None, large, b"", large, other, other, b"z" * 100, large, b"z" * 70_000]
    replies = [connection.mget(len(answer)), connection.mget(2), connection.get(), connection.mget(1)]
    connection.feed(array(answer) + array([large, None]) + bulk(large) + array([large]), iter(lambda: step, 0))
    assert [plain(reply) for reply in replies] == [answer, [large, None], large, [large]]


@pytest.mark.parametrize("at", range(4))
async def test_a_small_value_without_its_line_end_is_noticed(at: int) -> None:
    connection = Receiver()
    reply = connection.mget(4)
    values = [b"$2\r\nab\r\n"] * 4
    values[at] = b"$2\r\nabcd"
    connection.feed(b"*4\r\n" + b"".join(values))
    assert_broken(connection, [reply], ProtocolError)


async def test_a_large_value_is_received_in_place_with_its_line_end() -> None:
    connection = Receiver()
    reply = connection.mget(2)
    connection.feed(array([b"one" * 30_000, b"two" * 30_000]))
    received = [cast(np.ndarray[Any, Any], value.base) for value in reply.result()]
    assert [value.size for value in reply.result()] == [90_000, 90_000]
    assert not np.shares_memory(received[0], received[1])
    assert all(value[-2:].tobytes() == b"\r\n" for value in received)


async def test_a_reply_is_done_with_the_last_byte() -> None:
    connection = Receiver()
    reply = connection.mget(2)
    whole = array([b"abc", b"def"])
    for byte in whole[:-1]:
        connection.feed(bytes([byte]))
        assert not reply.done()
    connection.feed(whole[-1:])
    assert plain(reply) == [b"abc", b"def"]


@pytest.mark.parametrize("size", [1, 3000, LARGE])
@pytest.mark.parametrize("lost", [1, 2, 3])
@pytest.mark.parametrize("step", [1, 5000, 10**9])
async def test_lost_bytes_of_a_value_are_not_replaced_by_bytes_of_the_next_reply(
    size: int, lost: int, step: int
) -> None:
    connection = Receiver()
    replies = [connection.mget(1), connection.mget(1)]
    first, second = array([b"a" * size]), array([b"b" * size])
    connection.feed(first[: -2 - lost] + first[-2:] + second, iter(lambda: step, 0))
    assert_broken(connection, replies, ProtocolError)


# Large values: errors that the server returns


async def test_a_refused_mget_raises_and_the_next_one_gets_its_values() -> None:
    connection = Receiver()
    refused, good = connection.mget(3), connection.mget(1)
    connection.feed(b"-LOADING Redis is loading the dataset in memory\r\n" + array([b"v"]), [5, 5, 5])
    with pytest.raises(ResponseError, match="^LOADING"):
        await refused
    assert plain(good) == [b"v"]
    assert not connection.raw.closed


async def test_a_refused_get_raises_and_the_next_one_gets_its_value() -> None:
    connection = Receiver()
    refused, good = connection.get(), connection.get()
    connection.feed(b"-WRONGTYPE no string\r\n" + bulk(b"v"))
    with pytest.raises(ResponseError, match="^WRONGTYPE"):
        await refused
    assert plain(good) == b"v"


async def test_an_error_longer_than_the_narrow_window_is_read_whole() -> None:
    connection = Receiver()
    first, second = connection.mget(1), connection.mget(1)
    text = "ERR " + "x" * 5000
    connection.feed(array([bytes(LARGE)]) + f"-{text}\r\n".encode())
    assert plain(first) == [bytes(LARGE)]
    with pytest.raises(ResponseError) as caught:
        await second
    assert str(caught.value) == text


async def test_an_error_that_is_no_utf8_is_an_error_too() -> None:
    connection = Receiver()
    reply = connection.mget(1)
    connection.feed(b"-ERR \xff\xfe\r\n")
    with pytest.raises(ResponseError):
        await reply


async def test_the_reply_of_a_cancelled_request_goes_to_no_other_request() -> None:
    connection = Receiver()
    gone, stays = connection.mget(1), connection.mget(1)
    gone.cancel()
    connection.feed(array([b"for the first"]) + array([b"for the second"]))
    assert plain(stays) == [b"for the second"]
    refused, after = connection.mget(1), connection.mget(1)
    refused.cancel()
    connection.feed(b"-ERR no\r\n" + array([b"x"]))
    assert plain(after) == [b"x"]


# Connections for commands and writes

NESTED = st.recursive(
    st.none() | st.integers(-(2**63), 2**63 - 1) | st.binary(max_size=12),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)


def resp(value: Any) -> bytes:
    """A value encoded in Redis's protocol, as the server sends it."""
    if isinstance(value, list):
        return b"*%d\r\n" % len(value) + b"".join(map(resp, value))
    return b":%d\r\n" % value if isinstance(value, int) else bulk(value)


@given(st.lists(NESTED, min_size=1, max_size=5), cuts)
def test_replies_of_commands_arrive_in_order_wherever_they_are_cut(answers: list[Any], sizes: list[int]) -> None:
    async def work() -> None:
        commands = Commands()
        replies = [commands.raw.call([b"X"]) for _ in answers]
        commands.feed(b"".join(map(resp, answers)), sizes)
        assert [reply.result() for reply in replies] == answers

    in_a_loop(work)


@given(st.data())
def test_writes_between_commands_get_their_own_replies(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(["set", "call"]), min_size=1, max_size=6))

    async def work() -> None:
        commands, stream = Commands(), b""
        expected: list[Any] = []
        replies: list[Reply] = []
        for kind in kinds:
            if kind == "call":
                value = data.draw(NESTED)
                stream += resp(value)
                replies.append(commands.raw.call(["EVALSHA", b"sha", 0]))
                expected.append(value)
                continue
            outcomes = data.draw(st.lists(st.sampled_from(["+OK", "$-1", "-OOM no room"]), min_size=1))
            stream += b"".join(outcome.encode() + b"\r\n" for outcome in outcomes)
            replies.append(commands.set(len(outcomes)))
            expected.append([outcome[1:] if outcome.startswith("-") else None for outcome in outcomes])
        commands.feed(stream, data.draw(cuts))
        assert [plain(reply) for reply in replies] == expected

    in_a_loop(work)


async def test_a_refused_row_is_an_error_of_that_row_alone() -> None:
    commands = Commands()
    reply = commands.set(3)
    commands.feed(b"+OK\r\n-OOM command not allowed when used memory > 'maxmemory'.\r\n$-1\r\n")
    stored, refused, kept = reply.result()
    assert (stored, kept) == (None, None)
    assert isinstance(refused, ResponseError)
    assert str(refused) == "OOM command not allowed when used memory > 'maxmemory'."
    assert not commands.raw.closed


@pytest.mark.parametrize("data", [b":1\r\n", b"$1\r\nx\r\n", b"*1\r\n:1\r\n"])
async def test_a_reply_that_no_set_can_have_closes_the_connection(data: bytes) -> None:
    # A SET's impossible reply means that a reply was lost, so later replies would be assigned to wrong commands.
    commands = Commands()
    replies = [commands.set(2), commands.raw.call([b"PING"])]
    commands.feed(b"+OK\r\n" + data)
    assert_broken(commands, replies, ProtocolError)


async def test_writes_that_were_cancelled_leave_the_replies_of_others_alone() -> None:
    commands = Commands()
    gone, call = commands.set(3), commands.raw.call([b"X"])
    gone.cancel()
    commands.feed(b"+OK\r\n-OOM\r\n+OK\r\n:7\r\n")
    assert call.result() == 7


async def test_a_lost_connection_fails_writes() -> None:
    commands = Commands()
    replies = [commands.set(2), commands.set(1)]
    commands.feed(b"+OK\r\n")
    commands.raw.connection_lost(OSError("cable cut"))
    assert_broken(commands, replies, ConnectionError)


async def test_a_refused_command_raises_and_the_next_one_gets_its_reply() -> None:
    commands = Commands()
    refused, good = commands.raw.call([b"X"]), commands.raw.call([b"Y"])
    commands.feed(b"-NOGROUP No such key\r\n:3\r\n")
    with pytest.raises(ResponseError, match="^NOGROUP No such key$"):
        await refused
    assert good.result() == 3


async def test_the_reply_of_a_cancelled_command_goes_to_no_other_command() -> None:
    commands = Commands()
    gone, refused, stays = (commands.raw.call([b"X"]) for _ in range(3))
    gone.cancel()
    refused.cancel()
    commands.feed(b":1\r\n-ERR no\r\n:3\r\n")
    assert stays.result() == 3


@pytest.mark.parametrize("data", [b"hello\r\n", b"*x\r\n", b"$-9\r\n", b"\r\n\r\n"])
async def test_garbage_closes_a_connection_for_commands(data: bytes) -> None:
    commands = Commands()
    replies = [commands.raw.call([b"X"]), commands.raw.call([b"Y"])]
    commands.feed(data)
    assert_broken(commands, replies, ProtocolError)


async def test_a_reply_to_no_command_closes_the_connection() -> None:
    commands = Commands()
    reply = commands.raw.call([b"X"])
    commands.feed(b":1\r\n:2\r\n")
    assert reply.result() == 1
    assert commands.raw.closed


async def test_a_lost_connection_fails_all_commands_and_a_closed_one_sends_nothing() -> None:
    commands = Commands()
    before = commands.raw.call([b"X"])
    commands.raw.connection_lost(OSError("cable cut"))
    commands.transport.written = b""
    after = [commands.raw.call([b"Y"]), commands.set(1), commands.set(1, size=LARGE)]
    assert commands.transport.written == b""
    for reply in (before, *after):
        with pytest.raises(ConnectionError, match="cable cut"):
            await reply


# Bytes that connections send


async def test_the_protocol_is_changed_while_reading_is_paused() -> None:
    assert Receiver().transport.calls == ["pause_reading", "set_protocol", "resume_reading"]


async def test_mget_on_the_wire() -> None:
    connection = Receiver()
    connection.raw.call([b"MGET", b"a", b"\x00\r\n\xff"], 1)
    assert connection.transport.written == b"*3\r\n$4\r\nMGET\r\n$1\r\na\r\n$4\r\n\x00\r\n\xff\r\n"


CALL: list[Argument] = [b"EVALSHA", "shä", 2, b"\xff\r\n", "", -15]
CALL_ON_THE_WIRE = b"*6\r\n$7\r\nEVALSHA\r\n$4\r\nsh\xc3\xa4\r\n$1\r\n2\r\n$3\r\n\xff\r\n\r\n$0\r\n\r\n$3\r\n-15\r\n"


async def test_a_call_on_the_wire() -> None:
    commands = Commands()
    commands.raw.call(CALL)
    assert commands.transport.written == CALL_ON_THE_WIRE


SET = b"*6\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n%b\r\n$2\r\nPX\r\n$5\r\n60000\r\n$2\r\nNX\r\n"
OVERWRITE = b"*5\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n%b\r\n$2\r\nPX\r\n$5\r\n60000\r\n"


@pytest.mark.parametrize("size", [0, 1, 8, 32 * 1024 - 1, 32 * 1024, LARGE])
async def test_set_on_the_wire(size: int) -> None:
    commands, numbers = Commands(), np.random.default_rng(0).bytes(size)
    value = b"header--" + numbers
    first = RowWrite(b"k", b"header--", memoryview(numbers), False)
    commands.raw.set([first], 60_000)
    assert commands.transport.written == SET % (len(value), value)
    commands.transport.written = b""
    commands.raw.set([first, first._replace(overwrite=True), first], 60_000)
    kept, replaced = SET % (len(value), value), OVERWRITE % (len(value), value)
    assert commands.transport.written == kept + replaced + kept


async def test_rows_of_several_sizes_in_one_call_are_sent_whole() -> None:
    for sizes in ((1, LARGE, 5), (LARGE, 0, 1), (0, 5, LARGE)):
        commands = Commands()
        commands.raw.set([RowWrite(b"k", b"", memoryview(bytes(size)), False) for size in sizes], 60_000)
        assert commands.transport.calls.count("write") == 7, "the large row was copied"
        assert commands.transport.written == b"".join(SET % (size, bytes(size)) for size in sizes)


async def test_no_writes_are_done_at_once() -> None:
    commands = Commands()
    assert await commands.raw.set([], 1000) == []
    assert commands.transport.written == b""
