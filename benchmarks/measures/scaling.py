"""How a model's workers add up when computing is what takes the time."""

from __future__ import annotations

from contextlib import ExitStack

from benchmarks.harness.pairs import Goal, Result, Side, alternate
from benchmarks.harness.workplace import Workplace
from benchmarks.measures.transport import TINY_V, rate

_STEP_MS = 20
_WORKERS = 4
_AT_ONCE = 1024


def scaling(place: Workplace) -> list[Result]:
    """Four workers against one."""
    options = ["--backend", "synthetic", "--vocab-size", str(TINY_V), "--step-ms", str(_STEP_MS)]
    with ExitStack() as stack:
        stack.enter_context(place.workers("four", "four", *options, "--seed", "5", number=_WORKERS))
        stack.enter_context(place.workers("one", "one", *options, "--seed", "6"))
        rows = place.scaled(4096, 2048)
        four = rate(stack.enter_context(place.producer("four")), rows * _WORKERS, _AT_ONCE)
        one = rate(stack.enter_context(place.producer("one")), rows, _AT_ONCE)
        four(), one()
        samples = alternate({"4 workers": four, "1 worker": one}, place.repeats)
    meaning = (
        f"rows/s of {_WORKERS} synthetic workers with steps of {_STEP_MS} ms ÷ those of one, each asked by one "
        f"producer with {_AT_ONCE:,} awaits under way; V = {TINY_V}"
    )
    return [Result("scaling", meaning, Goal(3.6), *[Side(side, "rows/s", taken) for side, taken in samples.items()])]
