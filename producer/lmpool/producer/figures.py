"""How long a producer's requests took, and why some failed: plain numbers, counted where requests end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from time import monotonic

from lmpool.histogram import Histogram
from lmpool.producer.client.lru import RowLRU
from lmpool.producer.stats import ProducerStats

OUTCOMES = ("cache_hits", "joined", "computed", "failed")
"""How a request ends that the producer's own memory does not answer: see `ProducerStats`."""


class Figures:
    """Numbers of one producer. Its event loop counts them up, anybody reads them.

    Args:
        stats: its counters.
        cache: its own rows.

    Attributes:
        model: the model's name, once the producer has connected.
        stats: as above.
        cache: as above.
        seconds: outcome, of `OUTCOMES` -> seconds of the requests that ended so. Each request is in one of them.
        failures: name of the exception, or "cancelled" -> requests.
        fetched_bytes: bytes of rows and answers fetched from the cache, in the encoding that the model's card names.
    """

    def __init__(self, stats: ProducerStats, cache: RowLRU) -> None:
        self.model = ""
        self.stats = stats
        self.cache = cache
        self.seconds = {outcome: Histogram() for outcome in OUTCOMES}
        self.failures: Counter[str] = Counter()
        self.fetched_bytes = 0

    @property
    def under_way(self) -> int:
        """Requests that wait for an answer."""
        ended = sum(sum(histogram.counts) for histogram in self.seconds.values())
        return max(0, self.stats.requests - self.stats.local_hits - ended)

    def landed(self, origin: str, began: float, joined: Sequence[float] | None, now: float) -> None:
        """Count requests that were answered together.

        Args:
            origin: where the row came from for the first of them.
            began: since when the first has waited; a time of `monotonic`.
            joined: since when the others have; None for no others.
            now: when they were answered.
        """
        self.seconds[origin].observe(now - began)
        for since in joined or ():
            self.seconds["joined"].observe(now - since)

    def failed(self, why: str, began: float) -> None:
        """Count a request that ended without an answer; `began` is a time of `monotonic`."""
        self.failures[why] += 1
        self.seconds["failed"].observe(monotonic() - began)
