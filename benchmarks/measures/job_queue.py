"""Compares the pool with the job queue arq, whose jobs return the same rows as the pool."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from benchmarks.harness.comparison import FULL_V
from benchmarks.harness.pairs import Goal, Result, Side, alternate
from benchmarks.harness.processes import Child
from benchmarks.harness.testbed import Testbed
from benchmarks.measures.transport import rate
from benchmarks.peers.environment import peers_python

_DEFAULT_MAX_JOBS = 10  # arq's default number of concurrent jobs per worker.
_RAISED_MAX_JOBS = 1000  # Concurrent jobs per worker in the tuned configuration.
_TRIED_CONCURRENCY = (30, 100, 300, 1000)  # Tried numbers of concurrently awaited results; the fastest is used.
_WAVES = 2  # Jobs of a trial, as a multiple of the concurrently awaited results.


def arq(testbed: Testbed) -> list[Result]:
    """Rows per second through the pool and through arq, with arq's defaults and with more concurrent jobs."""
    python = peers_python()
    with ExitStack() as stack:
        stack.enter_context(testbed.workers("rows", "rows", "--backend", "synthetic", "--seed", "7"))
        producer = stack.enter_context(testbed.producer("rows"))
        default = _start(stack, testbed, python, "arq:queue", _DEFAULT_MAX_JOBS)
        raised = _start(stack, testbed, python, "arq:many", _RAISED_MAX_JOBS)
        default_concurrency, raised_concurrency = _best_concurrency(default), _best_concurrency(raised)
        pool = rate(producer, testbed.scaled(4096, 1024))
        pool()
        samples = alternate(
            {
                "pool": pool,
                "default": rate(default, testbed.scaled(2000, _WAVES * default_concurrency), default_concurrency),
                "raised": rate(raised, testbed.scaled(4000, _WAVES * raised_concurrency), raised_concurrency),
            },
            testbed.repeats,
        )
    meaning = (
        f"new rows/s through the pool (one producer, one synthetic worker) ÷ arq jobs that return such a row (one "
        f"client, one worker, on the same server's Unix socket); V = {FULL_V:,}, f32; arq with "
    )
    tried = f"the best of {', '.join(map(str, _TRIED_CONCURRENCY))} concurrently awaited results"
    ours = Side("pool", "rows/s", samples["pool"])
    theirs = Side(f"arq, {default_concurrency} awaited", "rows/s", samples["default"])
    tuned = Side(f"arq, {raised_concurrency} awaited", "rows/s", samples["raised"])
    return [
        Result(
            "arq", f"{meaning}its default settings (max_jobs = {_DEFAULT_MAX_JOBS}) and {tried}", Goal(10), ours, theirs
        ),
        Result("arq-many", f"{meaning}max_jobs raised to {_RAISED_MAX_JOBS} and {tried}", None, ours, tuned),
    ]


def _start(stack: ExitStack, testbed: Testbed, python: str, queue: str, max_jobs: int) -> Child:
    """Start an arq worker and its client."""
    environment = {
        "BENCH_ARQ_SOCKET": testbed.url.removeprefix("unix://"),
        "BENCH_ARQ_QUEUE": queue,
        "BENCH_ARQ_MAX_JOBS": str(max_jobs),
    }
    command = [str(Path(python).with_name("arq")), "benchmarks.peers.arq_peer.WorkerSettings"]
    stack.enter_context(testbed.process(f"arq-{max_jobs}", *command, **environment))
    return stack.enter_context(testbed.child("peers.arq_peer", python=python, **environment))


def _best_concurrency(client: Child) -> int:
    """The number of concurrently awaited results with the most rows per second; also warms up the worker."""
    rates = {concurrency: rate(client, _WAVES * concurrency, concurrency)() for concurrency in _TRIED_CONCURRENCY}
    return max(rates, key=lambda concurrency: rates[concurrency])
