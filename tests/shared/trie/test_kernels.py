"""Kernels of the CPU and of torch: each node's sum, maximum and log-sum-exp equal values from brute force."""

from __future__ import annotations

import math
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Barrier
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numba import types
from numpy.typing import NDArray

from lmpool.errors import InvalidWeights, SettingsError
from lmpool.protocol.query import OPS, Op
from lmpool.trie.cpu import CpuKernels, _compiled, _Scratch
from lmpool.trie.kernels import Kernels, open_kernels
from lmpool.trie.torch_device import TorchKernels
from lmpool.trie.trie import Trie
from tests.support.tries import EXAMPLE, bytes_held, tekken, vocabularies

Weights = NDArray[np.float32]
Maker = Callable[[Trie], Kernels]

MAKERS: dict[str, Maker] = {
    "cpu": CpuKernels,
    "cpu, one thread": lambda trie: CpuKernels(trie, threads=1),
    "torch": lambda trie: TorchKernels(trie, "cpu"),
}
everywhere = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
every_op = pytest.mark.parametrize("op", OPS)
BATCHES = [1, 3, 8, 9, 33]


def numbers(low: float, high: float, *, infinite: bool = False) -> st.SearchStrategy[float]:
    """Strategy for float32 numbers in a range, with tiny numbers, and with -inf if `infinite` is true."""
    finite = st.floats(np.float32(low).item(), np.float32(high).item(), width=32)
    return finite | st.just(-math.inf) if infinite else finite


@st.composite
def cases(draw: st.DrawFn, elements: st.SearchStrategy[float]) -> tuple[Trie, Weights]:
    """Draw a trie and a batch of weights for its tokens."""
    trie = Trie(draw(vocabularies))
    shape = (draw(st.sampled_from(BATCHES)), trie.n_tokens)
    return trie, draw(hnp.arrays(np.float32, shape, elements=elements))


def by_hand(trie: Trie, weights: Weights, over: Callable[[list[float]], float]) -> NDArray[np.float64]:
    """Compute each node's value from the tokens that begin with the node's prefix, as float64 (B, N)."""
    tokens = trie.vocabulary.tokens
    prefixes = [trie.prefix(node) for node in range(trie.n_nodes)]
    below = [[i for i, token in enumerate(tokens) if token.startswith(prefix)] for prefix in prefixes]
    return np.array([[over(row[ids].tolist()) for ids in below] for row in weights.astype(np.float64)])


def log_sum(logs: list[float]) -> float:
    peak = max(logs)
    return peak if math.isinf(peak) else peak + math.log(math.fsum(math.exp(x - peak) for x in logs))


@cache
def large(vocabulary: str) -> Trie:
    if vocabulary == "tekken":
        return Trie(tekken())
    random = np.random.default_rng(5)
    sizes = random.integers(0, 9, 300_000).tolist()
    raw = random.integers(0, 20, sum(sizes), np.uint8).tobytes()
    ends = np.cumsum(sizes).tolist()
    return Trie([raw[end - size : end] for size, end in zip(sizes, ends, strict=True)])


def plain_sums(trie: Trie, weights: Weights) -> NDArray[np.float64]:
    """Sums of all nodes of a large trie, added up level by level."""
    sums = np.zeros((len(weights), trie.n_nodes))
    for row, given_row in zip(sums, weights, strict=True):
        np.add.at(row, trie.leaf, given_row.astype(np.float64))
        for level in range(int(trie.depth.max()), 0, -1):
            nodes = np.flatnonzero(trie.depth == level)
            np.add.at(row, trie.parent[nodes], row[nodes])
    return sums


def some_weights(rows: int, tokens: int, seed: int = 0) -> Weights:
    """Random probabilities that differ by many orders of magnitude."""
    logits = 6 * np.random.default_rng(seed).standard_normal((rows, tokens))
    odds = np.exp(logits - logits.max(1, keepdims=True))
    weights: Weights = (odds / odds.sum(1, keepdims=True)).astype(np.float32)
    return weights


# Values equal brute force


@everywhere
@settings(max_examples=60)
@given(case=cases(numbers(0, 1)))
def test_each_node_has_the_sum_of_the_tokens_below_it(make: Maker, case: tuple[Trie, Weights]) -> None:
    trie, weights = case
    expected = by_hand(trie, weights, math.fsum)
    # Float32 numbers below the smallest normal number have fewer digits, hence the absolute tolerance.
    np.testing.assert_allclose(make(trie).values("sum", weights), expected, rtol=1e-6, atol=1e-44)


