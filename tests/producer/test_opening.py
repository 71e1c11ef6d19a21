"""Opening a producer that is closed before it is open, or whose server or workers start later or restart."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import redis

import lmpool.testing
from lmpool.embedded import EmbeddedServer, socket_url
from lmpool.errors import AmbiguousModel, AuthenticationFailed, LMPoolError, NoWorker, ProducerClosed, ServerUnreachable
from lmpool.producer import Producer, SyncProducer
from lmpool.producer.client import discovery
from lmpool.producer.client.requests import Deadline
from lmpool.producer.client.session import SessionPerLoop
from lmpool.synthetic import synthetic_row
from lmpool.testing import SyntheticModel
from tests.support.pool import PATIENCE, Pool, V, is_held, open_sockets, until, until_async
from tests.support.scrape import free_port

ENDS_WITHIN_S = 120.0
CALLS: dict[str, Callable[[Producer], Coroutine[Any, Any, Any]]] = {
    "open": lambda producer: producer.open(),
    "a row": lambda producer: producer.logprobs([1]),
    "entries of an adapter's rows": lambda producer: producer.batch_logprobs([[1]], targets=[2], adapter="poet"),
    "a trie of the model's vocabulary": lambda producer: producer.trie(),
}


class Mute:
    """A server that accepts connections and sends nothing.

    Attributes:
        is_open: number of open connections.
    """

    def __init__(self, socket: Path) -> None:
        self.url = socket_url(socket)
        self.is_open = 0
        self._socket = socket

    async def start(self) -> None:
        self._listener = await asyncio.start_unix_server(self._on_connect, self._socket)

    async def stop(self) -> None:
        self._listener.close()
        await until_async(self.is_left, "all connections are closed")

    async def is_tried(self) -> bool:
        return self.is_open > 0

    async def is_left(self) -> bool:
        return self.is_open == 0

    async def _on_connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.is_open += 1
        try:
            while await reader.read(1000):
                pass
        finally:
            self.is_open -= 1
            writer.close()


class Said:
    """The warnings that producers log while they wait."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog
        caplog.set_level(logging.WARNING, "lmpool.producer")

    def times(self, text: str) -> int:
        return sum(text in message for message in self._caplog.messages)

    def wait_for(self, text: str) -> None:
        """Wait until a producer logs a line that contains a text."""
        until(lambda: self.times(text), f"a producer says {text!r}")

    async def once(self, text: str) -> None:
        """Wait until a producer logs a text, which must appear only once."""

        async def is_said() -> bool:
            return self.times(text) > 0

        await until_async(is_said, f"a producer says {text!r}")
        assert self.times(text) == 1


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Said:
    return Said(caplog)


@pytest.fixture
async def mute(short_dir: Path) -> AsyncIterator[Mute]:
    server = Mute(short_dir / "m.sock")
    await server.start()
    yield server
    await server.stop()


async def ended(*tasks: asyncio.Task[Any]) -> list[Any]:
    """Wait until tasks end; return their results or exceptions."""
    async with asyncio.timeout(ENDS_WITHIN_S):
        return await asyncio.gather(*tasks, return_exceptions=True)


async def in_a_thread(producer: Producer) -> None:
    await asyncio.to_thread(producer.close_soon)


async def soon(producer: Producer) -> None:
    producer.close_soon()


CLOSES: dict[str, Callable[[Producer], Awaitable[None]]] = {
    "close": lambda producer: producer.close(),
    "close_soon": soon,
    "close_soon in another thread": in_a_thread,
}


@pytest.mark.parametrize("way", CLOSES)
@pytest.mark.parametrize("when_absent", ["wait", "raise"])
async def test_closing_while_connecting_ends_all_callers_and_leaves_no_task(
    mute: Mute, way: str, when_absent: Any
) -> None:
    before = asyncio.all_tasks()
    producer = Producer(redis=mute.url, timeout=50, when_absent=when_absent)
    asked = [asyncio.create_task(call(producer)) for call in CALLS.values()]
    await until_async(mute.is_tried, "it connects")
    await CLOSES[way](producer)
    ends = await ended(*asked)
    assert [type(end) for end in ends] == [ProducerClosed] * len(CALLS)
    assert len({id(end) for end in ends}) == len(CALLS), "each has an exception of its own"
    assert repr(producer).endswith(", closed)")

    async def is_quiet() -> bool:
        return len(asyncio.all_tasks() - before) == mute.is_open == 0  # The server has a task for each connection.

    await until_async(is_quiet, "no task and no connection is left")


