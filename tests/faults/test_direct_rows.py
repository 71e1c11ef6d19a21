"""Clients on other hosts read rows from row servers of workers, and through Redis if no row server can be reached."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from redis.exceptions import NoPermissionError

from lmpool.broker.connection import pack_command
from lmpool.producer import Producer
from lmpool.producer.client.session import Session
from lmpool.rows import direct as direct_module
from lmpool.rows.direct import DirectReader
from lmpool.rows.shared_memory import Reference, is_reference, unpack_reference
from lmpool.synthetic import synthetic_row
from lmpool.workers.queue import row_server
from lmpool.workers.queue.row_server import RowServer
from tests.shared.broker.secure_server import SecureServer
from tests.support.gate import Gate
from tests.support.pool import DEADLINE_S, Pool, WorkerProcess, lmpool_command, until, until_async

V = 2048
SLOT = 12_288
"""Bytes of a slot for one row of V float32 values, rounded up to whole pages."""
PROMPTS = [[i, i + 1, 7] for i in range(40)]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for the sockets of segments of the workers, which stand for another host."""
    with tempfile.TemporaryDirectory(dir=os.environ["LMPOOL_SHM_DIR"]) as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the producers of this process have another folder than the workers, like producers on another host."""
    monkeypatch.setenv("LMPOOL_SHM_DIR", tempfile.mkdtemp(dir=os.environ["LMPOOL_SHM_DIR"]))


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let producers wait longer for row servers: on a busy machine a worker may send nothing for more than 2 s."""
    monkeypatch.setattr(direct_module, "_CONNECT_S", DEADLINE_S)
    monkeypatch.setattr(direct_module, "_SILENT_S", DEADLINE_S)


