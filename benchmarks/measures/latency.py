"""Measures the latency of one request when no other request is in flight."""

from __future__ import annotations

from contextlib import ExitStack

from benchmarks.harness.comparison import FULL_V
from benchmarks.harness.pairs import Goal, Result, Side, alternate
from benchmarks.harness.testbed import Testbed
from benchmarks.measures.transport import TINY_V

_JOB_BYTES = 100  # Bytes of a job in the plain Redis queue of the comparison, about the size of a short prompt.


def alone(testbed: Testbed) -> list[Result]:
    """Measure single requests, with no other request in flight: full-size rows, tiny rows, a cached full-size row."""
    return [
        *_alone(testbed, "alone-f32", FULL_V, Goal(7, at_most=True)),
        *_alone(testbed, "alone-tiny", TINY_V, Goal(6.5, at_most=True)),
    ]


def _alone(testbed: Testbed, name: str, vocab_size: int, goal: Goal) -> list[Result]:
    requests, gets = testbed.scaled(500, 100), testbed.scaled(2000, 400)
    options = ["--backend", "synthetic", "--vocab-size", str(vocab_size), "--seed", "4"]
    is_full = vocab_size == FULL_V
    with ExitStack() as stack:
        stack.enter_context(testbed.workers(name, name, *options))
        if is_full:
            testbed.wait_for_shared_memory(name)
        producer = stack.enter_context(testbed.producer(name, "--cache-bytes", "0"))
        plain = stack.enter_context(testbed.child("peers.plain_redis", testbed.url))

        def through_pool() -> float:
            seconds: float = producer.request("alone", requests=requests)
            return seconds * 1e6

        def from_cache() -> float:
            seconds: float = producer.request("alone_again", requests=requests)
            return seconds * 1e6

        def by_get() -> float:
            seconds: float = plain.request("round_trip", requests=gets)
            return seconds * 1e6

        def by_queue() -> float:
            seconds: float = plain.request("through_queue", requests=requests, job_bytes=_JOB_BYTES)
            return seconds * 1e6

        worker = stack.enter_context(testbed.child("peers.plain_redis", testbed.url))
        worker.send("take_jobs", row_bytes=4 * vocab_size)
        taken = {
            "request": through_pool,
            "queue": by_queue,
            **({"cached": from_cache} if is_full else {}),
            "GET": by_get,
        }
        for take in taken.values():
            take()
        samples = alternate(taken, testbed.repeats)
    against = f"p50 of one GET of a small value (redis-py asyncio, hiredis, uvloop); V = {vocab_size:,}, f32"
    sides = {side: Side(side, "µs", values) for side, values in samples.items()}
    new = f"p50 of one request alone (a new prompt, computed by the worker) ÷ {against}"
    results = [Result(name, new, goal, sides["request"], sides["GET"])]
    bare = (
        "p50 of one request alone ÷ p50 of a job through a bare queue, the minimum for a request through Redis: "
        "XADD by redis-py; XREADGROUP in another process; a thread creates the value; SET, XADD, XACK and XDEL in "
        f"one pipeline; XREAD. No leases, no shared results, no retries; V = {vocab_size:,}, f32"
    )
    queue_goal = Goal(1.2 if is_full else 1.0, at_most=True)
    results.append(
        Result("alone-queue-f32" if is_full else "alone-queue", bare, queue_goal, sides["request"], sides["queue"])
    )
    if is_full:
        again = f"p50 of one request alone for a row in the pool's cache (no cache in the producer) ÷ {against}"
        results.append(Result("alone-cached", again, Goal(1, at_most=True), sides["cached"], sides["GET"]))
    return results
