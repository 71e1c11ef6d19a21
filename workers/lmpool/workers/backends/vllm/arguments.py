"""What vLLM is asked for: our settings and the user's options as arguments of its engine."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from vllm import __version__ as vllm_version
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

from lmpool.errors import SettingsError
from lmpool.protocol.adapter import qualify
from lmpool.workers.backends.checkpoint import (
    checkpoint_dtype,
    checkpoint_revision,
    checkpoint_source,
)
from lmpool.workers.backends.engine_args import check_engine_args, check_one_process, parse_engine_args
from lmpool.workers.backends.lora import adapter_folder, check_adapter
from lmpool.workers.backends.vllm.settings import VllmSettings

Adapters = dict[str, tuple[LoRARequest, str]]
"""Adapter ("name@revision") -> what a request names it by, and its folder or hub name."""

_CPU_KV_BYTES = 1 << 30
_CPU_BLOCK = 32
_MANY = 1 << 30
_LATER_RANK = 64
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)

_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "nnodes")
_REFUSED = {
    "model": "it is the MODEL of the command",
    "tokenizer": "prompts are token ids",
    "skip_tokenizer_init": "prompts are token ids",
    "logits_processors": "rows are captured by one; name installed ones with --logits-processors",
    "enable_lora": "name adapters with --adapters name=folder",
    "lora_modules": "name adapters with --adapters name=folder",
    "speculative_config": "every prompt asks for one row, so there is nothing to speculate on",
    "logprobs_mode": "rows are captured before it applies",
    "generation_config": "what a checkpoint wishes for its samples must not touch its rows",
    "runner": "rows come from models that generate",
    "convert": "rows come from models that generate",
}

# Options that leave rows as they are but for rounding: workers that differ in them only may serve one model.
_HARMLESS = {
    "async_scheduling", "attention_backend", "attention_config", "block_size", "compilation_config", "cpu_offload_gb",
    "cudagraph_capture_sizes", "disable_cascade_attn", "disable_log_stats", "download_dir", "enable_chunked_prefill",
    "enable_prefix_caching", "enforce_eager", "gpu_memory_utilization", "kv_cache_memory_bytes",
    "long_prefill_token_threshold", "max_cpu_loras", "max_cudagraph_capture_size", "max_long_partial_prefills",
    "max_lora_rank", "max_loras", "max_model_len", "max_num_active_seqs", "max_num_batched_tokens",
    "max_num_partial_prefills", "max_num_seqs", "num_gpu_blocks_override", "optimization_level",
    "safetensors_load_strategy", "scheduling_policy", "use_tqdm_on_load", *_PARALLEL,
}  # fmt: skip


def user_arguments(settings: VllmSettings) -> dict[str, Any]:
    """The options that are handed on, checked.

    Raises:
        SettingsError: vLLM has no such option, or it cannot be set here.
    """
    given = parse_engine_args(settings.engine_args)
    check_engine_args(given, {field.name for field in fields(EngineArgs)}, _REFUSED, f"vLLM {vllm_version}")
    check_one_process(given, _PARALLEL)
    return given


def find_adapters(settings: VllmSettings, model: Path) -> Adapters:
    """The adapters that the settings name, for the model in a folder.

    Raises:
        SettingsError: there is no such folder, or no adapter for this model in it.
    """
    found: Adapters = {}
    for number, (name, place) in enumerate(settings.adapter_folders.items(), start=1):
        adapter, request = read_adapter(name, place, number, model)
        found[adapter] = (request, checkpoint_source(place))
    return found


def read_adapter(name: str, place: str, number: int, model: Path) -> tuple[str, LoRARequest]:
    """An adapter in a folder or on the hub, as jobs and as vLLM name it.

    Raises:
        SettingsError: there is no such folder, or no adapter for this model in it.
    """
    folder = adapter_folder(place)
    check_adapter(folder, model)
    adapter = qualify(name, checkpoint_revision(folder))
    # By the qualified name: vLLM's prefix cache tells adapters apart by it.
    return adapter, LoRARequest(adapter, number, str(folder))


def engine_arguments(settings: VllmSettings, folder: Path, adapters: Adapters, given: dict[str, Any]) -> dict[str, Any]:
    """Everything that vLLM is told but for the logits processor; the user's options win."""
    arguments: dict[str, Any] = {
        "model": str(folder),
        "trust_remote_code": settings.trust_remote_code,
        "dtype": checkpoint_dtype(folder, settings.dtype),
        # Sessions that wait have a place in the runner's batch too; vLLM wants a token for each place.
        "max_num_seqs": min(settings.max_batch + settings.sessions, settings.max_batch_tokens or _MANY),
        "max_num_batched_tokens": settings.max_batch_tokens,
        # One token is sampled for every prompt, though nobody wants it.
        "max_model_len": None if settings.max_prompt_tokens is None else settings.max_prompt_tokens + 1,
        "kv_cache_memory_bytes": settings.kv_cache_bytes,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "disable_log_stats": True,
        "use_tqdm_on_load": sys.stderr.isatty(),  # Progress bars make a mess of a log.
    }
    if current_platform.is_cpu():
        arguments |= {
            "enforce_eager": True,
            "block_size": _CPU_BLOCK,
            "kv_cache_memory_bytes": settings.kv_cache_bytes or _CPU_KV_BYTES,
        }
    if adapters or settings.max_adapters:
        # One more than there are: on a CPU prompts without an adapter were given one's rows otherwise.
        most = adapter_places(settings) + 1
        rank = max(_rank(Path(request.lora_path)) for request, _ in adapters.values()) if adapters else 0
        rank = max(rank, _LATER_RANK if settings.max_adapters else 0)
        arguments |= {"enable_lora": True, "max_loras": most, "max_cpu_loras": most, "max_lora_rank": rank}
    return arguments | given


def adapter_places(settings: VllmSettings) -> int:
    """Adapters that may be loaded at once."""
    further = settings.max_adapters
    # One that is replaced stays until all workers have the new one.
    return len(settings.adapters) + (further + 1 if further else 0)


def fitting_sessions(settings: VllmSettings, places: int) -> int:
    """Sessions that may wait when the engine has so many places for prompts: those wanted, but at most half."""
    return min(settings.sessions, places // 2)


def row_deciding(given: dict[str, Any]) -> dict[str, Any]:
    """The user's options that may change rows by more than rounding: they are part of the fingerprint."""
    return {name: value for name, value in given.items() if name not in _HARMLESS}


def _rank(folder: Path) -> int:
    """The smallest rank that vLLM has room for and an adapter fits in."""
    rank = json.loads((folder / "adapter_config.json").read_text("utf-8")).get("r", 0)
    fitting = [most for most in _LORA_RANKS if most >= rank]
    if not fitting:
        raise SettingsError(f"adapters: {folder} has rank {rank}: vLLM takes at most {_LORA_RANKS[-1]}")
    return fitting[0]
