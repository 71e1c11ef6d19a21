"""Checks of adapters on disk: an adapter that fits the model is accepted, any other is refused with the reason."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lmpool.errors import SettingsError
from lmpool.workers.backends import engines
from lmpool.workers.backends.engines import EngineBackend
from lmpool.workers.backends.lora import MAX_RANK, check_adapter
from lmpool.workers.backends.settings import HfSettings

MODULE = "layers.1.self_attn.q_proj"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of a checkpoint whose weights are in two files."""
    folder = tmp_path / "model"
    folder.mkdir()
    for number in (1, 2):
        tensors = {f"model.layers.{number}.self_attn.{name}.weight": torch.zeros(2) for name in ("q_proj", "v_proj")}
        save_file(tensors, folder / f"model-{number}.safetensors", metadata={"format": "pt"})
    return folder


def adapter(folder: Path, *names: str, **config: object) -> Path:
    """Write an adapter with tensors of these names; each lora_A has a lora_B too."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": 2} | config))
    if names:
        pairs = [name.replace("lora_A", "lora_B") for name in names]
        save_file({name: torch.zeros(2) for name in (*names, *pairs)}, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("before", ["base_model.model.model.", "base_model.model.", "base_model.model.language_model."])
def test_an_adapter_fits_with_any_prefix_before_the_layers(model: Path, tmp_path: Path, before: str) -> None:
    names = [f"{before}{MODULE}.lora_{factor}.weight" for factor in "AB"]
    check_adapter(adapter(tmp_path / "good", *names), model)


@pytest.mark.parametrize("module", ["layers.9.self_attn.q_proj", "layers.1.mlp.q_proj", "layers.1.self_attn.o_proj"])
def test_an_adapter_with_weights_of_unknown_modules_is_refused(model: Path, tmp_path: Path, module: str) -> None:
    names = [f"base_model.model.model.{name}.lora_A.weight" for name in (MODULE, module)]
    with pytest.raises(SettingsError, match=rf"does not fit .*no place for base_model\.model\.model\.{module}$"):
        check_adapter(adapter(tmp_path / "bad", *names), model)


def test_an_adapter_of_the_head_fits_a_model_that_has_one(model: Path, tmp_path: Path) -> None:
    good = adapter(tmp_path / "good", *(f"base_model.model.lm_head.lora_{factor}.weight" for factor in "AB"))
    with pytest.raises(SettingsError, match=r"does not fit .*no place for base_model\.model\.lm_head$"):
        check_adapter(good, model)
    save_file({"lm_head.weight": torch.zeros(2)}, model / "model-3.safetensors")
    check_adapter(good, model)


HEAD = torch.arange(3000 * 4).reshape(3000, 4) / 7000 - 0.5


@pytest.mark.parametrize(
    ("saved", "fits"),
    [
        pytest.param(HEAD, True, id="a copy"),
        pytest.param(HEAD.bfloat16(), True, id="a copy in bfloat16"),
        pytest.param(HEAD.half(), True, id="a copy in float16"),
        pytest.param(HEAD + 0.01, False, id="other weights"),
        pytest.param(HEAD.index_fill(0, torch.tensor([2999]), 1.0), False, id="another last row"),
        pytest.param(HEAD[:2048], False, id="fewer rows"),
        pytest.param(torch.cat([HEAD, HEAD]), False, id="more rows"),
        pytest.param(HEAD[:, :3].contiguous(), False, id="fewer columns"),
        pytest.param(HEAD.reshape(-1), False, id="another shape"),
        pytest.param(HEAD.long(), False, id="whole numbers"),
        pytest.param(HEAD.to(torch.float8_e4m3fn), False, id="a dtype that peft never writes"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_of_the_models_head_is_accepted_and_another_head_is_refused(
    model: Path, tmp_path: Path, saved: torch.Tensor, fits: bool, dtype: torch.dtype
) -> None:
    save_file({"lm_head.weight": HEAD.to(dtype)}, model / "model-3.safetensors")
    folder = adapter(tmp_path / "head", f"base_model.model.model.{MODULE}.lora_A.weight")
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(tensors | {"base_model.model.lm_head.base_layer.weight": saved}, folder / "adapter_model.safetensors")
    if fits:
        check_adapter(folder, model)
        return
    with pytest.raises(SettingsError, match=r"does not fit .*model: it has other weights for lm_head; save"):
        check_adapter(folder, model)


def test_a_copy_of_a_weight_that_the_model_lacks_is_refused(model: Path, tmp_path: Path) -> None:
    names = (f"base_model.model.model.{MODULE}.lora_A.weight", "base_model.model.lm_head.base_layer.weight")
    with pytest.raises(SettingsError, match="it has other weights for lm_head"):
        check_adapter(adapter(tmp_path / "bad", *names), model)


Shapes = tuple[tuple[int, ...], ...]


@pytest.mark.parametrize(
    ("module", "weights", "factors", "message"),
    [
        pytest.param("q_proj", ((6, 4),), ((2, 4), (6, 2)), "", id="it fits"),
        pytest.param("q_proj", ((6, 4),), ((2, 3), (6, 2)), r"\[2, 3\] and \[6, 2\], .* has \[6, 4\]$", id="input"),
        pytest.param("q_proj", ((6, 4),), ((2, 4), (5, 2)), r"\[2, 4\] and \[5, 2\], .* has \[6, 4\]$", id="output"),
        pytest.param("q_proj", ((6, 4),), ((2, 6), (4, 2)), "have the shapes", id="swapped"),
        pytest.param("q_proj", ((6, 4),), ((2, 4), (6, 3)), "have the shapes", id="two ranks"),
        pytest.param("q_proj", ((6, 4),), ((2, 4), (6,)), "have the shapes", id="a vector"),
        pytest.param("q_proj", ((6, 4),), ((2, 4), ()), "only one LoRA factor of .*q_proj$", id="a number"),
        pytest.param("q_proj", ((6, 4),), ((2, 4),), "only one LoRA factor of .*q_proj$", id="one factor"),
        pytest.param("q_proj", ((6, 4), (3, 9)), ((2, 9), (3, 2)), "", id="of one of two modules"),
        pytest.param("q_proj", ((6,),), ((2, 9), (3, 2)), "", id="a packed weight"),
        pytest.param("c_attn", ((4, 6),), ((2, 4), (6, 2)), "", id="a matrix of GPT-2"),
    ],
)
def test_the_factors_of_an_adapter_must_have_the_shape_of_the_weight(
    tmp_path: Path, module: str, weights: Shapes, factors: Shapes, message: str
) -> None:
    for number, shape in enumerate(weights):  # Engines compare the last parts of names, which two modules may share.
        name = f"model.part{number}.layers.1.self_attn.{module}.weight"
        save_file({name: torch.zeros(shape)}, tmp_path / f"model-{number}.safetensors")
    fits = adapter(tmp_path / "fits")
    names = [f"layers.1.self_attn.{module}.lora_{factor}.weight" for factor in "AB"]
    tensors = {name: torch.zeros(shape) for name, shape in zip(names, factors, strict=False)}
    save_file(tensors, fits / "adapter_model.safetensors")
    if not message:
        check_adapter(fits, tmp_path)
        return
    with pytest.raises(SettingsError, match=f"^adapters: .*fits does not fit .*{message}"):
        check_adapter(fits, tmp_path)


def test_a_folder_without_lora_weights_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no place for any LoRA weights"):
        check_adapter(adapter(tmp_path / "other", "base_model.model.score.weight"), model)
    with pytest.raises(SettingsError, match=r"holds no adapter_config\.json"):
        check_adapter(model, model)


def test_an_unreadable_checkpoint_is_left_to_the_engine(model: Path, tmp_path: Path) -> None:
    (tmp_path / "pickled").mkdir()
    check_adapter(adapter(tmp_path / "good", f"{MODULE}.lora_A.weight"), tmp_path / "pickled")
    for nonsense in (b"", b"x", b"\xff" * 16, (5).to_bytes(8, "little") + b"12{3x"):
        (tmp_path / "pickled" / "model.safetensors").write_bytes(nonsense)
        check_adapter(tmp_path / "good", tmp_path / "pickled")


def test_weights_that_may_be_pickles_are_refused(model: Path, tmp_path: Path) -> None:
    pickled = adapter(tmp_path / "bin")
    (pickled / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(SettingsError, match=r"holds no adapter_model\.safetensors; other formats may be pickles"):
        check_adapter(pickled, model)


PATTERN = r"((\w|\w|\.)+)*!"
Config = Mapping[str, object]
PATTERNS: list[tuple[Config, str]] = [
    ({"target_modules": PATTERN}, r"target_modules is '.*', a pattern: .* list them"),
    ({"target_modules": "q_proj"}, "target_modules is 'q_proj', a pattern"),
    *(
        ({field: ["q_proj", PATTERN]}, rf"{field} names '.*': a module's name must match")
        for field in ("target_modules", "exclude_modules", "modules_to_save", "target_parameters", "layers_pattern")
    ),
    ({"exclude_modules": PATTERN}, "exclude_modules is '.*', a pattern"),
    ({"layers_pattern": PATTERN}, "layers_pattern names '.*': a module's name must match"),
    ({"rank_pattern": {PATTERN: 2}}, "rank_pattern names '.*': a module's name must match"),
    ({"alpha_pattern": {PATTERN: 2}}, "alpha_pattern names '.*': a module's name must match"),
    ({"trainable_token_indices": {PATTERN: [1]}}, "trainable_token_indices names '.*': a module's name must match"),
    ({"rank_pattern": [PATTERN]}, "rank_pattern is .*, a pattern"),
    ({"modules_to_save": [f"m{number}" for number in range(65)]}, "modules_to_save has 65 names: 64 are taken"),
    ({"target_modules": [5]}, "target_modules names 5: a module's name must match"),
    ({"layer_replication": [[0, 2], [0, 2]]}, "layer_replication is set, and workers serve no adapters that use it"),
    ({"megatron_config": {"a": 1}}, "megatron_config is set"),
]
RANKS: list[tuple[Config, str]] = [
    *(
        ({"r": rank}, rf"the rank 'r': {rank} must be a whole number from 1 to {MAX_RANK}: train it with a smaller")
        for rank in (0, -1, MAX_RANK + 1, 10**6, 2.0, True, None)
    ),
    ({"r": "9" * 5000}, r"the rank 'r': '9+\.\.\. must be a whole number"),
    ({"rank_pattern": {"q_proj": 10**6}}, "the rank 'q_proj': 1000000 must be a whole number"),
    ({"r": 8}, r"does not fit itself: .*lora_A\.weight has rank 2, and .* says 8: save it anew"),
    ({"r": 8, "rank_pattern": {"v_proj": 16}}, "says 8, 16: save it anew"),
    ({"lora_alpha": math.inf}, "the alpha 'lora_alpha': inf must be a number from -1.79"),
    ({"lora_alpha": 10**400}, r"0\.\.\. must be a number from -1.79"),
    ({"lora_alpha": "8"}, "'8' must be a number from -1.79"),
    ({"alpha_pattern": {"q_proj": math.nan}}, "the alpha 'q_proj': nan must be a number"),
    ({"peft_type": "LOHA"}, "it is of the kind 'LOHA': workers serve LORA"),
    ({"base_model_name_or_path": "x" * 2**20}, r"adapter_config\.json has more than 1048576 bytes"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "message"), [*PATTERNS, *RANKS])
def test_a_config_beyond_the_limits_is_refused(model: Path, tmp_path: Path, config: Config, message: str) -> None:
    bad = adapter(tmp_path / "bad", f"{MODULE}.lora_A.weight", **config)
    with pytest.raises(SettingsError, match=rf"^adapters: {re.escape(str(bad))}.*{message}"):
        check_adapter(bad, model)


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj", "model.layers.0.self_attn.v_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": "all-linear", "exclude_modules": [], "layers_pattern": "", "rank_pattern": {}},
        {"layers_pattern": "layers", "layers_to_transform": [0, 1], "trainable_token_indices": [1, 2]},
        {"r": 8, "rank_pattern": {"self_attn.q_proj": 2}, "alpha_pattern": {"q_proj": 0.5}, "lora_alpha": 16},
        {"r": 1, "target_parameters": ["mlp.experts.gate_up_proj"]},
        {"peft_type": "LORA", "target_modules": None, "megatron_config": None, "megatron_core": "megatron.core"},
    ],
)
def test_usual_configs_are_accepted(model: Path, tmp_path: Path, config: Config) -> None:
    check_adapter(adapter(tmp_path / "good", f"{MODULE}.lora_A.weight", **config), model)


class Recording(EngineBackend):
    """A backend that calls `change` with the folder of each adapter while it loads the adapter."""

    def __init__(self, model: Path, change: Callable[[Path], object]) -> None:
        super().__init__(HfSettings(str(model)))
        self._folder, self._change = model, change
        self.loaded: list[str] = []

    def _load(self, adapter: str, folder: Path) -> None:
        self.loaded.append(adapter)
        self._change(folder)

    def _unload(self, adapter: str) -> None:
        self.loaded.remove(adapter)


def overwrite(folder: Path) -> None:
    save_file({f"{MODULE}.lora_A.weight": torch.ones(2)}, folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [(overwrite, "BAD was changed while it was loaded"), (shutil.rmtree, "BAD.* cannot be read: .*No such file")],
)
def test_an_adapter_whose_files_change_during_its_load_is_unloaded_and_refused(
    model: Path, tmp_path: Path, change: Callable[[Path], object], message: str
) -> None:
    bad = adapter(tmp_path / "bad", f"{MODULE}.lora_A.weight")
    backend = Recording(model, change)
    with pytest.raises(SettingsError, match="^adapters: " + message.replace("BAD", re.escape(str(bad)))):
        backend.load_adapter("a", str(bad))
    assert (backend.loaded, backend.adapters) == ([], {})


def test_an_adapter_whose_files_vanish_before_its_load_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_and_remove(*given: Any) -> Path:
        shutil.rmtree(folder := check_adapter(*given))
        return folder

    bad = adapter(tmp_path / "bad", f"{MODULE}.lora_A.weight")
    monkeypatch.setattr(engines, "check_adapter", check_and_remove)
    with pytest.raises(SettingsError, match=r"^adapters: '.*bad' cannot be read: .*No such file"):
        Recording(model, print).load_adapter("a", str(bad))
