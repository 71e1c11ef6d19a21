"""Beside others: bulk clients, what they cost those and what they get; and what open pages of `lmpool web` cost."""

from __future__ import annotations

import secrets
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.harness.pairs import Goal, Result, Side, alternate
from benchmarks.harness.processes import BenchmarkError, Child, free_port
from benchmarks.harness.workplace import Workplace
from benchmarks.measures.asking import alternated
from benchmarks.measures.real_model import smollm2_folder
from benchmarks.measures.transport import AT_ONCE_TINY, TINY_V, rate

_WORKERS, _STEP_MS, _BATCH = 2, 50, 32
_MEASURED_AT_ONCE, _BULK_AT_ONCE, _ALONE_AT_ONCE = 4, 2000, 1024
_LOADS = {"half": 32, "busy": 96, "overloaded": 400}
"""Awaits of other interactive clients: the pool computes 64 prompts in a step."""
_TEXTS_AT_ONCE, _TEXT_TOKENS, _QUESTION_TOKENS, _PAUSE_S = 256, 500, 5, 0.1
_WARM_S = 2.0
_PAGES = 100
_PAIRS_A_REPEAT = 4
"""What is asked of them is 2 %, which single samples differ by."""

_MIN_FRAMES = 0.5
"""A second and page: where every core is busy a look may take longer than the service lets it take."""


def beside_bulk(place: Workplace) -> list[Result]:
    """What an interactive client waits beside a bulk run, on a pool that other interactive clients keep busy."""
    seconds = place.scaled(30, 6)
    options = ("--backend", "synthetic", "--vocab-size", str(TINY_V), "--step-ms", str(_STEP_MS))
    results = []
    with ExitStack() as stack:
        stack.enter_context(place.workers("shared", "shared", *options, "--max-batch", str(_BATCH), number=_WORKERS))
        client, others, bulk = (
            stack.enter_context(place.producer("shared", "--priority", priority))
            for priority in ("interactive", "interactive", "bulk")
        )
        for load, at_once in _LOADS.items():
            rows: dict[str, list[float]] = {"others": [], "bulk": []}

            def take(is_beside: bool, at_once: int = at_once, rows: dict[str, list[float]] = rows) -> float:
                under_way: dict[str, Child] = {"others": others, **({"bulk": bulk} if is_beside else {})}
                for name, asking in under_way.items():
                    awaits = _BULK_AT_ONCE if name == "bulk" else at_once
                    asking.send("steadily", at_once=awaits, warm_s=_WARM_S, seconds=seconds)
                waits = client.ask("waits", at_once=_MEASURED_AT_ONCE, warm_s=_WARM_S, seconds=seconds)
                came = {name: int(asking.receive(120)) / seconds for name, asking in under_way.items()}
                if is_beside:
                    for name, value in came.items():
                        rows[name].append(value)
                return 1000 * float(np.quantile(waits, 0.99))

            samples = alternate({"beside": lambda: take(True), "alone": lambda: take(False)}, place.repeats)
            meaning = (
                f"99th percentile of what {_MEASURED_AT_ONCE} awaits of an interactive client take, each for a new "
                f"prompt, beside a bulk client with {_BULK_AT_ONCE:,} awaits under way ÷ without it, while other "
                f"interactive clients have {at_once} under way; {_WORKERS} synthetic workers, steps of {_STEP_MS} ms "
                f"and {_BATCH} prompts"
            )
            sides = Side("beside bulk", "ms", samples["beside"]), Side("without", "ms", samples["alone"])
            goal = Goal(1.3, at_most=True) if load == "busy" else None
            results.append(Result(f"priority-{load}", meaning, goal, *sides))
            share = "rows/s of the bulk client ÷ those of the others in the same run"
            gets = Side("bulk", "rows/s", rows["bulk"]), Side("others", "rows/s", rows["others"])
            results.append(Result(f"priority-{load}-share", share, None, *gets))
    return [*results, _beside_texts(place)]


def _beside_texts(place: Workplace) -> Result:
    """What an interactive client waits on a CPU next to a bulk run over long texts."""
    seconds = place.scaled(60, 15)
    with ExitStack() as stack:
        stack.enter_context(place.workers("texts", str(smollm2_folder()), "--backend", "hf", "--device", "cpu"))
        client, bulk = (
            stack.enter_context(place.producer("texts", "--priority", priority)) for priority in ("interactive", "bulk")
        )

        def take(is_beside: bool) -> float:
            place.wait_until_idle("texts")
            if is_beside:
                bulk.send("steadily", at_once=_TEXTS_AT_ONCE, warm_s=_WARM_S, seconds=seconds, tokens=_TEXT_TOKENS)
            asked = {"at_once": 1, "tokens": _QUESTION_TOKENS, "pause_s": _PAUSE_S}
            waits = client.ask("waits", warm_s=_WARM_S, seconds=seconds, within=seconds + 120, **asked)
            if is_beside:
                bulk.receive(120)
            return 1000 * float(np.quantile(waits, 0.99))

        samples = alternate({"beside": lambda: take(True), "alone": lambda: take(False)}, place.repeats)
    meaning = (
        f"99th percentile of what a prompt of {_QUESTION_TOKENS} tokens takes, one after the other, beside a bulk "
        f"client with {_TEXTS_AT_ONCE} texts of {_TEXT_TOKENS} tokens in flight ÷ without it; SmolLM2-135M f32, hf on "
        "a CPU"
    )
    sides = Side("beside bulk", "ms", samples["beside"]), Side("without", "ms", samples["alone"])
    return Result("priority-texts", meaning, Goal(2, at_most=True), *sides)


