"""One connection serves many callers: it is closed if the server is silent, and callers are served in order."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from lmpool.broker.connection import CommandConnection, Connection
from lmpool.broker.server import Server
from lmpool.errors import ServerUnreachable
from tests.support.pool import SkippingLoop, run_skipping


class Deaf:
    """A connection to a server that replies only when the test says so."""

    def __init__(self) -> None:
        self.closed = False
        self.asked: list[asyncio.Future[str]] = []

    def ask(self) -> asyncio.Future[str]:
        self.asked.append(asyncio.get_running_loop().create_future())
        return self.asked[-1]

    def close(self, reason: Exception) -> None:
        self.closed = True
        for reply in self.asked:
            if not reply.done():
                reply.set_exception(reason)


@pytest.fixture
def deaf() -> Deaf:
    return Deaf()


@pytest.fixture
async def connection(deaf: Deaf) -> Connection[Any]:
    async def connect() -> Any:
        return deaf

    return Connection(Server("redis://localhost:1"), connect)


async def test_a_server_that_falls_silent_is_given_up_whenever_that_is(connection: Connection[Any], deaf: Deaf) -> None:
    connection.reply_timeout_s = 0.05
    for _ in range(2):
        answered, unanswered = (asyncio.ensure_future(connection.wait_for(deaf, deaf.ask())) for _ in range(2))
        await asyncio.sleep(0)
        deaf.asked[-2].set_result("there")
        assert await answered == "there"
        with pytest.raises(ServerUnreachable, match="has not answered for"):
            await asyncio.wait_for(unanswered, 60)
        assert deaf.closed
        deaf.closed = False


async def test_a_server_that_answers_in_time_is_not_given_up(connection: Connection[Any], deaf: Deaf) -> None:
    connection.reply_timeout_s, loop = 0.05, asyncio.get_running_loop()
    began = loop.time()
    # Requests go on for longer than the first request's deadline.
    while loop.time() < began + 3 * connection.reply_timeout_s:
        loop.call_soon(deaf.ask().set_result, "there")
        assert await connection.wait_for(deaf, deaf.asked[-1]) == "there"
    assert not deaf.closed


def test_a_reply_may_take_as_long_again_after_a_pause_of_the_event_loop_but_no_longer() -> None:
    async def wait(loop: SkippingLoop) -> None:
        deaf = Deaf()

        async def connect() -> Any:
            return deaf

        connection: Connection[Any] = Connection(Server("redis://localhost:1"), connect)
        connection.reply_timeout_s = 10.0
        late, never = (asyncio.ensure_future(connection.wait_for(deaf, deaf.ask())) for _ in range(2))
        await asyncio.sleep(0)
        loop.skipped_s += 30.0
        await asyncio.sleep(0.01)
        deaf.asked[0].set_result("there")
        assert await late == "there"
        assert not deaf.closed
        loop.skipped_s += 30.0
        with pytest.raises(ServerUnreachable, match="has not answered for"):
            await asyncio.wait_for(never, 1e6)

    run_skipping(wait)


async def test_a_reply_that_was_cut_counts_once_however_long_the_server_is_away() -> None:
    connection = CommandConnection(Server("redis://localhost:1"))
    raw: Any = SimpleNamespace(closed=True, received=3, close=lambda reason: None)
    connection._raw = raw
    assert connection.ended_within_reply
    connection.hang_up(ServerUnreachable("cut"))
    assert not connection.ended_within_reply
    with pytest.raises(ServerUnreachable):
        await connection.call(b"PING")
    assert not connection.ended_within_reply


async def test_a_shorter_timeout_counts_next_to_longer_ones(connection: Connection[Any], deaf: Deaf) -> None:
    connection.reply_timeout_s = 3600
    patient = asyncio.ensure_future(connection.wait_for(deaf, deaf.ask()))
    await asyncio.sleep(0)
    connection.reply_timeout_s = 0.01
    with pytest.raises(ServerUnreachable, match=r"has not answered for 0\.01 s"):
        await asyncio.wait_for(connection.wait_for(deaf, deaf.ask()), 60)
    with pytest.raises(ServerUnreachable):
        await patient


async def test_callers_get_a_connection_in_the_order_of_their_calls() -> None:
    # Callers of one connection must run in order, so that a SET and a later DEL of one row are not swapped.
    connected = asyncio.Event()

    async def connect() -> Any:
        await connected.wait()
        return SimpleNamespace(closed=False)

    connection: Connection[Any] = Connection(Server("redis://localhost:1"), connect)
    order: list[int] = []
    tasks: list[asyncio.Task[None]] = []

    async def use(number: int) -> None:
        await connection.open()
        order.append(number)
        if len(tasks) < 12:
            tasks.append(asyncio.create_task(use(len(tasks))))

    tasks += [asyncio.create_task(use(number)) for number in range(6)]
    await asyncio.sleep(0)
    connected.set()
    while not all(task.done() for task in tasks):
        await asyncio.gather(*tasks)
    assert order == list(range(12))
