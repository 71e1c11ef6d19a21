"""Start of an SGLang engine: its options, the adapters that it reads, and errors in one line.

`launch` imports `engine` only after the settings are checked and the environment is set, because SGLang reads the
environment and loads its kernels while it is imported.
"""

from __future__ import annotations

import json
import logging
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lmpool.errors import LMPoolError, SettingsError, first_line
from lmpool.protocol.adapter import qualify
from lmpool.protocol.model_info import ModelInfo
from lmpool.settings import shown
from lmpool.trie import torch_device
from lmpool.workers.backends.checkpoint import (
    checkpoint_dtype,
    checkpoint_folder,
    checkpoint_revision,
    checkpoint_source,
)
from lmpool.workers.backends.lora import (
    BASE_WEIGHT,
    HARMLESS_INITS,
    LATER_RANK,
    PEFT_PREFIX,
    WEIGHTS,
    adapter_folder,
    check_adapter,
    ranks_of,
    read_adapter_config,
    scale_of,
    write_adapter_config,
)
from lmpool.workers.backends.row_encoder import pick_device
from lmpool.workers.backends.settings import (
    ONE_PROCESS,
    SGLANG_DISTRIBUTIONS,
    SGLANG_VERSIONS,
    SglangSettings,
    check_engine_args,
    parse_engine_args,
    require_version,
)

if TYPE_CHECKING:
    from lmpool.workers.backends.sglang.engine import Engine

RESERVED_TOKENS = 7
"""How much shorter a prompt must be than SGLang's context, which reserves space for sampled tokens."""

_CPU_KV_BYTES = 1 << 30  # Memory for keys and values on a CPU, where SGLang would take most of the machine's.
_FOREVER_S = 1e9  # SGLang's watchdog must never act.
_ITEM_SIZES = {"float32": 4, "fp8_e5m2": 1, "fp8_e4m3": 1}  # Bytes per number of keys and values; other dtypes have 2.
_TOO_LITTLE_MEMORY = re.compile("(?i)out of memory|not enough memory|allocate memory|memory pool|memory capacity")

_PARALLEL = (
    "tp_size", "pp_size", "dp_size", "ep_size", "nnodes", "dcp_size", "attn_cp_size", "attn_dp_size", "moe_dp_size",
    "dwdp_size",
)  # fmt: skip

_ONE_ROW = "each request computes one row, so nothing is sampled"

# Reason -> options that cannot be set.
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

# Fields of an adapter's config that SGLang leaves out without a word, or does not serve.
_UNSERVED = (
    "use_dora", "lora_bias", "modules_to_save", "target_parameters", "trainable_token_indices",
    "alora_invocation_tokens", "use_qalora", "use_bdlora",
)  # fmt: skip

# Modules that adapters may change which are loaded while SGLang serves: it reserves memory for them at its start.
_LATER_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

# Options that change rows by rounding at most: workers that differ only in these may serve the same model.
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


class Launched(NamedTuple):
    """A running engine.

    Attributes:
        engine: the engine.
        info: of the model; the encoding of its rows is not known yet.
        adapters: "name@revision" -> folder or hub name.
        dtype: of the model.
        device: where the model is: "cpu", or a torch device such as "cuda:0".
        folder: of the checkpoint.
    """

    engine: Engine
    info: ModelInfo
    adapters: dict[str, str]
    dtype: torch.dtype
    device: str
    folder: Path


