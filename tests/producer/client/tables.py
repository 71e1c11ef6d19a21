"""A table of pending requests with a cache and counters, for the tests of this folder."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from lmpool.producer.client.requests import Answer, PendingRequests, RowLRU
from lmpool.producer.metrics import Counters, ProducerStats
from lmpool.protocol.job import Prompt, encode_prompt
from lmpool.protocol.row import Row


def prompt(*ids: int) -> Prompt:
    return encode_prompt(ids, vocab_size=100, max_tokens=10)


def row(value: float = 0.0) -> Row:
    return np.full(3, value, np.float32)


class Listener:
    """A waiter of a pending request, which records its results."""

    def __init__(self) -> None:
        self.results: list[Answer] = []

    def __call__(self, answer: Answer) -> None:
        self.results.append(answer)


class Table:
    """Pending requests with their cache and counters."""

    def __init__(self) -> None:
        self.cache = RowLRU(10_000)
        self.stats = ProducerStats()
        self.requests = PendingRequests(Counters(self.stats, self.cache))

    def counted(self) -> dict[str, int]:
        """Return the counters that are not zero."""
        return {name: count for name, count in asdict(self.stats).items() if count}
