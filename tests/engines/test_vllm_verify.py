"""A vLLM worker with --verify finds rows that vLLM computes wrongly, and that agree with each other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from vllm.lora.peft_helper import PEFTHelper

from lmpool.errors import SettingsError
from lmpool.workers.backends.vllm import engine
from tests.contract.model import write_adapter, write_model, write_reference
from tests.engines.vllm_small import settings


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """An adapter whose scale is lora_alpha / sqrt(r)."""
    return write_adapter(tmp_path / "rslora", "rslora")


@pytest.fixture
def folder(tmp_path: Path, adapter: Path) -> Path:
    """A model with a stored reference."""
    folder = write_model(tmp_path / "llama")
    write_reference(folder, {"": None, "rslora": adapter})
    return folder


def test_keys_and_values_of_eight_bits_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_NARROW_KV", re.compile("none"))  # On a CPU, workers refuse the option otherwise.
    narrow = settings(folder, dtype="bfloat16", verify=True, engine_args=["kv_cache_dtype=fp8"], sessions=0)
    has_kernel = torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()
    found = r"llama cannot be served by vllm: a row of \d+ tokens differs from transformers"
    with pytest.raises(SettingsError, match=found if has_kernel else r"cannot load .*: FP8 KV cache on CPU requires"):
        narrow.open()


def test_an_adapter_whose_scale_vllm_ignores_is_found(
    folder: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PEFTHelper, "_scaling", lambda self, rank, alpha: alpha / rank)
    with pytest.raises(SettingsError, match=r"a row of \d+ tokens with the adapter 'rs' differs from transformers"):
        settings(folder, verify=True, adapters=[f"rs={adapter}"]).open()