async def test_a_deadline_while_connecting_leaves_no_task(mute: Mute) -> None:
    before = asyncio.all_tasks()
    producer = Producer(redis=mute.url)
    first = asyncio.create_task(producer.logprobs([1], timeout=0.3))
    second = asyncio.create_task(producer.logprobs([1], timeout=0.3))
    ends = await ended(first, second)
    assert [type(end) for end in ends] == [ServerUnreachable] * 2
    assert ends[0] is not ends[1]
    await producer.close()
    assert "lmpool-connect" not in {task.get_name() for task in asyncio.all_tasks()}, "closing waits for the attempt"

    async def is_quiet() -> bool:
        return len(asyncio.all_tasks() - before) == mute.is_open == 0

    await until_async(is_quiet, "no task and no connection is left")


async def test_each_caller_that_fails_to_connect_has_an_exception_of_its_own(short_dir: Path) -> None:
    producer = Producer(redis=f"unix://{short_dir}/none.sock")
    ends = await ended(*(asyncio.create_task(producer.logprobs([at])) for at in range(3)))
    assert [type(end) for end in ends] == [ServerUnreachable] * 3
    ends[0].add_note("mine")
    assert len({id(end) for end in ends}) == 3
    assert not any(hasattr(end, "__notes__") for end in ends[1:])


def test_closing_ends_the_attempts_of_all_event_loops(short_dir: Path) -> None:
    started, stopped = threading.Event(), threading.Event()
    ends: list[Any] = []
    server = Mute(short_dir / "m.sock")
    producer = Producer(redis=server.url, timeout=50)

    async def serve() -> None:
        await server.start()
        started.set()
        await asyncio.to_thread(stopped.wait)
        await server.stop()

    async def ask() -> None:
        ends.extend(await ended(asyncio.create_task(producer.logprobs([1]))))
        ends.append(len(asyncio.all_tasks()))

    serving = threading.Thread(target=asyncio.run, args=(serve(),))
    serving.start()
    started.wait(ENDS_WITHIN_S)
    asking = [threading.Thread(target=asyncio.run, args=(ask(),)) for _ in range(3)]
    for thread in asking:
        thread.start()
    until(lambda: server.is_open == 3, "all of them connect")
    producer.close_soon()
    for thread in asking:
        thread.join(ENDS_WITHIN_S)
    stopped.set()
    serving.join(ENDS_WITHIN_S)
    assert sorted(map(str, map(type, ends))) == sorted([str(ProducerClosed)] * 3 + [str(int)] * 3)
    assert [end for end in ends if type(end) is int] == [1] * 3, "just the one that looks"


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Disable the garbage collector, because it would close connections that lmpool forgets to close."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
async def test_closing_at_any_step_of_opening_leaves_no_session(pool: Pool) -> None:
    await asyncio.to_thread(pool.start)
    before, connected = asyncio.all_tasks(), open_sockets()
    for steps in [*range(1, 30), *range(30, 400, 9)]:
        producer = pool.producer()
        asked = asyncio.create_task(producer.logprobs([1]))
        for _ in range(steps):
            await asyncio.sleep(0)
        await producer.close()
        await ended(asked)
        assert asyncio.all_tasks() - before <= {asked}, f"after {steps} steps"
        assert not asked.exception() or isinstance(asked.exception(), ProducerClosed)

    async def is_left() -> bool:
        return open_sockets() <= connected

    await until_async(is_left, "the connections are closed")
    async with producer:
        await producer.logprobs([1])


class Openings:
    """Sessions that need no server, and the `SessionPerLoop` that holds them.

    Attributes:
        open: function that a session awaits when it opens.
        sessions: the `SessionPerLoop` that holds the sessions.
    """

    def __init__(self) -> None:
        self.open: Callable[[], Awaitable[Any]] = asyncio.Event().wait
        self.sessions = SessionPerLoop(lambda: cast(Any, Offline()), lambda _: cast(Any, FakeSession(self)), None)


class Offline:
    """Stand-in for a server that cannot be reached."""

    def explain(self, error: BaseException) -> LMPoolError:
        return ServerUnreachable(str(error))


class FakeSession:
    """The part of a session that `SessionPerLoop` uses."""

    info = SimpleNamespace(version=0)

    def __init__(self, openings: Openings) -> None:
        self.loop = asyncio.get_running_loop()
        self.closed = False
        self._openings = openings

    async def open(self, model: str | None, seen: object = None) -> None:
        await self._openings.open()

    async def close(self) -> None:
        self.closed = True


