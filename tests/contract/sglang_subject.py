"""The sglang backend as a subject of the contract tests; on a CPU, stubs replace SGLang's GPU packages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lmpool.workers.backends.settings import SglangSettings
from lmpool.workers.execution.contract import Backend
from tests.contract.subjects import DEVICE, KV_TOKENS, MAX_BATCH, MAX_BATCH_TOKENS, Subject, as_options
from tests.engines.newest import accept
from tests.engines.sglang_cpu.shim import install
from tests.support.pool import lmpool_command

if DEVICE == "cpu":
    install()
accept()


def settings_of(folder: Path, dtype: str, adapters: dict[str, Path], ranks: int = 1) -> dict[str, Any]:
    """Settings with limits so low that the tests reach them all. `ranks`: processes that the model is spread over."""
    return {
        "model": str(folder),
        "device": DEVICE,
        "dtype": dtype,
        "max_batch": MAX_BATCH,
        "max_batch_tokens": MAX_BATCH_TOKENS,
        # A token takes two layers, each with two heads of 32 keys and 32 values, times the bytes of the dtype. Each
        # rank has its share of the heads.
        "kv_cache_bytes": KV_TOKENS * 2 * 2 * 2 * 32 * (4 if dtype == "float32" else 2) // ranks,
        "tensor_parallel_size": ranks,
        "max_adapters": 2 * ranks,
        "adapters": [f"{name}={place}" for name, place in adapters.items()],
    }


def _make(folder: Path, dtype: str, adapters: dict[str, Path], ranks: int = 1) -> Backend:
    return SglangSettings(**settings_of(folder, dtype, adapters, ranks), verify=True).open()


def _options(folder: Path, adapters: dict[str, Path], ranks: int = 1) -> list[str]:
    settings = settings_of(folder, "float32", adapters, ranks)
    named = [text for pair in settings.pop("adapters") for text in ("--adapters", pair)]
    return [*as_options(settings), "--verify", *named]


@contextmanager
def _spy(backend: Backend) -> Iterator[list[torch.Tensor]]:
    from lmpool.workers.backends.sglang.backend import SglangBackend

    assert isinstance(backend, SglangBackend)
    scheduler: Any = backend._engine.scheduler
    seen: list[torch.Tensor] = []

    def record(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        seen.append(output.next_token_logits.cpu().clone())

    handle = scheduler.tp_worker.model_runner.model.logits_processor.register_forward_hook(record)
    try:
        yield seen
    finally:
        handle.remove()


def _command() -> list[str]:
    return [sys.executable, "-m", "tests.engines.sglang_cpu"] if DEVICE == "cpu" else lmpool_command()


SUBJECT = Subject(
    "sglang", _make, _options, spy=_spy, has_adapters=True, loads_adapters=True, positions=True, has_hidden=True,
    command=_command, refused={
        "head": "has weights for the head, lm_head, which SGLang cannot serve",
        "values": "has weights for base_model.model.model.layers.0.self_attn.v_proj and none for",
    },
)  # fmt: skip
TENSOR_PARALLEL = replace(SUBJECT, make=partial(_make, ranks=2), options=partial(_options, ranks=2), processes=2)
