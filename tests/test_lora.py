"""Adapters on disk: what fits a model is taken, what does not is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lmpool.errors import SettingsError
from lmpool.workers.backends.lora import check_adapter

MODULE = "layers.1.self_attn.q_proj"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint in two files."""
    folder = tmp_path / "model"
    folder.mkdir()
    for number in (1, 2):
        tensors = {f"model.layers.{number}.self_attn.{name}.weight": torch.zeros(2) for name in ("q_proj", "v_proj")}
        save_file(tensors, folder / f"model-{number}.safetensors", metadata={"format": "pt"})
    return folder


def adapter(folder: Path, *names: str) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    if names:
        save_file({name: torch.zeros(2) for name in names}, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("before", ["base_model.model.model.", "base_model.model.", "base_model.model.language_model."])
def test_an_adapter_fits_whatever_comes_before_the_layers(model: Path, tmp_path: Path, before: str) -> None:
    names = [f"{before}{MODULE}.lora_{factor}.weight" for factor in "AB"]
    check_adapter(adapter(tmp_path / "good", *names), model)


@pytest.mark.parametrize("module", ["layers.9.self_attn.q_proj", "layers.1.mlp.q_proj", "layers.1.self_attn.o_proj"])
def test_an_adapter_with_weights_that_have_no_place_is_refused(model: Path, tmp_path: Path, module: str) -> None:
    names = [f"base_model.model.model.{name}.lora_A.weight" for name in (MODULE, module)]
    with pytest.raises(SettingsError, match=rf"does not fit .*no place for base_model\.model\.model\.{module}$"):
        check_adapter(adapter(tmp_path / "bad", *names), model)


def test_a_folder_without_lora_weights_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no place for any LoRA weights"):
        check_adapter(adapter(tmp_path / "other", "base_model.model.score.weight"), model)
    with pytest.raises(SettingsError, match=r"holds no adapter_config\.json"):
        check_adapter(model, model)


def test_what_cannot_be_looked_into_is_left_to_the_engine(model: Path, tmp_path: Path) -> None:
    check_adapter(adapter(tmp_path / "bin"), model)
    (tmp_path / "pickled").mkdir()
    check_adapter(adapter(tmp_path / "good", f"{MODULE}.lora_A.weight"), tmp_path / "pickled")
    for nonsense in (b"", b"x", b"\xff" * 16, (5).to_bytes(8, "little") + b"12{3x"):
        (tmp_path / "pickled" / "model.safetensors").write_bytes(nonsense)
        check_adapter(tmp_path / "good", tmp_path / "pickled")
