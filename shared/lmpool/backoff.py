"""How long to wait before the next try when the server does not answer."""

from __future__ import annotations

import random
from collections.abc import Iterator

_FIRST_S = 0.05
_LONGEST_S = 2.0


def delays(longest_s: float = _LONGEST_S) -> Iterator[float]:
    """Seconds before each further try: doubling up to `longest_s`, and jittered so that clients do not come at once."""
    ceiling = _FIRST_S
    while True:
        yield random.uniform(ceiling / 2, ceiling)
        ceiling = min(longest_s, ceiling * 2)
