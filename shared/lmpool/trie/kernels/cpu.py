"""Kernels on the CPU: the sweep, compiled by numba, and its threads.

The inner nodes are numbered in preorder, so a sweep from the last to the first meets every node after all nodes below
it, and what is still open is one path to the root: the accumulators are a stack with a place a depth, which stays in
the first-level cache. Several rows go through together, side by side in memory (a "block"), because the sweep of one
row waits for the latency of every addition.

A block's weights are brought into the order in which the sweep meets the tokens, the sweep gives the inner nodes, and
the result is gathered from both. All sums are float64, in an order that neither the
width of the block nor the number of threads changes.

Blocks are shared out over threads of our own: the compiled loops let go of the interpreter lock. Numba's parallel loops
would do it too, but its default layer kills the process when two threads use it at once, and the others depend on what
is installed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmpool.trie.kernels.cores import count_threads
from lmpool.trie.kernels.cpu_loops import LEAST, MOST, WIDTHS, block_loops, exps, far_sweep, logs
from lmpool.trie.kernels.plan import Compressed, Op, Plan, check_op, check_out, make_plan
from lmpool.trie.weights import check_layout, nan_found


@dataclass(slots=True)
class _Scratch:
    """What one thread computes a block in. Kept between calls: fresh memory costs a third of the time."""

    plan: Plan
    weights: NDArray[np.float32] = field(init=False)
    numbers: NDArray[np.float32] = field(init=False)
    stack: NDArray[np.float64] = field(init=False)
    doubles: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        self.weights = np.empty(self.plan.n_tokens * WIDTHS[-1], np.float32)
        rows = self.plan.n_inner + self.plan.n_tokens
        self.numbers = np.empty(rows * WIDTHS[-1], np.float32)
        self.stack = np.empty((int(self.plan.depth.max()) + 2) * WIDTHS[-1], np.float64)

    @property
    def nbytes(self) -> int:
        doubles = 0 if self.doubles is None else self.doubles.nbytes
        return self.weights.nbytes + self.numbers.nbytes + self.stack.nbytes + doubles

    def compute(self, op: Op, weights: NDArray[np.float32], first: int, width: int) -> NDArray[np.float32] | None:
        """[M inner values | V weights by rank] of a block, float32 (M + V, width); None when a weight is NaN."""
        plan, loops = self.plan, block_loops(width)
        numbers = _columns(self.numbers, width)
        stack = _columns(self.stack, width)
        inner, tokens = numbers[: plan.n_inner], numbers[plan.n_inner :]
        weights_by_id = _columns(self.weights, width)
        if loops.interleave(weights, first, weights_by_id):
            return None
        loops.permute(plan.order, weights_by_id, tokens)
        if op == "logsumexp":
            self._log_sums(weights, first, width)
        else:
            (loops.add if op == "sum" else loops.largest)(plan.start, plan.depth, tokens, stack, inner)
        return numbers

    def _log_sums(self, weights: NDArray[np.float32], first: int, width: int) -> None:
        plan = self.plan
        if self.doubles is None:
            self.doubles = np.empty(self.numbers.size, np.float64)
        numbers, doubles, stack = (_columns(flat, width) for flat in (self.numbers, self.doubles, self.stack))
        split = plan.n_inner
        far = exps(numbers[split:].reshape(-1), doubles[split:].reshape(-1))
        block_loops(width).add_doubles(plan.start, plan.depth, doubles[split:], stack, doubles[:split])
        logs(doubles[:split].reshape(-1), numbers[:split].reshape(-1))
        if not far:
            return
        # Each row by itself: in which company it came must not show.
        for lane in range(width):
            row = weights[min(first + lane, len(weights) - 1)]
            if np.any((row > MOST) | ((row < LEAST) & (row > -np.inf))):
                peaks, masses = np.empty(len(stack)), np.empty(len(stack))
                far_sweep(plan.start, plan.depth, numbers[split:], lane, peaks, masses, numbers[:split])


def _columns(flat: NDArray[Any], width: int) -> NDArray[Any]:
    """The beginning of a buffer for the widest block, laid out for one of `width`."""
    return flat[: flat.size // WIDTHS[-1] * width].reshape(-1, width)


class CpuKernels:
    """Kernels of one trie on the CPU: see `lmpool.trie.kernels.Kernels`."""

    def __init__(self, trie: Compressed, *, threads: int | None = None) -> None:
        """Lay out the sweep, and compile the loops unless they are on disk.

        Args:
            trie: the trie.
            threads: how many threads share a batch; see `lmpool.trie.kernels.cores.count_threads`.
        """
        self._plan = make_plan(trie)
        self._threads = threads or count_threads()
        # One a thread; calls that meet may need more, which are not kept.
        self._scratch: deque[_Scratch] = deque(maxlen=self._threads)
        for width in WIDTHS:
            block_loops(width)

    @property
    def nbytes(self) -> int:
        """Bytes of the plan and of the buffers kept."""
        return self._plan.nbytes + sum(scratch.nbytes for scratch in tuple(self._scratch))

    def inner(self, op: Op, weights: NDArray[np.float32]) -> NDArray[np.float32]:
        """Values of the inner nodes, float32 (B, M): see `Kernels.inner`."""
        return self._compute(op, weights, self._plan.identity, None)

    def values(
        self, op: Op, weights: NDArray[np.float32], out: NDArray[np.float32] | None = None
    ) -> NDArray[np.float32]:
        """Values of all nodes, float32 (B, N): see `Kernels.values`."""
        return self._compute(op, weights, self._plan.source, out)

    def _compute(
        self, op: Op, weights: NDArray[np.float32], source: NDArray[np.uint32], out: NDArray[np.float32] | None
    ) -> NDArray[np.float32]:
        check_op(op)
        weights = check_layout(weights, self._plan.n_tokens, batch=True)
        shape = (len(weights), len(source))
        if out is None:
            out = np.empty(shape, np.float32)
        else:
            check_out(out, shape)
        # As wide as leaves no thread without work: a wide block takes less time a row, but more in all.
        widest = next((width for width in WIDTHS if len(weights) <= width * self._threads), WIDTHS[-1])
        firsts = range(0, len(weights), widest)
        nan = False

        def compute(block: int) -> None:
            nonlocal nan
            first = firsts[block]
            width = next(width for width in WIDTHS if width >= min(widest, len(weights) - first))
            with self._borrowed() as scratch:
                numbers = scratch.compute(op, weights, first, width)
                if numbers is None:
                    nan = True
                else:
                    block_loops(width).gather(source, numbers, first, out)

        _share_out(compute, len(firsts), self._threads)
        if nan:
            raise nan_found(weights)
        return out

    @contextmanager
    def _borrowed(self) -> Iterator[_Scratch]:
        try:
            scratch = self._scratch.pop()
        except IndexError:
            scratch = _Scratch(self._plan)
        yield scratch
        self._scratch.append(scratch)


def _share_out(work: Callable[[int], None], count: int, threads: int) -> None:
    """work(0) ... work(count - 1), by the calling thread and as many of the pool as are free."""
    todo = iter(range(count))
    # Taking the next one is a single step of the interpreter: no lock is needed.
    helpers = [_pool(threads).submit(_drain, work, todo) for _ in range(min(threads, count) - 1)]
    try:
        _drain(work, todo)
    finally:
        # One that never began is not waited for: the pool may be busy with another call.
        for helper in [helper for helper in helpers if not helper.cancel()]:
            helper.result()


def _drain(work: Callable[[int], None], todo: Iterator[int]) -> None:
    for block in todo:
        work(block)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="lmpool-trie")
