"""How much of what Redis and redis-py can carry arrives through the pool."""

from __future__ import annotations

import time
from contextlib import ExitStack

from benchmarks.harness.pairs import Goal, Result, Side, Take, alternate
from benchmarks.harness.processes import Child
from benchmarks.harness.workplace import Workplace

FULL_V = 49_152
LARGE_V = 152_064
TINY_V = 64

AT_ONCE = 512
AT_ONCE_TINY = 1024
_PRIMED_ROWS = 256
_BATCH = 256


def new_f32(place: Workplace) -> list[Result]:
    """New rows of float32."""
    return _new(place, "new-f32", FULL_V, "f32", Goal(1.6), place.scaled(8192, 2048))


def new_f32_large(place: Workplace) -> list[Result]:
    """New rows of float32 of a large vocabulary."""
    return _new(place, "new-f32-large", LARGE_V, "f32", Goal(3), place.scaled(4096, 1024))


def new_bf16(place: Workplace) -> list[Result]:
    """New rows of bfloat16."""
    return _new(place, "new-bf16", FULL_V, "bf16", Goal(1), place.scaled(12_288, 3072))


def tiny(place: Workplace) -> list[Result]:
    """New rows that weigh nothing, so that only control costs."""
    return _new(place, "tiny", TINY_V, "f32", Goal(0.5), place.scaled(61_440, 12_288))


def cached(place: Workplace) -> list[Result]:
    """Rows that the pool's cache has already, one await each and in batches."""
    rows, times = 1024, place.scaled(8, 2)
    with ExitStack() as stack:
        stack.enter_context(place.workers("cached", "cached", "--backend", "synthetic", "--seed", "3"))
        producer = stack.enter_context(place.producer("cached", "--cache-bytes", "0"))
        plain = stack.enter_context(place.child("peers.plain_redis", place.url))
        place.wait_for_shared_memory("cached")
        producer.ask("new", rows=rows, at_once=AT_ONCE)
        keys = [f"plain:row:{number}".encode().hex() for number in range(rows)]
        plain.ask("fill", keys=keys, row_bytes=4 * FULL_V)

        def through_pool() -> float:
            seconds: float = producer.ask("again", times=times, at_once=AT_ONCE)
            return rows * times / seconds

        def in_batches() -> float:
            seconds: float = producer.ask("again_in_batches", times=times, size=_BATCH)
            return rows * times / seconds

        def by_mget() -> float:
            seconds: float = plain.ask("get_keys", keys=keys, times=times)
            return rows * times / seconds

        through_pool(), in_batches(), by_mget()
        samples = alternate({"pool": through_pool, "batches": in_batches, "MGET": by_mget}, place.repeats)
    against = (
        f"plain MGETs of 32 values of that size by one process (redis-py asyncio, hiredis, uvloop); V = {FULL_V:,}"
    )
    sides = {name: Side(name, "rows/s", taken) for name, taken in samples.items()}
    whose = "rows/s of one producer (no memory of its own) when the pool's cache has all rows"
    single = f"{whose}, {AT_ONCE} awaits under way ÷ {against}, f32"
    batched = f"{whose}, `batch_logprobs` of {_BATCH} ÷ {against}, f32"
    return [
        Result("cached", single, Goal(1.3), sides["pool"], sides["MGET"]),
        Result("cached-batch", batched, Goal(1.8), sides["batches"], sides["MGET"]),
    ]


def row_link(place: Workplace) -> list[Result]:
    """The pool's row transport alone."""
    rows = place.scaled(8192, 2048)
    with ExitStack() as stack:
        links = [stack.enter_context(place.child("clients.row_link", place.url, str(FULL_V))) for _ in range(2)]
        ceiling = Ceiling(stack, place, FULL_V * 4)

        def by_row_link() -> float:
            links[0].ask("put", rows=_PRIMED_ROWS)
            return rows / _both(links[0], links[1], rows=rows)

        by_row_link(), ceiling.take(rows)
        samples = alternate({"row link": by_row_link, "ceiling": lambda: ceiling.take(rows)}, place.repeats)
    meaning = (
        f"the pool's row transport without its control (one process stores, one fetches, 32 rows at a time) ÷ the "
        f"ceiling; V = {FULL_V:,}, f32"
    )
    sides = [Side(name, "rows/s", taken) for name, taken in samples.items()]
    return [Result("row-link", meaning, Goal(3.8), *sides)]


def rate(producer: Child, rows: int, at_once: int = AT_ONCE) -> Take:
    """Rows per second of a process that answers `new`, such as a producer's."""

    def take() -> float:
        seconds: float = producer.ask("new", rows=rows, at_once=at_once)
        return rows / seconds

    return take


class Ceiling:
    """What the server and redis-py can carry: one process SETs rows while another MGETs as many, nothing else.

    Args:
        stack: ends the two processes.
        place: where.
        row_bytes: size of a row.
    """

    def __init__(self, stack: ExitStack, place: Workplace, row_bytes: int) -> None:
        self._setter, self._getter = (
            stack.enter_context(place.child("peers.plain_redis", place.url)) for _ in range(2)
        )
        self._row_bytes = row_bytes

    def take(self, rows: int) -> float:
        """Rows per second, by the time that both take together."""
        # The other side may have pushed the last rows out of the server.
        self._setter.ask("put", rows=_PRIMED_ROWS, row_bytes=self._row_bytes)
        return rows / _both(self._setter, self._getter, rows=rows, row_bytes=self._row_bytes)


def _both(setter: Child, getter: Child, **arguments: int) -> float:
    """Seconds until one process has put and the other has got, both at the same time."""
    start = time.perf_counter()
    setter.send("put", **arguments)
    getter.send("get", **arguments)
    setter.receive(120)
    getter.receive(120)
    return time.perf_counter() - start


def _new(place: Workplace, name: str, vocab_size: int, encoding: str, goal: Goal, rows: int) -> list[Result]:
    at_once = AT_ONCE_TINY if vocab_size == TINY_V else AT_ONCE
    options = ["--backend", "synthetic", "--vocab-size", str(vocab_size), "--encoding", encoding]
    with ExitStack() as stack:
        stack.enter_context(place.workers(name, name, *options))
        if vocab_size != TINY_V:
            place.wait_for_shared_memory(name)
        producer = stack.enter_context(place.producer(name))
        ceiling = Ceiling(stack, place, vocab_size * (2 if encoding == "bf16" else 4))

        through_pool = rate(producer, rows, at_once)
        through_pool(), ceiling.take(rows)
        samples = alternate({"pool": through_pool, "ceiling": lambda: ceiling.take(rows)}, place.repeats)
    meaning = (
        f"new rows/s through the pool, one producer process ({at_once} awaits under way) and one synthetic worker "
        f"process ÷ the ceiling: one process SETs values of the same size in pipelines of 32 while another MGETs "
        f"as many (redis-py asyncio, hiredis, uvloop); V = {vocab_size:,}, {encoding}"
    )
    sides = [Side(side, "rows/s", taken) for side, taken in samples.items()]
    return [Result(name, meaning, goal, *sides)]
