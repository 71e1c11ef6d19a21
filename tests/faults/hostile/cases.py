"""The number of hostile cases: 2,000 in all by default, or `LMPOOL_FUZZ_CASES`."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

USUAL = 2000
CASES = int(os.environ.get("LMPOOL_FUZZ_CASES", USUAL))


def cases(usual: int, *, a_batch: int = 1, most: int = 10**9) -> settings:
    """Hypothesis settings of one property.

    Args:
        usual: cases of the default 2,000.
        a_batch: cases in one example.
        most: max cases of a slow property.
    """
    count = min(most, usual * CASES // USUAL)
    # Batches go to processes that keep state between examples, so shrinking would prove nothing.
    return settings(
        phases=[Phase.explicit, Phase.reuse, Phase.generate, *([Phase.shrink] if a_batch == 1 else [])],
        max_examples=max(1, count // a_batch),
        deadline=None,
        # The default run repeats the same cases. A long run tries new cases and keeps the failures.
        derandomize=CASES <= USUAL,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
    )
