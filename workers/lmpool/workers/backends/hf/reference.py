"""Computes reference rows: a checkpoint's rows in float32 on a CPU, by transformers and peft as they are."""

from __future__ import annotations

import os
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from lmpool.errors import SettingsError, first_line
from lmpool.protocol.row import Row
from lmpool.rows.segment import free_bytes
from lmpool.trie import torch_device
from lmpool.workers.backends.checkpoint import checkpoint_revision
from lmpool.workers.backends.hf.model import EAGER, LIMITS
from lmpool.workers.backends.lora import check_adapter
from lmpool.workers.backends.reference import DIGEST, ReferenceRows, advice, folder_of
from lmpool.workers.backends.settings import HfSettings

_LENGTHS = (2, 8, 40, 200)  # Tokens of the prompts; one more prompt is longer than a sliding window.
_MAX_WINDOW = 4096  # Max tokens of a sliding window that a prompt exceeds: a longer prompt would take minutes on a CPU.
# Exceptions of transformers for broken checkpoints, missing packages and unknown architectures.
_ERRORS = (OSError, ValueError, ImportError, KeyError, RuntimeError, AttributeError, TypeError)


@torch.inference_mode()
def compute_reference(settings: HfSettings) -> ReferenceRows:
    """The reference of a checkpoint and of the adapters of the settings."""
    torch_device.settle()
    folder = folder_of(settings)
    file = {} if settings.gguf_file is None else {"gguf_file": settings.gguf_file}
    options: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code, "local_files_only": True, **file}
    auto: Any = AutoModelForCausalLM
    adapters = [check_adapter(source, folder) for source in settings.adapter_folders.values()]
    try:
        config = AutoConfig.from_pretrained(folder, **options)
        _check_memory(settings, config)
        # Eager attention supports all options of a model, such as soft caps, which transformers' default ignores.
        model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation=EAGER, **options).eval()
        prompts = _prompts(config.get_text_config(decoder=True), int(_row(model, [0]).shape[0]))
        rows = {"": _rows(model, prompts)}
        for place in adapters:
            rows[checkpoint_revision(place)] = _rows_with(model, place, prompts)
    except SettingsError:
        raise
    except _ERRORS as error:
        raise SettingsError(f"verify: transformers cannot compute {settings.model}: {first_line(error)}") from error
    return ReferenceRows(os.environ.get(DIGEST) or checkpoint_revision(folder), prompts, rows)


def _check_memory(settings: HfSettings, config: PreTrainedConfig) -> None:
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config, trust_remote_code=settings.trust_remote_code)
    needed, free = 4 * sum(weight.numel() for weight in model.parameters()), free_bytes()
    if needed > free:
        sizes = f"{needed / 2**30:.1f} GiB in float32, and {free / 2**30:.1f} GiB are free here"
        raise SettingsError(f"verify: {settings.model} takes {sizes}. {advice(settings.model)}")


def _prompts(config: PreTrainedConfig, vocab_size: int) -> list[list[int]]:
    """Random prompts of several lengths, of which one exceeds the longest sliding window up to `_MAX_WINDOW`."""
    sizes = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    windows = [size for size in sizes if type(size) is int and 0 < size <= _MAX_WINDOW]
    limit = next((value for name in LIMITS if type(value := getattr(config, name, None)) is int and value > 1), None)
    # Leave out the last positions, which engines reserve for sampled tokens.
    most = _MAX_WINDOW + 8 if limit is None else max(1, limit - 7)
    lengths = {min(most, size) for size in (*_LENGTHS, *(window + 8 for window in windows))}
    # Leave out the ends of the vocabulary, which have special tokens: some stand for images.
    first, last = vocab_size // 8, max(vocab_size // 8 + 1, vocab_size // 2)
    draw = np.random.default_rng(0)
    return [draw.integers(first, last, size).tolist() for size in sorted(lengths)]


def _row(model: Any, ids: list[int]) -> Row:
    given = {"input_ids": torch.tensor([ids]), "use_cache": False, "logits_to_keep": 1}
    taken = signature(model.forward).parameters
    logits = model(**{name: value for name, value in given.items() if name in taken}).logits[0, -1]
    row: Row = torch.log_softmax(logits.float(), -1).numpy()
    return row


def _rows(model: Any, prompts: list[list[int]]) -> Row:
    return np.stack([_row(model, ids) for ids in prompts])


def _rows_with(model: Any, adapter: Path, prompts: list[list[int]]) -> Row:
    """The rows of prompts with an adapter, which peft puts on the model and removes again."""
    from peft import PeftModel

    adapted: Any = PeftModel.from_pretrained(model, str(adapter)).eval()
    rows = _rows(adapted.base_model.model, prompts)
    adapted.unload()
    return rows
