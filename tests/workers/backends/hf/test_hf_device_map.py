"""The hf backend with --device-map: offloaded weights, one storage of keys and values per device, and refusals."""

from __future__ import annotations

import dataclasses
import fcntl
import logging
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedConfig, XLNetConfig

from lmpool.errors import SettingsError
from lmpool.protocol.query import HeadQuery
from lmpool.workers.backends.hf import model as hf_model
from lmpool.workers.backends.hf.backend import HfBackend
from lmpool.workers.backends.hf.placement import is_offloaded
from lmpool.workers.backends.settings import HfSettings
from tests.support.models.tiny_models import VOCAB_SIZE, make_model, rwkv
from tests.workers.backends.hf.hf_tiny import Reference, Tiny, random_prompts, serve

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
PROMPTS = random_prompts(4, (10, 30))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"))


def spread(folder: Path, share: float, **values: Any) -> HfBackend:
    """A backend with memory for a share of the weights in a folder; the other weights are on the disk."""
    size = sum(file.stat().st_size for file in [*folder.glob("*.safetensors"), *folder.glob("*.bin")])
    return HfBackend(HfSettings(str(folder), device_map="auto", max_memory=f"cpu={int(share * size)}", **values))


def save(folder: Path, config: PreTrainedConfig) -> Path:
    auto: Any = AutoModelForCausalLM
    auto.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("kind", "share"), [("llama", 0.0), ("llama", 0.7), ("gemma3", 0.9), ("mamba", 0.0)])
def test_an_offloaded_model_gives_the_same_model_info_rows_and_head(tiny: Tiny, kind: str, share: float) -> None:
    whole, parts = tiny.backend(kind), spread(tiny.folder(kind), share)
    model: Any = parts._forward.model
    assert is_offloaded(model)
    assert all(weight.is_meta for weight in model.parameters()) == (share == 0.0)
    assert not is_offloaded(whole._forward.model)
    assert parts.info == whole.info
    assert parts.device == "cpu"
    assert parts.devices == ["cpu"]
    prompts = [ids + (5,) * n for ids in PROMPTS for n in range(3)]
    rows = serve(parts, prompts)
    for prompt, row in serve(whole, prompts).items():
        np.testing.assert_allclose(rows[prompt], row, atol=1e-4, rtol=0)
    if whole.info.hidden:
        query = HeadQuery("weights", 3, 5)
        assert np.array_equal(parts.head(query, ""), whole.head(query, ""))


def test_all_gpus_that_hold_layers_are_reported(tiny: Tiny) -> None:
    backend = tiny.backend()
    assert backend.devices == ["cpu"]
    model: Any = backend._forward.model
    model.hf_device_map = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "lm_head": "cpu"}
    assert backend.devices == ["cuda:0", "cuda:1"]
    del model.hf_device_map


def test_accelerate_keeps_no_address_of_a_weight_that_was_moved(tmp_path: Path) -> None:
    """accelerate takes a weight that is read to such an address for the tied weight that was there."""
    make_model("gemma3").save_pretrained(tmp_path)
    model: Any = spread(tmp_path, 0.9)._forward.model
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    addresses = {weight.data_ptr() for weight in model.parameters()}
    hooks = [module._hf_hook for module in model.modules() if hasattr(module, "_hf_hook")]
    assert not {address for hook in hooks for address in hook.tied_params_map or {}} - addresses


