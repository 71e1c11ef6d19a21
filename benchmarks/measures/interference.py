"""Interference between clients: bulk runs next to interactive clients, and open pages of `lmpool web`."""

from __future__ import annotations

import secrets
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.harness.comparison import alternated
from benchmarks.harness.pairs import Goal, Result, Side, alternate
from benchmarks.harness.processes import BenchmarkError, Child, free_port
from benchmarks.harness.testbed import Testbed
from benchmarks.measures.real_model import smollm2_folder
from benchmarks.measures.transport import CONCURRENCY_TINY, TINY_V, rate

_WORKERS, _STEP_MS, _BATCH = 2, 50, 32  # Number of workers; milliseconds per step; prompts per step.
# Requests in flight of the measured client, of the bulk client, and of a client that is alone on the pool.
_MEASURED_CONCURRENCY, _BULK_CONCURRENCY, _ALONE_CONCURRENCY = 4, 2000, 1024
_LOADS = {"half": 32, "busy": 96, "overloaded": 400}
"""Requests in flight of all interactive clients that are not measured; the two workers compute 64 prompts per step."""
# A bulk run with 256 texts of 500 tokens in flight, next to interactive prompts of 5 tokens at intervals of 0.1 s.
_TEXTS_CONCURRENCY, _TEXT_TOKENS, _QUESTION_TOKENS, _PAUSE_S = 256, 500, 5, 0.1
_WARM_S = 2.0  # Seconds under load before the measurement starts.
_PAGES = 100  # Number of open pages of `lmpool web`.
_PAIRS_A_REPEAT = 4  # Pairs of samples per repeat: many, because samples differ by 2 %, as much as the goal allows.
_MIN_FRAMES = 0.5  # Min frames per second of a page: polls of the pool may time out on busy cores.


def with_bulk_run(testbed: Testbed) -> list[Result]:
    """Latency of an interactive client next to a bulk run, on a pool that other interactive clients keep busy."""
    seconds = testbed.scaled(30, 6)
    options = ("--backend", "synthetic", "--vocab-size", str(TINY_V), "--step-ms", str(_STEP_MS))
    results = []
    with ExitStack() as stack:
        stack.enter_context(testbed.workers("shared", "shared", *options, "--max-batch", str(_BATCH), number=_WORKERS))
        client, others, bulk = (
            stack.enter_context(testbed.producer("shared", "--priority", priority))
            for priority in ("interactive", "interactive", "bulk")
        )
        for load, concurrency in _LOADS.items():
            rows: dict[str, list[float]] = {"others": [], "bulk": []}

            def take(with_bulk: bool, concurrency: int = concurrency, rows: dict[str, list[float]] = rows) -> float:
                running: dict[str, Child] = {"others": others, **({"bulk": bulk} if with_bulk else {})}
                for name, producer in running.items():
                    in_flight = _BULK_CONCURRENCY if name == "bulk" else concurrency
                    producer.send("steady_load", concurrency=in_flight, warm_s=_WARM_S, seconds=seconds)
                latencies = client.request(
                    "latencies", concurrency=_MEASURED_CONCURRENCY, warm_s=_WARM_S, seconds=seconds
                )
                received = {name: int(producer.receive(120)) / seconds for name, producer in running.items()}
                if with_bulk:
                    for name, value in received.items():
                        rows[name].append(value)
                return 1000 * float(np.quantile(latencies, 0.99))

            samples = alternate({"with bulk": lambda: take(True), "alone": lambda: take(False)}, testbed.repeats)
            meaning = (
                f"99th percentile latency of an interactive client with {_MEASURED_CONCURRENCY} requests in flight, "
                f"each a new prompt, next to a bulk client with {_BULK_CONCURRENCY:,} in flight ÷ without the bulk "
                f"client; other interactive clients have {concurrency} in flight; {_WORKERS} synthetic workers, steps "
                f"of {_STEP_MS} ms and {_BATCH} prompts"
            )
            sides = Side("with bulk", "ms", samples["with bulk"]), Side("without", "ms", samples["alone"])
            goal = Goal(1.3, at_most=True) if load == "busy" else None
            results.append(Result(f"priority-{load}", meaning, goal, *sides))
            share = "rows/s of the bulk client ÷ rows/s of the other interactive clients in the same run"
            gets = Side("bulk", "rows/s", rows["bulk"]), Side("others", "rows/s", rows["others"])
            results.append(Result(f"priority-{load}-share", share, None, *gets))
    return [*results, _long_texts(testbed)]


