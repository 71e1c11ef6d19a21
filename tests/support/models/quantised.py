"""Writes the model of the contract tests as small quantised checkpoints, and the weights that they stand for.

    PYTHONPATH=QUANTISERS python -m tests.support.models.quantised FOLDER

The program needs the packages that quantise models: compressed-tensors, gptqmodel, optimum, torchao, bitsandbytes and
gguf. `make` installs these packages in a folder of their own, QUANTISERS, because transformers imports them at every
start if they are installed. Next to each checkpoint the program writes FORMAT-plain, the same model with dequantised
weights in float32, from which tests compute reference rows. Engines read the checkpoints without most of the packages.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import chdir
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from lmpool.workers.backends.hf.reference import compute_reference
from lmpool.workers.backends.reference import folder_of, stored_path
from lmpool.workers.backends.settings import HfSettings
from tests.contract.model import V, write_model, write_tokenizer

GROUP = 64
"""Weights that share a scale in the formats with 4 bits; every layer of the model has a multiple of them."""

_Weights = dict[str, Tensor]


def _compressed(scheme: str) -> Callable[[Path, Path], _Weights]:
    """The maker of a checkpoint of compressed-tensors, with a preset scheme and scales from the largest weights."""

    def make(plain: Path, folder: Path) -> _Weights:
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import (
            QuantizationConfig,
            QuantizationStatus,
            apply_quantization_config,
            preset_name_to_scheme,
        )
        from compressed_tensors.quantization.lifecycle import fake_quantize
        from compressed_tensors.quantization.utils import calculate_qparams

        model, chosen = _load(plain), preset_name_to_scheme(scheme, ["Linear"])
        arguments = chosen.weights
        if arguments.group_size is not None:
            arguments.group_size = GROUP
        config = QuantizationConfig(config_groups={"group_0": chosen}, ignore=["lm_head"], quantization_status="frozen")
        apply_quantization_config(model, config)
        weights: _Weights = {}
        for name, layer in model.named_modules():
            if getattr(layer, "quantization_scheme", None) is None:
                continue
            weight = layer.weight.data
            grouped = weight.unflatten(1, (-1, arguments.group_size or weight.shape[1]))
            scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), arguments)
            layer.weight_scale.data.copy_(scale)
            layer.quantization_status = QuantizationStatus.FROZEN
            weights[f"{name}.weight"] = fake_quantize(weight, scale, zero, arguments)
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        model.save_pretrained(folder)
        compressor.update_config(str(folder))
        return weights

    return make


def _gptqmodel(
    method: str, checkpoint_format: str, kernel: str, *, is_symmetric: bool
) -> Callable[[Path, Path], _Weights]:
    """The maker of a checkpoint of gptqmodel, with random prompts for calibration."""

    def make(plain: Path, folder: Path) -> _Weights:
        # With one worker, its default on two cores, gptqmodel 7.7.0 refuses to start.
        os.environ["GPTQMODEL_CPU_WORKERS"] = "2"
        from gptqmodel import GPTQModel, QuantizeConfig

        prompts = torch.randint(0, V, (8, 1, 64), generator=torch.Generator().manual_seed(0))
        wanted = {"bits": 4, "group_size": GROUP, "sym": is_symmetric, "method": method, "format": checkpoint_format}
        config = QuantizeConfig(**wanted, desc_act=False, device="cpu", pack_impl="original")
        model = GPTQModel.load(str(plain), config, backend="torch")
        model.quantize([{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in prompts], batch_size=1)
        model.save(str(folder))
        for path in folder.glob("*token*"):
            path.unlink()
        # Have gptqmodel compute with torch's operators: it would compile operators in C++ at the first start.
        path = folder / "config.json"
        written = json.loads(path.read_text())
        written["quantization_config"]["backend"] = kernel
        path.write_text(json.dumps(written))
        loaded = _load(folder)
        layers = {name: layer for name, layer in loaded.named_modules() if hasattr(layer, "qweight")}
        # AWQ changes the norms' weights too.
        norms = {name: weight for name, weight in loaded.state_dict().items() if name.endswith("norm.weight")}
        return {f"{name}.weight": _matrix_of(layer) for name, layer in layers.items()} | norms

    return make


def _matrix_of(layer: Any) -> Tensor:
    """The matrix of a layer without a bias: the layer's output for each unit vector."""
    with torch.inference_mode():
        matrix: Tensor = layer(torch.eye(layer.in_features)).T.contiguous().clone()
    return matrix


