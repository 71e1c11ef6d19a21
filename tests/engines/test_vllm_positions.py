"""Positions queries of the vllm backend: with adapters of the output head, computed in parts, and next to rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from vllm.config import KVTransferConfig
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from lmpool.errors import WorkerError
from lmpool.protocol.adapter import name_of
from lmpool.protocol.query import PositionsQuery
from lmpool.protocol.row import Row
from lmpool.workers.backends.vllm import head
from lmpool.workers.backends.vllm.backend import VllmBackend
from lmpool.workers.backends.vllm.capture import PositionCapture
from lmpool.workers.backends.vllm.head import HeadPart
from lmpool.workers.execution.contract import BackendJob, Finished
from tests.contract.model import RANK, V, reference_row, reference_rows
from tests.engines.vllm_small import BLOCK, answer, draw, job, settings

HIDDEN = 128


@pytest.fixture(scope="module")
def backend(
    model_folder: Path, adapter_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmBackend]:
    """A small backend with an adapter of the attention and an adapter of the output head."""
    head = tmp_path_factory.mktemp("adapter") / "head"
    head.mkdir()
    draws = torch.Generator().manual_seed(7)
    factors = {
        "lora_A": torch.randn(RANK, HIDDEN, generator=draws) * 0.2,
        "lora_B": torch.randn(V, RANK, generator=draws) * 0.2,
    }
    save_file(
        {f"base_model.model.lm_head.{name}.weight": factor for name, factor in factors.items()},
        head / "adapter_model.safetensors",
    )
    config = json.loads((adapter_folder / "adapter_config.json").read_text()) | {"target_modules": ["lm_head"]}
    (head / "adapter_config.json").write_text(json.dumps(config))
    made = settings(model_folder, adapters=[f"warm={adapter_folder}", f"head={head}"]).open()
    assert isinstance(made, VllmBackend)
    yield made
    made.close()


def positions(ids: list[int], query: PositionsQuery, adapter: str = "") -> BackendJob:
    """A job with a positions query."""
    return job(ids, f"{query} {adapter}")._replace(positions=query, adapter=adapter)


def finish(backend: VllmBackend, jobs: list[BackendJob]) -> tuple[dict[bytes, NDArray[np.float32]], dict[bytes, str]]:
    """Run jobs; returns digest -> row or values, and digest -> message of failures."""
    backend.submit(jobs)
    answers: dict[bytes, NDArray[np.float32]] = {}
    failures: dict[bytes, str] = {}
    while len(answers) + len(failures) < len(jobs):
        finished: Finished = backend.step()
        failures |= finished.failures
        for block in finished.blocks:
            answers.update(zip(block.digests, block.numbers, strict=True))
        if finished.answers is not None:
            answers.update(zip(finished.answers.digests, finished.answers.vectors, strict=True))
    assert no_answer_is_open(backend)
    return answers, failures


def no_answer_is_open(backend: VllmBackend) -> bool:
    """Whether no positions query is pending."""
    capture: Any = backend._engine.positions
    return not (capture._open or backend._requests)


def expected(ids: list[int], start: int = 0) -> Row:
    """The reference rows of a prompt's positions from `start` on, (n, V)."""
    return np.stack(reference_rows([ids[: at + 1] for at in range(start, len(ids))]))


def test_each_prompt_of_a_batch_has_the_head_of_its_adapter(backend: VllmBackend) -> None:
    by_name = {name_of(adapter): adapter for adapter in backend.adapters}
    prompts = [draw(10 + at, 9 + at) for at in range(6)]
    adapters = [by_name.get(name, "") for name in ("head", "", "warm", "head", "", "warm")]
    jobs = [positions(ids, PositionsQuery(0), adapter) for ids, adapter in zip(prompts, adapters, strict=True)]
    answers, _ = finish(backend, jobs)
    for asked, ids in zip(jobs, prompts, strict=True):
        prefixes = [job(ids[:end], f"row {end}")._replace(adapter=asked.adapter) for end in range(1, len(ids) + 1)]
        rows, _ = finish(backend, prefixes)
        same = np.stack([rows[prefix.digest] for prefix in prefixes])
        np.testing.assert_allclose(answers[asked.digest].reshape(len(ids), V), same, atol=3e-4)
        assert (np.abs(same - expected(ids)).max() > 0.1) == bool(asked.adapter)


