"""A model that SGLang spreads over two processes: a worker and its follower end together."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lmpool.errors import SettingsError
from lmpool.workers.backends.settings import SglangSettings
from lmpool.workers.backends.sglang import backend
from tests.contract.sglang_subject import TENSOR_PARALLEL, settings_of
from tests.engines.spread import check_ctrl_c, start
from tests.support.pool import Pool


async def test_ctrl_c_lets_all_processes_finish_their_prompts(model_folder: Path, pool: Pool) -> None:
    await check_ctrl_c(pool, TENSOR_PARALLEL, start(pool, TENSOR_PARALLEL, model_folder))


def test_a_process_that_cannot_load_its_part_fails_the_start_in_one_line(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = "from lmpool.workers.backends.ranks import following\nwith following(): raise RuntimeError('no device 1')"
    monkeypatch.setattr(backend, "FOLLOWER", [sys.executable, "-c", lost])
    with pytest.raises(SettingsError) as caught:
        SglangSettings(**settings_of(model_folder, "float32", {}, ranks=2)).open()
    reason = "rank 1 of the model has failed: no device 1"
    assert str(caught.value).endswith(f"cannot serve {model_folder}: {reason}")
