"""The model of the contract tests: a tiny random Llama on disk, its adapters, and its reference rows."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lmpool.protocol.row import Row
from lmpool.trie import torch_device
from lmpool.workers.backends.checkpoint import checkpoint_revision
from lmpool.workers.backends.reference import FILE, ReferenceRows

# Vocabulary size, not a multiple of 64, so that engines must pad the vocabulary.
V = 517
MAX_TOKENS = 256
RANK = 8
ADAPTERS = ("warm", "cold")
"""Names of plain adapters that `write_adapter` can write."""
KINDS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True},
    "alphas": {"alpha_pattern": {"v_proj": 4 * RANK, "layers.1.self_attn.q_proj": RANK // 2}},
    "ranks": {"rank_pattern": {"q_proj": RANK // 2, "layers.0.self_attn.v_proj": 5 * RANK}},
    "head": {"target_modules": ["q_proj", "v_proj", "lm_head"]},
    "up": {"target_modules": ["up_proj"]},
    "values": {"target_modules": ["v_proj"]},
}
"""Names of further adapters that `write_adapter` can write -> fields that peft writes into their config."""
PIECES = {
    "<s>": b"<s>",
    "a": b"a",
    "\u0120the": b" the",
    "\u010a": b"\n",
    "\u00c3\u00a9": "é".encode(),
    "\u0120t": b" t",
}
"""Piece of the tokenizer -> its bytes, in the order of the ids; the model has more ids than the tokenizer."""

_HIDDEN, _HEAD, _HEADS, _KV_HEADS, _LAYERS, _MLP = 128, 32, 4, 2, 2, 192
_MODULES = {
    "q_proj": ("self_attn", _HEADS * _HEAD),
    "v_proj": ("self_attn", _KV_HEADS * _HEAD),
    "up_proj": ("mlp", _MLP),
}
"""Name of each module that adapters change -> the part of a layer that it belongs to, and its output size."""


def write_model(folder: Path) -> Path:
    """Write the model in float32, without a tokenizer."""
    if not (folder / "config.json").exists():
        _model("").save_pretrained(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer whose tokens are `PIECES`."""
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(PIECES)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]
    fast.save_pretrained(folder)


def write_weights(path: Path, version: int) -> Path:
    """Write all tensors of a version of the model to a safetensors file."""
    save_file(_version(version), path)
    return path


def write_changes(path: Path, version: int) -> Path:
    """Write a sparse file with the numbers in which a version differs from the version before it.

    Tensors of one dimension are given whole.
    """
    before, changed = _version(version - 1), {}
    for name, tensor in _version(version).items():
        indices = (tensor != before[name]).reshape(-1).nonzero()[:, 0]
        if len(indices) and tensor.ndim == 1:
            changed[name] = tensor
        elif len(indices):
            changed |= {f"{name}.indices": indices, f"{name}.values": tensor.reshape(-1)[indices]}
    save_file(changed, path)
    return path


def write_adapter(folder: Path, name: str) -> Path:
    """Write the adapter `name`, one of `ADAPTERS` or `KINDS`, as peft does."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for module, (down, up, _) in _adapter(name).items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = down
        tensors[f"base_model.model.{module}.lora_B.weight"] = up
    if name == "head":
        # Add a copy of the model's own head, as peft does when an adapter targets the head.
        tensors["base_model.model.lm_head.base_layer.weight"] = _model("").lm_head.weight.detach()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "bias": "none",
              "target_modules": ["q_proj", "v_proj"], **KINDS.get(name, {})}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def write_reference(folder: Path, adapters: Mapping[str, Path | None]) -> None:
    """Write the reference of the model in `folder` for `lmpool worker --verify`; "" in `adapters`: no adapter."""
    draw = random.Random(0)
    prompts = [[draw.randrange(V) for _ in range(length)] for length in (1, 8, 33, 150)]
    rows = {
        checkpoint_revision(place) if place else "": np.stack([reference_row(ids, name) for ids in prompts])
        for name, place in adapters.items()
    }
    ReferenceRows(checkpoint_revision(folder), prompts, rows).write(folder / FILE)


def reference_row(ids: Sequence[int], adapter: str = "", version: int = 0) -> Row:
    """The correct row of a prompt: transformers' float32 log-softmax at the last position, shape (V,)."""
    return reference_rows([ids], adapter, version)[0]