def test_weights_that_are_offloaded_are_logged(tiny: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lmpool"):
        spread(tiny.folder("llama"), 0.0)
    assert "the layers are on disk" in caplog.messages
    assert any(text.startswith("100 % of the weights (0.00 GiB) are offloaded") for text in caplog.messages)


def test_each_device_stores_the_keys_and_values_of_its_layers(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    layout_of = hf_model._cache_layout

    def split(forward: Any) -> Any:
        layout = layout_of(forward)
        assert layout is not None
        # torch treats "cpu" and "cpu:0" as different devices.
        return dataclasses.replace(layout, devices=tuple(map(torch.device, ("cpu", "cpu:0", "cpu:0"))))

    monkeypatch.setattr(hf_model, "_cache_layout", split)
    backend = tiny.backend(kv_cache_bytes=50_000)
    assert backend._pool is not None
    first, second = backend._pool._storages
    assert 2 * first.shape[1] == second.shape[1]
    for end in (0, 1, 2, 5):
        tiny.reference("llama").check(serve(backend, [ids + (7,) * end for ids in PROMPTS]))
    assert backend.stats().reused > 0


@pytest.mark.parametrize("make", ["bin", "mixture"])
def test_weights_of_another_form_are_written_to_the_offload_folder(tmp_path: Path, make: str) -> None:
    folder = tmp_path / "model"
    if make == "bin":
        model: Any = make_model("llama")
        model.save_pretrained(folder)
        (folder / "model.safetensors").unlink()
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    else:
        save(folder, MixtralConfig(**SHAPE, num_local_experts=4))
    with pytest.raises(SettingsError, match=r"^offload_folder: .* name a folder with --offload-folder$"):
        spread(folder, 0.3)
    offload = tmp_path / "offload"
    left, used = offload / "lmpool-offload-left", offload / "lmpool-offload-used"
    for other in (left, used):
        other.mkdir(parents=True)
        (other / "weights.safetensors").touch()
        (other / "lock").touch()
    with (used / "lock").open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        backend = spread(folder, 0.3, offload_folder=str(offload))
        assert used.exists()
    assert not left.exists(), "the folder of a worker that was killed is removed"
    rmtree(used)
    assert list(offload.glob("lmpool-*/*.safetensors"))
    with (next(offload.glob("lmpool-*")) / "lock").open("r+b") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    Reference(folder).check(serve(backend, PROMPTS))
    backend.close()
    assert list(offload.iterdir()) == [], "a closed backend removes its files"


def test_tied_weights_that_are_not_found_on_the_disk_are_refused(tmp_path: Path) -> None:
    model: Any = make_model("gemma3")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    weights = model.state_dict()
    del weights["lm_head.weight"]
    torch.save(weights, tmp_path / "pytorch_model.bin")
    message = r"^device_map: .* has tied weights on the disk, and 'lm_head.weight' is not found there: .* safetensors$"
    with pytest.raises(SettingsError, match=message):
        spread(tmp_path, 0.0, offload_folder=str(tmp_path / "offload"))


@pytest.mark.filterwarnings("ignore:The following device_map keys do not match any submodules")
@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (XLNetConfig(vocab_size=VOCAB_SIZE, d_model=32, n_layer=3, n_head=4, d_inner=48), "XLNetLMHeadModel names no "),
        (rwkv(), "RwkvForCausalLM changes its weights in memory"),
    ],
    ids=["xlnet", "rwkv"],
)
def test_an_architecture_whose_rows_would_be_wrong_is_refused(
    tmp_path: Path, config: PreTrainedConfig, reason: str
) -> None:
    save(tmp_path, config)
    message = f"^device_map: {tmp_path} cannot be spread over cpu, disk: {reason}.*; serve it on one device$"
    with pytest.raises(SettingsError, match=message):
        spread(tmp_path, 0.9)


def test_adapters_are_refused_while_weights_are_offloaded(tiny: Tiny, tmp_path: Path) -> None:
    message = r"^adapters: 'poet' cannot be loaded: parts of the model are offloaded.*--max-memory"
    with pytest.raises(SettingsError, match=message):
        spread(tiny.folder("llama"), 0.5, adapters=[f"poet={tmp_path}"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"device_map": "everywhere"}, "device_map: 'everywhere' is not "),
        ({"device_map": "auto", "device": "cpu"}, "device_map: auto chooses devices: leave out --device cpu"),
        ({"max_memory": "cpu=1GiB"}, "max_memory: this option has no effect without --device-map"),
        ({"offload_folder": "/tmp"}, "offload_folder: this option has no effect without --device-map"),
        ({"device_map": "auto", "max_memory": "gpu=1GiB"}, "max_memory: 'gpu=1GiB' is not DEVICE=SIZE"),
        ({"device_map": "auto", "max_memory": "0=1GiB,,"}, "max_memory: '' is not DEVICE=SIZE"),
        ({"device_map": "auto", "max_memory": "0=1G"}, "max_memory: '0=1G' is not DEVICE=SIZE"),
        ({"device_map": "auto", "max_memory": ""}, "max_memory: '' is not a name"),
    ],
)
def test_malformed_settings_are_refused(values: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=f"^{message}"):
        HfSettings("somewhere", **values)  # type: ignore[arg-type]  # every value is a text


def test_memory_is_given_per_device_with_units() -> None:
    settings = HfSettings("somewhere", device_map="auto", max_memory="0=1.5GiB, 1=2GB,CPU=700mb")
    assert settings.memory_per_device == {0: 3 << 29, 1: 2_000_000_000, "cpu": 700_000_000}


def test_a_gpu_that_does_not_exist_is_refused(tiny: Tiny) -> None:
    with pytest.raises(SettingsError, match="^device: 'cuda:77' cannot be used: this machine has 'cpu'"):
        HfBackend(HfSettings(str(tiny.folder("llama")), device_map="auto", max_memory="77=1GiB"))


def test_a_folder_that_cannot_be_written_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=rf"^offload_folder: {tmp_path}/file/x cannot be written: Not a directory$"):
        spread(tiny.folder("llama"), 0.5, offload_folder=str(tmp_path / "file" / "x"))
