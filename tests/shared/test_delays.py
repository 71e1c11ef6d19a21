"""Delays between retries grow from short to long, with jitter; the timeout of a reply is limited."""

from __future__ import annotations

from itertools import islice

import pytest

from lmpool.aio import delays
from lmpool.broker.connection import reply_timeout


def test_delays_double_up_to_two_seconds() -> None:
    drawn = list(islice(delays(), 12))
    ceilings = [min(2.0, 0.05 * 2**number) for number in range(12)]
    assert all(ceiling / 2 <= pause <= ceiling for pause, ceiling in zip(drawn, ceilings, strict=True))


def test_two_clients_have_different_delays() -> None:
    assert len({tuple(islice(delays(), 5)) for _ in range(100)}) == 100


@pytest.mark.parametrize(("lease_s", "seconds"), [(0.1, 2.0), (3.0, 3.0), (15.0, 15.0), (3600.0, 30.0)])
def test_the_timeout_of_a_reply_is_a_lease_within_bounds(lease_s: float, seconds: float) -> None:
    assert reply_timeout(lease_s) == seconds
