"""Logits in tiles of positions and tokens, and sums over the vocabulary that need one tile at a time."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from lmpool.distill.sources import Array, Rows, Source, States
from lmpool.errors import SettingsError
from lmpool.settings import check_number

TILE_NUMBERS = 1 << 20
"""Max logits of a tile on a CPU: 4 MiB in float32, so that the tiles of teacher and student stay in the caches."""

DEVICE_TILE_NUMBERS = 1 << 24
"""Max logits of a tile on another device, where a kernel launch costs as much time as a million logits."""

MAX_ROWS = 2048
"""Max positions of a tile: matrix products of fewer positions were slower on a CPU."""

MIN_TEMPERATURE = 1e-6
"""Smallest temperature: float32 logits of ordinary size, divided by a smaller temperature, could overflow."""


@dataclass(frozen=True, slots=True)
class Grid:
    """How the logits of one call are computed.

    Attributes:
        xp: the module numpy, or the module torch.
        dtype: dtype of the logits and of all sums: float64 if an argument is float64, else float32.
        device: torch's device of the student; None for numpy.
        size: number of tokens that both sides have; further columns are left out.
        temperature: divides all logits.
        width: most numbers that a source needs for each token of a tile.
    """

    xp: Any
    dtype: Any
    device: Any
    size: int
    temperature: float
    width: int

    def row_spans(self, count: int) -> Iterator[slice]:
        """The positions of the tiles, at least one span."""
        for at in range(0, max(count, 1), MAX_ROWS):
            yield slice(at, min(at + MAX_ROWS, count))

    def column_spans(self, count: int) -> Iterator[slice]:
        """The tokens of the tiles that contain up to `count` positions."""
        numbers = TILE_NUMBERS if self.device is None or self.device.type == "cpu" else DEVICE_TILE_NUMBERS
        # A tile of few positions and many tokens would need the weights of most of the head.
        step = max(1, numbers // max(1, min(count, MAX_ROWS), self.width))
        for at in range(0, self.size, step):
            yield slice(at, min(at + step, self.size))

    def tile(self, source: Source, rows: slice, columns: slice) -> Array:
        """The logits of some positions and tokens, divided by the temperature, in memory that may be overwritten."""
        places = source.places(rows, columns)
        parts = [self.array(array[at]) for array, at in zip(source.arrays, places, strict=True)]
        return self.own(source, self.scaled(source.logits(*parts)))

    def scaled(self, logits: Array) -> Array:
        """Logits in the grid's dtype, divided by the temperature."""
        logits = logits.astype(self.dtype, copy=False) if self.xp is np else logits.to(self.dtype)
        return logits if self.temperature == 1 else logits / self.temperature

    def own(self, source: Source, logits: Array) -> Array:
        """Logits in memory of their own: those of rows may be the caller's array."""
        return logits + 0.0 if isinstance(source, Rows) else logits

    def array(self, values: Any) -> Array:
        """Values as an array of `xp` on the device. A numpy array is copied to a tensor: it may be read-only."""
        if self.xp is np:
            return np.asarray(values)
        if isinstance(values, self.xp.Tensor):
            return values.to(self.device)
        return self.xp.tensor(values, device=self.device)

    def prepared(self, source: Source) -> Source:
        """A source without gradients, whose hidden states are converted once instead of once per tile."""
        if self.xp is np or isinstance(source, Rows):
            return source
        hidden = self.array(source.hidden).detach()
        return replace(source, hidden=hidden.to(getattr(self.xp, source.dtype)) if source.dtype else hidden)

    def full(self, shape: tuple[int, int], value: float) -> Array:
        """An array of one value."""
        device = {} if self.xp is np else {"device": self.device}
        return self.xp.full(shape, value, dtype=self.dtype, **device)


class Normaliser(NamedTuple):
    """What turns logits into log-probabilities, for each position.

    The two numbers stay separate: their sum would lose the digits of `log_sum` next to large logits.
    """

    largest: Array  # (n, 1), the largest logit.
    log_sum: Array  # (n, 1), the log of the sum of exp(logit - largest).

    def logprobs(self, logits: Array) -> Array:
        """Turn a tile of logits into log-probabilities, in place."""
        logits -= self.largest
        logits -= self.log_sum
        return logits

    def probabilities(self, logits: Array, factor: Array, xp: Any) -> Array:
        """Turn a tile of logits into probabilities times a factor (n, 1), in place."""
        logits -= self.largest
        xp.exp(logits, out=logits)
        # Without any token, as in an empty tail, all probabilities are 0.
        logits *= xp.where(self.log_sum == -math.inf, 0.0, factor / xp.exp(self.log_sum))
        return logits


class RunningSum:
    """The sum of exp(logit) over the tiles seen so far, relative to the largest logit seen so far.

    Source: Maxim Milakov and Natalia Gimelshein, "Online normalizer calculation for softmax", 2018, algorithm 3,
    https://arxiv.org/abs/1805.02867.
    """

    def __init__(self, grid: Grid, count: int) -> None:
        """Start with no tile, for `count` positions."""
        self._xp = grid.xp
        # The lowest finite number, not -inf: a difference of two infinities would be NaN.
        self.largest = grid.full((count, 1), float(grid.xp.finfo(grid.dtype).min))
        self.sum = grid.full((count, 1), 0.0)

    def add(self, tile: Array) -> tuple[Array, Array]:
        """Add a tile and subtract `largest` from its logits; returns their exp, and the factor for earlier sums."""
        xp = self._xp
        largest = xp.maximum(self.largest, xp.amax(tile, axis=-1, keepdims=True))
        tile -= largest
        exps, factor = xp.exp(tile), xp.exp(self.largest - largest)
        self.sum = self.sum * factor + xp.sum(exps, axis=-1, keepdims=True)
        self.largest = largest
        return exps, factor

    def normaliser(self) -> Normaliser:
        """The result after all tiles."""
        return Normaliser(self.largest, self._xp.log(self.sum))


def as_source(name: str, given: Any) -> Source:
    """Logits (n, V) or `States` as a source of tiles; raises `SettingsError` for arrays of another number of axes."""
    axes = {"logits": given}
    if isinstance(given, States):
        axes = {"hidden states": given.hidden, "weights": given.weights}
    for what, array in axes.items():
        if getattr(array, "ndim", None) != 2:
            shape = tuple(getattr(array, "shape", ())) or type(array).__name__
            raise SettingsError(
                f"{name}: {what} of shape {shape} must be an array or tensor with two axes; "
                "select the positions of a batch with a mask, such as hidden[mask]"
            )
    return given if isinstance(given, States) else Rows(given)


def make_grid(student: Source, others: tuple[Array, ...], size: int, temperature: float, width: int = 1) -> Grid:
    """The grid for a student and the arrays of a teacher; torch if one of them is a tensor.

    `width`: `States.width` of the teacher.
    """
    check_number("temperature", temperature, MIN_TEMPERATURE, whole=False)
    torch = sys.modules.get("torch")
    arrays = (*student.arrays, *others)
    is_double = any(str(array.dtype).endswith("float64") for array in arrays)
    tensors = [array for array in arrays if torch is not None and isinstance(array, torch.Tensor)]
    xp: Any = torch if tensors else np
    device = tensors[0].device if tensors else None
    dtype = xp.float64 if is_double else xp.float32
    return Grid(xp, dtype, device, size, temperature, max(width, student.width))
