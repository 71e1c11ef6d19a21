"""Helpers for tests of the vllm backend with a small engine."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmpool.errors import SettingsError
from lmpool.protocol.job import digest_of
from lmpool.workers.backends.settings import VllmSettings
from lmpool.workers.backends.vllm.backend import VllmBackend
from lmpool.workers.execution.contract import BackendJob
from tests.contract.model import V, reference_row

SESSIONS = 4
KV_TOKENS = 512
BLOCK = 32
"""Tokens per block of keys and values on a CPU."""
BYTES_A_TOKEN = 2 * 2 * 2 * 32 * 4


def settings(folder: Path, **more: Any) -> VllmSettings:
    """Settings with limits so low that tests reach them."""
    given: dict[str, Any] = {
        "max_batch": 8,
        "max_batch_tokens": 64,
        "sessions": SESSIONS,
        "kv_cache_bytes": KV_TOKENS * BYTES_A_TOKEN,
    }
    return VllmSettings(str(folder), **(given | more))


def job(ids: list[int], name: str = "") -> BackendJob:
    """A job for a prompt."""
    data = np.asarray(ids, "<u4").tobytes()
    return BackendJob(digest_of(data, name), data)


def answer(backend: VllmBackend, *prompts: list[int]) -> None:
    """Run prompts, and check their rows against the reference rows."""
    jobs = {queued.digest: ids for queued, ids in ((job(ids), ids) for ids in prompts)}
    backend.submit(job(ids) for ids in prompts)
    while jobs:
        finished = backend.step()
        assert not finished.failures
        for block in finished.blocks:
            for digest, row in zip(block.digests, block.numbers, strict=True):
                assert np.abs(row - reference_row(jobs.pop(digest))).max() <= 3e-4


def draw(seed: int, length: int) -> list[int]:
    """A random prompt."""
    chosen_ids = random.Random(seed)
    return [chosen_ids.randrange(V) for _ in range(length)]


def refused(folder: Path, **more: Any) -> str:
    """The error message with which the backend refuses to start; it must be one line."""
    with pytest.raises(SettingsError) as caught:
        settings(folder, **more).open()
    assert "\n" not in str(caught.value)
    return str(caught.value)
