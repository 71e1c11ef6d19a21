"""Writes tiny random models for tests; each architecture differs in its attention, cache or position encoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    RwkvConfig,
)

VOCAB_SIZE = 97
MAX_TOKENS = 64

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_TOKENS,
}


def llama() -> PreTrainedConfig:
    """Config of a Llama with rotary embeddings and two query heads per key head."""
    return LlamaConfig(**_SHAPE, num_hidden_layers=3)


def gpt2() -> PreTrainedConfig:
    """Config of a GPT-2, whose absolute position embeddings are learned."""
    return GPT2Config(vocab_size=VOCAB_SIZE, n_positions=MAX_TOKENS, n_embd=32, n_layer=2, n_head=4)


def mistral() -> PreTrainedConfig:
    """Config of a Mistral whose layers all attend to a window of four tokens."""
    return MistralConfig(**_SHAPE, num_hidden_layers=2, sliding_window=4)


def gemma2() -> PreTrainedConfig:
    """Config of a Gemma 2 that caps attention scores, which transformers' default attention (sdpa) does not."""
    return Gemma2Config(**_SHAPE, num_hidden_layers=2, head_dim=8, sliding_window=4, attn_logit_softcapping=2.0)


def gemma3() -> PreTrainedConfig:
    """Config of a Gemma 3, where layers with and without a window alternate and have different rotary embeddings."""
    kinds = ["sliding_attention", "full_attention"] * 2
    return Gemma3TextConfig(**_SHAPE, num_hidden_layers=4, head_dim=8, sliding_window=4, layer_types=kinds)


def longrope() -> PreTrainedConfig:
    """Config of a Llama whose rotary embeddings change when a batch has a prompt of more than 16 tokens."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 16,
    }
    return LlamaConfig(**_SHAPE, num_hidden_layers=2, rope_parameters=rope)


def mamba() -> PreTrainedConfig:
    """Config of a Mamba, which has a recurrent state instead of keys and values."""
    return MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=32, state_size=4, num_hidden_layers=2)


def rwkv() -> PreTrainedConfig:
    """Config of an RWKV, which has a recurrent state and does not support padding."""
    return RwkvConfig(vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, context_length=MAX_TOKENS)


CONFIGS = {make.__name__: make for make in (llama, gpt2, mistral, gemma2, gemma3, longrope, mamba, rwkv)}


def make_model(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A model of the given kind (a key of `CONFIGS`) with random weights, in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(CONFIGS[kind]())
        # Use larger weights than the default, which makes all rows so similar that wrong rows would pass.
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.3)
    model.tie_weights()
    made: PreTrainedModel = model.to(dtype).eval()
    return made


def write_model(folder: Path, kind: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """Write the weights and config of a model of the given kind to `folder`, without a tokenizer."""
    make_model(kind, dtype, seed).save_pretrained(folder)
    return folder