@pytest.fixture
def _usual_limits(_patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let producers wait 2 s, for tests of row servers that do not reply."""
    monkeypatch.setattr(direct_module, "_CONNECT_S", 2.0)
    monkeypatch.setattr(direct_module, "_SILENT_S", 2.0)


def start(pool: Pool, place: Path, *arguments: str | int, size: int = 1000 * SLOT, **settings: Any) -> WorkerProcess:
    """Start a worker, and wait until it has shared memory and a row server."""
    options = ("--vocab-size", V, "--lease-s", 2, "--shm-bytes", size, *arguments)
    worker = pool.start(*options, environment={"LMPOOL_SHM_DIR": str(place)}, **settings)
    worker.until_says("for clients on this machine")
    if "--no-direct" not in arguments:
        worker.until_says("rows for clients that cannot map this shared memory at")
    return worker


async def ask(producer: Producer, prompts: list[list[int]]) -> None:
    """Request rows and compare every value."""
    for prompt, row in zip(prompts, await asyncio.gather(*map(producer.logprobs, prompts)), strict=True):
        assert row.tobytes() == synthetic_row(prompt, vocab_size=V).tobytes()


def direct(producer: Producer) -> int:
    """The number of rows that a producer has read from row servers."""
    return producer._counters.shared.direct


def reader_of(producer: Producer) -> DirectReader:
    """The reader of rows from row servers of a producer's session."""
    session = producer._sessions.session
    assert session is not None
    assert session._connections.direct is not None
    return session._connections.direct


@contextmanager
def no_second_reads() -> Iterator[None]:
    """Let clients read no row again although the first read takes a second, as it may on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "_recheck", lambda _: asyncio.sleep(0))
        yield


async def ask_directly(producer: Producer, prompts: list[list[int]]) -> None:
    """Request rows, each of which comes from a row server, once."""
    before = direct(producer)
    with no_second_reads():
        await ask(producer, prompts)
    assert direct(producer) == before + len(prompts)


async def until_direct(producer: Producer) -> None:
    """Request new rows until two come from a row server.

    The first one may have been requested while the client turned to row servers. Then it is read twice, and the second
    read may be counted after the row has arrived.
    """
    number = iter(range(100_000))

    async def is_direct() -> bool:
        before = direct(producer)
        await ask(producer, [[V - 1, next(number) % V, id(producer) % V]])
        return direct(producer) > before > 0

    with no_second_reads():
        await until_async(is_direct, "a row comes from a row server")


def references(pool: Pool) -> list[Reference]:
    """The references to rows in Redis."""
    keys = list(pool.redis.scan_iter(match=f"{pool.prefix}:row:*", count=1000))
    values = [pool.redis.get(key) for key in keys]
    found = [unpack_reference(value) for value in values if isinstance(value, bytes) and is_reference(value)]
    return [reference for reference in found if reference is not None]


async def test_new_and_cached_rows_come_from_the_worker_and_redis_has_references(pool: Pool, place: Path) -> None:
    worker = start(pool, place)
    async with pool.producer(cache_bytes=0) as first, pool.producer(cache_bytes=0) as second:
        await until_direct(first)
        await ask_directly(first, PROMPTS)
        await until_direct(second)
        await ask_directly(second, PROMPTS)
        assert second.stats().cache_hits >= len(PROMPTS)
        batch = await second.batch_logprobs(PROMPTS)
        assert batch.tobytes() == np.stack([synthetic_row(prompt, vocab_size=V) for prompt in PROMPTS]).tobytes()
        targets = await second.logprobs(PROMPTS[0], targets=[3, 5])
        assert targets.tobytes() == synthetic_row(PROMPTS[0], vocab_size=V)[[3, 5]].tobytes()
    found = references(pool)
    assert len(found) >= len(PROMPTS)
    assert all(reference.address.decode() in worker.text for reference in found)


async def test_rows_of_queries_come_from_the_worker(pool: Pool, place: Path) -> None:
    start(pool, place)
    async with pool.producer(cache_bytes=0) as producer:
        await until_direct(producer)
        for prompt in PROMPTS:
            await producer.topk(prompt, 3)
        computed = producer.stats().computed
        await ask_directly(producer, PROMPTS)
        assert producer.stats().computed == computed
    assert len(references(pool)) >= len(PROMPTS)


async def through_redis(producer: Producer, *, since: int, prompts: list[list[int]] = PROMPTS) -> None:
    """Request rows, none of which comes from a row server."""
    await ask(producer, prompts)
    assert direct(producer) == since


@pytest.mark.parametrize("side", ["worker", "client"])
async def test_either_side_can_switch_row_servers_off(pool: Pool, place: Path, side: str) -> None:
    worker = start(pool, place, *(["--no-direct"] if side == "worker" else []))
    async with pool.producer(direct=side == "worker") as producer:
        for at in range(0, len(PROMPTS), 4):
            await through_redis(producer, since=0, prompts=PROMPTS[at : at + 4])
    assert ("rows for clients that" in worker.text) == (side == "client")
    assert not references(pool)


def mute_port() -> tuple[socket.socket, int]:
    """A port that accepts no connection: its queue of connections is full, so packets get no reply."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    address = listener.getsockname()
    keep = [socket.socket() for _ in range(4)]
    for connection in keep:
        connection.setblocking(False)
        connection.connect_ex(address)
    _KEPT.extend(keep)
    return listener, int(address[1])


_KEPT: list[socket.socket] = []


@pytest.mark.usefixtures("_usual_limits")
@pytest.mark.parametrize("kind", ["refusing", "silent"])
async def test_behind_a_firewall_rows_come_through_redis_with_one_line_in_the_log(
    pool: Pool, place: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    listener, port = mute_port()
    with listener:
        if kind == "refusing":
            listener.close()
        start(pool, place, "--direct-address", f"127.0.0.1:{port}", "--direct-bind", "127.0.0.1:0")
        async with pool.producer(cache_bytes=0) as producer:
            number = iter(range(1, 100_000))

            async def has_warned() -> bool:
                await through_redis(producer, since=0, prompts=[[next(number) % V, 2, 3]])
                return "rows come through Redis" in caplog.text

            await until_async(has_warned, "the client has tried to connect")
            # Try again as if minutes had passed.
            (peer,) = reader_of(producer)._peers.values()
            peer.next_try_at = reader_of(producer).next_try_at = -math.inf

            async def has_tried() -> bool:
                await through_redis(producer, since=0, prompts=[[next(number) % V, 2, 3]])
                return peer.next_try_at > 0

            await until_async(has_tried, "the client has tried again")
    assert caplog.text.count("rows come through Redis") == 1
    assert not references(pool)


async def test_rows_whose_slots_were_reused_are_computed_again(pool: Pool, place: Path) -> None:
    start(pool, place, size=65 * SLOT)
    prompts = [[i, 3] for i in range(300)]
    async with pool.producer(cache_bytes=0) as producer:
        await until_direct(producer)
        for _ in range(2):
            await ask(producer, prompts)


async def test_a_row_that_disappears_between_notification_and_read_is_computed_again(
    pool: Pool, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(pool, place, size=65 * SLOT)
    async with pool.producer(cache_bytes=0) as producer, pool.producer(cache_bytes=0) as other:
        await until_direct(producer)
        await until_direct(other)
        reader = reader_of(producer)
        read, lost = reader.read, list[Any]()

        async def late(*arguments: Any) -> Any:
            """Read only after other rows have taken the slots of the announced rows."""
            for i in range(100):
                await ask(other, [[len(lost), 9, i]])
            lost.append(values := await read(*arguments))
            monkeypatch.setattr(reader, "read", read)
            return values

        monkeypatch.setattr(reader, "read", late)
        await ask(producer, [[4, 4, 4], [5, 5, 5]])
        assert None in lost[0]


async def test_a_worker_that_is_killed_while_a_client_reads_loses_no_request(pool: Pool, place: Path) -> None:
    worker = start(pool, place)
    async with pool.producer(cache_bytes=0, when_absent="wait") as producer:
        await until_direct(producer)
        asked = [asyncio.create_task(ask(producer, [[i, j, 8] for j in range(50)])) for i in range(40)]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        worker.signal(signal.SIGKILL)
        await asyncio.to_thread(worker.wait)
        await asyncio.to_thread(start, pool, place)
        await asyncio.wait_for(asyncio.gather(*asked), DEADLINE_S)
        # The cached rows of the killed worker are lost, and the client reads new rows from the new worker.
        await ask(producer, [[i, j, 8] for i in range(40) for j in range(0, 50, 10)])
        before = direct(producer)

        async def is_direct() -> bool:
            await ask(producer, [[6, direct(producer) % V, len(asked)]])
            asked.append(asked[0])
            return direct(producer) > before

        await until_async(is_direct, "rows come from the new worker's row server")


async def test_the_last_rows_of_a_worker_that_drains_do_not_end_with_it(
    pool: Pool, place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gate = Gate(tmp_path / "gate")
    gate.open()
    worker = start(pool, place, command=gate.command)
    (key,) = pool.redis.scan_iter(match=f"{pool.prefix}:worker:*")
    async with pool.producer(cache_bytes=0) as producer:
        await until_direct(producer)
        reader = reader_of(producer)
        read = reader.read

        async def late(*arguments: Any) -> Any:
            """Read only after the worker has ended."""
            await asyncio.to_thread(worker.wait)
            return await read(*arguments)

        monkeypatch.setattr(reader, "read", late)
        gate.shut()
        asked = asyncio.create_task(ask(producer, PROMPTS[:8]))

        async def are_in_flight() -> bool:
            return bool(pool.redis.hget(key, "in_flight") == b"8")

        await until_async(are_in_flight, "the worker has all prompts")
        worker.signal(signal.SIGTERM)
        await asyncio.to_thread(worker.until_says, "stopping: 8 prompts to finish")
        gate.open()
        await asyncio.wait_for(asked, DEADLINE_S)


@pytest.mark.usefixtures("_usual_limits")
async def test_a_frozen_worker_delays_its_rows_only_for_a_lease(pool: Pool, place: Path) -> None:
    frozen = start(pool, place)
    async with pool.producer(cache_bytes=0) as producer:
        await until_direct(producer)
        await ask(producer, PROMPTS)
        frozen.signal(signal.SIGSTOP)
        try:
            await asyncio.to_thread(start, pool, place)
            await asyncio.wait_for(ask(producer, PROMPTS), DEADLINE_S)
        finally:
            frozen.signal(signal.SIGCONT)


class Peer:
    """A connection to the row server of a worker, which sends any bytes."""

    def __init__(self, pool: Pool) -> None:
        (key,) = pool.redis.scan_iter(match=f"{pool.prefix}:worker:*")
        address: Any = until(lambda: pool.redis.hget(key, "direct"), "a heartbeat has the address")
        host, _, port = address.decode().rpartition(":")
        self.socket = socket.create_connection((host, int(port)), DEADLINE_S)

    def sends(self, data: bytes) -> bytes:
        """Send bytes; return the reply until the server has closed the connection."""
        self.socket.sendall(data)
        reply = b""
        while part := self._receive():
            reply += part
        self.socket.close()
        return reply

    def _receive(self) -> bytes:
        try:
            return self.socket.recv(65536)
        except ConnectionResetError:
            return b""


def token(pool: Pool) -> bytes:
    """The command with which a client presents the pool's token."""
    value = pool.redis.get(pool.keys.row_token())
    assert isinstance(value, bytes)
    return pack_command((b"AUTH", value))


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        pack_command((b"MGET", bytes(24))),
        bytes(100_000),
        b"*2\r\n$4\r\nAUTH\r\n$1000000000\r\n",
    ],
)
async def test_a_stranger_gets_no_row_and_disturbs_no_client(pool: Pool, place: Path, data: bytes) -> None:
    start(pool, place)
    async with pool.producer(cache_bytes=0) as producer:
        await until_direct(producer)
        assert (await asyncio.to_thread(Peer(pool).sends, data)) in (b"", _NO_TOKEN)
        wrong = pack_command((b"AUTH", b"0" * 32))
        assert (await asyncio.to_thread(Peer(pool).sends, wrong)).startswith(b"-WRONGPASS")
        await ask_directly(producer, PROMPTS)


_NO_TOKEN = b"-ERR AUTH with the pool's token must be the first request\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"*1000000000\r\n",
        b"*99999\r\n" + bytes(100_000),
        b"*0\r\n",
        b"*2\r\n$3\r\nGET\r\n$24\r\n" + bytes(24) + b"\r\n",
        pack_command((b"MGET", bytes(23), bytes(25))),
        pack_command((b"MGET", *[bytes(24)] * 5000)),
        b"+" * 40,
    ],
)
async def test_a_known_client_that_sends_garbage_is_disconnected(pool: Pool, place: Path, data: bytes) -> None:
    start(pool, place)
    assert await asyncio.to_thread(Peer(pool).sends, token(pool) + data) in (b"", _NO_TOKEN)
    peer = Peer(pool)
    peer.socket.sendall(token(pool))
    assert await asyncio.to_thread(peer.socket.recv, 100) == b"+OK\r\n"
    assert (await asyncio.to_thread(peer.sends, data))[:4] in (b"", b"-ERR")
    async with pool.producer(cache_bytes=0) as producer:
        await until_direct(producer)


