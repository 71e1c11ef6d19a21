"""What a server refuses only for a while."""

from __future__ import annotations

_PASSING = ("READONLY", "LOADING", "BUSY", "MISCONF", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS")


def passes(refusal: str) -> bool:
    """Whether it makes sense to try again: a failover ends, a script, the loading of data; a full memory may not."""
    return refusal.partition(" ")[0] in _PASSING
