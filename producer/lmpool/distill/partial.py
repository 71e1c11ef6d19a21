"""Divergences from a part of the teacher's distribution: some tokens, and the mass of all other tokens together."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lmpool.distill import passes
from lmpool.distill.divergence import reduced, shared_size, values_of
from lmpool.distill.sources import Array, Rows, Source, States
from lmpool.distill.tiles import Grid, as_source, make_grid
from lmpool.errors import SettingsError
from lmpool.settings import check_number


def partial_divergence(
    known: tuple[Array, Array],
    tail: Array,
    student: Array | States,
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    weights: Array | None = None,
    reduction: str = "mean",
    vocab_size: int | None = None,
) -> Any:
    """A lower bound of `divergence`, from k tokens of the teacher and the mass of all other tokens, the tail.

    All tokens outside `known` count as one token on both sides. To merge tokens is a function of the token, so by the
    data-processing inequality this value is at most the divergence of the whole distributions, for every beta. It is
    equal where teacher and student divide their tails in the same proportions, and for k = V. Source: Imre Csiszár and
    Paul C. Shields, "Information Theory and Statistics: A Tutorial", 2004, section 4 (f-divergences of partitions),
    https://doi.org/10.1561/0100000004. `partial_divergence_error` bounds the difference.

    Args:
        known: the teacher's log-probabilities (n, k), and the ids of their tokens, (n, k), or (k,) for all positions.
            An id of -1 is padding, whose value is ignored; a repeated id counts once. `predictions.top` is such a pair,
            and `(predictions.targets, ids)`. If both were requested, join both pairs.
        tail: log of the teacher's mass outside `known`, (n,), such as `predictions.tail`.
        student: logits (n, V), or `States`, with gradients as in `divergence`.
        beta: as in `divergence`, as are `weights`, `reduction` and the result.
        temperature: divides the student's logits. The values of `known` and `tail` must already have this temperature:
            request them with it.
        vocab_size: leave out the student's columns from this number on. The tail of the teacher keeps all its tokens.

    Raises:
        SettingsError: an argument is malformed, or an id is out of range.
    """
    check_number("beta", beta, 0, 1, whole=False)
    of_student, values, ids, grid = _read(known, tail, student, temperature, vocab_size)
    if grid.xp is np:
        with np.errstate(all="ignore"):
            rows = passes.coarsen(of_student, ids, grid).logits
    else:
        from lmpool.distill import gradients

        rows = gradients.coarsen(of_student, ids, grid)
    joined = make_grid(Rows(rows), (values,), values.shape[1], 1.0)
    return reduced(values_of(Rows(values), Rows(rows), beta, joined), weights, reduction, joined)


def partial_divergence_error(
    known: tuple[Array, Array],
    tail: Array,
    student: Array | States,
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    is_top: bool = False,
) -> Any:
    """An upper bound, (n,), of `divergence` minus `partial_divergence` at each position; without gradients.

    With p and q the tail masses of teacher and student, m = beta p + (1 - beta) q, q_min the smallest probability of
    the student, and p_max the largest possible probability of one tail token: p, or, with `is_top`, at most the
    smallest value of `known`.

    - beta = 0: p (log(p_max / q_min) - log(p / q)), because each tail token adds at most its probability times
      log(p_max / q_min).
    - beta = 1: inf, unless q is 0: the teacher's tail may exclude a token that the student gives probability.
    - else: beta p log(m / (beta p)) + (1 - beta) q log(m / ((1 - beta) q)), because the mixture is at least beta times
      the teacher and at least 1 - beta times the student. This is at most log 2 times m for beta = 0.5.

    The bounds follow from these inequalities; they guarantee a limit and are no estimates. The arguments are those of
    `partial_divergence`.

    Args:
        is_top: whether `known` has exactly the k most likely tokens of the teacher, as `predictions.top` has.
    """
    check_number("beta", beta, 0, 1, whole=False)
    of_student, values, ids, grid = _read(known, tail, student, temperature, vocab_size)
    xp = grid.xp
    if xp is np:
        with np.errstate(all="ignore"):
            return _error(passes.coarsen(of_student, ids, grid), values, beta, is_top, xp)
    with xp.no_grad():
        return _error(passes.coarsen(of_student, ids, grid), values, beta, is_top, xp)


def _error(found: passes.Coarse, values: Array, beta: float, is_top: bool, xp: Any) -> Array:
    rows = found.logits
    log_sum = xp.log(xp.sum(xp.exp(rows), axis=-1))  # The largest entry of `rows` is about 0.
    log_p, log_q, log_q_min = values[:, -1], rows[:, -1] - log_sum, found.lowest[:, 0] - log_sum
    p, q = xp.exp(log_p), xp.exp(log_q)
    if beta == 1:
        return xp.where(log_q == -math.inf, 0.0, math.inf)
    if beta == 0:
        log_p_max = log_p
        if is_top:
            some = values[:, :-1]
            smallest = xp.amin(xp.where(some == -math.inf, math.inf, some), axis=-1)
            log_p_max = xp.minimum(log_p, smallest)
        error = p * (log_p_max - log_q_min - log_p + log_q)
        # Compare logarithms: the probability of a possible token may be 0 in float32.
        return xp.where(log_p == -math.inf, 0.0, xp.where(log_q_min == -math.inf, math.inf, error))
    log_m = passes.log_mixture(log_p, log_q, beta, xp)
    of_p = xp.where(p == 0, 0.0, beta * p * (log_m - log_p - math.log(beta)))
    of_q = xp.where(q == 0, 0.0, (1 - beta) * q * (log_m - log_q - math.log1p(-beta)))
    return of_p + of_q


def _read(
    known: tuple[Array, Array], tail: Array, student: Array | States, temperature: float, vocab_size: int | None
) -> tuple[Source, Array, Array, Grid]:
    """The student, the values with the tail as last column (n, k + 1), the ids (n, k), and the grid."""
    of_student = as_source("student", student)
    known = known[0] if hasattr(known[0], "dtype") else np.asarray(known[0]), known[1]
    count, columns = of_student.shape
    grid = make_grid(of_student, known[:1], shared_size(columns, columns, vocab_size), temperature)
    values, ids, rest = (grid.array(array) for array in (*known, tail))
    if ids.ndim == 1 and values.ndim == 2:
        ids = grid.xp.broadcast_to(ids, values.shape)
    ids = _whole(ids, grid)
    is_empty = values.ndim == 2 and values.shape[1] == 0
    if values.shape != ids.shape or values.ndim != 2 or is_empty or len(values) != count or rest.shape != (count,):
        shapes = ", ".join(str(tuple(array.shape)) for array in (values, ids, rest))
        raise SettingsError(f"known, tail: shapes {shapes} must be (n, k), (n, k) and (n,), where n = {count}, k > 0")
    values, ids = _without_repeats(values, ids, grid)
    student_arrays = map(grid.array, of_student.arrays)
    return of_student.with_arrays(*student_arrays), grid.xp.concatenate((values, rest[:, None]), axis=-1), ids, grid


def _whole(ids: Array, grid: Grid) -> Array:
    """Ids as int64; raises `SettingsError` for other numbers."""
    if not str(ids.dtype).rpartition(".")[2].startswith(("int", "uint")):
        raise SettingsError(f"known: ids of {ids.dtype} must be whole numbers")
    return ids.astype(np.int64) if grid.xp is np else ids.to(grid.xp.int64)


def _without_repeats(values: Array, ids: Array, grid: Grid) -> tuple[Array, Array]:
    """The tokens in order of their ids, with padding in place of repeats; refuses ids that the student lacks."""
    if 0 in ids.shape:
        return values, ids
    least, most = int(ids.min()), int(ids.max())
    if least < -1 or most >= grid.size:
        raise SettingsError(f"known: ids from {least} to {most} must be from 0 to {grid.size - 1}, or -1 for padding")
    rows, order = grid.array(np.arange(len(ids)))[:, None], grid.xp.argsort(ids, axis=-1)
    values, ids = values[rows, order], ids[rows, order]
    values[ids == -1] = -math.inf
    repeated = ids[:, 1:] == ids[:, :-1]
    values[:, 1:][repeated], ids[:, 1:][repeated] = -math.inf, -1
    return values, ids