@everywhere
@settings(max_examples=60)
@given(case=cases(numbers(-(2.0**100), 2.0**100)))
def test_sums_of_any_sign_lose_only_cancelled_digits(make: Maker, case: tuple[Trie, Weights]) -> None:
    trie, weights = case
    expected = by_hand(trie, weights, math.fsum)
    cancelled = by_hand(trie, np.abs(weights), math.fsum) * 1e-14
    values = make(trie).values("sum", weights)
    assert (np.abs(values - expected) <= 1e-6 * np.abs(expected) + cancelled + 1e-44).all()


@everywhere
@settings(max_examples=60)
@given(case=cases(numbers(-(2.0**100), 2.0**100, infinite=True)))
def test_each_node_has_the_exact_maximum_of_the_tokens_below_it(make: Maker, case: tuple[Trie, Weights]) -> None:
    trie, weights = case
    assert np.array_equal(make(trie).values("max", weights), by_hand(trie, weights, max))


@everywhere
@settings(max_examples=60)
@given(case=cases(numbers(-100, 0, infinite=True) | numbers(-30000, 30000)))
def test_each_node_has_the_log_sum_exp_of_the_tokens_below_it(make: Maker, case: tuple[Trie, Weights]) -> None:
    trie, weights = case
    expected = by_hand(trie, weights, log_sum)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = make(trie).values("logsumexp", weights)
    assert np.array_equal(np.isinf(values), np.isinf(expected))
    finite = np.isfinite(expected)
    error = np.abs(values[finite] - expected[finite])
    assert (error <= 1e-6 * np.maximum(1, np.abs(expected[finite]))).all()


@everywhere
@every_op
@settings(max_examples=60)
@given(case=cases(numbers(-50, 0, infinite=True)))
def test_all_values_are_the_inner_ones_expanded(make: Maker, op: Op, case: tuple[Trie, Weights]) -> None:
    trie, weights = case
    kernels = make(trie)
    assert np.array_equal(kernels.values(op, weights), trie.expand(kernels.inner(op, weights), weights))


@everywhere
@pytest.mark.parametrize("vocabulary", ["tekken", "300,000 random tokens"])
def test_large_vocabularies_keep_every_sum(make: Maker, vocabulary: str) -> None:
    trie = large(vocabulary)
    weights = some_weights(2, trie.n_tokens)
    expected = plain_sums(trie, weights)
    kernels = make(trie)
    np.testing.assert_allclose(kernels.values("sum", weights), expected, rtol=1e-6, atol=1e-44)
    with np.errstate(divide="ignore"):
        logs, expected = np.log(weights), np.log(plain_sums(trie, np.exp(np.log(weights))))
    values = kernels.values("logsumexp", logs)
    assert np.nanmax(np.abs(values - expected) / np.maximum(1, np.abs(expected))) < 1e-6


@everywhere
def test_a_chain_of_3000_nested_tokens_has_all_its_suffix_sums(make: Maker) -> None:
    trie = Trie([b"x" * size for size in range(3000)])
    weights = some_weights(2, 3000)
    expected = np.cumsum(weights[:, ::-1].astype(np.float64), axis=1)[:, ::-1]
    np.testing.assert_allclose(make(trie).values("sum", weights), expected, rtol=1e-6)


@pytest.mark.parametrize("rows", range(1, 34))
def test_every_row_of_a_batch_finds_its_own_range(rows: int) -> None:
    """The kernel pads a batch with copies of its last row; each row is scaled by its own maximum."""
    trie = Trie([b"a", b"ab", b"ac"])
    for far in range(rows):
        weights = np.full((rows, 3), -1, np.float32)
        weights[far] = -20000
        values = CpuKernels(trie, threads=2).values("logsumexp", weights)[:, 0]
        expected = np.full(rows, math.log(3) - 1)
        expected[far] = math.log(3) - 20000
        np.testing.assert_allclose(values, expected, rtol=1e-6)


# Special numbers as weights


@everywhere
def test_a_light_node_next_to_a_heavy_one_keeps_its_sum(make: Maker) -> None:
    trie = Trie([b"a", b"b1", b"b2", b"b3"])
    weights = np.array([[1, 1e-30, 2e-30, 3e-30]], np.float32)
    values = make(trie).values("sum", weights)[0]
    assert values[trie.node(b"b")] == pytest.approx(6e-30, rel=1e-6)
    assert values[0] == 1


@everywhere
def test_a_light_node_keeps_its_log_10000_below_the_heaviest(make: Maker) -> None:
    trie = Trie([b"a", b"b1", b"b2", b"c1", b"c2"])
    weights = np.array([[0, -10000, -10000, -np.inf, -np.inf], [0, -1, -1, -2, -2]], np.float32)
    values = make(trie).values("logsumexp", weights)
    assert values[0, trie.node(b"b")] == pytest.approx(-10000 + math.log(2), rel=1e-7)
    assert values[0, trie.node(b"c")] == -np.inf
    assert values[:, 0] == pytest.approx([0, math.log(1 + 2 * math.exp(-1) + 2 * math.exp(-2))], abs=1e-6)


