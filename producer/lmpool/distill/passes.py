"""Passes over the tiles of a teacher and a student: divergences, and rows that keep a few tokens and one remainder.

numpy and torch share this code: it uses only functions that both modules have.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from lmpool.distill.sources import Array, Source
from lmpool.distill.tiles import Grid, Normaliser, RunningSum


class Divergences(NamedTuple):
    """The divergences at n positions, and what their gradients need; all arrays (n, 1)."""

    values: Array
    teacher: Normaliser
    student: Normaliser
    student_kl: Array  # KL(student || mixture); the mixture is the teacher for the reverse divergence.


def divergences(teacher: Source, student: Source, beta: float, grid: Grid) -> Divergences:
    """Forward KL for beta = 0, reverse KL for beta = 1, else the generalised Jensen-Shannon divergence."""
    if beta == 0:
        values, of_teacher, of_student = kl(teacher, student, grid)
        return Divergences(values, of_teacher, of_student, values)
    values, of_student, of_teacher = kl(student, teacher, grid)
    if beta == 1:
        return Divergences(values, of_teacher, of_student, values)
    values, student_kl = _jensen_shannon(teacher, of_teacher, student, of_student, beta, grid)
    return Divergences(values, of_teacher, of_student, student_kl)


def kl(first: Source, second: Source, grid: Grid) -> tuple[Array, Normaliser, Normaliser]:
    """KL(first || second) of each position, (n, 1), in one pass; also both normalisers.

    With p = exp(a) / Z_a and q = exp(b) / Z_b, the divergence is the sum of exp(a) (a - b) / Z_a, minus log Z_a, plus
    log Z_b. All logits are taken relative to the largest logit seen so far, so that no digits are lost to large logits.
    """
    parts = [_kl_of(first, second, rows, grid) for rows in grid.row_spans(first.shape[0])]
    joined = [grid.xp.concatenate(arrays) for arrays in zip(*parts, strict=True)]
    return joined[0], Normaliser(*joined[1:3]), Normaliser(*joined[3:5])


def _kl_of(first: Source, second: Source, rows: slice, grid: Grid) -> tuple[Array, ...]:
    xp, count = grid.xp, rows.stop - rows.start
    of_first, of_second = RunningSum(grid, count), RunningSum(grid, count)
    total, is_infinite = grid.full((count, 1), 0.0), grid.full((count, 1), 0.0) > 0
    for columns in grid.column_spans(first.shape[0]):
        before, before_of_second, sum_before = of_first.largest, of_second.largest, of_first.sum
        a, b = grid.tile(first, rows, columns), grid.tile(second, rows, columns)
        exps, factor = of_first.add(a)
        of_second.add(b)
        # Earlier tiles took a and b relative to other numbers: correct their sum of exp(a) (a - b).
        moved = (before - of_first.largest) - (before_of_second - of_second.largest)
        total = (total + sum_before * moved) * factor
        if not (first.is_finite and second.is_finite):
            no_first, no_second = a == -math.inf, b == -math.inf
            is_infinite |= xp.any(no_second & ~no_first, axis=-1, keepdims=True)
            a[no_first | no_second] = b[no_first | no_second] = 0.0
        a -= b
        exps *= a
        total = total + xp.sum(exps, axis=-1, keepdims=True)
    values = total / of_first.sum - xp.log(of_first.sum) + xp.log(of_second.sum)
    values = xp.where(is_infinite, math.inf, values)
    return values, *of_first.normaliser(), *of_second.normaliser()


def _jensen_shannon(
    teacher: Source, of_teacher: Normaliser, student: Source, of_student: Normaliser, beta: float, grid: Grid
) -> tuple[Array, Array]:
    """The divergence, and KL(student || mixture), from the normalisers that a first pass has computed."""
    xp, parts = grid.xp, []
    for rows in grid.row_spans(teacher.shape[0]):
        teacher_kl = student_kl = grid.full((rows.stop - rows.start, 1), 0.0)
        for columns in grid.column_spans(teacher.shape[0]):
            p = part(of_teacher, rows).logprobs(grid.tile(teacher, rows, columns))
            q = part(of_student, rows).logprobs(grid.tile(student, rows, columns))
            mixture = log_mixture(p, q, beta, xp)
            teacher_kl = teacher_kl + _expected(p, p - mixture, xp)
            student_kl = student_kl + _expected(q, q - mixture, xp)
        parts.append((beta * teacher_kl + (1 - beta) * student_kl, student_kl))
    values, student_kls = zip(*parts, strict=True)
    return xp.concatenate(values), xp.concatenate(student_kls)


def log_mixture(p: Array, q: Array, beta: float, xp: Any) -> Array:
    """log(beta exp(p) + (1 - beta) exp(q)); `p` for beta = 1."""
    return p if beta == 1 else xp.logaddexp(p + math.log(beta), q + math.log1p(-beta))


def _expected(logprobs: Array, values: Array, xp: Any) -> Array:
    """The sum of exp(logprobs) * values; a token without probability counts 0, even if its value is not finite."""
    return xp.sum(xp.exp(logprobs) * xp.where(logprobs == -math.inf, 0.0, values), axis=-1, keepdims=True)


def part(of: Normaliser, rows: slice) -> Normaliser:
    """The normaliser of some positions."""
    return Normaliser(of.largest[rows], of.log_sum[rows])


def logit_gradient(
    p_tile: Array, q_tile: Array, rows: slice, found: Divergences, factors: Array, beta: float, grid: Grid
) -> Array:
    """The gradient of sum(factors * divergences) with respect to a tile of the student's logits; overwrites the tiles.

    With m = beta p + (1 - beta) q: q - p for beta = 0; q (log(q / m) - KL(q || m)) times 1 - beta for 0 < beta < 1, and
    times 1 for beta = 1, where m = p. Source: derivatives of equation 1 of Agarwal et al. 2024 (see `divergence`).
    """
    xp, factors = grid.xp, factors[rows]
    of_teacher, of_student = part(found.teacher, rows), part(found.student, rows)
    if beta == 0:
        q_tile = of_student.probabilities(q_tile, factors, xp)
        q_tile -= of_teacher.probabilities(p_tile, factors, xp)
        return q_tile
    p, q = of_teacher.logprobs(p_tile), of_student.logprobs(q_tile)
    ratio = xp.where(q == -math.inf, 0.0, q - log_mixture(p, q, beta, xp))
    scale = factors * (1.0 if beta == 1 else 1 - beta)
    return xp.exp(q) * (ratio - found.student_kl[rows]) * scale


class Coarse(NamedTuple):
    """Rows of the named tokens and one remainder."""

    logits: Array  # (n, k + 1), the last column is the log of the sum of exp of all other logits.
    remainder: Normaliser  # Of the tokens that are not named.
    lowest: Array  # (n, 1), the smallest logit of the row, on the scale of `logits`.


def coarsen(source: Source, ids: Array, grid: Grid) -> Coarse:
    """Keep the logits at `ids` (n, k), and join all other tokens to one; -1 is padding, whose logit is -inf."""
    parts = [_coarsen(source, ids, rows, grid) for rows in grid.row_spans(source.shape[0])]
    logits, largest, log_sum, lowest = (grid.xp.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return Coarse(logits, Normaliser(largest, log_sum), lowest)


def _coarsen(source: Source, ids: Array, rows: slice, grid: Grid) -> tuple[Array, ...]:
    xp, some = grid.xp, ids[rows]
    named = grid.full(tuple(some.shape), -math.inf)
    remainder, lowest = RunningSum(grid, len(some)), grid.full((len(some), 1), math.inf)
    for columns in grid.column_spans(source.shape[0]):
        tile = grid.tile(source, rows, columns)
        lowest = xp.minimum(lowest, xp.amin(tile, axis=-1, keepdims=True))
        at, which, column = places(some, columns, xp)
        named[at, which] = tile[at, column]
        tile[at, column] = -math.inf
        remainder.add(tile)
    of_remainder = remainder.normaliser()
    # Subtract the largest logit before the digits of the sum are lost to it.
    largest = xp.maximum(xp.amax(named, axis=-1, keepdims=True), of_remainder.largest)
    tail = of_remainder.largest - largest + of_remainder.log_sum
    return xp.concatenate((named - largest, tail), axis=-1), *of_remainder, lowest - largest


def places(ids: Array, columns: slice, xp: Any) -> tuple[Array, Array, Array]:
    """The named tokens of a tile: their rows, their columns in `ids`, and their columns in the tile, each (m,)."""
    at, which = xp.where((ids >= columns.start) & (ids < columns.stop))
    return at, which, ids[at, which] - columns.start
