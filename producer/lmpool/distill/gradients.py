"""Gradients with respect to a student's arrays: the backward computes each tile of the logits again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lmpool.distill import passes
from lmpool.distill.sources import Source, States
from lmpool.distill.tiles import Grid

TileGradient = Callable[[slice, slice, Tensor], Tensor]
"""The gradient with respect to a tile of the student's logits, from positions, tokens and the logits (overwritten)."""


def divergences(teacher: Source, student: Source, beta: float, grid: Grid) -> Tensor:
    """`passes.divergences`, (n,), with gradients for the student."""
    values: Tensor = _Divergences.apply(teacher, student, beta, grid, *student.arrays)  # type: ignore[no-untyped-call]
    return values


def coarsen(student: Source, ids: Tensor, grid: Grid) -> Tensor:
    """`passes.coarsen`, (n, k + 1), with gradients for the student."""
    rows: Tensor = _Coarse.apply(student, ids, grid, *student.arrays)  # type: ignore[no-untyped-call]
    return rows


class _Divergences(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, teacher: Source, student: Source, beta: float, grid: Grid, *arrays: Tensor) -> Tensor:
        found = passes.divergences(teacher, student, beta, grid)
        ctx.save_for_backward(*arrays)
        ctx.given = teacher, student, beta, grid, found
        values: Tensor = found.values[:, 0].clone()
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factors: Tensor) -> tuple[Any, ...]:
        teacher, student, beta, grid, found = ctx.given
        factors = factors[:, None]
        unweighted = factors == 0
        has_unweighted = bool(unweighted.any())

        def of_tile(rows: slice, columns: slice, logits: Tensor) -> Tensor:
            taught = grid.tile(teacher, rows, columns)
            gradient: Tensor = passes.logit_gradient(taught, logits, rows, found, factors, beta, grid)
            # A position without weight may have NaN, which a factor of 0 does not remove.
            return gradient.masked_fill_(unweighted[rows], 0) if has_unweighted else gradient

        return None, None, None, None, *_pull(student.with_arrays(*ctx.saved_tensors), of_tile, grid, ctx, 4)


class _Coarse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student: Source, ids: Tensor, grid: Grid, *arrays: Tensor) -> Tensor:
        found = passes.coarsen(student, ids, grid)
        ctx.save_for_backward(*arrays)
        ctx.given = student, ids, grid, found.remainder
        logits: Tensor = found.logits
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_rows: Tensor) -> tuple[Any, ...]:
        student, ids, grid, remainder = ctx.given

        def of_tile(rows: slice, columns: slice, logits: Tensor) -> Tensor:
            gradient: Tensor = passes.part(remainder, rows).probabilities(logits, of_rows[rows, -1:], torch)
            at, which, column = passes.places(ids[rows], columns, torch)
            gradient[at, column] = of_rows[rows][at, which]
            return gradient

        return None, None, None, *_pull(student.with_arrays(*ctx.saved_tensors), of_tile, grid, ctx, 3)


def _pull(student: Source, of_tile: TileGradient, grid: Grid, ctx: Any, first: int) -> list[Tensor | None]:
    """The gradients of the student's arrays; `first` is the place of the first array among the Function's inputs."""
    needed = ctx.needs_input_grad[first:]
    arrays = student.arrays
    # Every tile of tokens adds to the gradient of the hidden states: sum it in the grid's dtype.
    dtypes = [grid.dtype if isinstance(student, States) and at == 0 else array.dtype for at, array in enumerate(arrays)]
    gradients = [
        torch.zeros_like(array, dtype=dtype) if is_needed else None
        for array, dtype, is_needed in zip(arrays, dtypes, needed, strict=True)
    ]
    count = student.shape[0]
    for columns in grid.column_spans(count):
        for rows in grid.row_spans(count):
            places: tuple[Any, ...] = student.places(rows, columns)
            leaves = [
                array[place].detach().requires_grad_(is_needed)
                for array, place, is_needed in zip(arrays, places, needed, strict=True)
            ]
            with torch.enable_grad():
                logits = grid.scaled(student.logits(*leaves))
            gradient = of_tile(rows, columns, grid.own(student, logits.detach()))
            found = iter(torch.autograd.grad(logits, [leaf for leaf in leaves if leaf.requires_grad], gradient))
            for total, place in zip(gradients, places, strict=True):
                if total is not None:
                    total[place].add_(next(found))
    return [None if total is None else total.to(array.dtype) for total, array in zip(gradients, arrays, strict=True)]
