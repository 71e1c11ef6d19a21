"""Counters of a producer."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(slots=True)
class ProducerStats:
    """What became of a producer's requests to the model's workers.

    A request is for a row. A trie's calls make requests too: for a prompt's row where they need one, and for values
    where the model's workers have tries. What trie workers are asked is not counted, nor is a call that ends before
    the producer has connected or because its arguments are wrong.

    Attributes:
        requests: all of them. Each that has ended is counted in one of the others, too.
        local_hits: answered from the producer's own memory.
        cache_hits: answered from the cache in Redis.
        joined: answered with a request for the same prompt that was under way here or in another process.
        computed: queued for a worker, and answered.
        failed: ended with an exception, or cancelled.
    """

    requests: int = 0
    local_hits: int = 0
    cache_hits: int = 0
    joined: int = 0
    computed: int = 0
    failed: int = 0

    def add(self, name: str, count: int = 1) -> None:
        """Count."""
        setattr(self, name, getattr(self, name) + count)

    def copy(self) -> ProducerStats:
        """A snapshot."""
        return replace(self)
