"""The loops of the CPU kernels, compiled by numba: the only file that imports it.

Every loop lets go of the interpreter lock. Sums are float64, and each row's are in one order whatever the width: the
lanes of a block never meet.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types

from lmpool.trie.kernels.footprint import WIDEST

WIDTHS = (1, 4, WIDEST)
# The sum of 4 million exponentials below this stays finite, and a lone one above stays a normal number.
LEAST, MOST = -700.0, 600.0


def _given(kind: Any, ndim: int) -> Any:
    return types.Array(kind, ndim, "C", readonly=True)


_INTS, _WEIGHTS = _given(types.uint32, 1), _given(types.float32, 2)
_PAIR = types.UniTuple(types.float64, 2)  # type: ignore[no-untyped-call]
_SINGLES, _DOUBLES, _STACK = types.float32[:, ::1], types.float64[:, ::1], types.float64[::1]


def _compiled(*signature: Any, returns: Any = types.void) -> Callable[[Callable[..., Any]], Any]:
    """Compile at once, for one signature; keep the code on disk where some folder can be written to."""

    def compile_now(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(returns(*signature), nogil=True, cache=True)(function)
        except (RuntimeError, OSError):  # No folder for the cache, or a full disk.
            return numba.njit(returns(*signature), nogil=True)(function)

    return compile_now


@_compiled(types.float64, returns=types.float64)
def _exp(x):  # type: ignore[no-untyped-def]
    """exp for -700 <= x <= 600, relative error below 1e-14; unlike the library's it is vectorised."""
    # Adding 1.5 * 2**52 rounds to a whole number, which then stands in the lowest bits.
    shifted = x * 1.4426950408889634 + 6755399441055744.0
    twos = shifted - 6755399441055744.0
    r = (x - twos * 6.93147180369123816490e-01) - twos * 1.90821492927058770002e-10
    p = 1 / 39916800
    p = p * r + 1 / 3628800
    p = p * r + 1 / 362880
    p = p * r + 1 / 40320
    p = p * r + 1 / 5040
    p = p * r + 1 / 720
    p = p * r + 1 / 120
    p = p * r + 1 / 24
    p = p * r + 1 / 6
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    power = np.int64((np.float64(shifted).view(np.int64) + 1023) << 52)
    return p * power.view(np.float64)


@_compiled(_given(types.float32, 1), types.float64[::1], returns=types.boolean)
def exps(logs, out):  # type: ignore[no-untyped-def]
    """Exponentials of all numbers; whether one is too far from 0 for that (-inf is not)."""
    far = False
    for i in range(logs.shape[0]):
        x = np.float64(logs[i])
        out[i] = _exp(x) if x >= LEAST else 0.0
        far |= (x > MOST) | ((x < LEAST) & (x > -np.inf))  # type: ignore[assignment]
    return far


@_compiled(_given(types.float64, 1), types.float32[::1])
def logs(sums, out):  # type: ignore[no-untyped-def]
    for i in range(sums.shape[0]):
        out[i] = np.log(sums[i])


@_compiled(*[types.float64] * 4, returns=_PAIR)
def _join(peak, mass, other_peak, other_mass):  # type: ignore[no-untyped-def]
    """mass * exp(peak) + other_mass * exp(other_peak) as (peak, mass), with the larger of both peaks."""
    if other_peak > peak:
        peak, mass, other_peak, other_mass = other_peak, other_mass, peak, mass
    if np.isinf(peak) or other_peak == -np.inf:
        return peak, mass
    return peak, mass + other_mass * np.exp(other_peak - peak)


