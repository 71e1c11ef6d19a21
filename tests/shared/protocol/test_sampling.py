"""Sampling of tokens from rows in the client's process."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lmpool.errors import ProtocolError
from lmpool.protocol.picks import Sampling, kept, sample, top
from lmpool.protocol.query import pack_token, pack_top, unpack_token, unpack_top
from lmpool.synthetic import synthetic_row

ROWS = hnp.arrays(np.float32, st.integers(1, 60), elements=st.sampled_from([-np.inf, -9.0, -2.5, -1.0, -0.5, 0.0]))
ROW = synthetic_row([1, 2, 3], vocab_size=5000)


@given(ROWS, st.data())
def test_the_largest_entries_are_sorted_by_value_and_then_by_id(row: np.ndarray, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(row)))
    expected = sorted(range(len(row)), key=lambda token: (-row[token], token))[:k]
    likeliest = top(row, k)
    assert likeliest.ids.tolist() == expected
    assert np.array_equal(likeliest.values, row[expected])
    assert likeliest.ids.dtype == np.int64
    assert likeliest.values.dtype == np.float32


@given(ROWS.filter(lambda row: row.max() > -np.inf), st.floats(0.01, 1), st.floats(0.05, 5), st.integers(0, 2**64 - 1))
def test_a_draw_is_among_the_fewest_tokens_that_have_the_mass(
    row: np.ndarray, top_p: float, temperature: float, seed: int
) -> None:
    weights = np.exp((row - row.max()).astype(np.float64) / temperature)
    order = sorted(range(len(row)), key=lambda token: (-weights[token], token))
    mass = np.cumsum(weights[order]) / weights.sum()
    allowed = order[: int(np.searchsorted(mass, top_p * (1 + 1e-9))) + 1]
    token = sample(row, Sampling(temperature, top_p, seed))
    assert token in allowed
    assert weights[token] > 0


def test_draws_have_the_frequencies_of_the_probabilities() -> None:
    row = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    tokens = [sample(row, Sampling(1.0, 1.0, seed)) for seed in range(4000)]
    assert np.allclose(np.bincount(tokens, minlength=4) / 4000, [0.5, 0.25, 0.125, 0.125], atol=0.03)
    tokens = [sample(row, Sampling(0.5, 1.0, seed)) for seed in range(4000)]
    squared = np.array([0.5, 0.25, 0.125, 0.125]) ** 2
    assert np.allclose(np.bincount(tokens, minlength=4) / 4000, squared / squared.sum(), atol=0.03)
    tokens = [sample(row, Sampling(1.0, 0.75, seed)) for seed in range(4000)]
    assert np.allclose(np.bincount(tokens, minlength=4) / 4000, [2 / 3, 1 / 3, 0, 0], atol=0.03)


def test_a_temperature_of_zero_takes_the_most_likely_token_and_equal_seeds_draw_equally() -> None:
    assert sample(ROW, Sampling(0.0, 0.5, 1)) == int(ROW.argmax())
    assert sample(ROW, Sampling(1e-6, 1.0, 1)) == int(ROW.argmax())
    # Some of these temperatures are too small or too large for float32.
    for tiny in (1e-30, 1e-45, 1e-117, 5e-324):
        assert sample(ROW, Sampling(tiny, 0.9, 1)) == sample(ROW, Sampling(tiny, 1.0, 1)) == int(ROW.argmax())
    for huge in (1e30, 1e39, 1.7e308):
        assert len({sample(ROW, Sampling(huge, 1.0, seed)) for seed in range(50)}) > 20
    assert len({sample(ROW, Sampling(1.0, 1.0, 7)) for _ in range(5)}) == 1
    assert len({sample(ROW, Sampling(1.0, 1.0, seed)) for seed in range(50)}) > 20


@pytest.mark.parametrize(
    ("temperature", "top_p", "tokens"),
    [
        (1.0, 1.0, [820, 4935, 3405, 4309, 4075, 1303]),
        (0.7, 1.0, [1254, 4935, 3825, 4309, 4075, 1984]),
        (1.0, 0.9, [2825, 1516, 3407, 1287, 4311, 4309]),
        (0.7, 0.9, [3972, 1884, 4075, 2988, 4681, 2165]),
        (3.0, 0.5, [4681, 3911, 1938, 2658, 4054, 3332]),
        (1.5, 0.999, [1254, 4664, 892, 2301, 1046, 2094]),
        (0.0, 0.3, [3972] * 6),
        (1e-45, 0.9, [3972] * 6),
    ],
)
def test_equal_seeds_draw_equal_tokens(temperature: float, top_p: float, tokens: list[int]) -> None:
    seeds = (0, 1, 2, 7, 2**40, 2**64 - 1)
    assert [sample(ROW, Sampling(temperature, top_p, seed)) for seed in seeds] == tokens


@given(ROWS.filter(lambda row: row.max() > -np.inf), st.sampled_from([0.0, 1e-117, 0.7, 1.0, 1e39]), st.floats(0.01, 1))
def test_kept_tokens_can_be_drawn_and_are_sorted_by_weight(row: np.ndarray, temperature: float, top_p: float) -> None:
    ids, weights = kept(row, temperature, top_p)
    tokens = list(range(len(row))) if ids is None else ids.tolist()
    assert len(tokens) == len(weights) == len(set(tokens))
    assert weights.dtype == np.float32
    assert weights.max() == 1
    if ids is not None:
        assert list(zip(-weights, tokens, strict=True)) == sorted(zip(-weights, tokens, strict=True))
    weighing = {token for token, weight in zip(tokens, weights, strict=True) if weight > 0}
    assert {sample(row, Sampling(temperature, top_p, seed)) for seed in range(20)} <= weighing


def test_a_flat_row_is_drawn_from_beyond_the_first_thousand() -> None:
    flat = np.full(5000, -np.log(5000), np.float32)
    assert max(sample(flat, Sampling(1.0, 0.9, seed)) for seed in range(100)) > 3000
    assert max(sample(flat, Sampling(1.0, 0.9, seed)) for seed in range(100)) < 4501


def test_answers_survive_the_wire_and_wrong_ones_are_refused() -> None:
    likeliest = top(ROW, 7)
    again = unpack_top(pack_top(likeliest), len(ROW))
    assert np.array_equal(again.ids, likeliest.ids)
    assert np.array_equal(again.values, likeliest.values)
    assert unpack_token(pack_token(2**32 - 1), 2**32) == 2**32 - 1
    with pytest.raises(ProtocolError, match="not the largest entries of a row of 3"):
        unpack_top(pack_top(likeliest), 3)
    with pytest.raises(ProtocolError, match="4999 was drawn from a row of 4999 entries"):
        unpack_token(pack_token(4999), 4999)
    with pytest.raises(ProtocolError):
        unpack_top(np.full(2, np.nan, np.float32), 2**32)