async def nothing() -> None:
    pass


def test_event_loops_that_failed_to_connect_are_removed() -> None:
    openings = Openings()
    sessions = openings.sessions

    async def fail() -> None:
        raise ServerUnreachable("no server")

    async def connect(seconds: float = 50) -> Any:
        return await sessions.open(Deadline(seconds))

    for _ in range(5):
        openings.open = fail
        with pytest.raises(ServerUnreachable):
            asyncio.run(connect())
        openings.open = asyncio.Event().wait
        with pytest.raises(ServerUnreachable):
            asyncio.run(connect(0.01))
        assert not sessions._opening
    openings.open = nothing
    asyncio.run(connect())
    assert not sessions._opening
    assert len(sessions.by_loop) == 1


def test_an_event_loop_closed_while_connecting_is_removed_by_the_next_one() -> None:
    openings = Openings()
    sessions = openings.sessions
    loop = asyncio.new_event_loop()
    left = openings.sessions.open(loop.run_until_complete(a_deadline()))
    task = loop.create_task(left)
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert list(sessions._opening) == [loop]
    openings.open = nothing
    asyncio.run(connect(sessions))
    assert not sessions._opening
    left.close()
    assert not task.done()


async def a_deadline() -> Deadline:
    return Deadline(50)


async def connect(sessions: SessionPerLoop) -> None:
    await sessions.open(await a_deadline())


async def test_closing_ends_a_reconnect_although_another_loop_has_connected() -> None:
    openings = Openings()
    sessions = openings.sessions
    openings.open = nothing
    first = await sessions.open(Deadline(50))
    first.closed = True
    connects = asyncio.Event()

    async def never() -> None:
        connects.set()
        await asyncio.Event().wait()

    openings.open = never
    again = asyncio.create_task(sessions.open(Deadline(50)))
    await connects.wait()
    openings.open = nothing

    await asyncio.to_thread(asyncio.run, connect(sessions))
    await sessions.close()
    assert [type(end) for end in await ended(again)] == [ProducerClosed]


async def test_leaving_the_context_ends_requests_that_wait_for_trie_workers(said: Said) -> None:
    async with lmpool.testing.pool(SyntheticModel(vocab_size=64)) as pool:
        before = asyncio.all_tasks()
        async with Producer(redis=pool.url, when_absent="wait") as producer:
            trie = await producer.trie()
            asked = asyncio.create_task(trie.weight_sum(np.ones(64, np.float32)))
            await said.once("waiting for a worker to serve 'trie'")
        assert [type(end) for end in await ended(asked)] == [ProducerClosed]
        assert asyncio.all_tasks() <= before


def test_closing_a_sync_producer_ends_calls_of_other_threads_while_connecting(said: Said) -> None:
    ends: list[BaseException] = []
    with lmpool.testing.pool(SyntheticModel(vocab_size=64)) as pool:
        producer = SyncProducer(redis=pool.url, when_absent="wait")
        trie = producer.trie()

        def ask() -> None:
            try:
                trie.weight_sum(np.ones(64, np.float32))
            except LMPoolError as error:
                ends.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        said.wait_for("waiting for a worker to serve 'trie'")
        producer.close()
        thread.join(ENDS_WITHIN_S)
    assert [type(end) for end in ends] == [ProducerClosed]


# Pools that start after their clients


async def test_server_worker_and_programs_start_in_any_order(short_dir: Path, tmp_path: Path, said: Said) -> None:
    producer = Producer(redis=socket_url(short_dir / "s" / "redis.sock"), prefix="any", when_absent="wait")
    asked = asyncio.create_task(producer.logprobs([1]))
    await said.once("waiting for the server: no Redis server answers at unix://")
    with pytest.raises(ServerUnreachable, match="^no answer within 0.2 s: no Redis server answers at unix://"):
        await producer.logprobs([2], timeout=0.2)
    server = EmbeddedServer(memory_bytes=1 << 28, folder=short_dir / "s")
    await asyncio.to_thread(server.start)
    pool = Pool(server.url, "any", tmp_path)
    try:
        await said.once("waiting for a worker to serve a model: no model is served: start a worker with")
        with pytest.raises(NoWorker, match="^no answer within 0.2 s: no model is served: start a worker with"):
            await producer.logprobs([2], timeout=0.2)
        gate = tmp_path / "gate"
        words = (pool.url, pool.prefix, str(free_port()), str(gate))
        command = [sys.executable, "-m", "tests.support.gated_worker", *words]
        pool._launch(command, None, wait=False)

        async def is_seen_to_load() -> bool:
            with pytest.raises(NoWorker) as caught:
                await producer.open(timeout=0.2)
            return "a worker is loading 'syn'" in str(caught.value)

        await until_async(is_seen_to_load, "the producer sees that it is loading")
        assert not asked.done()
        gate.touch()
        assert np.array_equal(await asked, synthetic_row([1], vocab_size=V))
        assert said.times("waiting for") == 2
        await producer.close()
    finally:
        pool.end()
        server.stop()


