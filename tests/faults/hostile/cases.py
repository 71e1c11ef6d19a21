"""How many hostile cases are tried: 2,000 in all where nothing is said, and as many as `LMPOOL_FUZZ_CASES` says."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

USUAL = 2000
CASES = int(os.environ.get("LMPOOL_FUZZ_CASES", USUAL))


def cases(usual: int, *, a_batch: int = 1, most: int = 10**9) -> settings:
    """Settings of one property.

    Args:
        usual: cases of the usual 2,000.
        a_batch: cases in one example.
        most: cases that it may have however many are wanted, where each takes long.
    """
    count = min(most, usual * CASES // USUAL)
    # Batches are sent to processes that remember what came before: a smaller example would say nothing.
    return settings(
        phases=[Phase.explicit, Phase.reuse, Phase.generate, *([Phase.shrink] if a_batch == 1 else [])],
        max_examples=max(1, count // a_batch),
        deadline=None,
        # The usual run is the same each time; a long one looks elsewhere each time, and keeps what it has found.
        derandomize=CASES <= USUAL,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
    )
