"""Summaries of many workers: counts by state and version, the workers that need attention, and pages of workers.

The functions take workers as `lmpool status --json` prints them: dicts with the fields of a heartbeat.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

Worker = dict[str, Any]

SILENT = "silent"  # State of a worker whose last two heartbeats are missing: it may have been killed.
MAX_OUTLIERS = 5
"""Max workers that a summary names of each kind of outlier; more workers are only counted."""

_MAX_GROUPS = 8  # Max states and versions that a summary names; any program may write any state.
# A worker is slow if its p99 is this many times the median p99 of its model's workers: two buckets of a histogram above
# the median, because equal workers may differ by one bucket, a factor of 2.5.
_SLOW = 4.0
_SUMS = ("rows", "tokens", "reused", "homed", "stolen", "shared", "failures")


class OutlierKind(NamedTuple):
    """A kind of outliers: workers that an operator wants to see before all others.

    Attributes:
        name: name of the kind.
        field: field of a worker that shows how much the worker is affected; "" for none.
        is_of: whether a worker is of this kind, given the median p99 of the model's workers.
    """

    name: str
    field: str
    is_of: Callable[[Worker, float], bool]


KINDS = (
    OutlierKind(SILENT, "silent_s", lambda worker, _: worker["state"] == SILENT),
    OutlierKind("changed files", "", lambda worker, _: bool(worker.get("changed_files"))),
    OutlierKind("failing", "failures", lambda worker, _: (number(worker, "failures") or 0) > 0),
    OutlierKind("slow", "p99_s", lambda worker, median: (number(worker, "p99_s") or 0) > _SLOW * median),
    OutlierKind("draining", "", lambda worker, _: worker["state"] == "draining"),
    OutlierKind("loading", "", lambda worker, _: worker["state"] == "loading"),
)
"""The kinds of outliers, the most urgent first."""


def number(fields: Any, name: str) -> float | None:
    """Return a field of a heartbeat as a number, or None if it is not a number."""
    try:
        return float(fields.get(name, ""))
    except (TypeError, ValueError):
        return None


def summarize(workers: Sequence[Worker]) -> dict[str, Any]:
    """Summarize the workers of one model; the size of the summary does not depend on the number of workers.

    Returns:
        `workers`: number of workers. `states`, `versions`: name -> number of workers, the most frequent first.
        `occupancy`: prompts that ready workers hold ÷ prompts that these workers compute at once, or None.
        `outliers`: one entry per kind with workers: `kind`, `count`, and `most`, the most affected workers as (id,
        value) with the value of the kind's `field`. The sums of the workers' counters, such as `rows`.
    """
    ready = [worker for worker in workers if worker["state"] == "ready" and _finite(worker, "capacity")]
    capacity = sum(_finite(worker, "capacity") for worker in ready)
    median, outliers = _median_p99(workers), []
    for kind in KINDS:
        affected = [worker for worker in workers if kind.is_of(worker, median)]
        affected.sort(key=lambda worker: (-_finite(worker, kind.field), worker["id"]))
        most = [(worker["id"], number(worker, kind.field)) for worker in affected[:MAX_OUTLIERS]]
        if affected:
            outliers.append({"kind": kind.name, "count": len(affected), "most": most})
    return {
        "workers": len(workers),
        "states": _counts(workers, "state"),
        "versions": _counts(workers, "version"),
        "occupancy": sum(_finite(worker, "in_flight") for worker in ready) / capacity if capacity > 0 else None,
        "outliers": outliers,
        **{name: sum(_finite(worker, name) for worker in workers) for name in _SUMS},
    }


def by_need(models: Iterable[dict[str, Any]]) -> list[Worker]:
    """Return the workers of all models, with `model` set to the name of the model, the most urgent first.

    Outliers come first, in the order of `KINDS`, the most affected first. The other workers are in the order of their
    p99 in relation to the median p99 of their model, the slowest first.
    """
    ranked = []
    for model in models:
        median = _median_p99(model["workers"])
        ranked += [(_need(worker, median), worker["id"], worker, model["name"]) for worker in model["workers"]]
    ranked.sort(key=lambda entry: entry[:2])
    return [{**worker, "model": name} for _, _, worker, name in ranked]


def by_name(models: Iterable[dict[str, Any]]) -> list[Worker]:
    """Return the workers of all models, with `model` set to the name of the model, by model and id."""
    return [{**worker, "model": model["name"]} for model in models for worker in model["workers"]]


def _need(worker: Worker, median_p99: float) -> tuple[int, float]:
    for rank, kind in enumerate(KINDS):
        if kind.is_of(worker, median_p99):
            return rank, -_finite(worker, kind.field)
    return len(KINDS), -_finite(worker, "p99_s") / median_p99


def _counts(workers: Iterable[Worker], name: str) -> dict[str, int]:
    found = Counter(str(worker[name]) for worker in workers if worker.get(name))
    counts = dict(found.most_common(_MAX_GROUPS))
    if rest := found.total() - sum(counts.values()):
        counts["other"] = counts.get("other", 0) + rest
    return counts


def _median_p99(workers: Iterable[Worker]) -> float:
    values = [value for worker in workers if (value := _finite(worker, "p99_s")) > 0]
    return statistics.median(values) if values else math.inf


def _finite(worker: Worker, name: str) -> float:
    """Return a field as a number, or 0 if it is no finite number: any program may write a heartbeat."""
    value = number(worker, name) or 0.0
    return value if abs(value) < 1e300 else 0.0
