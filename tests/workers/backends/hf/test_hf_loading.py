"""The hf backend chooses a model's attention, copies weights to its own memory, and refuses models in one line."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lmpool.errors import SettingsError
from lmpool.workers.backends import settings as settings_module
from lmpool.workers.backends.hf import model as hf_model
from lmpool.workers.backends.hf.backend import HfBackend
from lmpool.workers.backends.hf.model import EAGER, weights_revision
from lmpool.workers.backends.settings import HfSettings
from tests.support.models.tiny_models import VOCAB_SIZE, make_model, write_model
from tests.workers.backends.hf.hf_tiny import Reference, Tiny, random_prompts, serve

PROMPTS = random_prompts(4, (10, 30))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"))


def attention_of(backend: HfBackend) -> str | None:
    implementation: str | None = backend._forward.model.config._attn_implementation
    return implementation


@pytest.mark.parametrize("left_out", [hf_model._LEFT_OUT, ()], ids=["by-config", "by-comparison"])
def test_attention_applies_the_soft_cap_of_the_config(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, left_out: tuple[str, ...]
) -> None:
    monkeypatch.setattr(hf_model, "_LEFT_OUT", left_out)
    backend = tiny.backend("gemma2")
    assert attention_of(backend) == EAGER
    rows = serve(backend, PROMPTS)
    tiny.reference("gemma2").check(rows)
    uncapped = Reference(tiny.folder("gemma2"), "sdpa")
    assert max(np.abs(row - uncapped.row(prompt)).max() for prompt, row in rows.items()) > 0.1


def test_a_small_soft_cap_is_kept_although_no_row_of_the_check_shows_it(tmp_path: Path) -> None:
    model = make_model("gemma2")
    model.config.attn_logit_softcapping = 1e4
    model.save_pretrained(tmp_path)
    assert attention_of(HfBackend(HfSettings(str(tmp_path), device="cpu"))) == EAGER


def test_the_default_attention_stays_if_it_implements_the_config(tiny: Tiny) -> None:
    for kind in ("llama", "gpt2", "mistral", "gemma3"):
        assert attention_of(tiny.backend(kind)) == "sdpa"


def test_rows_of_another_attention_have_another_fingerprint(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis may still hold rows computed by an attention without soft cap, so the fingerprint must differ."""
    capped = tiny.backend("gemma2").info
    monkeypatch.setattr(
        hf_model, "_choose_attention", lambda model, config, prompts: ("", hf_model._logits_alone(model, prompts))
    )
    assert tiny.backend("gemma2").info.fingerprint != capped.fingerprint