def _loaded(**options: Any) -> Callable[[Path, Path], _Weights]:
    """The maker of a checkpoint that transformers quantises while it loads the model; `options` name the config."""

    def make(plain: Path, folder: Path) -> _Weights:
        model = _load(plain, **{name: value() for name, value in options.items()})
        model.save_pretrained(folder)
        weights: _Weights = {}
        for name, layer in model.named_modules():
            if isinstance(layer, torch.nn.Linear) and name != "lm_head":
                scales = getattr(layer.weight, "SCB", None)
                weight: Any = layer.weight
                weights[f"{name}.weight"] = weight.dequantize() if scales is None else weight * scales[:, None] / 127
        return weights

    return make


def _torchao() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    make: Any = TorchAoConfig
    return make(Int8WeightOnlyConfig())


def _bitsandbytes() -> Any:
    from transformers import BitsAndBytesConfig

    make: Any = BitsAndBytesConfig
    return make(load_in_8bit=True)


def _gguf(plain: Path, folder: Path) -> _Weights:
    """Write `model.gguf` with 8 bits per weight (Q8_0)."""
    import gguf

    folder.mkdir()
    model = _load(plain)
    config = model.config
    writer: Any = gguf.GGUFWriter(str(folder / "model.gguf"), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(V)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    kind: Any = gguf.GGMLQuantizationType.Q8_0
    weights: _Weights = {}
    for name, tensor in model.state_dict().items():
        named = names.get_name(name, try_suffixes=(".weight",))
        if tensor.ndim == 1:
            writer.add_tensor(named, tensor.numpy())
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        # GGUF stores the two halves of each head interleaved, in the order of llama.cpp's rotary embeddings.
        stored = tensor if heads is None else _interleave(tensor, heads)
        packed = gguf.quants.quantize(stored.numpy(), kind)
        writer.add_tensor(named, packed, raw_dtype=kind)
        plain_numbers = torch.from_numpy(gguf.quants.dequantize(packed, kind))
        weights[name] = plain_numbers if heads is None else _interleave(plain_numbers, heads, is_back=True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def _interleave(weight: Tensor, heads: int, *, is_back: bool = False) -> Tensor:
    """Interleave the two halves of each head's rows, or undo it."""
    half = len(weight) // heads // 2
    shape = (heads, half, 2) if is_back else (heads, 2, half)
    return weight.reshape(*shape, weight.shape[1]).transpose(1, 2).reshape(weight.shape).contiguous()


FORMATS: Mapping[str, Callable[[Path, Path], _Weights]] = {
    "w8a8": _compressed("W8A8"),
    "fp8": _compressed("FP8_DYNAMIC"),
    "w4a16": _compressed("W4A16"),
    "gptq": _gptqmodel("gptq", "gptq", "gptq_torch", is_symmetric=True),
    "awq": _gptqmodel("awq", "gemm", "torch_awq", is_symmetric=False),
    "bitsandbytes": _loaded(quantization_config=_bitsandbytes),
    "torchao": _loaded(quantization_config=_torchao),
    "gguf": _gguf,
}
"""Format -> function that writes a checkpoint of a plain model in this format, and returns the dequantised weights."""


def plain_folder(folder: Path) -> Path:
    """The folder of the dequantised model of a quantised checkpoint."""
    return folder.with_name(f"{folder.name}-plain")


def write_all(folder: Path) -> None:
    """Write the checkpoints of all formats, and their dequantised models; replaces existing checkpoints."""
    torch._dynamo.config.disable = True  # gptqmodel would compile its operators, for a minute.
    folder = folder.resolve()
    rmtree(folder, ignore_errors=True)
    with TemporaryDirectory() as place, chdir(place):  # gptqmodel writes log files into the current folder.
        _write_all(folder)
    (folder / "written").touch()


def _write_all(folder: Path) -> None:
    plain = folder / "plain"
    write_model(plain)
    write_tokenizer(plain)  # gptqmodel needs a tokenizer.
    for name, make in FORMATS.items():
        weights = make(plain, folder / name)
        model = _load(plain)
        kept = model.state_dict()
        assert weights.keys() <= kept.keys()
        assert all(weight.shape == kept[key].shape for key, weight in weights.items())
        model.save_pretrained(plain_folder(folder / name), state_dict=kept | {k: w.float() for k, w in weights.items()})
        # Workers with --verify need the reference: the engines' environments lack packages to compute it.
        settings = HfSettings(str(folder / name / ("model.gguf" if name == "gguf" else "")), device="cpu")
        compute_reference(settings).write(stored_path(folder_of(settings), settings))


def _load(folder: Path, **more: Any) -> Any:
    load: Any = AutoModelForCausalLM.from_pretrained
    return load(folder, dtype=torch.float32, **more).eval()


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
