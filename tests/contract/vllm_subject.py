"""The vllm backend as a subject of the contract tests."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lmpool.workers.backends.settings import VllmSettings
from lmpool.workers.execution.contract import Backend
from tests.contract.subjects import KV_TOKENS, MAX_BATCH, MAX_BATCH_TOKENS, Subject, as_options, recorded
from tests.engines.newest import WANTED, accept
from tests.support.pool import lmpool_command

accept()


def _settings(folder: Path, dtype: str, adapters: dict[str, Path], tensor: int, pipeline: int) -> dict[str, Any]:
    # Each rank has its own memory for keys and values: of some heads, or of some layers.
    kv_bytes = KV_TOKENS * 2 * 2 * 2 * 32 * (4 if dtype == "float32" else 2) // (tensor * pipeline)
    config = folder / "config.json"  # A GGUF file has none.
    return {
        "model": str(folder),
        "dtype": dtype,
        "max_batch": MAX_BATCH,
        "max_batch_tokens": MAX_BATCH_TOKENS,
        "kv_cache_bytes": kv_bytes,
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": pipeline,
        "sessions": MAX_BATCH,
        # vLLM has no adapters of GPT-2, and none of experts on a CPU.
        "max_adapters": 0 if config.is_file() and re.search("GPT2|Moe", config.read_text()) else 2 * tensor * pipeline,
        "adapters": [f"{name}={place}" for name, place in adapters.items()],
    }


@contextmanager
def _spy(backend: Backend) -> Iterator[list[torch.Tensor]]:
    from lmpool.workers.backends.vllm.backend import VllmBackend

    assert isinstance(backend, VllmBackend)
    executor: Any = backend._core.engine_core.model_executor
    model = executor.driver_worker.worker.model_runner.get_model()
    with recorded(model.logits_processor) as seen:
        yield seen


def _command() -> list[str]:
    return [sys.executable, "-m", "tests.engines.newest"] if WANTED else lmpool_command()


def _subject(tensor: int, pipeline: int) -> Subject:
    def make(folder: Path, dtype: str, adapters: dict[str, Path]) -> Backend:
        return VllmSettings(**_settings(folder, dtype, adapters, tensor, pipeline), verify=True).open()

    def options(folder: Path, adapters: dict[str, Path]) -> list[str]:
        settings = _settings(folder, "float32", adapters, tensor, pipeline)
        named = [text for pair in settings.pop("adapters") for text in ("--adapters", pair)]
        return [*as_options(settings), "--verify", *named]

    return Subject(
        "vllm", make, options, spy=_spy if tensor * pipeline == 1 else None, has_adapters=True, loads_adapters=True,
        positions=True, has_hidden=True, command=_command, processes=tensor * pipeline,
    )  # fmt: skip


SUBJECT = _subject(1, 1)
TENSOR_PARALLEL = _subject(2, 1)
PIPELINE_PARALLEL = _subject(1, 2)
