"""Tries after a failure: soon at first, seldom later, and not all clients at once."""

from __future__ import annotations

from itertools import islice

import pytest

from lmpool.aio import delays
from lmpool.broker.connection import reply_timeout


def test_the_pauses_between_tries_double_up_to_two_seconds() -> None:
    drawn = list(islice(delays(), 12))
    ceilings = [min(2.0, 0.05 * 2**number) for number in range(12)]
    assert all(ceiling / 2 <= pause <= ceiling for pause, ceiling in zip(drawn, ceilings, strict=True))


def test_no_two_clients_try_again_at_the_same_times() -> None:
    assert len({tuple(islice(delays(), 5)) for _ in range(100)}) == 100


@pytest.mark.parametrize(("lease_s", "seconds"), [(0.1, 2.0), (3.0, 3.0), (15.0, 15.0), (3600.0, 30.0)])
def test_a_reply_is_awaited_for_a_lease(lease_s: float, seconds: float) -> None:
    assert reply_timeout(lease_s) == seconds
