"""Bulk clients beside others: what they cost those, and what they get."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from benchmarks.harness.pairs import Goal, Result, Side, alternate
from benchmarks.harness.processes import Child
from benchmarks.harness.workplace import Workplace
from benchmarks.measures.asking import alternated
from benchmarks.measures.transport import TINY_V, rate

_WORKERS, _STEP_MS, _BATCH = 2, 50, 32
_MEASURED_AT_ONCE, _BULK_AT_ONCE, _ALONE_AT_ONCE = 4, 2000, 1024
_LOADS = {"half": 32, "busy": 96, "overloaded": 400}
"""Awaits of other interactive clients: the pool computes 64 prompts in a step."""
_WARM_S = 2.0


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
    return results


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
