"""Options of SGLang: checks the user's options, and sets the other options from the backend's settings."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from lmpool.errors import SettingsError
from lmpool.workers.backends.checkpoint import checkpoint_dtype
from lmpool.workers.backends.lora import LATER_RANK
from lmpool.workers.backends.settings import ONE_PROCESS, SglangSettings, check_engine_args, parse_engine_args

RESERVED_TOKENS = 7
"""Tokens of SGLang's context that a prompt cannot use, because SGLang reserves them for sampled tokens."""

_CPU_KV_BYTES = 1 << 30  # Default bytes for keys and values on a CPU, where SGLang would take most of the memory.
_FOREVER_S = 1e9  # Timeout in seconds of SGLang's watchdog: so long that the watchdog never acts.
_ITEM_SIZES = {"float32": 4, "fp8_e5m2": 1, "fp8_e4m3": 1}  # Bytes per number of keys and values; 2 in other dtypes.

_PARALLEL = dict.fromkeys((
    "tp_size", "pp_size", "dp_size", "ep_size", "nnodes", "dcp_size", "attn_cp_size", "attn_dp_size", "moe_dp_size",
    "dwdp_size",
), 1)  # fmt: skip

_ONE_ROW = "each request computes one row, so nothing is sampled"

# Reason -> options that the user cannot set for this reason.
_REASONS = {
    "it is the MODEL of the command": ("model_path",),
    "use --revision": ("revision",),
    "use --name": ("served_model_name",),
    "prompts are token ids": ("tokenizer_path", "skip_tokenizer_init"),
    "the row of a shortened prompt is another prompt's row": ("allow_auto_truncate",),
    "rows are captured in the event loop without overlap": ("disable_overlap_schedule", "enable_pdmux"),
    "rows come from models that generate token after token": ("is_embedding", "dllm_algorithm"),
    "a prompt's row needs the whole model in one place": ("disaggregation_mode", "encoder_only", "language_only"),
    ONE_PROCESS: ("use_ray",),
    "the worker limits its prompts itself": ("max_queued_requests",),
    "a worker's prompts have no priorities": ("enable_priority_scheduling",),
    "an idle worker sleeps in any case": ("sleep_on_idle",),
    "leases detect a worker that hangs; SGLang's watchdog would kill the process that started it": (
        "watchdog_timeout", "soft_watchdog_timeout",
    ),
    "name adapters with --adapters name=folder": ("enable_lora", "lora_paths"),
    _ONE_ROW: ("enable_multi_layer_eagle", "preferred_sampling_params", "enable_custom_logit_processor"),
}  # fmt: skip
_REFUSED = {option: reason for reason, options in _REASONS.items() for option in options}

# Modules that adapters loaded after the start may change: SGLang reserves memory for them when it starts.
_LATER_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

# Options that change rows by rounding at most. Workers that differ only in these options may serve the same model.
_HARMLESS = {
    "attention_backend", "base_gpu_id", "chunked_prefill_size", "context_length", "cpu_offload_gb",
    "cuda_graph_backend_decode", "cuda_graph_backend_prefill", "cuda_graph_bs_decode", "cuda_graph_bs_prefill",
    "cuda_graph_config", "cuda_graph_max_bs_decode", "cuda_graph_max_bs_prefill", "decode_attention_backend", "device",
    "disable_cuda_graph", "disable_cuda_graph_padding", "disable_decode_cuda_graph", "disable_prefill_cuda_graph",
    "disable_radix_cache", "download_dir", "enable_hierarchical_cache", "enable_mixed_chunk", "enable_torch_compile",
    "grammar_backend", "hicache_ratio", "hicache_size", "log_level", "lora_backend", "lora_target_modules",
    "max_lora_rank",
    "max_loras_per_batch", "max_prefill_tokens", "max_running_requests", "max_total_tokens", "mem_fraction_static",
    "numa_node", "page_size", "prefill_attention_backend", "prefill_max_requests", "radix_eviction_policy",
    "random_seed", "sampling_backend", "schedule_conservativeness", "schedule_policy", "torch_compile_max_bs",
    "trust_remote_code", "weight_loader_disable_mmap", *_PARALLEL,
}  # fmt: skip


