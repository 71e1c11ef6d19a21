"""Divergences between the whole distributions of a teacher and a student."""

from __future__ import annotations

from typing import Any

import numpy as np

from lmpool.distill import passes
from lmpool.distill.sources import Array, Source, States
from lmpool.distill.tiles import Grid, as_source, make_grid
from lmpool.errors import SettingsError
from lmpool.settings import check_choice, check_number

REDUCTIONS = ("none", "sum", "mean")


def divergence(
    teacher: Array | States,
    student: Array | States,
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    weights: Array | None = None,
    reduction: str = "mean",
    vocab_size: int | None = None,
) -> Any:
    """The divergence of a student from a teacher at n positions, exact over the whole vocabulary.

    With P the teacher's and Q the student's distribution: beta = 0 is forward KL, KL(P || Q); beta = 1 is reverse KL,
    KL(Q || P); between, the generalised Jensen-Shannon divergence is beta KL(P || M) + (1 - beta) KL(Q || M), where M =
    beta P + (1 - beta) Q. Source: Rishabh Agarwal et al., "On-Policy Distillation of Language Models: Learning from
    Self-Generated Mistakes", 2024, equation 1 and section 2, https://arxiv.org/abs/2306.13649; TRL's GKDTrainer has
    the same beta. Divide logits by a temperature as Geoffrey Hinton et al., "Distilling the Knowledge in a Neural
    Network", 2015, section 2, https://arxiv.org/abs/1503.02531; the result is not multiplied by its square.

    Only a few tiles of logits are in memory at a time, of four million bytes each on a CPU. The sums run in
    float32, or in float64 if an array is float64. A token that the teacher excludes (-inf) adds 0 to forward KL. The
    result is inf where the divergence is infinite; the gradient of an infinite reverse KL is NaN.

    Args:
        teacher: log-probabilities or logits (n, V) at temperature 1, or `States`. No gradient reaches the teacher.
        student: logits (n, V), or `States`. Tensors have gradients: the backward computes the tiles again.
        beta: 0 to 1.
        temperature: divides the logits of both sides.
        weights: bools or numbers (n,), one for each position; a position with weight 0 adds exactly 0, even if its
            divergence is inf or NaN. None: 1 each.
        reduction: "none" for the weighted divergences (n,), "sum", or "mean": the sum divided by the sum of the weights
            (TRL calls this mean "batchmean").
        vocab_size: leave out the columns from this number on, on both sides, as if their logits were -inf. Needed if
            one side has more columns, for example because its embeddings are padded.

    Returns:
        nats, as an array or tensor in float32 or float64: (n,), or a single number. A tensor if an argument is one.

    Raises:
        SettingsError: an argument is malformed, or the sides differ in V (without `vocab_size`) or in n.
    """
    of_teacher, of_student = as_source("teacher", teacher), as_source("student", student)
    size = shared_size(of_teacher.shape[1], of_student.shape[1], vocab_size)
    if of_teacher.shape[0] != of_student.shape[0]:
        raise SettingsError(f"teacher: {of_teacher.shape[0]} positions, but the student has {of_student.shape[0]}")
    check_number("beta", beta, 0, 1, whole=False)
    grid = make_grid(of_student, of_teacher.arrays, size, temperature, of_teacher.width)
    return reduced(values_of(of_teacher, of_student, beta, grid), weights, reduction, grid)


def shared_size(teacher: int, student: int, vocab_size: int | None) -> int:
    """The number of tokens to compare, of two sides with so many columns."""
    if vocab_size is None and teacher != student:
        raise SettingsError(
            f"student: {student:,} tokens, but the teacher has {teacher:,}; if the further columns are padding, pass "
            f"vocab_size={min(teacher, student)}, or the smaller number of tokens that both tokenizers have"
        )
    size = teacher if vocab_size is None else vocab_size
    return int(check_number("vocab_size", size, 1, min(teacher, student)))


def values_of(teacher: Source, student: Source, beta: float, grid: Grid) -> Array:
    """The divergence of each position, (n,)."""
    teacher = grid.prepared(teacher)
    if grid.xp is np:
        # Logits of -inf are valid, and their differences are replaced.
        with np.errstate(all="ignore"):
            return passes.divergences(teacher, student, beta, grid).values[:, 0]
    from lmpool.distill import gradients

    return gradients.divergences(teacher, student.with_arrays(*map(grid.array, student.arrays)), beta, grid)


def reduced(values: Array, weights: Array | None, reduction: str, grid: Grid) -> Any:
    """Values (n,) with weights, reduced as `divergence` says."""
    check_choice("reduction", reduction, REDUCTIONS)
    total: Any = max(1, len(values))
    if weights is not None:
        factors = grid.array(weights)
        factors = factors.astype(grid.dtype) if grid.xp is np else factors.to(grid.dtype)
        if factors.shape != values.shape:
            raise SettingsError(
                f"weights: shape {tuple(factors.shape)} must be ({len(values)},), one for each position"
            )
        values, total = grid.xp.where(factors != 0, values, 0.0) * factors, factors.sum()  # 0 * infinity is NaN.
        total = grid.xp.where(total == 0, 1.0, total)  # The mean over no position is 0.
    if reduction == "none":
        return values
    return values.sum() if reduction == "sum" else values.sum() / total
