"""What one request costs when nothing else is under way."""

from __future__ import annotations

from contextlib import ExitStack

from benchmarks.harness.pairs import Goal, Result, Side, alternate
from benchmarks.harness.workplace import Workplace
from benchmarks.measures.transport import FULL_V, TINY_V


def alone(place: Workplace) -> list[Result]:
    """One request alone, rows of full and of no size."""
    return [_alone(place, "alone-f32", FULL_V), _alone(place, "alone-tiny", TINY_V)]


def _alone(place: Workplace, name: str, vocab_size: int) -> Result:
    requests, gets = place.scaled(500, 100), place.scaled(2000, 400)
    options = ["--backend", "synthetic", "--vocab-size", str(vocab_size), "--seed", "4"]
    with ExitStack() as stack:
        stack.enter_context(place.workers(name, name, *options))
        producer = stack.enter_context(place.producer(name))
        plain = stack.enter_context(place.child("peers.plain_redis", place.url))

        def through_pool() -> float:
            seconds: float = producer.ask("alone", requests=requests)
            return seconds * 1e6

        def by_get() -> float:
            seconds: float = plain.ask("round_trip", requests=gets)
            return seconds * 1e6

        through_pool(), by_get()
        samples = alternate({"request": through_pool, "GET": by_get}, place.repeats)
    meaning = (
        f"p50 of one request alone (a new prompt; to the worker and back) ÷ p50 of one GET of a small value "
        f"(redis-py asyncio, hiredis, uvloop); V = {vocab_size:,}, f32"
    )
    sides = [Side(side, "µs", taken) for side, taken in samples.items()]
    return Result(name, meaning, Goal(8, at_most=True), *sides)
