"""A process with one client of the pool's tries, like a user's program: `python -m benchmarks.clients.trie_client`."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import numpy as np
import uvloop

from benchmarks.harness.line_protocol import serve
from benchmarks.harness.tekken import read_inputs
from lmpool.producer import Producer
from lmpool.producer.trie import PooledTrie
from lmpool.protocol.row import Values

Ids = list[int]

_PROMPT_TOKENS = 32  # Tokens per random prompt.
_PREFIXES = 2048  # Number of prefixes that are requested: the prefixes with the most children.
_TOLERANCE = 1e-4  # Max relative difference between the pool's values and local values.


class TrieClient:
    """Handlers that return timings; `weights` has one distinct row per request in flight."""

    def __init__(self, producer: Producer, trie: PooledTrie, weights: Values) -> None:
        self._producer = producer
        self._trie = trie
        self._weights = weights
        self._random = np.random.default_rng(secrets.randbits(64))
        self._pairs: Iterator[tuple[Ids, bytes]] = iter(())
        self._lone: Iterator[tuple[Ids, bytes]] = iter(())

    async def sizes(self) -> list[int]:
        """Numbers of tokens, nodes and inner nodes, and the mean number of children of the requested prefixes."""
        structure = self._trie.structure
        children = sum(len(structure.children(structure.node(prefix))) for prefix in self._prefixes())
        return [structure.n_tokens, structure.n_nodes, structure.n_inner, round(children / _PREFIXES)]

    async def full(self, requests: int, concurrency: int) -> float:
        """Seconds to request the values of all nodes, with `concurrency` requests in flight; discards the results."""
        weights = itertools.islice(itertools.cycle(self._weights), requests)
        return await _stream((partial(self._trie.weight_sum, ws) for ws in weights), concurrency)

    async def prepare(self, prompts: int, lone: int) -> None:
        """Compute the rows of new prompts: `prompts` for `by_reference` and `lone` for `by_lone_reference`."""
        drawn = self._random.integers(0, self._producer.model.vocab_size, (prompts + lone, _PROMPT_TOKENS)).tolist()
        await _stream((partial(self._producer.logprobs, ids) for ids in drawn), 64)
        prefixes = self._prefixes()
        shuffled = [self._random.permutation(_PREFIXES).tolist() for _ in range(prompts)]
        # Request each pair of prompt and prefix once: the cache keeps a result for a minute.
        orders = list(zip(drawn[:prompts], shuffled, strict=True))
        self._pairs = ((ids, prefixes[order[turn]]) for turn in range(_PREFIXES) for ids, order in orders)
        self._lone = ((ids, prefixes[turn]) for turn in range(_PREFIXES) for ids in drawn[prompts:])

    async def by_reference(self, requests: int, concurrency: int) -> float:
        """Seconds to request the values of prefixes' children; each prompt has a cached row and many prefixes."""
        return await self._request(self._pairs, requests, concurrency)

    async def by_lone_reference(self, requests: int, concurrency: int) -> float:
        """Like `by_reference`, but with many prompts in rotation, so that no recent request used the same row."""
        return await self._request(self._lone, requests, concurrency)

    async def _request(self, pairs: Iterator[tuple[Ids, bytes]], requests: int, concurrency: int) -> float:
        taken = list(itertools.islice(pairs, requests))
        if len(taken) < requests:
            raise RuntimeError("all pairs of a prompt and a prefix are used up")
        calls = (partial(self._trie.weight_sum, prompt=ids, under=under) for ids, under in taken)
        before = self._producer.stats().computed
        seconds = await _stream(calls, concurrency)
        computed = self._producer.stats().computed - before
        # Tolerate a few computed rows: a full server evicts random samples of its keys. A worker that serves tries of
        # its model also counts results of tries as computed rows.
        if computed > requests / 100 and not self._producer.model.answers_tries:
            raise RuntimeError(f"the workers computed {computed} of {requests} rows; the cache should have held them")
        return seconds

    async def check(self) -> None:
        """Raise RuntimeError if the pool's values differ from values computed in this process."""
        weights, (ids, under) = self._weights[0], next(self._pairs)
        calls = [
            partial(self._trie.weight_sum, weights),
            partial(self._trie.weight_sum, prompt=ids, under=under),
        ]
        for call in calls:
            pooled, expected = await call(local=False), await call(local=True)
            if not np.allclose(pooled, expected, rtol=_TOLERANCE, atol=0):
                raise RuntimeError(f"the pool's values are {pooled[:8]}; this process computes {expected[:8]}")

    def _prefixes(self) -> list[bytes]:
        """The prefixes with the most children."""
        structure = self._trie.structure
        nodes = np.argsort(-np.diff(structure.child_start), kind="stable")[:_PREFIXES]
        return [structure.prefix(node) for node in nodes]


async def _stream(calls: Iterator[Callable[[], Awaitable[Values]]], concurrency: int) -> float:
    """Seconds for all calls, `concurrency` of them in flight."""

    async def consume() -> None:
        for call in calls:
            await call()

    start = time.perf_counter()
    await asyncio.gather(*[consume() for _ in range(concurrency)])
    return time.perf_counter() - start


async def main() -> None:
    """Respond to requests on stdin until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--redis", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--inputs", required=True)
    given = parser.parse_args()
    inputs = read_inputs(given.inputs)
    async with Producer(given.model, redis=given.redis, timeout=120, cache_bytes=0) as producer:
        trie = await producer.trie(inputs.tokens)
        client = TrieClient(producer, trie, inputs.weights)
        handlers = (
            client.sizes, client.full, client.prepare, client.by_reference, client.by_lone_reference, client.check
        )  # fmt: skip
        await serve({handler.__name__: handler for handler in handlers})


if __name__ == "__main__":
    uvloop.run(main())