def reference_rows(prompts: Sequence[Sequence[int]], adapter: str = "", version: int = 0) -> list[Row]:
    """The correct rows of prompts; one forward computes all rows that no earlier call has computed."""
    wanted = [tuple(ids) for ids in prompts]
    if missing := [ids for ids in dict.fromkeys(wanted) if (ids, adapter, version) not in _rows]:
        longest = max(missing, key=len)
        # A prompt that begins the longest one needs no forward of its own.
        batch = [longest, *(ids for ids in missing if longest[: len(ids)] != ids)]
        for ids, row in zip(missing, _computed(batch, missing, adapter, version), strict=True):
            _rows[ids, adapter, version] = row
    return [_rows[ids, adapter, version] for ids in wanted]


def reference_states(ids: Sequence[int], adapter: str = "") -> Row:
    """The correct last hidden states of a prompt: what transformers gives to the head, float32 (n, d)."""
    torch_device.settle()
    with torch.inference_mode():
        states: Row = _model(adapter)(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0].numpy()
    return states


def _computed(batch: list[tuple[int, ...]], wanted: list[tuple[int, ...]], adapter: str, version: int) -> Row:
    """Run a batch, whose first prompt is the longest; returns the rows of prompts that begin it or are in the batch."""
    torch_device.settle()
    places = {ids: index for index, ids in enumerate(batch)}
    model, length = _model(adapter, version), len(batch[0])
    # Tokens after a prompt do not change its row: attention is causal.
    padded = torch.tensor([[*ids, *[0] * (length - len(ids))] for ids in batch])
    with torch.inference_mode():
        states = model.model(padded).last_hidden_state
        last = states[[places.get(ids, 0) for ids in wanted], [len(ids) - 1 for ids in wanted]]
        rows: Row = torch.log_softmax(model.lm_head(last).float(), -1).numpy()
    return rows


# (ids, adapter, version) -> the row that `reference_rows` has computed.
_rows: dict[tuple[tuple[int, ...], str, int], Row] = {}


@cache
def _model(adapter: str, version: int = 0) -> Any:
    """A version of the model, with an adapter merged into its weights.

    Version 1 has other numbers than version 0 everywhere. Version 2 differs from version 1 in its norms, and in 1 % of
    the numbers of each matrix; version 3 from version 2 in one matrix only.
    """
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=_HIDDEN,
        intermediate_size=_MLP,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS,
        head_dim=_HEAD,
        max_position_embeddings=MAX_TOKENS,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(min(version, 1))
        model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
        # Use larger weights than transformers' initial ones, which make all rows nearly equal, whether right or wrong.
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.15)
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for later in range(2, version + 1):
            for name, parameter in model.named_parameters():
                share = 1.0 if parameter.ndim == 1 else 0.01
                if later > 2:
                    share = 0.2 if name == "model.layers.1.self_attn.k_proj.weight" else 0.0
                is_changed = torch.rand(parameter.shape, generator=draws) < share
                parameter[is_changed] += torch.randn(int(is_changed.sum()), generator=draws)
    if adapter:
        merge(model, adapter)
    return model.float().eval()


def _version(version: int) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in _model("", version).named_parameters()}


def merge(model: Any, adapter: str) -> None:
    """Add an adapter to the weights of a model with the shapes of the contract's model."""
    weights: dict[str, Any] = dict(model.named_parameters())
    with torch.no_grad():
        for module, (down, up, scale) in _adapter(adapter).items():
            weights[f"{module}.weight"] += scale * up @ down


def _adapter(name: str) -> dict[str, tuple[torch.Tensor, torch.Tensor, float]]:
    """Name of each module -> its two LoRA factors, (rank, in) and (out, rank), and the scale of their product."""
    generator = torch.Generator().manual_seed(1 + [*ADAPTERS, *KINDS].index(name))
    targets = KINDS.get(name, {}).get("target_modules", ["q_proj", "v_proj"])
    sizes = {
        f"model.layers.{layer}.{part}.{module}": size
        for layer in range(_LAYERS)
        for module, (part, size) in _MODULES.items()
        if module in targets
    }
    if name == "head":
        sizes["lm_head"] = V
    factors = {}
    for module, size in sizes.items():
        rank, scale = _rank_and_scale(name, module)
        down = torch.randn(rank, _HIDDEN, generator=generator) * 0.2
        up = torch.randn(size, rank, generator=generator) * 0.2
        factors[module] = (down, up, scale)
    return factors


def _rank_and_scale(name: str, module: str) -> tuple[int, float]:
    """Rank and scale that peft derives from the config of `write_adapter`, worked out by hand; lora_alpha is RANK."""
    if name == "rslora":
        return RANK, RANK**0.5
    if name == "alphas":
        return RANK, 4.0 if module.endswith("v_proj") else 0.5 if "layers.1" in module else 1.0
    if name == "ranks":
        rank = RANK // 2 if module.endswith("q_proj") else 5 * RANK if "layers.0" in module else RANK
        return rank, RANK / rank
    return RANK, 1.0