def bulk_alone(place: Workplace) -> list[Result]:
    """A bulk client that has the pool to itself."""
    results = []
    for name, options in {"": ("--step-ms", "20"), "-tiny": ()}.items():
        with ExitStack() as stack:
            more = ("--backend", "synthetic", "--vocab-size", str(TINY_V), *options)
            stack.enter_context(place.workers("shared", "shared", *more, number=_WORKERS if name == "" else 1))
            takes = {
                priority: rate(
                    stack.enter_context(place.producer("shared", "--priority", priority)),
                    place.scaled(16_384, 4096),
                    _ALONE_AT_ONCE,
                )
                for priority in ("bulk", "interactive")
            }
            samples = alternated(takes, place.repeats)
        meaning = (
            f"rows/s of a bulk client alone ÷ those of an interactive one alone, {_ALONE_AT_ONCE:,} awaits under way; "
            f"{_WORKERS} synthetic workers with steps of 20 ms; or one without; V = {TINY_V}"
        )
        sides = [Side(side, "rows/s", taken) for side, taken in samples.items()]
        results.append(Result(f"priority-alone{name}", meaning, Goal(0.98), *sides))
    return results


def web_pages(place: Workplace) -> list[Result]:
    """Rows of a pool whose workers wait between steps, as for a GPU, and of one that is busy with its rows alone."""
    results = []
    for name, step, options in (
        ("web-pages", "steps of 20 ms", ("--step-ms", "20")),
        ("web-pages-tiny", "no steps", ()),
    ):
        with ExitStack() as stack:
            more = ("--backend", "synthetic", "--vocab-size", str(TINY_V), *options)
            stack.enter_context(place.workers(name, "synthetic", *more, number=_WORKERS))
            producer = stack.enter_context(place.producer(name))
            pages = stack.enter_context(place.child("clients.pages"))
            pair = _WebPair(place, producer, pages, float(place.scaled(10, 4)))
            pair.without()
            sides = {"pages open": pair.beside, "no service": pair.without}
            samples = alternate(sides, place.repeats * place.scaled(_PAIRS_A_REPEAT, 1))
        meaning = (
            f"rows/s of one producer, {AT_ONCE_TINY:,} awaits under way, while {_PAGES} pages of `lmpool web` are "
            "opened and stay open (each asks for the history once, and for the stream; what asks is one process) ÷ "
            f"without `lmpool web`; {_WORKERS} synthetic workers, {step}, V = {TINY_V}"
        )
        taken = [Side(side, "rows/s", values) for side, values in samples.items()]
        results.append(Result(name, meaning, Goal(0.98), *taken))
    return results


class _WebPair:
    """Rows a second beside pages and without them.

    Args:
        place: where the service runs.
        producer: asks for rows.
        pages: is the pages.
        seconds: that a sample takes.
    """

    def __init__(self, place: Workplace, producer: Child, pages: Child, seconds: float) -> None:
        self._place = place
        self._producer = producer
        self._pages = pages
        self._seconds = seconds

    def without(self) -> float:
        """Rows a second while no service runs."""
        asked = {"at_once": AT_ONCE_TINY, "warm_s": _WARM_S, "seconds": self._seconds}
        return float(self._producer.ask("steadily", **asked)) / self._seconds

    def beside(self) -> float:
        """Rows a second from the moment on at which the pages are opened.

        Raises:
            BenchmarkError: they were not told of the pool as often as it is looked at.
        """
        port, token = free_port(), secrets.token_hex(16)
        lmpool = str(Path(sys.executable).with_name("lmpool"))
        command = (lmpool, "web", "--port", str(port), "--redis", self._place.url)
        with self._place.process("web", *command, LMPOOL_WEB_TOKEN=token):
            self._pages.ask("until_ready", port=port)
            watched = {"port": port, "token": token, "pages": _PAGES, "begin_s": _WARM_S, "seconds": self._seconds}
            self._pages.send("watch", **watched)
            rate = self.without()
            frames = float(self._pages.receive(60)) / self._seconds
        if frames < _MIN_FRAMES:
            raise BenchmarkError(f"a page was sent {frames:.2f} frames a second: that is no page that is watched")
        return rate
