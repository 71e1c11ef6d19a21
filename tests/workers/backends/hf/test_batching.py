"""How the hf backend chooses the prompts that run together in one forward."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from lmpool.protocol.job import digest_of
from lmpool.workers.backends.hf import batching
from lmpool.workers.backends.hf.batching import (
    BatchLimit,
    BatchRules,
    BulkLimit,
    PromptChunk,
    choose,
    choose_shorter,
    shared_prefix,
)
from lmpool.workers.execution.yielding import PATIENCE_STEPS, QUIET_S


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


def chunks(*news: int, held: int = 0) -> dict[bytes, PromptChunk]:
    """Chunks of prompts that share no prefix, one chunk for each number of uncached tokens in `news`."""
    waiting = {}
    for row, new in enumerate(news):
        ids = np.full(held + new, row, "<u4").tobytes()
        path = array("q", range(1, held + 1))
        waiting[digest_of(bytes([row]))] = PromptChunk(held + new, path, shared=shared_prefix(ids, held + new, held))
    return waiting


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock in seconds that the test sets, and that `BulkLimit` reads."""
    now = [1000.0]
    monkeypatch.setattr(batching, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def run_bulk(limit: BulkLimit, seconds: Callable[[int], float], steps: int = 60) -> int:
    """Record bulk steps that take `seconds(number of tokens)`; returns the limit of tokens after the last step."""
    for _ in range(steps):
        limit.bulk_step(limit.tokens, seconds(limit.tokens))
    return limit.tokens


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("per_token_s", [1e-5, 1e-3, 1e-2])
def test_steps_of_bulk_prompts_alone_take_a_second_at_most(per_token_s: float) -> None:
    limit = BulkLimit(chunk=512, least=16, most=8192)
    tokens = run_bulk(limit, lambda tokens: 0.02 + per_token_s * tokens)
    assert tokens <= 8192
    assert tokens == 8192 or 0.6 < 0.02 + per_token_s * tokens < 1.5


def test_steps_of_bulk_prompts_next_to_interactive_clients_take_as_long_as_theirs(clock: list[float]) -> None:
    limit = BulkLimit(chunk=512, least=16, most=8192)
    before = limit.tokens
    for _ in range(40):
        limit.interactive_step(0.1)
    assert 30 <= run_bulk(limit, lambda tokens: 0.05 + 1e-3 * tokens) <= 70
    clock[0] += QUIET_S + 1
    assert limit.tokens == before, "what was found for steps alone"


@pytest.mark.usefixtures("clock")
def test_a_step_of_bulk_prompts_always_computes_some_tokens() -> None:
    limit = BulkLimit(chunk=512, least=16, most=8192)
    limit.interactive_step(0.001)
    assert limit.tokens == 64
    assert run_bulk(limit, lambda tokens: 5.0) == 16
    limit.bulk_step(1, 0.0001)
    assert limit.tokens == 16, "a step that little waited for says nothing"


@pytest.mark.usefixtures("clock")
def test_a_step_of_bulk_prompts_stays_large_where_a_small_one_takes_as_long() -> None:
    """On an accelerator, bulk steps of few and of many tokens take equally long: the limit stays at its minimum."""
    limit = BulkLimit(chunk=2048, least=256, most=8192)
    for _ in range(40):
        limit.interactive_step(0.02)
    assert run_bulk(limit, lambda tokens: 0.025 + 1e-6 * tokens) == 256


def test_bulk_prompts_have_a_step_after_some_of_others() -> None:
    limit = BulkLimit(chunk=512, least=16, most=8192)
    assert limit.is_turn(others_wait=False)
    turns = [limit.is_turn(others_wait=True) for _ in range(2 * PATIENCE_STEPS + 2)]
    assert turns == [*[False] * PATIENCE_STEPS, True] * 2


RULES = BatchRules(tokens=1000, logits=1000, kv_tokens=10_000, pads=True, horizon=5000, chunk=1000, shares=True)


def lacks(batch: Mapping[bytes, PromptChunk]) -> list[int]:
    return [chunk.new for chunk in batch.values()]


def oldest(waiting: Mapping[bytes, PromptChunk]) -> dict[bytes, PromptChunk]:
    return dict([next(iter(waiting.items()))])


def test_a_batch_has_prompts_of_similar_lengths() -> None:
    assert lacks(choose(chunks(100, 1, 105, 2, 300, 98), 64, RULES)) == [100, 98, 105]
    assert lacks(choose(chunks(1, 100, 2, 300, 3), 64, RULES)) == [1, 2, 3]


@pytest.mark.parametrize("budget", [1, 99, 100, 350, 1000])
def test_a_batch_keeps_to_its_token_budget(budget: int) -> None:
    batch = choose(chunks(*[100] * 20), 64, RULES._replace(tokens=budget))
    assert len(batch) == max(1, budget // 100)


@pytest.mark.parametrize(("kind", "size"), [("vector", 3), ("states", 8)])
def test_a_batch_keeps_to_its_number_of_logits_which_hidden_states_do_not_need(kind: str, size: int) -> None:
    waiting = {digest: replace(chunk, kept=100, kind=kind) for digest, chunk in chunks(*[100] * 8).items()}
    assert len(choose(waiting, 64, RULES._replace(logits=350))) == size


def test_a_batch_keeps_to_its_memory_of_keys_and_values() -> None:
    assert len(choose(chunks(*[1] * 20, held=99), 64, RULES._replace(kv_tokens=750))) == 7


def test_prompts_beyond_the_horizon_run_alone() -> None:
    rules = RULES._replace(horizon=50)
    assert lacks(choose(chunks(51, 51, 50, 50), 64, rules)) == [51]
    assert lacks(choose(chunks(50, 51, 50), 64, rules)) == [50, 50]


def test_prompts_of_similar_lengths_do_not_yield_to_each_other() -> None:
    rules = RULES._replace(chunk=100)
    many = chunks(*[90, 80, 70] * 5, 40)
    batch = choose(many, 4, rules)
    assert choose_shorter(batch, many, 4, rules) == {}
    alone = chunks(300, 90)
    assert choose_shorter(oldest(alone), alone, 4, rules) == {}
    much = chunks(300, 75, 70, 3)
    assert lacks(choose_shorter(oldest(much), much, 4, rules)) == [3]