@everywhere
@every_op
def test_infinities_stay_infinite(make: Maker, op: Op) -> None:
    trie = Trie([b"a1", b"a2", b"b1", b"b2", b"c1", b"c2"])
    weights = np.array([[-np.inf, -np.inf, np.inf, 0, 0, 0]], np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = make(trie).values(op, weights)[0]
    assert values[trie.node(b"a")] == -np.inf
    assert values[trie.node(b"b")] == np.inf
    assert np.isfinite(values[trie.node(b"c")])
    assert np.isnan(values[0]) if op == "sum" else values[0] == np.inf


@everywhere
def test_the_largest_exponents_do_not_overflow(make: Maker) -> None:
    trie = Trie([b"a"] * 1000)
    for value in (599.0, 601.0, 710.0, 3e38):
        values = make(trie).values("logsumexp", np.full((1, 1000), value, np.float32))
        assert values[0] == pytest.approx(value + math.log(1000), rel=1e-6)


@everywhere
def test_a_maximum_of_negative_numbers_is_negative(make: Maker) -> None:
    trie = Trie([b"ab", b"ac", b"d"])
    assert make(trie).values("max", np.array([[-3, -2, -7]], np.float32))[0, :2].tolist() == [-2, -2]


# Same bits in every batch, thread and run


@everywhere
@every_op
def test_a_row_has_the_same_bits_in_every_batch_and_every_run(make: Maker, op: Op) -> None:
    trie = large("tekken")
    weights = some_weights(33, trie.n_tokens)
    # Rows 2, 5 and 8 need the slow log-sum-exp, which must not change the results of other rows of the batch.
    weights[[2, 5, 8], 7] = -900
    kernels = make(trie)
    alone = np.concatenate([kernels.inner(op, weights[row : row + 1]) for row in range(9)])
    for rows in BATCHES:
        batch = kernels.inner(op, weights[:rows])
        assert batch[:9].tobytes() == alone[:rows].tobytes()
        assert kernels.inner(op, weights[:rows]).tobytes() == batch.tobytes()


@every_op
@pytest.mark.parametrize("threads", [1, 2, 3, 40])
def test_the_number_of_threads_does_not_show(op: Op, threads: int) -> None:
    trie = Trie(tekken()[:5000])
    weights = some_weights(33, 5000)
    single, many = CpuKernels(trie, threads=1), CpuKernels(trie, threads=threads)
    for rows in range(34):
        assert many.values(op, weights[:rows]).tobytes() == single.values(op, weights[:rows]).tobytes()


@everywhere
def test_calls_from_several_threads_at_once_do_not_mix(make: Maker) -> None:
    trie = Trie(tekken()[:20000])
    kernels = make(trie)
    jobs = [(op, some_weights(rows, 20000, rows)) for rows in (1, 4, 19, 32) for op in OPS] * 3
    expected = [kernels.values(op, weights) for op, weights in jobs]
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda job: kernels.values(*job), jobs))
    for result, wanted in zip(results, expected, strict=True):
        assert result.tobytes() == wanted.tobytes()


@everywhere
def test_a_result_belongs_to_the_caller(make: Maker) -> None:
    trie = Trie(EXAMPLE)
    kernels = make(trie)
    first = kernels.values("sum", np.ones((2, 7), np.float32))
    before = first.copy()
    kernels.values("sum", np.zeros((2, 7), np.float32))
    assert np.array_equal(first, before)
    first[:] = -1
    assert np.array_equal(kernels.values("sum", np.ones((2, 7), np.float32)), before)


@everywhere
@every_op
def test_weights_are_only_read(make: Maker, op: Op) -> None:
    weights = some_weights(9, 7)
    before = weights.copy()
    weights.flags.writeable = False
    kernels = make(Trie(EXAMPLE))
    assert np.array_equal(kernels.values(op, weights), kernels.values(op, before))
    assert np.array_equal(weights, before)


@everywhere
@every_op
def test_an_empty_batch_has_an_empty_result(make: Maker, op: Op) -> None:
    trie = Trie(EXAMPLE)
    kernels, none = make(trie), np.empty((0, 7), np.float32)
    assert kernels.inner(op, none).shape == (0, trie.n_inner)
    assert kernels.values(op, none).shape == (0, trie.n_nodes)


