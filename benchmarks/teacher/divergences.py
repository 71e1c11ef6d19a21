"""Compares the divergence from states and a head, in tiles, with arrays of all positions and all tokens."""

from __future__ import annotations

from benchmarks.harness.pairs import Goal, Result, Side
from benchmarks.harness.processes import BenchmarkError
from benchmarks.harness.testbed import Testbed

_POSITIONS, _QUICK_POSITIONS = 2048, 256
_WITHIN_S = 300.0  # Max seconds of one step; it takes a few on an idle machine.
_TOLERANCE = 1e-3  # Max relative difference between the divergences and gradients of the two sides.
_UNITS = {"seconds": "s", "megabytes": "MB"}


def divergence(testbed: Testbed) -> list[Result]:
    """Measure time and memory of forward KL with its gradients, one process for each side."""
    positions = testbed.scaled(_POSITIONS, _QUICK_POSITIONS)
    with (
        testbed.child("teacher.divergence_side", "states", str(positions)) as states,
        testbed.child("teacher.divergence_side", "rows", str(positions)) as rows,
    ):
        children = {"states": states, "rows": rows}
        samples: dict[str, list[dict[str, float]]] = {name: [] for name in children}
        # The first round is a warm-up, and compares the values of the two sides.
        for round_ in range(testbed.repeats + 1):
            taken = {name: child.request("run", within=_WITHIN_S) for name, child in children.items()}
            _agree(taken["states"]["values"], taken["rows"]["values"])
            for name in children if round_ else ():
                samples[name].append(taken[name])
    task = (
        f"forward KL and its gradients for the student's states and weights, {positions:,} positions, V = 49,152, d = "
        "576, bfloat16 teacher and float32 student, 2 threads, by lmpool.distill from states and heads ÷ by torch from "
        "whole arrays of logits"
    )
    results = []
    for name, field, what, goal in (
        ("divergence", "seconds", "seconds of", 1.3),
        ("divergence-memory", "megabytes", "peak of memory, the gradients included and the inputs excluded, of", 0.1),
    ):
        sides = [Side(side, _UNITS[field], [sample[field] for sample in taken]) for side, taken in samples.items()]
        results.append(Result(name, f"{what} {task}", Goal(goal, at_most=True), *sides))
    return results


def _agree(ours: list[float], theirs: list[float]) -> None:
    if any(abs(one - other) > _TOLERANCE * abs(other) for one, other in zip(ours, theirs, strict=True)):
        raise BenchmarkError(f"the sides disagree on the divergence or the norms of its gradients: {ours} and {theirs}")