def test_eager_attention_that_gives_no_numbers_is_not_chosen(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """With eager attention in 16 bits, the numbers of some models overflow."""
    monkeypatch.setattr(
        "transformers.models.llama.modeling_llama.eager_attention_forward",
        lambda module, query, *_, **__: (torch.full_like(query.transpose(1, 2), torch.nan), None),
    )
    assert attention_of(tiny.backend()) == "sdpa"


def test_a_model_that_cannot_run_with_eager_attention_is_served_without(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise NotImplementedError("no eager attention")

    monkeypatch.setattr("transformers.models.llama.modeling_llama.eager_attention_forward", fails)
    assert attention_of(tiny.backend()) == "sdpa"


def mapped_files(folder: Path) -> set[str]:
    """The files in a folder that this process has mapped into its memory."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[-1] for line in lines if str(folder) in line}


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """A folder with a model whose files the test changes."""
    return write_model(tmp_path / "served", "llama")


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_files_that_change_leave_the_rows_of_a_running_worker_as_they_are(
    tiny: Tiny, served: Path, tmp_path: Path, suffix: str
) -> None:
    file = served / f"model.{suffix}"
    if suffix == "bin":
        (served / "model.safetensors").unlink()
        file = served / "pytorch_model.bin"
        torch.save(make_model("llama").state_dict(), file)
    other = write_model(tmp_path / "other", "llama", seed=1)
    backend = HfBackend(HfSettings(str(served), device="cpu", kv_cache_bytes=0))
    assert mapped_files(served) == set()  # With a mapped file, `os.truncate` would cause a SIGBUS.
    inode = file.stat().st_ino
    shutil.copyfile(other / "model.safetensors", file)
    assert file.stat().st_ino == inode
    tiny.reference("llama").check(serve(backend, PROMPTS))
    os.truncate(file, 100)
    tiny.reference("llama").check(serve(backend, PROMPTS))


def test_tied_weights_stay_one_tensor(tmp_path: Path) -> None:
    make_model("gemma3").save_pretrained(tmp_path)
    served: Any = HfBackend(HfSettings(str(tmp_path), device="cpu"))._forward.model
    assert served.get_input_embeddings().weight.data_ptr() == served.get_output_embeddings().weight.data_ptr()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""),
        ("model", 7),
        ("name", "a{b}"),
        ("gguf_file", ""),
        ("device", ""),
        ("dtype", "float8"),
        ("encoding", "f32"),
        ("quantization", ""),
        ("max_batch", 0),
        ("max_batch", True),
        ("max_batch_tokens", 1.5),
        ("kv_cache_bytes", -1),
        ("max_prompt_tokens", 0),
        ("chunked_prefill_size", 0),
    ],
)
def test_malformed_settings_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=rf"^{field}: "):
        HfSettings(**{"model": "somewhere", field: value})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": "/nowhere/at-all"}, "model: /nowhere/at-all cannot be loaded: there is no such folder"),
        (
            {"model": "no-such-owner/no-such-model"},
            "model: 'no-such-owner/no-such-model' is no folder here, and the hub cannot provide it: HF_HUB_OFFLINE is ",
        ),
        ({"gguf_file": "missing.gguf"}, "gguf_file: missing.gguf of .* cannot be loaded: there is no such file"),
        ({"device": "cuda:77"}, "device: 'cuda:77' cannot be used: this machine has 'cpu'"),
        ({"device": "toaster"}, "device: 'toaster' cannot be used: this machine has 'cpu'"),
        ({"device": "meta"}, "device: 'meta' cannot be used: this machine has 'cpu'.*it computes nothing"),
        ({"device": "xla"}, "device: 'xla' cannot be used: this machine has 'cpu'"),
        ({"max_prompt_tokens": 65}, "max_prompt_tokens: 65 is more than the 64 positions"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_refused_in_one_line(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    given = {"model": str(tiny.folder("llama")), "device": "cpu", **values}
    with pytest.raises(SettingsError, match=f"^{message}") as caught:
        HfBackend(HfSettings(**given))
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has an Apple GPU")
def test_an_apple_gpu_is_refused_on_other_machines(tiny: Tiny) -> None:
    with pytest.raises(SettingsError, match=r"^device: 'mps' cannot be used: this machine has 'cpu'"):
        HfBackend(HfSettings(str(tiny.folder("llama")), device="mps"))


def test_a_model_in_the_hubs_cache_is_served_while_the_hub_cannot_be_reached(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    copy = tmp_path / "models--org--tiny"
    (copy / "refs").mkdir(parents=True)
    (copy / "refs" / "main").write_text("a" * 40)
    shutil.copytree(tiny.folder("llama"), copy / "snapshots" / ("a" * 40))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")

    def never(*_: object, **__: object) -> None:
        raise AssertionError("it waits before it asks the hub again")

    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", never)
    backend = HfBackend(HfSettings("org/tiny", device="cpu"))
    assert backend.info.source == "org/tiny"
    tiny.reference("llama").check(serve(backend, [(1, 2, 3)]))
    assert backend.vocabulary() is None


def test_an_encoder_is_not_a_causal_language_model(tmp_path: Path) -> None:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(vocab_size=VOCAB_SIZE, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    encoder: Any = T5EncoderModel
    encoder(config).save_pretrained(tmp_path)
    with pytest.raises(SettingsError, match="^model: "):
        HfBackend(HfSettings(str(tmp_path), device="cpu"))


def test_weights_that_are_missing_are_not_made_up(tiny: Tiny, tmp_path: Path) -> None:
    model: Any = make_model("llama")
    weights = model.state_dict()
    del weights["model.layers.1.mlp.down_proj.weight"]
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(SettingsError, match=r"^model: .* has no weights for model\.layers\.1\.mlp\.down_proj\.weight"):
        HfBackend(HfSettings(str(tmp_path), device="cpu"))


def test_a_damaged_gguf_file_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF\x03")
    with pytest.raises(SettingsError, match=r"^gguf_file: m\.gguf of .* cannot be loaded: the file is damaged or cut"):
        HfBackend(HfSettings(str(tmp_path / "m.gguf"), device="cpu"))


def test_the_package_that_quantises_weights_is_named_if_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_module, "find_spec", lambda name: None if name == "torchao" else object())
    with pytest.raises(SettingsError, match=r"^quantization: needs torchao; install with: pip install \"torchao\"$"):
        HfSettings("somewhere", quantization="int8_weight_only")


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(settings_module, "find_spec", lambda name: None if name == "transformers" else find(name))
    with pytest.raises(SettingsError, match=r"^model: needs transformers; install .*lmpool\[hf\]"):
        HfSettings("somewhere")


@pytest.mark.parametrize(
    ("quantisation", "package"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}, "optimum gptqmodel"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "compressed-tensors"),
        (
            {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}},
            "torchao",
        ),
    ],
)
def test_a_package_that_a_quantised_checkpoint_needs_is_named(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantisation: dict[str, Any], package: str
) -> None:
    folder = shutil.copytree(tiny.folder("llama"), tmp_path / "quantised")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantisation}))
    find = importlib.util.find_spec
    absent = {name.replace("-", "_") for name in package.split()}
    monkeypatch.setattr(hf_model, "find_spec", lambda name: None if name in absent else find(name))
    pattern = rf"^model: .* is quantised \({quantisation['quant_method']}\) and needs .*pip install {package}$"
    with pytest.raises(SettingsError, match=pattern):
        HfBackend(HfSettings(str(folder), device="cpu"))


class Quantised(torch.Tensor):
    """A weight like a quantised one of torchao: it consists of plain tensors, and implements no operations."""

    parts: dict[str, Tensor]

    @staticmethod
    def of(**parts: Tensor) -> Quantised:
        made = torch.zeros(2, 2).as_subclass(Quantised)
        made.parts = parts
        return made

    def __getattr__(self, name: str) -> Tensor:
        return self.parts[name]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return list(self.parts), None

    def reshape(self, *_: Any) -> Any:
        raise NotImplementedError


def test_the_revision_of_quantised_weights_is_that_of_the_tensors_they_consist_of() -> None:
    def revision(numbers: Tensor, scale: Tensor) -> str:
        model: Any = make_model("llama")
        weights = {"layer": Quantised.of(numbers=numbers, scales=Quantised.of(scale=scale)), "other": torch.ones(3)}
        model.state_dict = lambda: weights
        return weights_revision(model)

    numbers, scale = torch.arange(6, dtype=torch.int8), torch.tensor([0.5])
    first = revision(numbers, scale)
    assert revision(numbers.clone(), scale.clone()) == first
    assert len({first, revision(numbers + 1, scale), revision(numbers, scale / 2)}) == 3
