"""Which prompts run together in one forward."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from lmpool.protocol.prompt import digest_of
from lmpool.workers.backends.hf.batching import BatchLimit, BatchRules, Chunk, choose, choose_shorter, shared_prefix


def test_a_smaller_batch_grows_back() -> None:
    limit = BatchLimit(16)
    limit.too_large(16)
    limit.too_large(8)
    assert limit.rows == 4
    for _ in range(200):
        limit.fitted(limit.rows)
    assert limit.rows == 16
    limit.too_large(1)
    assert limit.rows == 1


def chunks(*news: int, held: int = 0) -> dict[bytes, Chunk]:
    """The chunks of prompts that lack so many tokens each, and share nothing."""
    waiting = {}
    for row, new in enumerate(news):
        ids = np.full(held + new, row, "<u4").tobytes()
        path = list(range(1, held + 1))
        waiting[digest_of(bytes([row]))] = Chunk(held + new, path, shared=shared_prefix(ids, held + new, held))
    return waiting


RULES = BatchRules(tokens=1000, logits=1000, kv_tokens=10_000, pads=True, horizon=5000, chunk=1000, shares=True)


def lacks(batch: Mapping[bytes, Chunk]) -> list[int]:
    return [chunk.new for chunk in batch.values()]


def oldest(waiting: Mapping[bytes, Chunk]) -> dict[bytes, Chunk]:
    return dict([next(iter(waiting.items()))])


def test_a_batch_is_of_like_lengths() -> None:
    assert lacks(choose(chunks(100, 1, 105, 2, 300, 98), 64, RULES)) == [100, 98, 105]
    assert lacks(choose(chunks(1, 100, 2, 300, 3), 64, RULES)) == [1, 2, 3]


@pytest.mark.parametrize("budget", [1, 99, 100, 350, 1000])
def test_a_batch_keeps_to_its_token_budget(budget: int) -> None:
    batch = choose(chunks(*[100] * 20), 64, RULES._replace(tokens=budget))
    assert len(batch) == max(1, budget // 100)


def test_a_batch_keeps_to_its_memory_of_keys_and_values() -> None:
    assert len(choose(chunks(*[1] * 20, held=99), 64, RULES._replace(kv_tokens=750))) == 7


def test_prompts_beyond_the_horizon_run_alone() -> None:
    rules = RULES._replace(horizon=50)
    assert lacks(choose(chunks(51, 51, 50, 50), 64, rules)) == [51]
    assert lacks(choose(chunks(50, 51, 50), 64, rules)) == [50, 50]


def test_prompts_of_like_lengths_do_not_give_way_to_each_other() -> None:
    rules = RULES._replace(chunk=100)
    many = chunks(*[90, 80, 70] * 5, 40)
    batch = choose(many, 4, rules)
    assert choose_shorter(batch, many, 4, rules) == {}
    alone = chunks(300, 90)
    assert choose_shorter(oldest(alone), alone, 4, rules) == {}
    much = chunks(300, 75, 70, 3)
    assert lacks(choose_shorter(oldest(much), much, 4, rules)) == [3]
