"""A client on the worker's host gets its row by a datagram; without the datagram, by the server's message."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmpool.embedded import EmbeddedServer
from lmpool.producer import Producer
from lmpool.protocol.job import digest_of
from lmpool.rows import datagram, shared_memory
from lmpool.rows.datagram import DatagramReceiver, DatagramSender, RowsReady
from lmpool.synthetic import synthetic_row
from tests.support.gate import Gate
from tests.support.pool import DEADLINE_S, Pool, count_waiting, is_held, until_async, until_done

PROMPT = [3, 1, 4]
SMALL, LARGE = 64, 2048
"""Vocabulary sizes: small rows are in the datagram itself, and large rows are in shared memory."""
sizes = pytest.mark.parametrize("vocab_size", [SMALL, LARGE])


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let producers wait longer for a worker's segment: on a busy machine a worker may take more than 0.1 s."""
    monkeypatch.setattr(shared_memory, "_ANSWER_S", DEADLINE_S)


@pytest.fixture
def own_pool(own_server: EmbeddedServer, tmp_path: Path) -> Iterator[Pool]:
    """A pool whose server the test may freeze."""
    pool = Pool(own_server.url, "datagrams", tmp_path)
    yield pool
    pool.end()


@contextmanager
def frozen_server(pool: Pool) -> Iterator[None]:
    """Freeze the server, so that no message of the server arrives."""
    info: Any = pool.redis.info("server")
    os.kill(info["process_id"], signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(info["process_id"], signal.SIGCONT)


def start(pool: Pool, gate: Gate, vocab_size: int, lease_s: float = 15) -> None:
    worker = pool.start("--vocab-size", vocab_size, "--lease-s", lease_s, command=gate.command)
    if vocab_size == LARGE:
        worker.until_says("for clients on this machine")


def row_of(vocab_size: int, prompt: list[int] = PROMPT) -> bytes:
    return synthetic_row(prompt, vocab_size=vocab_size).tobytes()


def request(producer: Producer) -> asyncio.Task[np.ndarray[Any, Any]]:
    return asyncio.ensure_future(producer.logprobs(PROMPT))


async def until_taken(pool: Pool) -> None:
    await until_async(lambda: is_held(pool), "the worker has taken the job")


def waiting_key(pool: Pool) -> bytes:
    return pool.keys.model("syn").waiting + digest_of(np.array(PROMPT, "<u4").tobytes())


def socket_of(producer: Producer) -> bytes:
    session: Any = producer._sessions.session
    name: bytes = session._connections.datagrams.name
    return name


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    """A shut gate for the steps of a worker."""
    return Gate(tmp_path / "gate")


@sizes
async def test_a_client_gets_its_row_while_the_server_is_frozen(own_pool: Pool, gate: Gate, vocab_size: int) -> None:
    start(own_pool, gate, vocab_size)
    async with own_pool.producer(cache_bytes=0) as producer:
        asked = request(producer)
        await until_taken(own_pool)
        with frozen_server(own_pool):
            gate.open()
            assert (await asked).tobytes() == row_of(vocab_size)
        await until_done(own_pool)
        assert not own_pool.redis.exists(waiting_key(own_pool))
        stats = producer.stats()
        assert (stats.computed, stats.cache_hits, stats.joined, stats.failed) == (1, 0, 0, 0)
        # The row is in the pool's cache now.
        assert (await producer.logprobs(PROMPT)).tobytes() == row_of(vocab_size)
        assert producer.stats().cache_hits == 1


@sizes
async def test_a_killed_worker_has_served_its_client_and_leaves_no_job(
    own_pool: Pool, gate: Gate, vocab_size: int
) -> None:
    start(own_pool, gate, vocab_size, lease_s=1)
    async with own_pool.producer(cache_bytes=0) as producer:
        asked = request(producer)
        await until_taken(own_pool)
        with frozen_server(own_pool):
            gate.open()
            assert (await asked).tobytes() == row_of(vocab_size)
            own_pool.workers[0].end()
        own_pool.start("--vocab-size", vocab_size, "--lease-s", 1)
        await until_done(own_pool)
        assert not own_pool.redis.exists(waiting_key(own_pool))
        assert (await producer.logprobs(PROMPT)).tobytes() == row_of(vocab_size)


@sizes
async def test_two_clients_of_a_prompt_get_the_same_row(own_pool: Pool, gate: Gate, vocab_size: int) -> None:
    start(own_pool, gate, vocab_size)
    async with own_pool.producer(cache_bytes=0) as first, own_pool.producer(cache_bytes=0) as second:
        asked = request(first)
        await until_taken(own_pool)
        joined, key = request(second), waiting_key(own_pool)

        async def has_joined() -> bool:
            return count_waiting(own_pool.redis, key) == 2

        await until_async(has_joined, "the second client waits for the same job")
        with frozen_server(own_pool):
            gate.open()
            assert (await asked).tobytes() == row_of(vocab_size)
            assert not joined.done()
        assert (await joined).tobytes() == row_of(vocab_size)
        assert (first.stats().computed, second.stats().joined) == (1, 1)


async def test_a_client_that_warms_the_cache_waits_until_the_row_is_stored(own_pool: Pool, gate: Gate) -> None:
    start(own_pool, gate, SMALL)

    async def holds_two() -> bool:
        return own_pool.held() == 2

    async with own_pool.producer(cache_bytes=0) as producer:
        warmed = asyncio.ensure_future(producer.warm(PROMPT))
        other = asyncio.ensure_future(producer.logprobs([1, 2]))
        await until_async(holds_two, "the worker has taken both jobs")
        with frozen_server(own_pool):
            gate.open()
            await other  # The row of the same step has arrived.
            assert not warmed.done()
        await warmed
        await producer.logprobs(PROMPT)
        assert producer.stats().cache_hits == 1


@sizes
async def test_without_a_socket_the_row_arrives_by_the_server(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, vocab_size: int
) -> None:
    pool.start("--vocab-size", vocab_size)
    monkeypatch.setattr("lmpool.rows.datagram.host_token", lambda: b"")
    async with pool.producer(cache_bytes=0) as producer:
        assert (await producer.logprobs(PROMPT)).tobytes() == row_of(vocab_size)
        assert socket_of(producer) == b""


@sizes
async def test_a_client_in_another_network_namespace_gets_its_row(pool: Pool, gate: Gate, vocab_size: int) -> None:
    """Abstract sockets belong to a network namespace, so no datagram reaches this client."""
    start(pool, gate, vocab_size)
    gate.open()
    program = f"""
from lmpool.producer import SyncProducer
with SyncProducer(redis={pool.url!r}, prefix={pool.prefix!r}, timeout=240) as producer:
    print(producer.logprobs({PROMPT}).tobytes().hex())
"""
    unshare = ["unshare", "-n" if os.geteuid() == 0 else "-rn", sys.executable, "-c", program]
    done = await asyncio.to_thread(subprocess.run, unshare, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == row_of(vocab_size).hex(), done.stderr


async def test_false_datagrams_are_ignored(pool: Pool, gate: Gate) -> None:
    start(pool, gate, SMALL)
    async with pool.producer(cache_bytes=0) as producer:
        asked = request(producer)
        await until_taken(pool)
        address = b"\0lmpool-" + socket_of(producer)
        fingerprint, digest = producer.model.fingerprint, digest_of(np.array(PROMPT, "<u4").tobytes())
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            for data in (
                b"",
                b"\xff" * 100,
                bytes(100_000),
                RowsReady("other", b"w", {digest: bytes(300)}, are_places=False).pack(),
                RowsReady(fingerprint, b"w", {bytes(16): bytes(300)}, are_places=False).pack(),
                RowsReady(fingerprint, b"w", {b"": b""}, are_places=True).pack(),
                RowsReady(fingerprint, b"w", {digest: bytes(300)}, are_places=False).pack(),
                RowsReady(fingerprint, b"w", {digest: b""}, are_places=False).pack(),
                RowsReady(fingerprint, b"w", {digest: bytes(15)}, are_places=True).pack(),
                RowsReady(fingerprint, b"w", {digest: bytes(16)}, are_places=True).pack(),
            ):
                sender.sendto(data, address)
        await asyncio.sleep(0)
        gate.open()
        assert (await asked).tobytes() == row_of(SMALL)
        stats = producer.stats()
        assert (stats.computed, stats.failed) == (1, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_datagrams_of_other_users_are_ignored() -> None:
    receiver, sender, received = DatagramReceiver(), DatagramSender(), list[bytes]()
    receiver.open(lambda message: received.extend(message.rows))
    os.setresuid(65534, 65534, 0)
    try:
        sender.send(receiver.name, RowsReady("f", b"w", {b"other user": b""}, are_places=True))
    finally:
        os.setresuid(0, 0, 0)
    sender.send(receiver.name, RowsReady("f", b"w", {b"own user": b""}, are_places=True))

    async def has_received() -> bool:
        return bool(received)

    await until_async(has_received, "the datagram of this user has arrived")
    assert received == [b"own user"]
    sender.close()
    receiver.close()


async def test_clients_that_do_not_read_delay_no_sender() -> None:
    receiver, sender, received = DatagramReceiver(), DatagramSender(), list[bytes]()
    receiver.open(lambda message: received.extend(message.rows))
    message = RowsReady("f", b"w", {b"digest": bytes(2000)}, are_places=False)
    with ExitStack() as stack:
        for number in range(100):
            silent = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            name = receiver.name + str(number).encode()
            silent.bind(b"\0lmpool-" + name)
            for _ in range(100):
                sender.send(name, message)
        sender.send(receiver.name + b"missing", message)

        async def has_received() -> bool:
            sender.send(receiver.name, message)
            return bool(received)

        await until_async(has_received, "the other client is notified")
        sender.close()
        receiver.close()


async def test_without_a_free_descriptor_clients_and_workers_continue_without_datagrams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened, receiver, sender = DatagramReceiver(), DatagramReceiver(), DatagramSender()
    opened.open(lambda _: None)

    def fail() -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(datagram, "_new_socket", fail)
    receiver.open(lambda _: None)
    assert receiver.name == b""
    for _ in range(10_000):  # More datagrams than the system keeps for a client that does not read.
        sender.send(opened.name, RowsReady("f", b"w", {b"digest": bytes(2000)}, are_places=False))
    for each in (opened, receiver, sender):
        each.close()


async def test_a_client_that_may_not_bind_a_socket_continues_without_datagrams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    receiver = DatagramReceiver()
    monkeypatch.setattr(datagram, "_address", lambda _: "/no/such/folder/socket")
    receiver.open(lambda _: None)
    assert receiver.name == b""
    receiver.close()
