"""Measures one `Producer` of any lmpool commit that is installed: `python -m benchmarks.clients.compare_client`.

The program uses only `Producer`, its `model` and its `stats()`, so that it also runs with older commits.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import secrets
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import uvloop
from numpy.typing import NDArray

from benchmarks.harness.line_protocol import Handler, serve
from lmpool.producer import Producer

PROMPT_TOKENS = 32  # Tokens per random prompt.

Ids = list[int]


class Bursts:
    """Handlers of the benchmark's requests, which return timings of an open producer."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._random = np.random.default_rng(secrets.randbits(64))
        self._prompts: list[Ids] = []

    def handlers(self) -> list[Handler]:
        """The methods that requests may call, by name."""
        return [self.new, self.again, self.alone, self.together, self.extend]

    async def new(self, rows: int, concurrency: int) -> float:
        """Seconds to request the rows of new prompts, with `concurrency` requests in flight; discards the rows."""
        self._prompts = self._fresh(rows)
        with self._computes(rows):
            return await self._stream(self._prompts, concurrency)

    async def again(self, times: int, concurrency: int) -> float:
        """Seconds to request the prompts of the last `new` again, `times` times; Redis must have cached all rows."""
        before = self._producer.stats().cache_hits
        seconds = await self._stream(itertools.chain.from_iterable([self._prompts] * times), concurrency)
        hits = self._producer.stats().cache_hits - before
        if hits != times * len(self._prompts):
            raise RuntimeError(f"{hits} of {times * len(self._prompts)} rows came from the cache in Redis")
        return seconds

    async def alone(self, requests: int) -> float:
        """Median seconds of one request for a new prompt, with no other request in flight."""
        return await self.median(self._producer.logprobs(ids) for ids in self._fresh(requests))

    async def together(self, prompts: list[Ids]) -> dict[str, Any]:
        """Seconds to request the rows of prompts all at once, and the first entries of the last row."""
        with self._computes(len(prompts)):
            start = time.perf_counter()
            rows = await asyncio.gather(*[self._producer.logprobs(ids) for ids in prompts])
        return {"seconds": time.perf_counter() - start, "probe": probe(rows[-1])}

    async def extend(self, shared: Ids, tokens: list[Ids]) -> dict[str, Any]:
        """Seconds to request rows of contexts that share a prompt and grow by tokens; first entries of the last row."""
        with self._computes(len({tuple(suffix[:length]) for length in range(len(tokens[0])) for suffix in tokens})):
            start = time.perf_counter()
            for length in range(len(tokens[0])):
                rows = await asyncio.gather(*[self._producer.logprobs(shared + suffix[:length]) for suffix in tokens])
        return {"seconds": time.perf_counter() - start, "probe": probe(rows[-1])}

    async def median(self, requests: Iterable[Awaitable[object]]) -> float:
        """Median seconds of requests that run one after the other."""
        taken = []
        for request in requests:
            start = time.perf_counter()
            await request
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)

    @contextmanager
    def _computes(self, rows: int) -> Iterator[None]:
        """Raise RuntimeError unless the workers computed exactly `rows` rows in the block."""
        before = self._producer.stats()
        yield
        after = self._producer.stats()
        if (computed := after.computed - before.computed) != rows:
            seen = {name: count - getattr(before, name) for name, count in asdict(after).items()}
            raise RuntimeError(f"{computed} of {rows} rows were computed; the producer counted {seen}")

    def _fresh(self, number: int, tokens: int = PROMPT_TOKENS) -> list[Ids]:
        drawn: list[Ids] = self._random.integers(0, self._producer.model.vocab_size, (number, tokens)).tolist()
        return drawn

    async def _stream(self, prompts: Iterable[Ids], concurrency: int) -> float:
        waiting = iter(prompts)

        async def consume() -> None:
            for ids in waiting:
                await self._producer.logprobs(ids)

        start = time.perf_counter()
        await asyncio.gather(*[consume() for _ in range(concurrency)])
        return time.perf_counter() - start


def probe(row: NDArray[np.float32]) -> list[float]:
    """The first entries of a row, which the benchmark compares between two sides."""
    return [float(value) for value in row[:8]]


async def main(client: Callable[[Producer], Bursts]) -> None:
    """Respond to requests on stdin until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--redis", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--cache-bytes", type=int)
    parser.add_argument("--priority")
    parser.add_argument("--no-direct", dest="direct", action="store_false", default=None)
    given = parser.parse_args()
    # Pass only options that were given: older commits may not have the other options.
    options: dict[str, Any] = {"cache_bytes": given.cache_bytes, "priority": given.priority, "direct": given.direct}
    settings = {name: value for name, value in options.items() if value is not None}
    async with Producer(given.model, redis=given.redis, timeout=120, **settings) as producer:
        await serve({handler.__name__: handler for handler in client(producer).handlers()})


if __name__ == "__main__":
    uvloop.run(main(Bursts))