def user_options(settings: SglangSettings, known: Mapping[str, bool], version: str) -> dict[str, Any]:
    """The user's engine options, checked. `known`: SGLang's options -> whether the option takes a text."""
    given = parse_engine_args(settings.engine_args)
    sampled = {name: _ONE_ROW for name in known if name.startswith(("speculative_", "decoupled_spec_"))}
    check_engine_args(given, known, _REFUSED | sampled, _PARALLEL, f"SGLang {version}")
    # Write tables as JSON for options that take a text.
    return {
        name: json.dumps(value) if known[name] and isinstance(value, dict) else value for name, value in given.items()
    }


def row_deciding(given: Mapping[str, Any]) -> dict[str, Any]:
    """The user's options that may change rows by more than rounding. The fingerprint includes them."""
    return {name: value for name, value in given.items() if name not in _HARMLESS}


def engine_options(
    settings: SglangSettings, folder: Path, device: str, adapters: Collection[Mapping[str, Any]]
) -> dict[str, Any]:
    """Default options that follow from the backend's settings; the user's options override them.

    `adapters` holds the configs, as `plain_adapter` returns them, of the adapters that are loaded at the start.
    """
    kind, _, index = device.partition(":")
    options: dict[str, Any] = {
        "model_path": str(folder),
        "skip_tokenizer_init": True,
        "trust_remote_code": settings.trust_remote_code,
        "dtype": checkpoint_dtype(folder, settings.dtype),
        "device": kind,
        "base_gpu_id": int(index or 0),
        "max_running_requests": settings.max_batch,
        "disable_overlap_schedule": True,
        "watchdog_timeout": _FOREVER_S,
        "sampling_backend": "pytorch",  # No token is sampled, and this backend needs no warm-up.
        "grammar_backend": "none",
        "disable_decode_cuda_graph": True,  # No token is decoded, and CUDA graphs take long to build.
        "log_level": "warning",
    }
    if settings.max_batch_tokens is not None:
        options |= dict.fromkeys(("chunked_prefill_size", "max_prefill_tokens"), settings.max_batch_tokens)
    if slots := settings.adapter_slots:
        later = [{"r": LATER_RANK, "target_modules": _LATER_MODULES}] if settings.max_adapters else []
        reserved = [*later, *adapters]
        options |= {
            "enable_lora": True,
            "max_loras_per_batch": slots + 1,  # Prompts without an adapter take a slot too.
            "lora_strict_loading": True,
            "max_lora_rank": max(config["r"] for config in reserved),
            "lora_target_modules": sorted({module for config in reserved for module in config["target_modules"]}),
        }
    if kind == "cpu":
        options |= {"attention_backend": "torch_native", "lora_backend": "torch_native"}
    return options


def kv_tokens(settings: SglangSettings, options: Mapping[str, Any], numbers: int) -> int | None:
    """Max tokens whose keys and values (`numbers` numbers per token) fit into memory; None for SGLang's default."""
    memory = settings.kv_cache_bytes
    if memory is not None and not numbers:
        raise SettingsError("kv_cache_bytes: this model keeps no keys and values; see mem_fraction_static of SGLang")
    if memory is None and options["device"] == "cpu":
        memory = _CPU_KV_BYTES
    if memory is None or not numbers:
        return None
    stored = options.get("kv_cache_dtype", "auto")
    token = numbers * _ITEM_SIZES.get(options["dtype"] if stored == "auto" else stored, 2)
    if memory // token <= RESERVED_TOKENS:
        raise SettingsError(f"kv_cache_bytes: {memory} is too little: the keys and values of a token take {token}")
    return memory // token


def device_of(options: Mapping[str, Any]) -> str:
    """The device that SGLang uses: "cpu", or another kind with its index, such as "cuda:0"."""
    kind = str(options["device"]).partition(":")[0]
    return kind if kind == "cpu" else f"{kind}:{options['base_gpu_id']}"