def test_cached_tokens_are_used_up_to_the_first_wanted_position(backend: VllmBackend) -> None:
    ids, start = draw(20, 150), 2 * BLOCK + 7
    answer(backend, ids)
    before = backend.stats().reused
    answers, _ = finish(backend, [asked := positions(ids, PositionsQuery(start))])
    np.testing.assert_allclose(answers[asked.digest].reshape(-1, V), expected(ids, start), atol=3e-4)
    assert backend.stats().reused - before == 2 * BLOCK


def test_long_prompts_are_scored_in_parts_together_with_rows(backend: VllmBackend) -> None:
    lengths, starts = (15, 30, 45, 60, 75, 150), (1, 20, 44, 7, 70, 1)
    prompts = [draw(50 + length, length) for length in lengths]
    for _ in range(2):  # In the second round the prefix cache holds the prompts, but scored positions must be computed.
        rows = [job(ids) for ids in prompts]
        jobs = [positions(ids, PositionsQuery.scores_from(at)) for ids, at in zip(prompts, starts, strict=True)]
        answers, failures = finish(backend, [queued for pair in zip(jobs, rows, strict=True) for queued in pair])
        assert not failures
        for scored, row, ids, start in zip(jobs, rows, prompts, starts, strict=True):
            references = reference_rows([ids[:at] for at in range(start, len(ids))])
            entries = [reference[token] for reference, token in zip(references, ids[start:], strict=True)]
            np.testing.assert_allclose(answers[scored.digest], entries, atol=3e-4)
            np.testing.assert_allclose(answers[row.digest], reference_row(ids), atol=3e-4)


@pytest.mark.parametrize("is_cached", [True, False], ids=["continued", "restarted"])
def test_a_preempted_prompt_gets_a_complete_answer(
    backend: VllmBackend, monkeypatch: pytest.MonkeyPatch, is_cached: bool
) -> None:
    query = PositionsQuery(3, targets=np.arange(4, dtype="<u4").tobytes())
    asked = positions(ids := draw(30 + is_cached, 150), query)._replace(fresh=not is_cached)
    manager: Any = backend._scheduler.kv_cache_manager
    allocate = manager.allocate_slots
    refused: list[Any] = []
    computed_at: list[int] = []

    def refuse_once(request: Any, *more: Any, **named: Any) -> Any:
        computed_at.append(request.num_computed_tokens)
        if request.num_computed_tokens and not refused:
            refused.append(request)
            return None
        return allocate(request, *more, **named)

    monkeypatch.setattr(manager, "allocate_slots", refuse_once)
    answers, _ = finish(backend, [asked])
    assert [request.num_preemptions for request in refused] == [1]
    assert computed_at[1] > 0, "a part was computed when it lost its memory"
    np.testing.assert_allclose(answers[asked.digest].reshape(-1, 4), expected(ids, 3)[:, :4], atol=3e-4)


def test_a_prompt_dropped_during_its_computation_leaves_no_state(backend: VllmBackend) -> None:
    scored = positions(ids := draw(58, 150), PositionsQuery.scores_from(3))
    backend.submit([scored])
    backend.step()
    backend.abort([scored.digest])
    answer(backend, ids)
    assert no_answer_is_open(backend)


