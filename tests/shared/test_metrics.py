"""Histograms count each observation in the right bucket, and have the quantiles that PromQL would compute."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from lmpool.metrics import SECONDS, Histogram, add_packed, pack_counts, quantile


def observe_all(histogram: Histogram, values: Iterable[float]) -> None:
    for value in values:
        histogram.observe(value)


def test_an_observation_falls_into_the_first_bucket_whose_bound_it_does_not_exceed() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    for value in (0.0, 1.0, 1.5, 2.0, 4.0, 4.1):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1, 1]
    assert histogram.total == pytest.approx(12.6)
    histogram.observe(3.0, 5)
    assert histogram.counts == [2, 2, 6, 1]
    assert histogram.total == pytest.approx(27.6)


@pytest.mark.parametrize("q", [0.01, 0.5, 0.9, 0.99])
def test_a_quantile_is_right_to_within_a_bucket(q: float) -> None:
    values = np.random.default_rng(1).lognormal(-3, 1.5, 5000)
    histogram = Histogram()
    observe_all(histogram, values.tolist())
    real, told = float(np.quantile(values, q)), quantile(histogram.counts, q)
    assert told is not None
    bounds = [0.0, *SECONDS]
    at = next(i for i, bound in enumerate(bounds) if bound >= real)
    assert bounds[at - 1] <= told <= bounds[at]


def test_no_observations_have_no_quantile_and_values_above_all_bounds_have_the_last_bound() -> None:
    histogram = Histogram()
    assert quantile(histogram.counts, 0.5) is None
    histogram.observe(1e9)
    assert quantile(histogram.counts, 0.5) == SECONDS[-1]


def test_packed_counts_are_added_and_malformed_ones_skipped() -> None:
    first, second = Histogram(), Histogram()
    observe_all(first, [0.001, 0.002, 5])
    observe_all(second, [0.002, 1000])
    total = [0] * len(first.counts)
    for histogram in (first, second):
        add_packed(total, pack_counts(histogram.counts))
    assert total == [a + b for a, b in zip(first.counts, second.counts, strict=True)]
    before = list(total)
    add_packed(total, "x 1: :1 99999:1 3:-1 1:99999999999999999999 \u0661:x 4")
    assert total == before


def test_since_returns_the_observations_after_an_earlier_state() -> None:
    histogram = Histogram((1.0,))
    histogram.observe(0.5)
    seen = list(histogram.counts)
    histogram.observe(2.0)
    assert histogram.since([]) == [1, 1]
    assert histogram.since(seen) == [0, 1]


def test_cumulative_buckets_end_at_infinity() -> None:
    histogram = Histogram((0.5, 1.0))
    observe_all(histogram, [0.1, 0.7, 0.8, 9.0])
    buckets, total = histogram.cumulative()
    assert buckets == [("0.5", 1), ("1", 3), ("+Inf", 4)]
    assert total == pytest.approx(10.6)
