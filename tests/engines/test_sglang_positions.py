"""Positions queries of the sglang backend: computed in parts, with SGLang's prefix cache, and after errors."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lmpool.protocol.query import PositionsQuery
from lmpool.protocol.row import Row
from lmpool.workers.backends.output_head import OutputHead
from lmpool.workers.backends.sglang import engine, head
from lmpool.workers.execution.contract import BackendJob
from tests.contract.driver import Opened, prompt
from tests.contract.model import V, reference_rows, reference_states
from tests.contract.sglang_subject import SUBJECT
from tests.contract.subjects import MAX_BATCH_TOKENS

LONG = 3 * MAX_BATCH_TOKENS + 5
TARGETS = PositionsQuery(0, targets=np.arange(4, dtype="<u4").tobytes())
HIDDEN = PositionsQuery(2, values="hidden", size=128)
POSITIONS_AT_ONCE = 20
"""Number of positions whose logits the backend computes at once in these tests, less than a part of a prompt."""


@pytest.fixture(scope="module")
def driver(model_folder: Path) -> Iterator[Opened]:
    """One backend that tests share if they leave the backend usable."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "MAX_LOGITS", POSITIONS_AT_ONCE * V)
        with Opened(SUBJECT, model_folder, "float32", {}) as opened:
            yield opened


@pytest.fixture
def draw(request: pytest.FixtureRequest) -> random.Random:
    """Random numbers for prompts, different in each test."""
    return random.Random(request.node.name)


def positions_job(driver: Opened, ids: list[int], query: PositionsQuery) -> BackendJob:
    """A job with a positions query."""
    return driver.job(ids)._replace(positions=query)


def expected(ids: list[int], start: int = 0) -> Row:
    """The reference rows of a prompt's positions from `start` on, (n, V)."""
    return np.stack(reference_rows([ids[: at + 1] for at in range(start, len(ids))]))


def processor_of(driver: Opened) -> Any:
    """SGLang's module that computes logprobs of prompts."""
    return scheduler_of(driver).tp_worker.model_runner.model.logits_processor.input_logprob_processor


def scheduler_of(driver: Opened) -> Any:
    """The scheduler of SGLang inside the backend."""
    backend: Any = driver.backend
    return backend._engine.scheduler


def no_answer_is_open(driver: Opened) -> bool:
    """Whether no positions query is pending."""
    backend: Any = driver.backend
    return not (backend._engine._positions._open or backend._engine._owed)


