"""The model of the contract tests: a tiny random Llama on disk, adapters for it, and what its rows must be."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lmpool.protocol.row import Row
from lmpool.trie.kernels import torch_device

# No multiple of 64: engines pad the vocabulary.
V = 517
MAX_TOKENS = 256
RANK = 8
ADAPTERS = ("warm", "cold")
"""Names of the adapters that `write_adapter` can make."""
PIECES = {
    "<s>": b"<s>",
    "a": b"a",
    "\u0120the": b" the",
    "\u010a": b"\n",
    "\u00c3\u00a9": "é".encode(),
    "\u0120t": b" t",
}
"""Piece of the tokenizer -> its bytes, in the order of the ids; the model has more ids than these."""

_HIDDEN, _HEAD, _HEADS, _KV_HEADS, _LAYERS = 128, 32, 4, 2, 2


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


def write_adapter(folder: Path, name: str) -> Path:
    """Write one of `ADAPTERS` as peft would."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for module, (down, up) in _adapter(name).items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = down
        tensors[f"base_model.model.{module}.lora_B.weight"] = up
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "bias": "none",
              "target_modules": ["q_proj", "v_proj"]}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def reference_row(ids: Sequence[int], adapter: str = "") -> Row:
    """transformers' float32 log-softmax at the last position; shape (V,)."""
    return _reference(tuple(ids), adapter)


@cache
def _reference(ids: tuple[int, ...], adapter: str) -> Row:
    torch_device.settle()
    with torch.inference_mode():
        logits = _model(adapter)(torch.tensor([ids])).logits[0, -1]
        row: Row = torch.log_softmax(logits.float(), -1).numpy()
    return row


@cache
def _model(adapter: str) -> Any:
    """The model with an adapter merged into its weights."""
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=_HIDDEN,
        intermediate_size=192,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS,
        head_dim=_HEAD,
        max_position_embeddings=MAX_TOKENS,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
        # As they come the weights are so small that all rows look alike: wrong ones would pass for right.
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.15)
    if adapter:
        weights: dict[str, Any] = dict(model.named_parameters())
        with torch.no_grad():
            for module, (down, up) in _adapter(adapter).items():
                weights[f"{module}.weight"] += up @ down
    return model.float().eval()


def _adapter(name: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Module -> its two factors, (RANK, in) and (out, RANK)."""
    seed = 1 + ADAPTERS.index(name)
    factors = {}
    generator = torch.Generator().manual_seed(seed)
    for layer in range(_LAYERS):
        for part, size in (("q_proj", _HEADS * _HEAD), ("v_proj", _KV_HEADS * _HEAD)):
            down = torch.randn(RANK, _HIDDEN, generator=generator) * 0.2
            up = torch.randn(size, RANK, generator=generator) * 0.2
            factors[f"model.layers.{layer}.self_attn.{part}"] = (down, up)
    return factors