@_compiled(_INTS, _INTS, _WEIGHTS, types.int64, _STACK, _STACK, _SINGLES)
def far_sweep(start, depth, tokens, lane, peaks, masses, inner):  # type: ignore[no-untyped-def]
    """Log-sum-exp of one lane, each node shifted by its own maximum: slow, for any range of numbers."""
    peaks[:] = -np.inf
    masses[:] = 0.0
    for i in range(depth.shape[0] - 1, -1, -1):
        at = np.int64(depth[i])
        peak, mass = peaks[at + 1], masses[at + 1]
        peaks[at + 1], masses[at + 1] = -np.inf, 0.0
        for rank in range(start[i], start[i + 1]):
            peak, mass = _join(peak, mass, np.float64(tokens[rank, lane]), 1.0)
        inner[i, lane] = peak if np.isinf(peak) else peak + np.log(mass)
        peaks[at], masses[at] = _join(peaks[at], masses[at], peak, mass)


class BlockLoops(NamedTuple):
    """The loops of blocks of one width. Rows past the last stand for the last: blocks are always full."""

    interleave: Callable[..., bool]
    permute: Callable[..., None]
    add: Callable[..., None]
    add_doubles: Callable[..., None]
    largest: Callable[..., None]
    gather: Callable[..., None]


@cache
def block_loops(width: int) -> BlockLoops:
    kinds = ((types.float32, _SINGLES), (types.float64, _DOUBLES))
    single, double = (_sweep(width, False, _given(kind, 2), inner) for kind, inner in kinds)
    largest = _sweep(width, True, _given(types.float32, 2), _SINGLES)
    return BlockLoops(_interleave(width), _permute(width), single, double, largest, _gather(width))


def _interleave(width: int) -> Callable[..., bool]:
    @_compiled(_WEIGHTS, types.int64, _SINGLES, returns=types.boolean)
    def interleave(weights, first, out):  # type: ignore[no-untyped-def]
        """Put the rows side by side; whether a weight is NaN."""
        last = weights.shape[0] - 1
        nan = False
        for token in range(weights.shape[1]):
            for lane in range(width):
                weight = weights[min(first + lane, last), token]
                nan |= weight != weight
                out[token, lane] = weight
        return nan

    return interleave  # type: ignore[no-any-return]


def _permute(width: int) -> Callable[..., None]:
    @_compiled(_INTS, _given(types.float32, 2), _SINGLES)
    def permute(order, numbers, out):  # type: ignore[no-untyped-def]
        # Random reads overtake each other, random writes do not: this is why it is not done while interleaving.
        for rank in range(order.shape[0]):
            token = order[rank]
            for lane in range(width):
                out[rank, lane] = numbers[token, lane]

    return permute  # type: ignore[no-any-return]


def _sweep(width: int, largest: bool, tokens: Any, inner: Any) -> Callable[..., None]:
    nothing = -np.inf if largest else 0.0

    @_compiled(_INTS, _INTS, tokens, _DOUBLES, inner)
    def sweep(start, depth, tokens, stack, inner):  # type: ignore[no-untyped-def]
        stack[:] = nothing
        for i in range(depth.shape[0] - 1, -1, -1):
            at = depth[i]
            here, above = stack[at + 1], stack[at]
            for rank in range(start[i], start[i + 1]):
                for lane in range(width):
                    x = np.float64(tokens[rank, lane])
                    if largest:
                        here[lane] = x if x > here[lane] else here[lane]
                    else:
                        here[lane] += x
            for lane in range(width):
                x = here[lane]
                here[lane] = nothing
                inner[i, lane] = x
                if largest:
                    above[lane] = x if x > above[lane] else above[lane]
                else:
                    above[lane] += x

    return sweep  # type: ignore[no-any-return]


def _gather(width: int) -> Callable[..., None]:
    @_compiled(_INTS, _given(types.float32, 2), types.int64, _SINGLES)
    def gather(source, numbers, first, out):  # type: ignore[no-untyped-def]
        last = out.shape[0] - 1
        for node in range(source.shape[0]):
            at = source[node]
            for lane in range(width):
                out[min(first + lane, last), node] = numbers[at, lane]

    return gather  # type: ignore[no-any-return]
