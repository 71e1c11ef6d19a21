"""Correct results of trie queries, computed by brute force; random vocabularies and weights for queries."""

from __future__ import annotations

from functools import cache
from itertools import accumulate, chain
from typing import Any

import numpy as np

from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.query import Op
from lmpool.protocol.row import Values
from lmpool.synthetic import synthetic_row
from lmpool.trie.trie import Trie
from tests.support.pool import Pool
from tests.support.tries import reference


class Answers:
    """The correct values of all trie nodes of one vocabulary, by brute force."""

    def __init__(self, tokens: tuple[bytes, ...]) -> None:
        expected = reference(list(tokens))
        self.tokens = tokens
        self.node = {prefix: node for node, prefix in enumerate(expected.prefixes)}
        self.children = expected.children
        self._below = np.array(list(chain.from_iterable(map(sorted, expected.below))))
        self._starts = [0, *accumulate(map(len, expected.below))][:-1]

    def of(self, op: Op, weights: Values) -> Values:
        """The values of all N nodes, float32 (N,), in preorder, with children in the order of their bytes."""
        below = weights.astype(np.float64)[self._below]
        if op == "logsumexp":
            return np.asarray(np.log(np.add.reduceat(np.exp(below), self._starts)), np.float32)
        function = np.add if op == "sum" else np.maximum
        return np.asarray(function.reduceat(below, self._starts), np.float32)


@cache
def answers(tokens: tuple[bytes, ...]) -> Answers:
    """Cached `Answers` of a vocabulary."""
    return Answers(tokens)


def answers_of(trie: Trie) -> Answers:
    """Cached `Answers` of a trie's vocabulary."""
    return answers(tuple(trie.vocabulary.tokens))


@cache
def words(seed: int, count: int) -> tuple[bytes, ...]:
    """A random vocabulary with an empty token, duplicate tokens and shared prefixes."""
    generator = np.random.default_rng(seed)
    return (b"", *(bytes(generator.integers(97, 101, size).tolist()) for size in generator.integers(1, 8, count - 1)))


def draw_weights(seed: int, count: int, op: Op = "sum") -> Values:
    """Random probabilities; for `logsumexp`, their logarithms."""
    logits = 3 * np.random.default_rng(seed).standard_normal(count)
    logs = logits - np.logaddexp.reduce(logits)
    return np.asarray(logs if op == "logsumexp" else np.exp(logs), np.float32)


def row_weights(prompt: list[int], vocab_size: int, op: Op) -> Values:
    """The weights that a synthetic model's row gives a trie: log-probabilities for `logsumexp`, else probabilities."""
    row = synthetic_row(prompt, vocab_size=vocab_size)
    return row if op == "logsumexp" else np.exp(row)


def assert_right(got: Values, expected: Any) -> None:
    """Check that values are float32 and differ from the expected values by a factor of at most 1 ± 1e-6."""
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-12)


def leftovers(pool: Pool) -> list[str]:
    """The keys and jobs of trie requests in Redis; soon after the requests have ended, this list must be empty."""
    info: Any = pool.redis.hget(pool.keys.trie_models(), "trie")
    made = pool.names(f"row:{ModelInfo.unpack(info).fingerprint}:*")
    jobs = [f"{pool.jobs('trie')} jobs"] if pool.jobs("trie") else []
    return [*pool.names("weights:*"), *made, *pool.names("{trie}:waiting:*"), *jobs]
