"""Compares rows of several architectures with transformers in float32, on models that an engine spreads over processes.

    LMPOOL_CONTRACT=vllm-tensor,vllm-pipeline python -m tests.engines.architectures [NAME...]

Prints the largest difference of any entry for each architecture and each subject, over rows that are computed twice,
with and without cached keys and values, and over scores of all tokens of some prompts.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from lmpool.protocol.row import Row
from lmpool.trie import torch_device
from lmpool.workers.backends.checkpoint import checkpoint_revision
from lmpool.workers.backends.reference import FILE, ReferenceRows
from tests.contract.driver import Opened, prompt
from tests.contract.model import MAX_TOKENS, V
from tests.contract.subjects import Subject, chosen

BOUND = 5e-5
_SHAPE: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_TOKENS,
}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SHAPE),
    "qwen3": lambda: Qwen3Config(**_SHAPE),
    "gemma3": lambda: Gemma3TextConfig(
        **_SHAPE, sliding_window=64, query_pre_attn_scalar=32, layer_types=["sliding_attention", "full_attention"]
    ),
    "qwen3-moe": lambda: Qwen3MoeConfig(**_SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96),
    "gpt2": lambda: GPT2Config(
        vocab_size=V, n_positions=MAX_TOKENS, n_embd=128, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    ),
}
_EDGES = (1, 2, 31, 32, 33, 63, 64, 65, 100, 128, 129, 200, 254, 255)  # Lengths next to block and window boundaries.
_SCORED = (40, 100, 200)


def make_model(name: str, folder: Path) -> Callable[[list[int]], Row]:
    """Write a random model; returns a function that computes all rows of a prompt, float32 (tokens, V)."""
    torch_device.settle()
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(CONFIGS[name]())
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.12)
    model.tie_weights()
    model = model.float().eval()
    model.save_pretrained(folder)

    def rows_of(ids: list[int]) -> Row:
        with torch.inference_mode():
            rows: Row = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1).numpy()
        return rows

    return rows_of


def difference(subject: Subject, folder: Path, rows_of: Callable[[list[int]], Row]) -> float:
    """The largest difference of the subject's rows and scores of a model."""
    draw = random.Random(0)
    prompts = [prompt(draw, length) for length in _EDGES]
    shared = prompt(draw, 90)
    prompts += [
        [*shared, *prompt(draw, length)] for length in (1, 5, 33)
    ]  # They have cached keys and values in common.
    prompts += [shared[:length] for length in range(40, 60)]
    expected = [rows_of(ids)[-1] for ids in prompts]
    ReferenceRows(checkpoint_revision(folder), prompts[:3], {"": np.stack(expected[:3])}).write(folder / FILE)
    worst = 0.0
    with Opened(subject, folder, "float32", {}) as driver:
        for _ in range(2):
            rows = driver.ask(prompts)
            worst = max(worst, *(float(np.abs(row - right).max()) for row, right in zip(rows, expected, strict=True)))
        scored = [prompt(draw, length) for length in _SCORED]
        for ids, scores in zip(scored, driver.score(scored, [1] * len(scored)), strict=True):
            right = rows_of(ids)[np.arange(len(ids) - 1), ids[1:]]
            worst = max(worst, float(np.abs(scores - right).max()))
    return worst


def main(names: list[str]) -> int:
    """Print a table; returns 1 if a difference exceeds `BOUND`."""
    subjects, worst = chosen(), 0.0
    print(f"{'':<12}", *(f"{name:>14}" for name in subjects))
    for name in names or CONFIGS:
        with tempfile.TemporaryDirectory(prefix="lmp") as folder:
            rows_of = make_model(name, Path(folder))
            found = [difference(replace(subject, spy=None), Path(folder), rows_of) for subject in subjects.values()]
        worst = max(worst, *found)
        print(f"{name:<12}", *(f"{value:>14.1e}" for value in found), flush=True)
    return int(worst > BOUND)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