def test_positions_that_have_no_distribution_fail_their_prompt_alone(
    backend: VllmBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture: Any = backend._engine.positions
    compute = capture._logits
    calls: list[int] = []

    def break_one(hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = compute(hidden)
        if not calls:
            logits[2, 5] = float("nan")
        calls.append(len(hidden))
        return logits

    monkeypatch.setattr(capture, "_logits", break_one)
    jobs = [positions(draw(40 + length, length), PositionsQuery(0, 5)) for length in (100, 20)]
    answers, failures = finish(backend, jobs)
    assert failures == {jobs[0].digest: "the model returned logits that are no distribution: NaN or infinite"}
    assert [*answers] == [jobs[1].digest]
    assert len(calls) > 1, "only a part of the long prompt was broken"


def test_logits_of_another_shape_are_refused(backend: VllmBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    capture: Any = backend._engine.positions
    monkeypatch.setattr(capture._runner.model, "compute_logits", lambda hidden: torch.zeros(len(hidden), V - 1))
    with pytest.raises(WorkerError, match=rf"logits of shape \(2, {V - 1}\) for 2 positions and V = {V}"):
        capture._logits(torch.zeros(2, HIDDEN))


def test_hidden_states_need_no_logits(backend: VllmBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(PositionCapture, "_logits")
    hidden = PositionsQuery(3, values="hidden", size=HIDDEN)
    jobs = [positions(ids := draw(90, 100), hidden, adapter) for adapter in ("", *backend.adapters)]
    answers, failures = finish(backend, jobs)
    assert not failures
    assert {answer.shape for answer in answers.values()} == {((len(ids) - 3) * HIDDEN,)}


def test_a_rank_whose_answers_are_not_used_computes_no_values() -> None:
    capture = PositionCapture(V, int, is_output=False)
    capture.open("1", positions(draw(91, 9), PositionsQuery(2, values="hidden", size=HIDDEN)))
    capture._lora_head = None
    capture._add_all(torch.zeros(9, HIDDEN), capture.wanted("1", range(9), 0))
    assert not capture.wanted("1", range(9), 0)
    assert isinstance(capture.take("1"), str)


@pytest.mark.parametrize(
    ("processor", "plain", "reason"),
    [
        # vLLM applies the cap before the scale, and clients after the scale.
        ({"scale": 0.5, "soft_cap": 0.1}, None, "the head does not give the model's logits"),
        ({"head_dtype": torch.bfloat16}, None, "the model has no plain linear head in its own dtype"),
        # The head's own method counts as a method of quantised weights.
        ({}, UnquantizedLinearMethod, "the model has no plain linear head in its own dtype"),
    ],
)
def test_the_head_is_served_only_if_clients_can_compute_the_logits(
    backend: VllmBackend, monkeypatch: pytest.MonkeyPatch, processor: dict[str, Any], plain: Any, reason: str
) -> None:
    capture: Any = backend._engine.positions
    assert isinstance(capture.find_head(), HeadPart)
    model = capture._runner.model
    for name, changed in processor.items():
        monkeypatch.setattr(model.logits_processor.base_layer, name, changed)
    if plain is not None:
        monkeypatch.setattr(head, "UnquantizedEmbeddingMethod", plain)
    assert capture.find_head() == reason


def test_an_end_without_all_positions_breaks_the_backend(backend: VllmBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = positions(draw(60, 10), PositionsQuery(4))
    backend.submit([asked])
    name = backend._held[asked.digest]
    ended = EngineCoreOutput(name, [1], finish_reason=FinishReason.LENGTH)
    monkeypatch.setattr(backend._core, "get_output", lambda: EngineCoreOutputs(outputs=[ended]))
    with pytest.raises(WorkerError, match="has ended a prompt without position 4"):
        backend.step()
    backend._core.abort_requests([name])


@pytest.mark.parametrize(
    ("part", "option", "value"),
    [("cache_config", "kv_sharing_fast_prefill", True), (None, "kv_transfer_config", KVTransferConfig())],
)
def test_options_that_skip_positions_switch_the_capture_off(
    backend: VllmBackend, monkeypatch: pytest.MonkeyPatch, part: str | None, option: str, value: object
) -> None:
    config = backend._engine.config
    monkeypatch.setattr(getattr(config, part) if part else config, option, value)
    assert not backend._engine.capture_positions()


def test_another_structure_of_vllm_switches_the_capture_off(
    backend: VllmBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    core: Any = backend._core.engine_core
    manager = core.scheduler.kv_cache_manager
    monkeypatch.delattr(manager, "get_computed_blocks")
    monkeypatch.delattr(type(manager), "get_computed_blocks")
    with caplog.at_level("WARNING"):
        assert not backend._engine.capture_positions()
    assert "values at positions are computed as rows" in caplog.text
    monkeypatch.undo()
    finish(backend, [positions(draw(80, 20), PositionsQuery(3))])