def launch(settings: SglangSettings) -> Launched:
    """Load the model that the settings name, and start SGLang's event loop."""
    torch_device.settle()
    version = require_version(SGLANG_DISTRIBUTIONS, SGLANG_VERSIONS)
    folder = checkpoint_folder("model", settings.model, settings.revision)
    folders = {name: checked_adapter(source, folder) for name, source in settings.adapter_folders.items()}
    # By the qualified name: SGLang tells prefixes of different adapters apart by it.
    adapters = {qualify(name, checkpoint_revision(path)): path for name, path in folders.items()}
    sources = dict(zip(adapters, map(checkpoint_source, settings.adapter_folders.values()), strict=True))
    device = str(pick_device(str(parse_engine_args(settings.engine_args).get("device", settings.device))))
    _prepare_import(device)
    try:
        from lmpool.workers.backends.sglang.engine import Engine, known_options, logprob_processors_of, read_facts
    except (ImportError, OSError, RuntimeError) as error:
        # RuntimeError: its kernels are not built for this machine.
        raise SettingsError(f"backend: SGLang {version} cannot be imported: {first_line(error)}") from error
    given = user_options(settings, known_options(), version)
    options = engine_options(settings, folder, device, adapters) | given
    if given.get("log_level"):
        logging.getLogger("sglang").setLevel(str(given["log_level"]).upper())
    try:
        positions, numbers = read_facts(folder, settings.trust_remote_code)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, ImportError) as error:
        raise SettingsError(f"model: {settings.model} cannot be loaded: {first_line(error)}") from error
    tokens = kv_tokens(settings, options, numbers)
    if tokens is not None:
        options.setdefault("max_total_tokens", tokens)
    wanted = settings.max_prompt_tokens
    if wanted is not None and wanted > positions:
        raise SettingsError(f"max_prompt_tokens: {wanted} is more than the {positions} positions of the model")
    options.setdefault("context_length", positions if wanted is None else min(wanted + RESERVED_TOKENS, positions))
    revision = checkpoint_revision(folder, also=row_deciding(given))
    # SGLang reads adapters while it starts, and then keeps them in memory.
    with TemporaryDirectory(prefix="lmpool-adapters-") as copies:
        if adapters:
            plain = {name: write_plain_adapter(path, Path(copies) / name) for name, path in adapters.items()}
            options["lora_paths"] = {name: str(path) for name, path in plain.items()}
        engine = Engine(options)
        try:
            if (failure := engine.wait()) is not None:
                raise _start_error(failure, f"SGLang {version} cannot serve {settings.model}") from failure
            scheduler, dtype = engine.scheduler, engine.scheduler.model_config.dtype
            limit = scheduler.max_req_input_len - 1  # It refuses prompts of max_req_input_len tokens.
            if limit < (wanted or 1):
                raise SettingsError(
                    f"max_prompt_tokens: {wanted or 1} is more than the {limit} tokens of a prompt that SGLang has "
                    "memory for"
                )
            info = ModelInfo(
                name=settings.served_as,
                backend="sglang",
                vocab_size=scheduler.model_config.vocab_size,
                max_prompt_tokens=wanted or limit,
                revision=revision,
                dtype=str(dtype).removeprefix("torch."),
                positions=bool(logprob_processors_of(scheduler)),
                source=checkpoint_source(settings.model),
            )
            return Launched(engine, info, sources, dtype, _device_of(options), folder)
        except BaseException:
            engine.close()
            raise


def user_options(settings: SglangSettings, known: Mapping[str, bool], version: str) -> dict[str, Any]:
    """The user's engine options, checked. `known` has SGLang's options, and whether each takes a text."""
    given = parse_engine_args(settings.engine_args)
    sampled = {name: _ONE_ROW for name in known if name.startswith(("speculative_", "decoupled_spec_"))}
    check_engine_args(given, known, _REFUSED | sampled, _PARALLEL, f"SGLang {version}")
    # Some options take a table as JSON text.
    return {
        name: json.dumps(value) if known[name] and isinstance(value, dict) else value for name, value in given.items()
    }


def row_deciding(given: Mapping[str, Any]) -> dict[str, Any]:
    """The user's options that may change rows by more than rounding. The fingerprint includes them."""
    return {name: value for name, value in given.items() if name not in _HARMLESS}


def engine_options(settings: SglangSettings, folder: Path, device: str, adapters: Mapping[str, Path]) -> dict[str, Any]:
    """The options that do not depend on the model; the user's options replace them."""
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
        "sampling_backend": "pytorch",  # Nothing is sampled, and this one needs no warm-up.
        "grammar_backend": "none",
        "disable_decode_cuda_graph": True,  # Nothing is decoded, and graphs take long to build.
        "log_level": "warning",
    }
    if settings.max_batch_tokens is not None:
        options |= dict.fromkeys(("chunked_prefill_size", "max_prefill_tokens"), settings.max_batch_tokens)
    if kind == "cpu":
        options["attention_backend"] = "torch_native"
    if adapters or settings.max_adapters:
        options |= {
            "enable_lora": True,
            # Prompts without an adapter take a slot too.
            "max_loras_per_batch": max(len(adapters), settings.max_adapters) + 1,
            "lora_strict_loading": True,
        }
        if adapters:
            options["lora_paths"] = {name: str(path) for name, path in adapters.items()}
        if settings.max_adapters:
            ranks = [max(ranks_of(read_adapter_config(path))) for path in adapters.values()]
            options |= {"max_lora_rank": max([LATER_RANK, *ranks]), "lora_target_modules": list(_LATER_MODULES)}
        if kind == "cpu":
            options["lora_backend"] = "torch_native"
    return options


def kv_tokens(settings: SglangSettings, options: Mapping[str, Any], numbers: int) -> int | None:
    """Tokens whose keys and values, of `numbers` numbers per token, fit into memory; None for SGLang's default."""
    memory = settings.kv_cache_bytes
    if memory is None and options["device"] == "cpu":
        memory = _CPU_KV_BYTES
    if memory is None or not numbers:
        if settings.kv_cache_bytes is not None:
            raise SettingsError(
                "kv_cache_bytes: this model keeps no keys and values; see mem_fraction_static of SGLang"
            )
        return None
    stored = options.get("kv_cache_dtype", "auto")
    token = numbers * _ITEM_SIZES.get(options["dtype"] if stored == "auto" else stored, 2)
    if memory // token <= RESERVED_TOKENS:
        raise SettingsError(f"kv_cache_bytes: {memory} is too little: the keys and values of a token take {token}")
    return memory // token


