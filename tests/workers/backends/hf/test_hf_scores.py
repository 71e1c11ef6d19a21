"""The hf backend's scores of a prompt's own tokens, and its rows computed without the cache, equal transformers'."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lmpool.protocol.query import PositionsQuery
from lmpool.workers.backends.hf import backend as hf_backend
from lmpool.workers.backends.hf.backend import HfBackend
from lmpool.workers.backends.row_encoder import values_at_positions
from lmpool.workers.execution.contract import Finished
from tests.support.models.tiny_models import CONFIGS
from tests.workers.backends.hf.hf_tiny import Logprobs, Tiny, decode, drain, job, random_prompts, serve


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"))


def vectors_of(steps: Iterable[Finished]) -> dict[bytes, Logprobs]:
    """Digest of each prompt -> the vector that a step returned for it."""
    vectors: dict[bytes, Logprobs] = {}
    for answers in (step.answers for step in steps if step.answers):
        vectors.update(zip(answers.digests, answers.vectors, strict=True))
    return vectors


def limit_logits(backend: HfBackend, positions: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the backend compute the logits of few positions at once; returns the list of the numbers of positions."""
    monkeypatch.setattr(hf_backend, "MAX_LOGITS", positions * backend.info.vocab_size)
    backend._rules = backend._rules._replace(logits=positions)
    seen = list[int]()
    at_positions = values_at_positions

    def note(states: Tensor, *more: Any) -> Logprobs | None:
        seen.append(len(states))
        return at_positions(states, *more)

    monkeypatch.setattr(hf_backend, "values_at_positions", note)
    return seen


@pytest.mark.parametrize("logits", [7, 1 << 20])
@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_every_architecture_scores_at_once_or_a_part_at_a_time(
    tiny: Tiny, kind: str, logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = tiny.backend(kind)
    seen = limit_logits(backend, logits, monkeypatch)
    prompts, starts = random_prompts(3, (40, 50)), (2, 30, 1)
    jobs = [
        job(ids)._replace(positions=PositionsQuery.scores_from(start))
        for ids, start in zip(prompts, starts, strict=True)
    ]
    backend.submit(jobs)
    steps = drain(backend)
    assert max(seen) <= logits
    assert len(seen) > 7 if logits == 7 else len(steps) <= 4
    scores = vectors_of(steps)
    for scored, ids, start in zip(jobs, prompts, starts, strict=True):
        expected = [tiny.reference(kind).row(ids[:at])[ids[at]] for at in range(start, len(ids))]
        np.testing.assert_allclose(scores[scored.digest], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("logits", [7, 1 << 20])
@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_every_architecture_answers_for_every_position(
    tiny: Tiny, kind: str, logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = tiny.backend(kind)
    limit_logits(backend, logits, monkeypatch)
    prompts, starts = random_prompts(3, (40, 50)), (0, 30, 1)
    jobs = [job(ids)._replace(positions=PositionsQuery(start)) for ids, start in zip(prompts, starts, strict=True)]
    backend.submit(jobs)
    answers = vectors_of(drain(backend))
    for asked, ids, start in zip(jobs, prompts, starts, strict=True):
        expected = np.stack([tiny.reference(kind).row(ids[: at + 1]) for at in range(start, len(ids))])
        np.testing.assert_allclose(answers[asked.digest].reshape(expected.shape), expected, atol=1e-4, rtol=0)


def test_logits_that_are_no_distribution_score_nothing(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = tiny.backend()
    logits = HfBackend._logits
    monkeypatch.setattr(HfBackend, "_logits", lambda self, states: logits(self, states) * float("nan"))
    scored = job((1, 2, 3))._replace(positions=PositionsQuery.scores_from(1))
    backend.submit([scored])
    (finished,) = drain(backend)
    assert finished.failures == {scored.digest: "the model returned logits that are no distribution: NaN or infinite"}


def test_scores_that_ran_out_of_memory_are_computed_again(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def failing_once(states: Tensor, query: PositionsQuery, ids: bytes, begin: int) -> Logprobs | None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return found_by_model(states, query, ids, begin)

    found_by_model = values_at_positions
    monkeypatch.setattr(hf_backend, "values_at_positions", failing_once)
    backend = tiny.backend()
    prompts = random_prompts(3, (10, 10))
    jobs = [job(ids)._replace(positions=PositionsQuery.scores_from(4)) for ids in prompts]
    backend.submit(jobs)
    steps = drain(backend)
    assert not any(step.failures for step in steps)
    scores = vectors_of(steps)
    for scored, ids in zip(jobs, prompts, strict=True):
        expected = [tiny.reference("llama").row(ids[:at])[ids[at]] for at in range(4, 10)]
        np.testing.assert_allclose(scores[scored.digest], expected, atol=1e-4, rtol=0)


def test_a_fresh_row_neither_uses_nor_leaves_keys_and_values(tiny: Tiny) -> None:
    backend = tiny.backend()
    (prompt,) = random_prompts(1, (20, 20))
    serve(backend, [prompt])
    assert backend._pool is not None
    held = len(backend._pool.slots)
    with torch.inference_mode():
        backend._pool._storages[0].fill_(7.0)  # Spoil all cached keys and values: results that use them would be wrong.
    fresh = job(prompt)._replace(digest=b"f" * 16, fresh=True)
    backend.submit([fresh, job(prompt[:7])._replace(digest=b"g" * 16, fresh=True)])
    rows = {digest: row for step in drain(backend) for digest, row in decode(step.blocks).items()}
    tiny.reference("llama").check({prompt: rows[fresh.digest], prompt[:7]: rows[b"g" * 16]})
    assert len(backend._pool.slots) == held
