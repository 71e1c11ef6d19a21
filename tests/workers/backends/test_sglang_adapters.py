"""The copy of an adapter that the backend of SGLang makes: SGLang can compute its rows, or the adapter is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lmpool.errors import SettingsError
from lmpool.workers.backends.sglang.backend import plain_adapter

LAYER = "model.layers.0"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of a checkpoint with the modules of Llama in layer 0, and an MLP without gate in layer 1."""
    names = [f"{LAYER}.self_attn.{part}_proj" for part in "qkv"] + [
        f"{LAYER}.mlp.{part}_proj" for part in ("gate", "up")
    ]
    tensors = {f"{name}.weight": torch.zeros(6, 4) for name in (*names, "model.layers.1.mlp.up_proj")}
    (tmp_path / "model").mkdir()
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    return tmp_path / "model"


def write(folder: Path, *modules: str) -> Path:
    folder.mkdir()
    shapes = {"lora_A": (2, 4), "lora_B": (6, 2)}
    tensors = {
        f"base_model.model.{name}.{factor}.weight": torch.ones(shape)
        for name in modules
        for factor, shape in shapes.items()
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 4}))
    return folder


def test_an_adapter_of_the_up_projection_alone_gets_a_gate_of_zeros(model: Path, tmp_path: Path) -> None:
    up, other = f"{LAYER}.mlp.up_proj", "model.layers.1.mlp.up_proj"
    tensors, config = plain_adapter(write(tmp_path / "a", up, other), model)
    gate = f"base_model.model.{LAYER}.mlp.gate_proj"
    assert {name.partition(".lora_")[0] for name in tensors} == {gate, *(f"base_model.model.{n}" for n in (up, other))}
    assert config["target_modules"] == ["gate_proj", "up_proj"]
    for factor in "AB":
        added = tensors[f"{gate}.lora_{factor}.weight"]
        assert torch.equal(added, torch.zeros_like(tensors[f"base_model.model.{up}.lora_{factor}.weight"]))


@pytest.mark.parametrize("part", ["k_proj", "v_proj"])
def test_an_adapter_of_keys_or_values_without_queries_is_refused(model: Path, tmp_path: Path, part: str) -> None:
    name = f"{LAYER}.self_attn.{part}"
    with pytest.raises(
        SettingsError, match=rf"^adapters: .*a has weights for .*{name} and none for .*q_proj, which SGL"
    ):
        plain_adapter(write(tmp_path / "a", name), model)
    plain_adapter(write(tmp_path / "b", name, f"{LAYER}.self_attn.q_proj"), model)