def test_logits_in_parts_are_assembled(driver: Opened, draw: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    # Use a chunk size that divides neither the lengths of the prompts nor the chunks of the prefill.
    monkeypatch.setattr(processor_of(driver), "logprobs_chunk_size", 7)
    prompts = [prompt(draw, length) for length in (3, 12, LONG, 8, 19)]
    rows_of_prompts = driver.submit(prompts)
    for ids, rows in zip(prompts, driver.expect(prompts, PositionsQuery(2)), strict=True):
        np.testing.assert_allclose(rows, expected(ids, 2), atol=3e-4)
    driver.check(prompts, driver.finish(rows_of_prompts))
    assert no_answer_is_open(driver)


def test_a_part_has_at_most_the_logits_that_a_backend_may_hold(driver: Opened) -> None:
    assert processor_of(driver).logprobs_chunk_size == POSITIONS_AT_ONCE


def test_hidden_states_need_no_logits(driver: Opened, draw: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    logits_processor = scheduler_of(driver).tp_worker.model_runner.model.logits_processor
    monkeypatch.setattr(logits_processor, "_get_logits", None)
    prompts = [prompt(draw, length) for length in (9, LONG)]
    for ids, states in zip(prompts, driver.expect(prompts, HIDDEN), strict=True):
        np.testing.assert_allclose(states, reference_states(ids)[2:], atol=3e-4)
    assert no_answer_is_open(driver)


def test_one_forward_computes_hidden_states_and_values_of_logits(
    driver: Opened, draw: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor_of(driver), "logprobs_chunk_size", 7)
    prompts = [prompt(draw, length) for length in (12, 8, LONG, 19, 9)]
    queries = [HIDDEN, PositionsQuery(2), HIDDEN, PositionsQuery(2), HIDDEN]
    jobs = [positions_job(driver, ids, query) for ids, query in zip(prompts, queries, strict=True)]
    driver.backend.submit(jobs)
    driver.check([[1, 2, 3]], driver.ask([[1, 2, 3]]))
    while not all(job.digest in driver.scores for job in jobs):
        driver.step()
    for ids, query, job in zip(prompts, queries, jobs, strict=True):
        right = reference_states(ids)[2:] if query is HIDDEN else expected(ids, 2)
        np.testing.assert_allclose(driver.scores[job.digest], right.ravel(), atol=3e-4)


def test_a_head_that_does_not_give_the_logits_is_not_served(
    driver: Opened, draw: random.Random, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found, model = scheduler_of(driver).output_head, scheduler_of(driver).model_config
    logits_processor = scheduler_of(driver).tp_worker.model_runner.model.logits_processor
    caplog.set_level("INFO", head.__name__)

    def without_cap(*facts: Any) -> OutputHead:
        return replace(OutputHead(*facts), soft_cap=None)

    # SGLang multiplies by the scale before it applies the cap, as clients do.
    monkeypatch.setattr(logits_processor, "logit_scale", 0.5)
    monkeypatch.setattr(logits_processor, "final_logit_softcapping", 3.0)
    for wrong, message in (
        ({}, ""),
        ({"OutputHead": without_cap}, "the head does not give the model's logits"),
        ({"VocabParallelEmbedding": torch.nn.Linear}, "the model has no plain linear head"),
        ({"dtype": torch.bfloat16}, "the model has no plain linear head"),
    ):
        caplog.clear()
        with monkeypatch.context() as changed:
            for name, value in wrong.items():
                changed.setattr(model if name == "dtype" else head, name, value)
            # The next forward checks the head as the first one does.
            found.part, found._is_checked = None, False
            driver.ask([prompt(draw, 9)])
        assert (found.part is None) == bool(message)
        assert caplog.messages == [f"{message}: its hidden states are not served"][: len(wrong)]
    found._is_checked = False


def test_the_radix_cache_is_read_up_to_the_first_wanted_position(driver: Opened, draw: random.Random) -> None:
    ids = prompt(draw, 60)
    driver.ask([ids])
    before = driver.backend.stats().reused
    (rows,) = driver.expect([ids], PositionsQuery(41))
    np.testing.assert_allclose(rows, expected(ids, 41), atol=3e-4)
    assert driver.backend.stats().reused - before == 41


def test_a_prompt_dropped_during_its_computation_leaves_no_state(driver: Opened, draw: random.Random) -> None:
    dropped, kept = (positions_job(driver, prompt(draw, LONG), TARGETS) for _ in range(2))
    driver.backend.submit([dropped, kept])
    driver.step()
    driver.backend.abort([dropped.digest])
    while kept.digest not in driver.scores:
        driver.step()
    ids = np.frombuffer(kept.ids, "<u4").tolist()
    np.testing.assert_allclose(driver.scores[kept.digest].reshape(-1, 4), expected(ids)[:, :4], atol=3e-4)
    driver.ask([prompt(draw, 5)])
    assert dropped.digest not in driver.scores
    assert no_answer_is_open(driver)


def test_positions_that_have_no_distribution_fail_their_prompt_alone(
    driver: Opened, draw: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits_processor = scheduler_of(driver).tp_worker.model_runner.model.logits_processor
    compute, calls = logits_processor._get_logits, list[int]()

    def break_one(*arguments: Any, **named: Any) -> torch.Tensor:
        logits: torch.Tensor = compute(*arguments, **named)
        if not calls:
            logits[2, 5] = float("nan")
        calls.append(len(logits))
        return logits

    monkeypatch.setattr(logits_processor, "_get_logits", break_one)
    broken, sound = (
        positions_job(driver, prompt(draw, LONG), PositionsQuery(0, 5)),
        positions_job(driver, prompt(draw, 9), TARGETS),
    )
    driver.backend.submit([broken, sound])
    while len(calls) < 2 or not (driver.failures and sound.digest in driver.scores):
        driver.step()
    message = "the model returned logits that are no distribution: NaN or infinite"
    assert driver.failures.pop(broken.digest) == message
    assert not driver.failures
    assert no_answer_is_open(driver)


def test_a_refused_prompt_leaves_no_state(driver: Opened, draw: random.Random) -> None:
    length = driver.backend.info.max_prompt_tokens + 1
    data = np.asarray(prompt(draw, length), "<u4").tobytes()
    long = BackendJob(bytes(16), data, positions=TARGETS)
    driver.backend.submit([long])
    while not driver.failures:
        driver.step()
    assert "SGLang refuses the prompt" in driver.failures.pop(long.digest)
    assert no_answer_is_open(driver)