IMPATIENT = """
from lmpool.cli import main
from lmpool.workers.queue import row_server

row_server._SLOW_S = 1.0
main()
"""


async def test_a_client_that_never_reads_is_disconnected_and_delays_no_other_client(pool: Pool, place: Path) -> None:
    start(pool, place, command=lambda: [sys.executable, "-c", IMPATIENT])
    async with pool.producer(cache_bytes=0) as producer:
        await until_direct(producer)
        await ask(producer, PROMPTS)
        reference = references(pool)[0]
        keys = [bytes(key)[-16:] for key in pool.redis.scan_iter(match=f"{pool.prefix}:row:*")]
        request = pack_command((b"MGET", *(reference.nonce + key for key in (keys * 20)[:500])))
        peer = Peer(pool)
        peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.socket.sendall(token(pool))
        assert await asyncio.to_thread(peer.socket.recv, 100) == b"+OK\r\n"
        peer.socket.sendall(request * 8)
        await ask_directly(producer, PROMPTS)

        async def is_closed() -> bool:
            """Whether the worker has closed the connection, and discarded the rows that were not sent."""
            return peer.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNRESET

        await until_async(is_closed, "the worker has disconnected the client")


async def test_a_reader_that_fails_keeps_no_other_reader_waiting() -> None:
    nothing: Any = SimpleNamespace(copy=None, prefix="pool")
    server, sent = RowServer(nothing, nothing, nothing, nothing, nothing), asyncio.Event()
    bad, good = (SimpleNamespace(has_turn=False, can_send=False, send=send) for send in (lambda: 1 // 0, sent.set))
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    for reader in (bad, good):
        server.give_turn(cast(Any, reader))
    await asyncio.wait_for(sent.wait(), DEADLINE_S)
    assert not bad.has_turn


class SlowTransport:
    """Stand-in for the transport of a reader; `unsent` is the number of bytes that it cannot send now."""

    def __init__(self) -> None:
        self.unsent, self.written = 0, list[bytes | memoryview]()

    def write(self, data: bytes | memoryview) -> None:
        self.written.append(data)

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def set_write_buffer_limits(self, _: int) -> None:
        """Ignore the limits: this stand-in does not pause its reader."""

    def is_closing(self) -> bool:
        return False


async def test_rows_for_a_slow_reader_are_copied_because_the_transport_keeps_their_memory() -> None:
    nothing: Any = None
    segment: Any = SimpleNamespace(row_bytes=4, copy_to=lambda memory, key: True)
    settings: Any = SimpleNamespace(prefix="pool")
    server, transport = RowServer(nothing, segment, settings, nothing, nothing), SlowTransport()
    server._token = bytes(32)
    reader = row_server._Reader(server)
    reader.connection_made(cast(Any, transport))
    reader.data_received(pack_command((b"AUTH", server._token)))
    for transport.unsent in (0, 1):
        before = len(transport.written)
        reader.data_received(pack_command((b"MGET", bytes(24))))

        async def is_sent(before: int = before) -> bool:
            return len(transport.written) > before

        await until_async(is_sent, "the row is written")
    assert transport.written == [b"+OK\r\n", *[b"*1\r\n$4\r\n\0\0\0\0\r\n"] * 2]
    assert [type(data) for data in transport.written[1:]] == [memoryview, bytes]
    reader.connection_lost(None)


async def test_clients_that_connect_at_once_after_the_token_changed_are_all_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nothing: Any = SimpleNamespace(copy=None, prefix="pool")
    server, reads = RowServer(nothing, nothing, nothing, nothing, nothing), list[int]()

    async def renew() -> None:
        reads.append(1)
        await asyncio.sleep(0)
        server._token = b"new"

    monkeypatch.setattr(server, "_renew_token", renew)
    sent = pack_command((b"AUTH", b"new"))
    assert await asyncio.gather(*(server.accepts_now(sent) for _ in range(3))) == [True] * 3
    assert reads == [1]


async def test_a_row_server_that_may_not_renew_the_token_stops_listening(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    segment: Any = SimpleNamespace(copy=None, is_wanted=True, address=b"127.0.0.1:7600")
    settings: Any = SimpleNamespace(prefix="pool", no_direct=False)
    nothing: Any = None
    server = RowServer(nothing, segment, settings, nothing, nothing)
    listening = server._server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)

    async def refuse() -> None:
        raise NoPermissionError("no permission")

    monkeypatch.setattr(server, "_renew_token", refuse)
    await server.run()
    assert "may not use pool:row_token" in caplog.text
    assert not listening.is_serving()
    assert segment.address == b""


@pytest.mark.parametrize("is_cluster", [False, True], ids=["server", "cluster"])
async def test_with_tls_and_users_rows_come_from_the_worker_by_tls(
    short_dir: Path, place: Path, is_cluster: bool
) -> None:
    scheme = "rediss+cluster://" if is_cluster else "rediss://"
    with SecureServer(short_dir, is_cluster=is_cluster).running() as server:
        url = {role: server.url(role).replace("rediss://", scheme) for role in ("worker", "producer")}
        environment = {"LMPOOL_REDIS_URL": url["worker"], "LMPOOL_SHM_DIR": str(place)}
        command = [*lmpool_command(), "worker", "syn", "--backend", "synthetic", "--vocab-size", str(V)]
        worker = WorkerProcess([*command, "--shm-bytes", str(1000 * SLOT)], short_dir / "log.txt", environment)
        try:
            await asyncio.to_thread(worker.until_says, "rows for clients that cannot map this shared memory at")
            await asyncio.to_thread(worker.until_says, "serving ")
            options: dict[str, Any] = {"timeout": DEADLINE_S, "cache_bytes": 0}
            async with Producer("syn", redis=url["producer"], **options) as producer:
                await until_direct(producer)
                await ask_directly(producer, PROMPTS)
            assert server.refusals() == []
        finally:
            worker.end()
