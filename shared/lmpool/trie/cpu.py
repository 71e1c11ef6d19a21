"""Trie kernels on the CPU: a sweep over the nodes, compiled by numba, in several threads.

The inner nodes are numbered in preorder, so a sweep from the last to the first visits every node after all nodes below
it. The unfinished nodes always form one path to the root: the accumulators are a stack with one entry per depth, which
stays in the first-level cache. Several rows are processed side by side in memory (a "block"), because in the sweep of a
single row every addition waits for the result of the previous one.

First the weights of a block are sorted into the order of the sweep, then the sweep computes the inner nodes, and then
the result is gathered from both. All sums are float64, in an order that depends neither on the width of the block nor
on the number of threads: the rows of a block never mix.

A pool of threads processes the blocks, because the compiled loops release the interpreter lock. Numba's parallel loops
are no alternative: their default threading layer ends the process when two threads use it at once, and the other layers
may not be installed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from lmpool.protocol.query import OPS, Op
from lmpool.settings import check_choice, count_threads
from lmpool.trie.trie import WIDEST, Compressed, Plan, check_weights, make_plan, nan_found

WIDTHS = (1, 4, WIDEST)  # Possible numbers of rows in a block; loops are compiled for each of these widths.
# In float64, the sum of 4 million exponentials of numbers up to MAX_LOG is finite, and exp(MIN_LOG) is a normal number.
MIN_LOG, MAX_LOG = -700.0, 600.0


_read_only = partial(types.Array, layout="C", readonly=True)
_INTS, _WEIGHTS = _read_only(types.uint32, 1), _read_only(types.float32, 2)
_SINGLES, _DOUBLES, _STACK = types.float32[:, ::1], types.float64[:, ::1], types.float64[::1]


def _compiled(*signature: Any, returns: Any = types.void) -> Callable[[Callable[..., Any]], Any]:
    """Compile at once, for one signature; cache the code on disk where a folder is writable."""

    def compile_now(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(returns(*signature), nogil=True, cache=True)(function)
        except (RuntimeError, OSError):  # There is no folder for the cache, or the disk is full.
            return numba.njit(returns(*signature), nogil=True)(function)

    return compile_now


@_compiled(types.float64, returns=types.float64)
def _exp(x):  # type: ignore[no-untyped-def]
    """exp for -700 <= x <= 600 with a relative error below 1e-14; unlike exp of the C library, it is vectorised."""
    # Adding 1.5 * 2**52 rounds to a whole number, which is then in the lowest bits.
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


@_compiled(_read_only(types.float32, 1), types.float64[::1], returns=types.boolean)
def exps(logs, out):  # type: ignore[no-untyped-def]
    """Write the exponentials of all numbers to `out`; returns whether a finite number is too far from 0 for `_exp`."""
    far = False
    for i in range(logs.shape[0]):
        x = np.float64(logs[i])
        out[i] = _exp(x) if x >= MIN_LOG else 0.0
        far |= (x > MAX_LOG) | ((x < MIN_LOG) & (x > -np.inf))  # type: ignore[assignment]
    return far


@_compiled(_read_only(types.float64, 1), types.float32[::1])
def logs(sums, out):  # type: ignore[no-untyped-def]
    """Write the logarithms of all numbers to `out`."""
    for i in range(sums.shape[0]):
        out[i] = np.log(sums[i])


@_compiled(*[types.float64] * 4, returns=types.UniTuple(types.float64, 2))  # type: ignore[no-untyped-call]
def _join(peak, mass, other_peak, other_mass):  # type: ignore[no-untyped-def]
    """Add mass * exp(peak) and other_mass * exp(other_peak); returns the sum as (peak, mass), with the larger peak."""
    if other_peak > peak:
        peak, mass, other_peak, other_mass = other_peak, other_mass, peak, mass
    if np.isinf(peak) or other_peak == -np.inf:
        return peak, mass
    return peak, mass + other_mass * np.exp(other_peak - peak)


@_compiled(_INTS, _INTS, _WEIGHTS, types.int64, _STACK, _STACK, _SINGLES)
def far_sweep(start, depth, tokens, lane, peaks, masses, inner):  # type: ignore[no-untyped-def]
    """Log-sum-exp of one row of a block, with each node shifted by its maximum: slow, but for any range of numbers."""
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


@cache
def block_loops(width: int) -> dict[str, Callable[..., Any]]:
    """The compiled loops for blocks of a width, by name; the last row of a batch stands in for missing rows of a block.

    "sum" and "max" are the sweeps over float32 weights, and "logsumexp" adds the exponentials, which are float64.
    """

    @_compiled(_WEIGHTS, types.int64, _SINGLES, returns=types.boolean)
    def interleave(weights, first, out):  # type: ignore[no-untyped-def]
        """Put rows side by side; returns whether a weight is NaN."""
        last = weights.shape[0] - 1
        nan = False
        for token in range(weights.shape[1]):
            for lane in range(width):
                weight = weights[min(first + lane, last), token]
                nan |= weight != weight
                out[token, lane] = weight
        return nan

    @_compiled(_INTS, _WEIGHTS, _SINGLES)
    def permute(order, numbers, out):  # type: ignore[no-untyped-def]
        """Sort weights into the order of the sweep."""
        # This loop is not part of `interleave`: a processor overlaps random reads, but not random writes.
        for rank in range(order.shape[0]):
            token = order[rank]
            for lane in range(width):
                out[rank, lane] = numbers[token, lane]

    @_compiled(_INTS, _WEIGHTS, types.int64, _SINGLES)
    def gather(source, numbers, first, out):  # type: ignore[no-untyped-def]
        """Write the values of nodes to the rows of the result."""
        last = out.shape[0] - 1
        for node in range(source.shape[0]):
            at = source[node]
            for lane in range(width):
                out[min(first + lane, last), node] = numbers[at, lane]

    sweeps = {op: _sweep(width, op == "max", _WEIGHTS, _SINGLES) for op in ("sum", "max")}
    sweeps["logsumexp"] = _sweep(width, False, _read_only(types.float64, 2), _DOUBLES)
    return {"interleave": interleave, "permute": permute, "gather": gather, **sweeps}


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


class _Scratch:
    """The memory in which one thread computes a block. Calls reuse it: allocation takes a third of a call's time."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.weights = np.empty(plan.n_tokens * WIDTHS[-1], np.float32)
        self.numbers = np.empty((plan.n_inner + plan.n_tokens) * WIDTHS[-1], np.float32)
        self.stack = np.empty((int(plan.depth.max()) + 2) * WIDTHS[-1], np.float64)
        self.doubles = np.empty(self.numbers.size, np.float64)

    def compute(self, op: Op, weights: NDArray[np.float32], first: int, width: int) -> NDArray[Any]:
        """[M inner values | V weights by rank] of a block, float32 (M + V, width); raises `InvalidWeights` for NaN."""
        plan, loops = self.plan, block_loops(width)
        # The buffers are large enough for the widest block.
        flats = (self.weights, self.numbers, self.stack, self.doubles)
        columns = [flat[: flat.size // WIDTHS[-1] * width].reshape(-1, width) for flat in flats]
        weights_by_id, numbers, stack, doubles = columns
        inner, tokens = numbers[: plan.n_inner], numbers[plan.n_inner :]
        if loops["interleave"](weights, first, weights_by_id):
            raise nan_found(weights)
        loops["permute"](plan.order, weights_by_id, tokens)
        if op != "logsumexp":
            loops[op](plan.start, plan.depth, tokens, stack, inner)
            return numbers
        sums, masses = doubles[: plan.n_inner], doubles[plan.n_inner :]
        is_far = exps(tokens.reshape(-1), masses.reshape(-1))
        loops[op](plan.start, plan.depth, masses, stack, sums)
        logs(sums.reshape(-1), inner.reshape(-1))
        # Check row by row: a result must not depend on the other rows of the block.
        for lane in range(width if is_far else 0):
            row = weights[min(first + lane, len(weights) - 1)]
            if np.any((row > MAX_LOG) | ((row < MIN_LOG) & (row > -np.inf))):
                far_sweep(plan.start, plan.depth, tokens, lane, np.empty(len(stack)), np.empty(len(stack)), inner)
        return numbers


class CpuKernels:
    """Kernels of one trie on the CPU: see `lmpool.trie.kernels.Kernels`."""

    def __init__(self, trie: Compressed, *, threads: int | None = None) -> None:
        """Lay out the sweep, and compile the loops unless they are cached on disk; `threads` threads share a batch."""
        self._plan = make_plan(trie)
        self._threads = threads or count_threads()
        # At most one scratch memory per thread is kept; concurrent calls may need more and discard the additional ones.
        self._scratch: deque[_Scratch] = deque(maxlen=self._threads)
        for width in WIDTHS:
            block_loops(width)

    def inner(self, op: Op, weights: NDArray[np.float32]) -> NDArray[np.float32]:
        """Values of the inner nodes, float32 (B, M): see `Kernels.inner`."""
        return self._compute(op, weights, self._plan.identity)

    def values(self, op: Op, weights: NDArray[np.float32]) -> NDArray[np.float32]:
        """Values of all nodes, float32 (B, N): see `Kernels.values`."""
        return self._compute(op, weights, self._plan.source)

    def _compute(self, op: Op, weights: NDArray[np.float32], source: NDArray[np.uint32]) -> NDArray[np.float32]:
        check_choice("op", op, OPS)
        weights = check_weights(weights, self._plan.n_tokens, batch=True, may_have_nan=True)
        out = np.empty((len(weights), len(source)), np.float32)
        # Choose blocks as wide as possible while every thread has work: a wide block takes less time per row.
        widest = next((width for width in WIDTHS if len(weights) <= width * self._threads), WIDTHS[-1])
        todo = iter(firsts := range(0, len(weights), widest))

        def compute_blocks() -> None:
            for first in todo:  # No lock: taking the next number is a single step of the interpreter.
                width = next(width for width in WIDTHS if width >= min(widest, len(weights) - first))
                try:
                    scratch = self._scratch.pop()
                except IndexError:
                    scratch = _Scratch(self._plan)
                try:
                    block_loops(width)["gather"](source, scratch.compute(op, weights, first, width), first, out)
                finally:
                    self._scratch.append(scratch)

        # Compute in this thread, and in the free threads of the pool.
        helpers = [_pool(self._threads).submit(compute_blocks) for _ in firsts[1 : self._threads]]
        try:
            compute_blocks()
        finally:
            # Cancel helpers that have not begun: the pool may be busy with another call.
            for helper in [helper for helper in helpers if not helper.cancel()]:
                helper.result()
        return out


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="lmpool-trie")
