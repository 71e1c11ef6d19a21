"""The vllm backend with very little memory for keys and values; each test starts its own engine."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from lmpool.workers.backends.vllm.backend import VllmBackend
from lmpool.workers.backends.vllm.capture import CaptureProcessor
from tests.contract.model import MAX_TOKENS
from tests.engines.vllm_small import BYTES_A_TOKEN, answer, draw, refused, settings


def test_sessions_that_all_need_one_more_block_do_not_stop_each_other(model_folder: Path) -> None:
    """vLLM's scheduler cannot preempt a session, not even to compute the next token of another session."""
    small = settings(model_folder, max_batch=12, sessions=12, kv_cache_bytes=320 * BYTES_A_TOKEN).open()
    assert isinstance(small, VllmBackend)
    try:
        contexts = [draw(seed, 30) for seed in range(70, 82)]
        for token in range(6):
            answer(small, *contexts, draw(90 + token, MAX_TOKENS - 1))
            contexts = [[*ids, token] for ids in contexts]
        assert len(small._scheduler.requests) == len(small._sessions)
    finally:
        small.close()


def test_preempted_sessions_are_not_kept(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A preempted session is in no queue of vLLM's scheduler, so a prompt that extends it would wait for ever."""
    made = settings(
        model_folder, max_batch=12, sessions=12, kv_cache_bytes=640 * BYTES_A_TOKEN,
        engine_args=["long_prefill_token_threshold=16"],
    ).open()  # fmt: skip
    assert isinstance(made, VllmBackend)
    try:
        scheduler: Any = made._scheduler
        preempt, preempted = scheduler._preempt_request, []

        def noted(*args: Any, **named: Any) -> None:
            preempted.append(args)
            preempt(*args, **named)

        monkeypatch.setattr(scheduler, "_preempt_request", noted)
        lengths = random.Random(11)
        contexts = [draw(seed, lengths.randrange(40, 120)) for seed in range(100, 112)]
        for token in range(5):
            long = [draw(200 + token, MAX_TOKENS - 1 - token)] if token % 3 == 0 else []
            answer(made, *contexts, *long)
            contexts = [[*ids, token] for ids in contexts]
        assert preempted
        assert len(made._scheduler.requests) == len(made._sessions)
    finally:
        made.close()


def test_prompts_and_sessions_share_the_slots(model_folder: Path) -> None:
    made = settings(model_folder, sessions=100, engine_args=["max_num_seqs=6"]).open()
    assert isinstance(made, VllmBackend)
    assert (made.batch, made._sessions._most) == (3, 3)
    made.close()
    made = settings(model_folder, max_batch=100, sessions=100, max_batch_tokens=16).open()
    assert made.batch == 8
    made.close()


def test_a_failing_first_forward_is_reported_in_one_line(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")

    monkeypatch.setattr(CaptureProcessor, "apply", fail)
    assert "cannot run" in refused(model_folder)
