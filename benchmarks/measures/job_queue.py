"""The pool against a job queue: the same rows as the results of arq jobs."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from benchmarks.harness.pairs import Goal, Result, Side, alternate
from benchmarks.harness.processes import Child
from benchmarks.harness.workplace import Workplace
from benchmarks.measures.transport import FULL_V, rate
from benchmarks.peers.environment import peers_python

_DEFAULT_MAX_JOBS = 10
_RAISED_MAX_JOBS = 1000
_TRIED_AT_ONCE = (30, 100, 300, 1000)
_WAVES = 2


def arq(place: Workplace) -> list[Result]:
    """Rows per second through the pool and through arq, as it comes and with more jobs at once."""
    python = peers_python()
    with ExitStack() as stack:
        stack.enter_context(place.workers("rows", "rows", "--backend", "synthetic", "--seed", "7"))
        producer = stack.enter_context(place.producer("rows"))
        default = _start(stack, place, python, "arq:queue", _DEFAULT_MAX_JOBS)
        raised = _start(stack, place, python, "arq:many", _RAISED_MAX_JOBS)
        default_at_once, raised_at_once = _best_at_once(default), _best_at_once(raised)
        pool = rate(producer, place.scaled(4096, 1024))
        pool()
        samples = alternate(
            {
                "pool": pool,
                "default": rate(default, place.scaled(2000, _WAVES * default_at_once), default_at_once),
                "raised": rate(raised, place.scaled(4000, _WAVES * raised_at_once), raised_at_once),
            },
            place.repeats,
        )
    meaning = (
        f"new rows/s through the pool (one producer, one synthetic worker) ÷ arq jobs that return such a row (one "
        f"client, one worker, on the same server's Unix socket); V = {FULL_V:,}, f32; arq with "
    )
    tried = f"the best of {', '.join(map(str, _TRIED_AT_ONCE))} results awaited at once"
    ours = Side("pool", "rows/s", samples["pool"])
    theirs = Side(f"arq, {default_at_once} awaited", "rows/s", samples["default"])
    tuned = Side(f"arq, {raised_at_once} awaited", "rows/s", samples["raised"])
    return [
        Result(
            "arq", f"{meaning}its default settings (max_jobs = {_DEFAULT_MAX_JOBS}) and {tried}", Goal(10), ours, theirs
        ),
        Result("arq-many", f"{meaning}max_jobs raised to {_RAISED_MAX_JOBS} and {tried}", None, ours, tuned),
    ]


def _start(stack: ExitStack, place: Workplace, python: str, queue: str, max_jobs: int) -> Child:
    """An arq worker, and the client that asks it."""
    environment = {
        "BENCH_ARQ_SOCKET": place.url.removeprefix("unix://"),
        "BENCH_ARQ_QUEUE": queue,
        "BENCH_ARQ_MAX_JOBS": str(max_jobs),
    }
    command = [str(Path(python).with_name("arq")), "benchmarks.peers.arq_peer.WorkerSettings"]
    stack.enter_context(place.process(f"arq-{max_jobs}", *command, **environment))
    return stack.enter_context(place.child("peers.arq_peer", python=python, **environment))


def _best_at_once(client: Child) -> int:
    """How many results to await at once for the most rows per second; warms the worker up too."""
    rates = {at_once: rate(client, _WAVES * at_once, at_once)() for at_once in _TRIED_AT_ONCE}
    return max(rates, key=lambda at_once: rates[at_once])
