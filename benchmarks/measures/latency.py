"""What one request costs when nothing else is under way."""

from __future__ import annotations

from contextlib import ExitStack

from benchmarks.harness.pairs import Goal, Result, Side, alternate
from benchmarks.harness.workplace import Workplace
from benchmarks.measures.transport import FULL_V, TINY_V

_JOB_BYTES = 100


def alone(place: Workplace) -> list[Result]:
    """One request alone, rows of full and of no size, and a full row that is cached."""
    return [
        *_alone(place, "alone-f32", FULL_V, Goal(7, at_most=True)),
        *_alone(place, "alone-tiny", TINY_V, Goal(6.5, at_most=True)),
    ]


def _alone(place: Workplace, name: str, vocab_size: int, goal: Goal) -> list[Result]:
    requests, gets = place.scaled(500, 100), place.scaled(2000, 400)
    options = ["--backend", "synthetic", "--vocab-size", str(vocab_size), "--seed", "4"]
    is_full = vocab_size == FULL_V
    with ExitStack() as stack:
        stack.enter_context(place.workers(name, name, *options))
        if is_full:
            place.wait_for_shared_memory(name)
        producer = stack.enter_context(place.producer(name, "--cache-bytes", "0"))
        plain = stack.enter_context(place.child("peers.plain_redis", place.url))

        def through_pool() -> float:
            seconds: float = producer.ask("alone", requests=requests)
            return seconds * 1e6

        def from_cache() -> float:
            seconds: float = producer.ask("alone_again", requests=requests)
            return seconds * 1e6

        def by_get() -> float:
            seconds: float = plain.ask("round_trip", requests=gets)
            return seconds * 1e6

        def by_queue() -> float:
            seconds: float = plain.ask("through_queue", requests=requests, job_bytes=_JOB_BYTES)
            return seconds * 1e6

        if not is_full:
            worker = stack.enter_context(place.child("peers.plain_redis", place.url))
            worker.send("take_jobs", row_bytes=4 * vocab_size)
        taken = {
            "request": through_pool,
            **({"cached": from_cache} if is_full else {"queue": by_queue}),
            "GET": by_get,
        }
        for take in taken.values():
            take()
        samples = alternate(taken, place.repeats)
    against = f"p50 of one GET of a small value (redis-py asyncio, hiredis, uvloop); V = {vocab_size:,}, f32"
    sides = {side: Side(side, "µs", values) for side, values in samples.items()}
    new = f"p50 of one request alone (a new prompt; to the worker and back) ÷ {against}"
    results = [Result(name, new, goal, sides["request"], sides["GET"])]
    if not is_full:
        bare = (
            "p50 of one request alone ÷ p50 of a job of a bare queue, the least that a request through a queue takes: "
            "XADD by redis-py; XREADGROUP in another process, a thread that makes the value, SET, XADD, XACK and XDEL "
            f"together; XREAD. No leases, nothing shared, nothing sent again; V = {vocab_size:,}, f32"
        )
        results.append(Result("alone-queue", bare, None, sides["request"], sides["queue"]))
    if is_full:
        again = f"p50 of one request alone for a row that the pool's cache has (no memory of its own) ÷ {against}"
        results.append(Result("alone-cached", again, Goal(1, at_most=True), sides["cached"], sides["GET"]))
    return results