async def test_a_model_and_its_trie_workers_may_start_later(said: Said) -> None:
    async with lmpool.testing.pool(SyntheticModel("first", vocab_size=64)) as pool:
        later = Producer("later", redis=pool.url, when_absent="wait")
        ws = np.ones(64, np.float32)

        async def sums() -> list[float]:
            trie = await later.trie()
            return [float(values[0]) for values in (await trie.weight_sum(ws), await trie.weight_sum(prompt=[1]))]

        row, summed = asyncio.create_task(later.logprobs([1])), asyncio.create_task(sums())
        await said.once("waiting for a worker to serve 'later': the model 'later' is not served; served are: first")
        await asyncio.to_thread(pool.serve, SyntheticModel("later", vocab_size=64, seed=3))
        assert np.array_equal(await row, synthetic_row([1], vocab_size=64, seed=3))
        await said.once("waiting for a worker to serve 'trie': no trie worker serves")
        with pytest.raises(NoWorker, match="no answer within 0.2 s: no trie worker serves"):
            await (await later.trie()).weight_sum(ws, timeout=0.2)
        await asyncio.to_thread(pool.serve_tries)
        assert np.allclose(await summed, [64, 1])
        await later.close()


async def test_errors_that_waiting_cannot_fix_are_raised_at_once(own_server: EmbeddedServer) -> None:
    async with lmpool.testing.pool(SyntheticModel("one"), SyntheticModel("two")) as pool:
        with pytest.raises(AmbiguousModel):
            await Producer(redis=pool.url, when_absent="wait").open()
    with redis.Redis.from_url(own_server.url, **PATIENCE) as client:
        client.config_set("requirepass", "secret")
        with pytest.raises(AuthenticationFailed):
            await Producer(redis=own_server.url, when_absent="wait").open()
        client.config_set("requirepass", "")


# Workers that leave and return


@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
async def test_requests_wait_until_workers_come_back(
    pool: Pool, said: Said, monkeypatch: pytest.MonkeyPatch, way: signal.Signals
) -> None:
    """The only worker is killed with a job in flight, or leaves; then a worker with other weights joins."""
    monkeypatch.setattr(discovery, "_RESTART_S", 0.0)
    # A worker that gets SIGTERM has up to a lease to leave.
    options = ("--lease-s", 1, "--step-ms", 600_000) if way is signal.SIGKILL else ("--lease-s", 5)
    last = await asyncio.to_thread(pool.start, *options)
    async with pool.producer(when_absent="wait", timeout=60) as producer:
        if way is signal.SIGKILL:
            held = asyncio.create_task(producer.logprobs([2]))
            await until_async(lambda: is_held(pool), "the worker holds a prompt")
        last.signal(way)
        await asyncio.to_thread(last.wait)
        if way is signal.SIGTERM:
            assert not pool.redis.hlen(pool.keys.models())
            held = asyncio.create_task(producer.logprobs([2]))
        await said.once("requests wait until their deadlines")
        assert not held.done()
        with pytest.raises(NoWorker, match="no row within 0.3 s: no live worker serves 'syn'; start one with"):
            await producer.logprobs([3], timeout=0.3)
        other = pool.producer("syn", when_absent="wait")
        opened = asyncio.create_task(other.open())
        if way is signal.SIGTERM:
            await said.once("waiting for a worker to serve 'syn'")
        await asyncio.to_thread(pool.start, "--lease-s", 1, "--seed", 7)
        assert np.array_equal(await held, synthetic_row([2], vocab_size=V, seed=7))
        assert np.array_equal(await producer.logprobs([3]), synthetic_row([3], vocab_size=V, seed=7))
        await opened
        await other.close()
