"""Compares the throughput of the pool with the throughput that Redis and redis-py reach without a pool."""

from __future__ import annotations

import time
from contextlib import ExitStack

from benchmarks.harness.comparison import FULL_V
from benchmarks.harness.pairs import Goal, Result, Side, Take, alternate
from benchmarks.harness.processes import Child
from benchmarks.harness.testbed import Testbed
from lmpool.rows import shared_memory

LARGE_V = 152_064  # Vocabulary size of Qwen2.5.
TINY_V = 64  # Vocabulary size for rows of 256 bytes, so that most of the cost is the control plane.

CONCURRENCY = 512  # Requests in flight for full-size rows.
CONCURRENCY_TINY = 1024  # Requests in flight for tiny rows.
_PRIMED_ROWS = 256  # Number of rows that are stored before the clock starts, one per key.
_BATCH = 256  # Prompts per call of `batch_logprobs`.


def new_f32(testbed: Testbed) -> list[Result]:
    """Measure new float32 rows of SmolLM2's vocabulary size."""
    return _new(testbed, "new-f32", FULL_V, "f32", Goal(1.6), testbed.scaled(8192, 2048))


def new_f32_large(testbed: Testbed) -> list[Result]:
    """Measure new float32 rows of a large vocabulary."""
    return _new(testbed, "new-f32-large", LARGE_V, "f32", Goal(3), testbed.scaled(4096, 1024))


def new_bf16(testbed: Testbed) -> list[Result]:
    """Measure new bfloat16 rows."""
    return _new(testbed, "new-bf16", FULL_V, "bf16", Goal(1), testbed.scaled(12_288, 3072))


def tiny(testbed: Testbed) -> list[Result]:
    """Measure new tiny rows, so that most of the cost is the control plane."""
    return _new(testbed, "tiny", TINY_V, "f32", Goal(0.5), testbed.scaled(61_440, 12_288))


def cached(testbed: Testbed) -> list[Result]:
    """Measure rows in the pool's cache, with single requests and in batches."""
    rows, times = 1024, testbed.scaled(8, 2)
    with ExitStack() as stack:
        stack.enter_context(testbed.workers("cached", "cached", "--backend", "synthetic", "--seed", "3"))
        producer = stack.enter_context(testbed.producer("cached", "--cache-bytes", "0"))
        plain = stack.enter_context(testbed.child("peers.plain_redis", testbed.url))
        testbed.wait_for_shared_memory("cached")
        producer.request("new", rows=rows, concurrency=CONCURRENCY)
        keys = [f"plain:row:{number}".encode().hex() for number in range(rows)]
        plain.request("fill", keys=keys, row_bytes=4 * FULL_V)

        def through_pool() -> float:
            seconds: float = producer.request("again", times=times, concurrency=CONCURRENCY)
            return rows * times / seconds

        def in_batches() -> float:
            seconds: float = producer.request("again_in_batches", times=times, size=_BATCH)
            return rows * times / seconds

        def by_mget() -> float:
            seconds: float = plain.request("get_keys", keys=keys, times=times)
            return rows * times / seconds

        through_pool(), in_batches(), by_mget()
        samples = alternate({"pool": through_pool, "batches": in_batches, "MGET": by_mget}, testbed.repeats)
    against = (
        f"plain MGETs of 32 values of the same size by one process (redis-py asyncio, hiredis, uvloop); V = {FULL_V:,}"
    )
    sides = {name: Side(name, "rows/s", taken) for name, taken in samples.items()}
    ours = "rows/s of one producer (without its own cache) when the pool's cache has all rows"
    single = f"{ours}, {CONCURRENCY} requests in flight ÷ {against}, f32"
    batched = f"{ours}, `batch_logprobs` of {_BATCH} ÷ {against}, f32"
    return [
        Result("cached", single, Goal(1.3), sides["pool"], sides["MGET"]),
        Result("cached-batch", batched, Goal(1.8), sides["batches"], sides["MGET"]),
    ]