def _prepare_import(device: str) -> None:
    """Set the environment and the loggers that SGLang uses while it is imported."""
    if device == "cpu":
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    logging.getLogger("sglang").setLevel(logging.WARNING)
    # It warns about every known model whose packages are missing.
    logging.getLogger("sglang.srt.models.registry").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"sglang\.")


def _start_error(error: BaseException, context: str) -> LMPoolError:
    """The refusal for an exception of SGLang, which has no exception type of its own."""
    if isinstance(error, LMPoolError):
        return error
    is_too_little = isinstance(error, MemoryError) or _TOO_LITTLE_MEMORY.search(str(error)) is not None
    return SettingsError(f"{'kv_cache_bytes' if is_too_little else 'model'}: {context}: {first_line(error)}")


def _device_of(options: Mapping[str, Any]) -> str:
    """The device that SGLang uses, with its number; the CPU has none."""
    kind = str(options["device"]).partition(":")[0]
    return kind if kind == "cpu" else f"{kind}:{options['base_gpu_id']}"


def write_plain_adapter(folder: Path, copy: Path) -> Path:
    """Write a copy of an adapter that SGLang reads as it is meant.

    SGLang takes one rank, and multiplies all modules by lora_alpha / r, whatever rsLoRA and alpha_pattern say.

    Args:
        folder: of the adapter.
        copy: where to write it.

    Raises:
        SettingsError: it changes more than SGLang can apply to one prompt, or cannot be read.
    """
    config = read_adapter_config(folder)
    unserved = [field for field in _UNSERVED if config.get(field)]
    unserved += [] if config.get("bias", "none") == "none" else ["bias"]
    unserved += [] if config.get("init_lora_weights", True) in HARMLESS_INITS else ["init_lora_weights"]
    if unserved:
        raise _unserved(folder, f"{unserved[0]}={shown(config[unserved[0]], 60)}")
    try:
        tensors = load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise SettingsError(f"adapters: {folder} cannot be read: {first_line(error)}") from error
    factors = _factors(folder, tensors)
    rank = max(len(down) for down, _ in factors.values())
    scales = {name: scale_of(config, name.removeprefix(PEFT_PREFIX), len(down)) for name, (down, _) in factors.items()}
    # The factor of most adapters stays in their config, and their weights stay bit for bit.
    common = next((scale for scale in scales.values() if scale), 1.0)
    written: dict[str, Tensor] = {}
    for name, (down, up) in factors.items():
        if scales[name] != common:
            up = up.float() * (scales[name] / common)
        missing = rank - len(down)
        written[f"{name}.lora_A.weight"] = torch.nn.functional.pad(down, (0, 0, 0, missing)).contiguous()
        written[f"{name}.lora_B.weight"] = torch.nn.functional.pad(up, (0, missing)).contiguous()
    copy.mkdir(parents=True)
    save_file(written, copy / WEIGHTS)
    modules = sorted({name.rpartition(".")[2] for name in factors})
    plain = {"peft_type": "LORA", "r": rank, "lora_alpha": common * rank, "target_modules": modules}
    write_adapter_config(copy, plain)
    return copy


def _factors(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Module -> its two factors, (r, in) and (out, r); copies of the model's own weights are left out."""
    names = {name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")}
    factors = {name: (f"{name}.lora_A.weight", f"{name}.lora_B.weight") for name in sorted(names)}
    used = {name for pair in factors.values() for name in pair}
    if strange := sorted(used ^ {name for name in tensors if not name.endswith(BASE_WEIGHT)}):
        raise _unserved(folder, f"weights that are no pair of LoRA factors, such as {strange[0]}")
    if heads := [name for name in factors if name.rpartition(".")[2] == "lm_head"]:
        # SGLang applies one prompt's head to the rows of others (0.5.23 on a CPU).
        raise _unserved(folder, f"weights for the head, {heads[0].removeprefix(PEFT_PREFIX)}")
    found = {name: (tensors[down], tensors[up]) for name, (down, up) in factors.items()}
    for name, (down, up) in found.items():
        if down.ndim != 2 or up.ndim != 2 or len(down) != up.shape[1]:
            raise _unserved(folder, f"factors of {name} with the shapes {tuple(down.shape)} and {tuple(up.shape)}")
    return found


def _unserved(folder: Path, found: str) -> SettingsError:
    """The refusal of an adapter whose rows would be wrong."""
    return SettingsError(
        f"adapters: {folder} has {found}, which SGLang cannot serve: serve it with --backend hf, or merge it into the "
        "model"
    )


def checked_adapter(source: str, model: Path) -> Path:
    """The folder of an adapter that fits the model in a folder.

    Raises:
        SettingsError: there is no such adapter, or it does not fit.
    """
    folder = adapter_folder(source)
    check_adapter(folder, model)
    return folder
