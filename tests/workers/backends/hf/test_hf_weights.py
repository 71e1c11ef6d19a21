"""Weights that replace those of the hf backend: rows are bitwise those of a backend opened on the new checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MixtralConfig, RwkvConfig

from lmpool.errors import SettingsError
from lmpool.protocol.adapter import qualify
from lmpool.protocol.tensors import TIED_HEAD, read_types
from lmpool.workers.backends.hf import model as hf_model
from lmpool.workers.backends.hf.backend import HfBackend
from lmpool.workers.backends.hf.model import load_model
from lmpool.workers.backends.settings import HfSettings
from tests.support.models.tiny_models import CONFIGS, write_model
from tests.workers.backends.hf.hf_tiny import random_prompts, serve
from tests.workers.backends.hf.test_hf_adapters import ask, write_lora

PROMPTS = random_prompts(6, (1, 24))


def opened(folder: Path, **values: Any) -> HfBackend:
    return HfBackend(HfSettings(str(folder), device="cpu", **values))


def check_equal(backend: HfBackend, folder: Path, **values: Any) -> None:
    """Check that rows equal those of a new backend, and rows of prompts that are computed alone and grow."""
    fresh = opened(folder, **values)
    for prompts in (PROMPTS, *([PROMPTS[0] + (3,) * count] for count in range(1, 4))):
        rows, expected = serve(backend, prompts), serve(fresh, prompts)
        assert all(np.array_equal(rows[prompt], expected[prompt]) for prompt in expected)
    fresh.close()


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_bitwise_those_of_a_new_backend(tmp_path: Path, kind: str, dtype: str) -> None:
    # The files are in bfloat16, and the model computes in either dtype. Gemma's head is tied to its embedding.
    folders = [write_model(tmp_path / str(seed), kind, torch.bfloat16, seed=seed) for seed in (0, 1)]
    backend = opened(folders[0], dtype=dtype)
    assert backend.tensors() == read_types(folders[0])
    for folder in (folders[1], folders[0]):
        serve(backend, PROMPTS)
        serve(backend, [PROMPTS[0] + (3,)])
        backend.load_weights(folder, [], -1)
        check_equal(backend, folder, dtype=dtype)


def test_a_tied_head_in_the_new_files_is_ignored(tmp_path: Path) -> None:
    old, new = (write_model(tmp_path / str(seed), "gemma3", seed=seed) for seed in (0, 1))
    tensors = load_file(new / "model.safetensors")
    assert TIED_HEAD not in tensors
    save_file(tensors | {TIED_HEAD: tensors["model.embed_tokens.weight"].clone()}, tmp_path / "with-head")
    backend = opened(old)
    backend.load_weights(tmp_path / "with-head", [], -1)
    check_equal(backend, new)


def test_sparse_numbers_of_a_bfloat16_file_reach_a_float32_model(tmp_path: Path) -> None:
    old, new = (write_model(tmp_path / str(seed), "llama", torch.bfloat16) for seed in (0, 1))
    tensors, changed = load_file(new / "model.safetensors"), dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        indices = torch.arange(0, tensor.numel(), 7)
        tensor.view(-1)[indices] *= 2
        changed |= {f"{name}.indices": indices, f"{name}.values": tensor.view(-1)[indices]}
    save_file(tensors, new / "model.safetensors", {"format": "pt"})
    save_file(changed, tmp_path / "sparse")
    backend = opened(old, dtype="float32")
    backend.load_weights(old, [tmp_path / "sparse"], 0)
    check_equal(backend, new, dtype="float32")


@pytest.mark.parametrize("modules", [["q_proj", "v_proj"], ["embed_tokens", "lm_head", "up_proj"]])
def test_adapters_stay_loaded_on_the_new_weights(tmp_path: Path, modules: list[str]) -> None:
    old, new = (write_model(tmp_path / str(seed), "llama", seed=seed) for seed in (0, 1))
    lora = write_lora(tmp_path / "lora", 5, target_modules=modules)
    backend, fresh = opened(old), opened(new)
    # Leave out copies of the base weights, which fit one of the two models only.
    (file,) = lora.glob("*.safetensors")
    save_file({name: tensor for name, tensor in load_file(file).items() if "base_layer" not in name}, file)
    adapter = qualify("a", backend.load_adapter("a", str(lora)))
    assert qualify("a", fresh.load_adapter("a", str(lora))) == adapter
    asked = [([*ids], name) for ids in PROMPTS for name in (adapter, "")]
    before = ask(backend, asked)
    backend.load_weights(new, [], -1)
    assert backend.tensors() == read_types(new)
    for row, expected, earlier in zip(ask(backend, asked), ask(fresh, asked), before, strict=True):
        assert np.array_equal(row, expected)
        assert not np.allclose(row, earlier)
    backend.drop_adapter(adapter)
    assert backend.load_adapter("a", str(lora)) == adapter.partition("@")[2]


def test_weights_keep_their_memory(tmp_path: Path) -> None:
    old, new = (write_model(tmp_path / str(seed), "llama", seed=seed) for seed in (0, 1))
    backend = opened(old)
    addresses = [weight.data_ptr() for weight in backend._forward.model.parameters()]
    backend.load_weights(new, [], -1)
    assert [weight.data_ptr() for weight in backend._forward.model.parameters()] == addresses
    (new / "model.safetensors").write_bytes(b"")  # The model no longer reads the file.
    check_equal(backend, write_model(tmp_path / "again", "llama", seed=1))


def check_fixed(backend: HfBackend, folder: Path) -> None:
    """Check that a backend's weights cannot be replaced."""
    assert backend.tensors() == {}
    with pytest.raises(SettingsError, match="^weights: the weights of this model cannot be replaced"):
        backend.load_weights(folder, [], -1)


def test_offloaded_weights_cannot_be_replaced(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "llama")
    check_fixed(HfBackend(HfSettings(str(folder), device_map="sequential", max_memory="cpu=1KB")), folder)


def test_weights_that_differ_from_the_tensors_of_the_file_cannot_be_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # RWKV divides the weights of the layers from the sixth on in the first forward.
    rwkv = RwkvConfig(vocab_size=50, hidden_size=32, num_hidden_layers=7, context_length=64)
    # transformers joins the experts of a layer into one weight.
    experts = MixtralConfig(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                            num_attention_heads=4, num_key_value_heads=2, num_local_experts=2)  # fmt: skip
    for config, reason in ((rwkv, "has other numbers in the model"), (experts, "the checkpoint has no tensor")):
        auto: Any = AutoModelForCausalLM
        auto.from_config(config).save_pretrained(folder := tmp_path / config.model_type)
        caplog.clear()
        with caplog.at_level("INFO", "lmpool"):
            check_fixed(opened(folder), folder)
        assert any(reason in text for text in caplog.messages)


def test_weights_of_files_that_changed_during_the_start_cannot_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path, "llama")

    def load_and_change(settings: HfSettings) -> Any:
        loaded = load_model(settings)
        write_model(folder, "llama", seed=1)
        return loaded

    monkeypatch.setattr(hf_model, "load_model", load_and_change)
    check_fixed(opened(folder), folder)