def new_direct(testbed: Testbed) -> list[Result]:
    """Measure new float32 rows for a client on another host, directly from the worker and through Redis."""
    testbed, rows = testbed.over_tcp(), testbed.scaled(8192, 2048)
    options = ["--backend", "synthetic", "--vocab-size", str(FULL_V), "--encoding", "f32"]
    with ExitStack() as stack:
        stack.enter_context(testbed.workers("new-direct", "new-direct", *options))
        testbed.wait_for_shared_memory("new-direct")
        # With another folder for shared memory, the clients read no memory of the worker, like clients on another host.
        elsewhere = {shared_memory.FOLDER_VARIABLE: str(testbed.folder)}
        direct = stack.enter_context(testbed.producer("new-direct", **elsewhere))
        through_redis = stack.enter_context(testbed.producer("new-direct", "--no-direct", **elsewhere))
        sides = {"direct": rate(direct, rows), "through Redis": rate(through_redis, rows)}
        for take in [*sides.values(), *sides.values()]:  # The first rows of a client come through Redis.
            take()
        samples = alternate(sides, testbed.repeats)
    meaning = (
        f"new rows/s of one producer process that reads the rows from the worker ÷ of one that reads them through "
        f"Redis; both reach Redis and the worker over TCP on one machine, {CONCURRENCY} requests in flight, one "
        f"synthetic worker process; V = {FULL_V:,}, f32"
    )
    return [Result("new-direct", meaning, Goal(2), *(Side(name, "rows/s", taken) for name, taken in samples.items()))]


def row_link(testbed: Testbed) -> list[Result]:
    """Measure only the transport of the pool's rows, without queue and notifications."""
    rows = testbed.scaled(8192, 2048)
    with ExitStack() as stack:
        links = [stack.enter_context(testbed.child("clients.row_link", testbed.url, str(FULL_V))) for _ in range(2)]
        ceiling = Ceiling(stack, testbed, FULL_V * 4)

        def by_row_link() -> float:
            links[0].request("put", rows=_PRIMED_ROWS)
            return rows / _both(links[0], links[1], rows=rows)

        by_row_link(), ceiling.take(rows)
        samples = alternate({"row link": by_row_link, "ceiling": lambda: ceiling.take(rows)}, testbed.repeats)
    meaning = (
        f"the pool's row transport without its control plane (one process stores, one fetches, 32 rows at a time) ÷ "
        f"the ceiling; V = {FULL_V:,}, f32"
    )
    sides = [Side(name, "rows/s", taken) for name, taken in samples.items()]
    return [Result("row-link", meaning, Goal(3.8), *sides)]


def rate(producer: Child, rows: int, concurrency: int = CONCURRENCY) -> Take:
    """Rows per second of a producer process, whose handler `new` requests new rows."""

    def take() -> float:
        seconds: float = producer.request("new", rows=rows, concurrency=concurrency)
        return rows / seconds

    return take


class Ceiling:
    """The rate of plain redis-py: one process SETs values of `row_bytes` while another MGETs equally many values."""

    def __init__(self, stack: ExitStack, testbed: Testbed, row_bytes: int) -> None:
        self._setter, self._getter = (
            stack.enter_context(testbed.child("peers.plain_redis", testbed.url)) for _ in range(2)
        )
        self._row_bytes = row_bytes

    def take(self, rows: int) -> float:
        """Rows per second until both processes have moved all rows."""
        # Store the rows again: the server may have evicted the earlier rows while the other side ran.
        self._setter.request("put", rows=_PRIMED_ROWS, row_bytes=self._row_bytes)
        return rows / _both(self._setter, self._getter, rows=rows, row_bytes=self._row_bytes)


def _both(setter: Child, getter: Child, **arguments: int) -> float:
    """Seconds until two concurrent processes have stored and fetched the rows."""
    start = time.perf_counter()
    setter.send("put", **arguments)
    getter.send("get", **arguments)
    setter.receive(120)
    getter.receive(120)
    return time.perf_counter() - start


def _new(testbed: Testbed, name: str, vocab_size: int, encoding: str, goal: Goal, rows: int) -> list[Result]:
    concurrency = CONCURRENCY_TINY if vocab_size == TINY_V else CONCURRENCY
    options = ["--backend", "synthetic", "--vocab-size", str(vocab_size), "--encoding", encoding]
    with ExitStack() as stack:
        stack.enter_context(testbed.workers(name, name, *options))
        if vocab_size != TINY_V:
            testbed.wait_for_shared_memory(name)
        producer = stack.enter_context(testbed.producer(name))
        ceiling = Ceiling(stack, testbed, vocab_size * (2 if encoding == "bf16" else 4))

        through_pool = rate(producer, rows, concurrency)
        through_pool(), ceiling.take(rows)
        samples = alternate({"pool": through_pool, "ceiling": lambda: ceiling.take(rows)}, testbed.repeats)
    meaning = (
        f"new rows/s through the pool, one producer process ({concurrency} requests in flight) and one synthetic "
        f"worker process ÷ the ceiling: one process SETs values of the same size in pipelines of 32 while another "
        f"MGETs as many (redis-py asyncio, hiredis, uvloop); V = {vocab_size:,}, {encoding}"
    )
    sides = [Side(side, "rows/s", taken) for side, taken in samples.items()]
    return [Result(name, meaning, goal, *sides)]
