"""Sets the number of random hostile inputs (cases) of all tests: `LMPOOL_FUZZ_CASES`, or 2,000 by default."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

USUAL = 2000
CASES = int(os.environ.get("LMPOOL_FUZZ_CASES", USUAL))


def cases(usual: int, *, a_batch: int = 1, most: int = 10**9) -> settings:
    """Return the Hypothesis settings of one property.

    Args:
        usual: the property's share of the default 2,000 cases.
        a_batch: number of cases in one example of Hypothesis.
        most: max number of cases, for a slow property.
    """
    count = min(most, usual * CASES // USUAL)
    # Do not shrink batches: they go to processes that keep state between examples, so a replay may differ.
    return settings(
        phases=[Phase.explicit, Phase.reuse, Phase.generate, *([Phase.shrink] if a_batch == 1 else [])],
        max_examples=max(1, count // a_batch),
        deadline=None,
        # The default run always tries the same cases; a longer run tries new cases and keeps the failures.
        derandomize=CASES <= USUAL,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
    )
