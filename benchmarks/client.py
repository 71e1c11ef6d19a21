"""A process with one producer, as a user would write it: `python -m benchmarks.client`."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import secrets
import statistics
import time
from collections.abc import Awaitable, Iterable
from typing import Any

import numpy as np
import uvloop
from numpy.typing import NDArray

from benchmarks.lines import serve
from lmpool.keys import Keys
from lmpool.producer import Producer
from lmpool.prompts import encode_prompt

PROMPT_TOKENS = 32

Ids = list[int]


class Client:
    """Answers the benchmark's requests with timings.

    Args:
        producer: open.
    """

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._random = np.random.default_rng(secrets.randbits(64))
        self._asked: list[Ids] = []

    async def new(self, rows: int, at_once: int) -> float:
        """Seconds for prompts that nobody has asked before, `at_once` awaits under way, each row dropped as read."""
        self._asked = self._fresh(rows)
        before = self._producer.stats().computed
        seconds = await self._stream(self._asked, at_once)
        computed = self._producer.stats().computed - before
        if computed != rows:
            raise RuntimeError(f"{computed} of {rows} rows were computed: the rest came from a cache")
        return seconds

    async def again(self, times: int, at_once: int) -> float:
        """Seconds for the prompts of the last `new`, all of them in the cache, this many times over."""
        before = self._producer.stats().cache_hits
        seconds = await self._stream(itertools.chain.from_iterable([self._asked] * times), at_once)
        hits = self._producer.stats().cache_hits - before
        if hits != times * len(self._asked):
            raise RuntimeError(f"{hits} of {times * len(self._asked)} rows came from the cache in Redis")
        return seconds

    async def entries(self, times: int, at_once: int, count: int) -> float:
        """As `again`, but just `count` entries are wanted of each row, others of each."""
        before = self._producer.stats().cache_hits
        asked = [(ids, [token % self._producer.model.vocab_size for token in ids[:count]]) for ids in self._asked]
        waiting = iter(asked * times)

        async def consume() -> None:
            for ids, targets in waiting:
                await self._producer.logprobs(ids, targets=targets)

        start = time.perf_counter()
        await asyncio.gather(*[consume() for _ in range(at_once)])
        seconds = time.perf_counter() - start
        hits = self._producer.stats().cache_hits - before
        if hits != times * len(asked):
            raise RuntimeError(f"{hits} of {times * len(asked)} requests were answered from the cache in Redis")
        return seconds

    async def row_of(self, prompts: list[Ids]) -> float:
        """Median seconds of one row, one request after the other."""
        return await self._median(self._producer.logprobs(ids) for ids in prompts)

    async def scored(self, prompts: list[Ids], tokens: int) -> float:
        """Median seconds of scoring the last `tokens` tokens of a prompt after those before, one after the other."""
        return await self._median(self._producer.score(ids[:-tokens], ids[-tokens:]) for ids in prompts)

    async def _median(self, requests: Iterable[Awaitable[object]]) -> float:
        taken = []
        for request in requests:
            start = time.perf_counter()
            await request
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)

    async def keys(self) -> list[str]:
        """Where the rows of the last `new` are: Redis keys in hexadecimal."""
        card = self._producer.model
        prefix = Keys().row(card.fingerprint)
        encoded = (
            encode_prompt(ids, vocab_size=card.vocab_size, max_tokens=card.max_prompt_tokens) for ids in self._asked
        )
        return [(prefix + prompt.digest).hex() for prompt in encoded]

    async def alone(self, requests: int) -> float:
        """Median seconds of one request when nothing else is under way, each for a new prompt."""
        taken = []
        for ids in self._fresh(requests):
            start = time.perf_counter()
            await self._producer.logprobs(ids)
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)

    async def together(self, prompts: list[Ids]) -> dict[str, Any]:
        """Seconds for prompts asked all at once, and the first entries of the last row."""
        start = time.perf_counter()
        rows = await asyncio.gather(*[self._producer.logprobs(ids) for ids in prompts])
        return {"seconds": time.perf_counter() - start, "probe": probe(rows[-1])}

    async def extend(self, shared: Ids, tokens: list[Ids]) -> dict[str, Any]:
        """Seconds for contexts that share a prompt and grow token by token, and the first entries of the last row."""
        start = time.perf_counter()
        for length in range(len(tokens[0])):
            rows = await asyncio.gather(*[self._producer.logprobs(shared + own[:length]) for own in tokens])
        return {"seconds": time.perf_counter() - start, "probe": probe(rows[-1])}

    async def grow(self, contexts: list[Ids], steps: int) -> dict[str, Any]:
        """Seconds for contexts that grow by a token `steps` times; what they begin with is asked before the clock."""
        await asyncio.gather(*[self._producer.logprobs(ids[: len(ids) - steps]) for ids in contexts])
        start = time.perf_counter()
        for left in range(steps - 1, -1, -1):
            rows = await asyncio.gather(*[self._producer.logprobs(ids[: len(ids) - left]) for ids in contexts])
        return {"seconds": time.perf_counter() - start, "probe": probe(rows[-1])}

    def _fresh(self, number: int) -> list[Ids]:
        drawn: list[Ids] = self._random.integers(0, self._producer.model.vocab_size, (number, PROMPT_TOKENS)).tolist()
        return drawn

    async def _stream(self, prompts: Iterable[Ids], at_once: int) -> float:
        waiting = iter(prompts)

        async def consume() -> None:
            for ids in waiting:
                await self._producer.logprobs(ids)

        start = time.perf_counter()
        await asyncio.gather(*[consume() for _ in range(at_once)])
        return time.perf_counter() - start


def probe(row: NDArray[np.float32]) -> list[float]:
    """A few entries of a row, by which the two sides are compared."""
    return [float(value) for value in row[:8]]


async def main() -> None:
    """Serve until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--redis", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--cache-bytes", type=int)
    given = parser.parse_args()
    settings = {} if given.cache_bytes is None else {"cache_bytes": given.cache_bytes}
    async with Producer(given.model, redis=given.redis, timeout=120, **settings) as producer:
        client = Client(producer)
        streams = (client.new, client.again, client.entries, client.keys)
        others = (client.alone, client.row_of, client.scored, client.together, client.extend, client.grow)
        await serve({handler.__name__: handler for handler in (*streams, *others)})


if __name__ == "__main__":
    uvloop.run(main())