def _long_texts(testbed: Testbed) -> Result:
    """Latency of an interactive client on a CPU next to a bulk run over long texts."""
    seconds = testbed.scaled(60, 15)
    with ExitStack() as stack:
        stack.enter_context(testbed.workers("texts", str(smollm2_folder()), "--backend", "hf", "--device", "cpu"))
        client, bulk = (
            stack.enter_context(testbed.producer("texts", "--priority", priority))
            for priority in ("interactive", "bulk")
        )

        def take(with_bulk: bool) -> float:
            testbed.wait_until_idle("texts")
            if with_bulk:
                bulk.send(
                    "steady_load", concurrency=_TEXTS_CONCURRENCY, warm_s=_WARM_S, seconds=seconds, tokens=_TEXT_TOKENS
                )
            options = {"concurrency": 1, "tokens": _QUESTION_TOKENS, "pause_s": _PAUSE_S}
            latencies = client.request("latencies", warm_s=_WARM_S, seconds=seconds, within=seconds + 120, **options)
            if with_bulk:
                bulk.receive(120)
            return 1000 * float(np.quantile(latencies, 0.99))

        samples = alternate({"with bulk": lambda: take(True), "alone": lambda: take(False)}, testbed.repeats)
    meaning = (
        f"99th percentile latency of prompts of {_QUESTION_TOKENS} tokens, one after the other, next to a bulk client "
        f"with {_TEXTS_CONCURRENCY} texts of {_TEXT_TOKENS} tokens in flight ÷ without the bulk client; SmolLM2-135M "
        "f32, hf on a CPU"
    )
    sides = Side("with bulk", "ms", samples["with bulk"]), Side("without", "ms", samples["alone"])
    return Result("priority-texts", meaning, Goal(2, at_most=True), *sides)


def bulk_alone(testbed: Testbed) -> list[Result]:
    """Compare a bulk client that is alone on the pool with an interactive client that is alone."""
    results = []
    for name, options in {"": ("--step-ms", "20"), "-tiny": ()}.items():
        with ExitStack() as stack:
            more = ("--backend", "synthetic", "--vocab-size", str(TINY_V), *options)
            stack.enter_context(testbed.workers("shared", "shared", *more, number=_WORKERS if name == "" else 1))
            takes = {
                priority: rate(
                    stack.enter_context(testbed.producer("shared", "--priority", priority)),
                    testbed.scaled(16_384, 4096),
                    _ALONE_CONCURRENCY,
                )
                for priority in ("bulk", "interactive")
            }
            samples = alternated(takes, testbed.repeats)
        meaning = (
            f"rows/s of a bulk client alone ÷ of an interactive client alone, {_ALONE_CONCURRENCY:,} requests in "
            f"flight; {_WORKERS} synthetic workers with steps of 20 ms, or one worker without steps; V = {TINY_V}"
        )
        sides = [Side(side, "rows/s", taken) for side, taken in samples.items()]
        results.append(Result(f"priority-alone{name}", meaning, Goal(0.98), *sides))
    return results


def web_pages(testbed: Testbed) -> list[Result]:
    """Throughput while web pages are open, of workers that sleep in each step (as if on a GPU) and of busy workers."""
    results = []
    for name, step, options in (
        ("web-pages", "steps of 20 ms", ("--step-ms", "20")),
        ("web-pages-tiny", "no steps", ()),
    ):
        with ExitStack() as stack:
            more = ("--backend", "synthetic", "--vocab-size", str(TINY_V), *options)
            stack.enter_context(testbed.workers(name, "synthetic", *more, number=_WORKERS))
            producer = stack.enter_context(testbed.producer(name))
            pages = stack.enter_context(testbed.child("clients.pages"))
            pair = _WebPair(testbed, producer, pages, float(testbed.scaled(10, 4)))
            pair.without()
            sides = {"pages open": pair.with_pages, "no service": pair.without}
            samples = alternate(sides, testbed.repeats * testbed.scaled(_PAIRS_A_REPEAT, 1))
        meaning = (
            f"rows/s of one producer with {CONCURRENCY_TINY:,} requests in flight, while {_PAGES} pages of `lmpool "
            "web` open and stay open (one process requests the history once per page, then the stream) ÷ without "
            f"`lmpool web`; {_WORKERS} synthetic workers, {step}, V = {TINY_V}"
        )
        taken = [Side(side, "rows/s", values) for side, values in samples.items()]
        results.append(Result(name, meaning, Goal(0.98), *taken))
    return results


class _WebPair:
    """Rows per second with and without open pages; a sample takes `seconds`."""

    def __init__(self, testbed: Testbed, producer: Child, pages: Child, seconds: float) -> None:
        self._testbed = testbed
        self._producer = producer
        self._pages = pages
        self._seconds = seconds

    def without(self) -> float:
        """Rows per second while no `lmpool web` runs."""
        options = {"concurrency": CONCURRENCY_TINY, "warm_s": _WARM_S, "seconds": self._seconds}
        return float(self._producer.request("steady_load", **options)) / self._seconds

    def with_pages(self) -> float:
        """Rows per second from the moment at which the pages open.

        Raises:
            BenchmarkError: the service sent too few frames to each page.
        """
        port, token = free_port(), secrets.token_hex(16)
        lmpool = str(Path(sys.executable).with_name("lmpool"))
        command = (lmpool, "web", "--port", str(port), "--redis", self._testbed.url)
        with self._testbed.process("web", *command, LMPOOL_WEB_TOKEN=token):
            self._pages.request("until_ready", port=port)
            watched = {"port": port, "token": token, "pages": _PAGES, "begin_s": _WARM_S, "seconds": self._seconds}
            self._pages.send("watch", **watched)
            rate = self.without()
            frames = float(self._pages.receive(60)) / self._seconds
        if frames < _MIN_FRAMES:
            raise BenchmarkError(f"each page received {frames:.2f} frames per second; at least {_MIN_FRAMES} expected")
        return rate
