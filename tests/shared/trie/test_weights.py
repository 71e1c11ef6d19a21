"""Arrays of weights: errors for bad arrays, arrays that are used without a copy, and the cost of the check."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lmpool.errors import InvalidWeights
from lmpool.trie.trie import check_weights

ONES = np.ones(3, np.float32)


def test_good_weights_are_not_copied() -> None:
    row, rows = np.arange(3, dtype=np.float32), np.ones((2, 3), np.float32)
    assert np.shares_memory(check_weights(row, 3, batch=False), row)
    assert np.shares_memory(check_weights(rows, 3, batch=True), rows)


def test_read_only_weights_are_taken_as_they_are() -> None:
    frozen = ONES.copy()
    frozen.flags.writeable = False
    assert np.shares_memory(check_weights(frozen, 3, batch=False), frozen)


def test_torch_tensors_of_the_cpu_are_read_in_place() -> None:
    tensor = torch.tensor([1.0, 2.0, 3.0])
    checked = check_weights(tensor, 3, batch=False)
    assert checked.tolist() == [1, 2, 3]
    assert checked.ctypes.data == tensor.data_ptr()


@pytest.mark.parametrize(
    "weights",
    [np.ones((3, 2), np.float32).T, np.ones((2, 6), np.float32)[:, ::2], np.ones((2, 3), np.float32)[::-1]],
    ids=["transposed", "every other", "backwards"],
)
def test_strided_weights_become_contiguous(weights: NDArray[np.float32]) -> None:
    checked = check_weights(weights, 3, batch=True)
    assert checked.flags.c_contiguous
    assert np.array_equal(checked, weights)


def test_unaligned_weights_become_aligned() -> None:
    raw = np.frombuffer(b"\0" + ONES.tobytes(), np.float32, count=3, offset=1)
    assert not raw.flags.aligned
    checked = check_weights(raw, 3, batch=False)
    assert checked.flags.aligned
    assert np.array_equal(checked, ONES)


def test_infinities_of_both_signs_are_weights() -> None:
    weights = np.array([np.inf, -np.inf, 0], np.float32)
    assert np.array_equal(check_weights(weights, 3, batch=False), weights)


def test_an_empty_batch_is_a_batch() -> None:
    assert check_weights(np.empty((0, 3), np.float32), 3, batch=True).shape == (0, 3)


@pytest.mark.parametrize(
    ("weights", "batch", "message"),
    [
        (np.ones(131071, np.float32), False, "131071 weights for 3 tokens"),
        (np.ones((2, 4), np.float32), True, "4 weights for 3 tokens"),
        (np.ones(3), False, "dtype float64: convert with numpy.asarray(w, numpy.float32)"),
        (np.ones(3, np.int32), False, "dtype int32: convert"),
        (np.ones(3, np.float16), False, "dtype float16: convert"),
        (np.ones(3, ">f4"), False, "dtype >f4: convert"),
        ([1.0, 2.0, 3.0], False, "[1.0, 2.0, 3.0] (list): pass a float32 array"),
        (None, False, "None (NoneType)"),
        (ONES, True, "shape (3,): a batch has shape (B, 3)"),
        (ONES[None], False, "shape (1, 3): one vector has shape (3,)"),
        (np.ones((1, 1, 3), np.float32), True, "shape (1, 1, 3)"),
        (np.float32(1), False, "shape (): one vector has shape (3,)"),
        (torch.ones(3, dtype=torch.float64), False, "dtype float64: convert"),
        (torch.ones(3, dtype=torch.bfloat16), False, "the weights, a Tensor, cannot be read as an array"),
        (torch.ones(3, requires_grad=True), False, "the weights, a Tensor, cannot be read as an array"),
        (torch.ones(3, device="meta"), False, "the weights, a Tensor, cannot be read as an array"),
    ],
    ids=str,
)
def test_errors_name_the_wrong_numbers(weights: Any, batch: bool, message: str) -> None:
    with pytest.raises(InvalidWeights) as caught:
        check_weights(weights, 3, batch=batch)
    assert message in str(caught.value)


def test_the_first_nan_is_named() -> None:
    weights = np.ones((3, 5), np.float32)
    weights[1, 3] = weights[1, 4] = weights[2, 0] = np.nan
    with pytest.raises(InvalidWeights, match=r"^weight 3 of row 1 is NaN"):
        check_weights(weights, 5, batch=True)
    with pytest.raises(InvalidWeights, match=r"^weight 0 is NaN"):
        check_weights(weights[2], 5, batch=False)


def test_a_nan_among_infinities_is_found() -> None:
    with pytest.raises(InvalidWeights, match="weight 1 is NaN"):
        check_weights(np.array([-np.inf, np.nan, np.inf], np.float32), 3, batch=False)


def test_checking_a_large_vocabulary_allocates_no_array() -> None:
    weights = np.ones(131072, np.float32)
    tracemalloc.start()
    try:
        check_weights(weights, 131072, batch=False)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < len(weights) / 8