def test_buffers_are_kept_and_counted() -> None:
    trie = Trie(tekken()[:1000])
    kernels = CpuKernels(trie, threads=2)
    new = bytes_held(kernels)
    kernels.values("sum", some_weights(1, 1000))
    used = bytes_held(kernels)
    assert used - new >= 8 * 4 * (1000 + trie.n_inner)
    for _ in range(5):
        kernels.values("sum", some_weights(1, 1000))
    assert bytes_held(kernels) == used


def test_no_more_buffers_are_kept_than_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    trie = Trie(tekken()[:1000])
    kernels = CpuKernels(trie, threads=1)
    empty = bytes_held(kernels)
    kernels.inner("sum", some_weights(1, 1000))
    buffer_size = bytes_held(kernels) - empty
    barrier, compute = Barrier(4), _Scratch.compute

    def compute_together(*args: Any) -> Any:
        barrier.wait(60)
        return compute(*args)

    monkeypatch.setattr(_Scratch, "compute", compute_together)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: kernels.inner("sum", some_weights(1, 1000)), range(4)))
    assert bytes_held(kernels) - empty == buffer_size


# Refused weights


@everywhere
@every_op
@pytest.mark.parametrize(("rows", "row", "index"), [(1, 0, 0), (8, 7, 6), (9, 8, 3), (33, 20, 2)])
def test_nan_is_refused_with_its_row_and_index(make: Maker, op: Op, rows: int, row: int, index: int) -> None:
    weights = some_weights(rows, 7)
    weights[row, index:] = np.nan
    kernels = make(Trie(EXAMPLE))
    for call in (kernels.inner, kernels.values):
        with pytest.raises(InvalidWeights, match=rf"weight {index} of row {row} is NaN"):
            call(op, weights)
    weights[row, index:] = 0
    assert not np.isnan(kernels.values(op, weights)).any()


@everywhere
@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.ones((2, 6), np.float32), "6 weights for 7 tokens"),
        (np.ones(7, np.float32), r"a batch has shape \(B, 7\)"),
        (np.ones((2, 7)), "dtype float64"),
    ],
)
def test_weights_that_do_not_fit_are_refused(make: Maker, weights: Any, message: str) -> None:
    kernels = make(Trie(EXAMPLE))
    for call in (kernels.inner, kernels.values):
        with pytest.raises(InvalidWeights, match=message):
            call("sum", weights)


@everywhere
def test_an_unknown_operation_is_refused(make: Maker) -> None:
    with pytest.raises(SettingsError, match="op: 'mean' is not one of sum, max, logsumexp"):
        make(Trie(EXAMPLE)).inner("mean", np.ones((1, 7), np.float32))  # type: ignore[arg-type]


# Kernels of torch


@every_op
def test_a_batch_that_is_computed_in_parts_has_the_same_bits(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    trie = Trie(tekken()[:1000])
    kernels, weights = TorchKernels(trie, "cpu"), some_weights(9, 1000)
    whole = kernels.inner(op, weights)
    monkeypatch.setattr("lmpool.trie.torch_device._MAX_BYTES", 1)
    assert kernels.inner(op, weights).tobytes() == whole.tobytes()


# The choice of kernels


def test_the_device_decides_which_kernels_compute() -> None:
    assert isinstance(open_kernels(Trie(EXAMPLE)), CpuKernels)
    assert isinstance(open_kernels(Trie(EXAMPLE), "cpu"), CpuKernels)
    with pytest.raises(SettingsError, match="device: torch cannot use 'cuda:99'"):
        open_kernels(Trie(EXAMPLE), "cuda:99")
    with pytest.raises(SettingsError, match="device: torch cannot use 'typewriter'"):
        open_kernels(Trie(EXAMPLE), "typewriter")


@pytest.mark.parametrize(("library", "device", "extra"), [("numba", "cpu", "trie"), ("torch", "cuda", "hf")])
def test_a_library_that_is_not_installed_is_named_with_how_to_get_it(library: str, device: str, extra: str) -> None:
    script = f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {library!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
from lmpool.errors import SettingsError
from lmpool.trie.kernels import open_kernels
from lmpool.trie.trie import Trie
try:
    open_kernels(Trie([b"a"]), {device!r})
except SettingsError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert f"need {library}: install it with pip install 'lmpool[{extra}]'" in said


def test_importing_the_kernels_imports_neither_numba_nor_torch() -> None:
    script = "import sys, lmpool.trie.kernels; print({'numba', 'torch'} & set(sys.modules))"
    said = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert said == "set()\n"


def test_the_loops_compile_where_no_cache_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.core.caching.CompileResultCacheImpl._locator_classes", [])
    double = _compiled(types.float64, returns=types.float64)(lambda x: 2 * x)
    assert double(2.0) == 4
