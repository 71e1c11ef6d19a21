"""Start of vLLM's engine core in this process: its arguments, its plugins, and errors in one line."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import EntryPoint, entry_points
from itertools import count
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from vllm import __version__ as vllm_version
from vllm import envs
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.plugins import DEFAULT_PLUGINS_GROUP
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.executor import Executor
from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP

from lmpool.errors import SettingsError, first_line
from lmpool.protocol.adapter import qualify, revision_of
from lmpool.protocol.model_info import ModelInfo
from lmpool.settings import shown
from lmpool.trie import torch_device
from lmpool.workers.backends.checkpoint import (
    checkpoint_dtype,
    checkpoint_folder,
    checkpoint_revision,
    checkpoint_source,
)
from lmpool.workers.backends.lora import LATER_RANK, adapter_folder, check_adapter, ranks_of, read_adapter_config
from lmpool.workers.backends.row_encoder import RowEncoder
from lmpool.workers.backends.settings import (
    ONE_PROCESS,
    VLLM_DISTRIBUTIONS,
    VllmSettings,
    check_engine_args,
    parse_engine_args,
)
from lmpool.workers.backends.vllm.capture import Captured, CaptureProcessor, PositionCapture

Adapters = dict[str, tuple[LoRARequest, str]]
"""Adapter ("name@revision") -> what a request names it by, and its folder or hub name."""

# Exceptions for options that do not fit, broken weights, and missing kernels, devices and memory: vLLM has no type.
START_ERRORS = (
    ValueError, TypeError, RuntimeError, OSError, MemoryError, NotImplementedError, ImportError, KeyError,
    AttributeError, AssertionError, SafetensorError,
)  # fmt: skip

_log = logging.getLogger(__name__)

_CPU_KV_BYTES = 1 << 30  # Memory for keys and values on a CPU, where vLLM would take most of the machine's.
_CPU_BLOCK = 32  # Tokens per block of keys and values; vLLM's CPU kernels need a multiple of 32.
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # Values that vLLM accepts for `max_lora_rank`.
_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "nnodes")

# Dtypes of keys and values with fewer than 16 bits. With fp8 on a CPU rows were off by 1.1 to 1.6 (0.32.0).
_NARROW_KV = re.compile("fp8|nvfp4|int[48]_|turboquant|ultraquant")

_REFUSED = {
    "model": "it is the MODEL of the command",
    "tokenizer": "prompts are token ids",
    "skip_tokenizer_init": "prompts are token ids",
    "logits_processors": "rows are captured by one; name installed ones with --logits-processors",
    "enable_lora": "name adapters with --adapters name=folder",
    "lora_modules": "name adapters with --adapters name=folder",
    "speculative_config": "each request computes one row, so there is nothing to speculate on",
    "logprobs_mode": "rows are captured before it applies",
    "generation_config": "the sampling parameters of a checkpoint must not change its rows",
    "runner": "rows come from models that generate",
    "convert": "rows come from models that generate",
}

# Options that change rows by rounding at most: workers that differ only in these may serve the same model.
_HARMLESS = {
    "async_scheduling", "attention_backend", "attention_config", "block_size", "compilation_config", "cpu_offload_gb",
    "cudagraph_capture_sizes", "disable_cascade_attn", "disable_log_stats", "download_dir", "enable_chunked_prefill",
    "enable_prefix_caching", "enforce_eager", "gpu_memory_utilization", "kv_cache_memory_bytes",
    "long_prefill_token_threshold", "max_cpu_loras", "max_cudagraph_capture_size", "max_long_partial_prefills",
    "max_lora_rank", "max_loras", "max_model_len", "max_num_active_seqs", "max_num_batched_tokens",
    "max_num_partial_prefills", "max_num_seqs", "num_gpu_blocks_override", "optimization_level",
    "safetensors_load_strategy", "scheduling_policy", "use_tqdm_on_load", *_PARALLEL,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine core that is ready to be stepped.

    Attributes:
        core: the client of the engine core in this process.
        info: of the model; the encoding of its rows is not known yet.
        captured: the rows that it has computed.
        positions: the answers of positions queries; None if this engine cannot answer any.
        max_batch: prompts that run together.
        sessions: sessions that fit next to them.
        kv_tokens: tokens whose keys and values fit into memory.
        block_size: tokens per block of keys and values.
        adapters: "name@revision" -> what a request names it by, and its folder or hub name.
        folder: of the checkpoint.
        adapter_slots: adapters that may be loaded at once.
        adapter_ids: what vLLM numbers the adapters to come by.
    """

    core: InprocClient
    info: ModelInfo
    captured: Captured
    positions: PositionCapture | None
    max_batch: int
    sessions: int
    kv_tokens: int
    block_size: int
    adapters: Adapters
    folder: Path
    adapter_slots: int
    adapter_ids: Iterator[int]

    def load_adapter(self, name: str, source: str) -> str:
        """Load an adapter; returns its revision.

        Raises:
            SettingsError: it cannot be had, does not fit the model, or there is no room for it.
        """
        adapter, request = read_adapter(name, source, next(self.adapter_ids), self.folder)
        if adapter not in self.adapters:
            if len(self.adapters) >= self.adapter_slots:
                raise SettingsError(
                    f"adapters: this worker has {self.adapter_slots} slots, all in use, and none for {name!r}: start "
                    "it with more (--max-adapters)"
                )
            _load_adapter(self.core, name, request)
            self.adapters[adapter] = (request, checkpoint_source(source))
        return revision_of(adapter)

    def drop_adapter(self, adapter: str) -> None:
        """Forget an adapter that no request names any more."""
        if (loaded := self.adapters.pop(adapter, None)) is not None:
            self.core.remove_lora(loaded[0].lora_int_id)


def open_engine(settings: VllmSettings) -> Engine:
    """Load the model that the settings name."""
    torch_device.settle()
    processors = _allowed_processors(settings.logits_processors)
    given = user_arguments(settings)
    folder = checkpoint_folder("model", settings.model, settings.revision)
    adapters = find_adapters(settings, folder)
    # vLLM makes the processor itself, so each engine needs a class of its own that holds the target of its rows.
    processor: type[CaptureProcessor] = type("LmpoolCapture", (CaptureProcessor,), {})
    arguments = engine_arguments(settings, folder, adapters, given)
    try:
        config = EngineArgs(**arguments, logits_processors=[processor]).create_engine_config(UsageContext.LLM_CLASS)
    except START_ERRORS as error:
        raise refusal(settings, "cannot serve", error) from error
    _check_kv(config)
    model, cache = config.model_config, config.cache_config
    vocab_size = model.get_vocab_size()
    processor.captured = Captured(vocab_size, RowEncoder(model.dtype, lossy=settings.encoding == "f16"))
    also = row_deciding(given)
    if processors:
        also["logits_processors"] = processors
    if plugins := _foreign_plugins():
        also["plugins"] = plugins
    if config.load_config.load_format == "dummy":
        also["seed"] = model.seed
    revision = checkpoint_revision(folder, also)
    core = _start(settings, config, adapters)
    positions = None if processors else _open_positions(core, config)
    # Waiting sessions have a place in the runner's batch too: at most half of the places.
    places = config.scheduler_config.max_num_active_seqs or config.scheduler_config.max_num_seqs
    sessions = min(settings.sessions, places // 2)
    return Engine(
        core=core,
        info=ModelInfo(
            name=settings.served_as,
            backend="vllm",
            vocab_size=vocab_size,
            max_prompt_tokens=model.max_model_len - 1,  # vLLM needs a place for the token that it samples.
            revision=revision,
            dtype=str(model.dtype).removeprefix("torch."),
            source=checkpoint_source(settings.model),
            positions=positions is not None,
        ),
        captured=processor.captured,
        positions=positions,
        max_batch=places - sessions,
        sessions=sessions,
        kv_tokens=(cache.num_gpu_blocks or 0) * cache.block_size,
        block_size=cache.block_size,
        adapters=adapters,
        folder=folder,
        adapter_slots=adapter_slots(settings),
        adapter_ids=count(len(adapters) + 1),
    )


def _allowed_processors(named: Sequence[str]) -> list[str]:
    """Descriptions of the installed logits processors, in load order. Refuses one that the user has not named."""
    entries = list(entry_points(group=LOGITSPROCS_GROUP))
    for entry in entries:
        if entry.name not in named:
            raise SettingsError(
                f"logits_processors: {_described(entry)} is installed, and vLLM would let it change rows. Uninstall it,"
                f" or name it with --logits-processors {entry.name}, which makes it part of the model's fingerprint"
            )
    if missing := sorted({*named} - {entry.name for entry in entries}):
        raise SettingsError(f"logits_processors: no entry point {missing[0]!r} of {LOGITSPROCS_GROUP} is installed")
    return [_described(entry) for entry in entries]


def _foreign_plugins() -> list[str]:
    """Descriptions of the general plugins of other packages, which vLLM runs when it starts, and which it logs."""
    chosen = envs.VLLM_PLUGINS
    plugins = [
        _described(entry)
        for entry in entry_points(group=DEFAULT_PLUGINS_GROUP)
        if (chosen is None or entry.name in chosen)
        and (entry.dist is None or entry.dist.name not in VLLM_DISTRIBUTIONS)
    ]
    if plugins:
        _log.warning("vLLM runs plugins of other packages, which the fingerprint includes: %s", ", ".join(plugins))
    return plugins


def _described(entry: EntryPoint) -> str:
    origin = f" of {entry.dist.name} {entry.dist.version}" if entry.dist is not None else ""
    return f"{entry.name!r} ({entry.value}{origin})"


def user_arguments(settings: VllmSettings) -> dict[str, Any]:
    """The user's engine options, checked."""
    given = parse_engine_args(settings.engine_args)
    known = {field.name for field in fields(EngineArgs)}
    check_engine_args(given, known, _REFUSED, _PARALLEL, f"vLLM {vllm_version}")
    if (executor := given.get("distributed_executor_backend", "uni")) != "uni":
        raise SettingsError(
            f"engine_args: distributed_executor_backend must be 'uni', not {shown(executor)}: {ONE_PROCESS}"
        )
    return given


def _check_kv(config: Any) -> None:
    """Refuse a dtype of keys and values, set by an option or by the checkpoint, that makes rows wrong."""
    dtype = config.cache_config.cache_dtype
    if dtype == "auto" and getattr(config.quant_config, "kv_cache_scheme", None):
        dtype = "fp8"  # vLLM treats every scheme as fp8.
    if current_platform.is_cpu() and _NARROW_KV.match(dtype):
        raise SettingsError(
            f"engine_args: kv_cache_dtype={dtype} cannot be served on a CPU: vLLM's rows would be off by more than 1. "
            "Leave it out; if the checkpoint sets it, use kv_cache_dtype=bfloat16"
        )


def row_deciding(given: dict[str, Any]) -> dict[str, Any]:
    """The user's options that may change rows by more than rounding. The fingerprint includes them."""
    return {name: value for name, value in given.items() if name not in _HARMLESS}


def engine_arguments(settings: VllmSettings, folder: Path, adapters: Adapters, given: dict[str, Any]) -> dict[str, Any]:
    """All arguments of vLLM except the logits processor; the user's options win."""
    places = settings.max_batch + settings.sessions
    arguments: dict[str, Any] = {
        "model": str(folder),
        "trust_remote_code": settings.trust_remote_code,
        "dtype": checkpoint_dtype(folder, settings.dtype),
        # vLLM requires a token per place.
        "max_num_seqs": min(places, settings.max_batch_tokens or places),
        "max_num_batched_tokens": settings.max_batch_tokens,
        # vLLM samples one token for every prompt.
        "max_model_len": None if settings.max_prompt_tokens is None else settings.max_prompt_tokens + 1,
        "kv_cache_memory_bytes": settings.kv_cache_bytes,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "disable_log_stats": True,
        "use_tqdm_on_load": sys.stderr.isatty(),  # No progress bars in a log.
    }
    if current_platform.is_cpu():
        arguments |= {
            "enforce_eager": True,
            "block_size": _CPU_BLOCK,
            "kv_cache_memory_bytes": settings.kv_cache_bytes or _CPU_KV_BYTES,
        }
    if adapters or settings.max_adapters:
        # One more than there are: on a CPU prompts without an adapter were given one's rows otherwise.
        most = adapter_slots(settings) + 1
        rank = max(_rank(Path(request.lora_path)) for request, _ in adapters.values()) if adapters else 0
        rank = max(rank, LATER_RANK if settings.max_adapters else 0)
        arguments |= {"enable_lora": True, "max_loras": most, "max_cpu_loras": most, "max_lora_rank": rank}
    return arguments | given


def adapter_slots(settings: VllmSettings) -> int:
    """Adapters that may be loaded at once."""
    return max(settings.max_adapters, len(settings.adapters))


def find_adapters(settings: VllmSettings, model: Path) -> Adapters:
    """The adapters that the settings name, for the model in a folder.

    Raises:
        SettingsError: there is no such folder, or no adapter for this model in it.
    """
    adapters: Adapters = {}
    for number, (name, source) in enumerate(settings.adapter_folders.items(), start=1):
        adapter, request = read_adapter(name, source, number, model)
        adapters[adapter] = (request, checkpoint_source(source))
    return adapters


def read_adapter(name: str, source: str, number: int, model: Path) -> tuple[str, LoRARequest]:
    """An adapter in a folder or on the hub, as jobs and as vLLM name it.

    Raises:
        SettingsError: there is no such folder, or no adapter for this model in it.
    """
    folder = adapter_folder(source)
    check_adapter(folder, model)
    adapter = qualify(name, checkpoint_revision(folder))
    # By the qualified name: vLLM's prefix cache tells adapters apart by it.
    return adapter, LoRARequest(adapter, number, str(folder))


def refusal(settings: VllmSettings, failing: str, error: BaseException) -> SettingsError:
    """The refusal of a model, with vLLM's reason in one line."""
    reason = first_line(error)
    if isinstance(error, ValidationError):  # Of pydantic, which checks vLLM's options. Its first line counts errors.
        found = error.errors()[0]
        reason = first_line(ValueError(": ".join([*map(str, found["loc"]), str(found["msg"])])))
    return SettingsError(f"model: vLLM {vllm_version} {failing} {settings.model}: {reason}")


def _start(settings: VllmSettings, config: Any, adapters: Adapters) -> InprocClient:
    _allow_tiles()
    try:
        core = InprocClient(config, Executor.get_class(config), log_stats=False)
    except START_ERRORS as error:
        raise refusal(settings, "cannot load", error) from error
    for name, (request, _) in adapters.items():
        # Now: an adapter that does not fit would end the engine with its first prompt.
        try:
            _load_adapter(core, name, request)
        except SettingsError:
            core.shutdown()
            raise
    return core


def _open_positions(core: InprocClient, config: Any) -> PositionCapture | None:
    """The capture of positions; None if positions have other logits than rows."""
    # Fast prefill skips positions in the last layers, and transferred keys and values skip them everywhere.
    if config.cache_config.kv_sharing_fast_prefill or config.kv_transfer_config is not None:
        return None
    try:
        return PositionCapture(core.engine_core, config.model_config.get_vocab_size())
    except AttributeError as error:
        _log.warning("vLLM %s: values at positions are computed as rows: %s", vllm_version, first_line(error))
        return None


def _load_adapter(core: InprocClient, name: str, request: LoRARequest) -> None:
    try:
        if not core.add_lora(request):
            raise RuntimeError("it does not fit the model")
    except START_ERRORS as error:
        raise SettingsError(f"adapters: vLLM {vllm_version} cannot load {name}: {first_line(error)}") from error


def _allow_tiles() -> None:
    """Request the processor's matrix tiles (Intel AMX) from the system.

    vLLM's bfloat16 attention on a CPU uses them without a request. Then the first use is an illegal instruction.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def _rank(folder: Path) -> int:
    """The smallest rank that vLLM has room for and an adapter fits in."""
    rank = max(ranks_of(read_adapter_config(folder)))
    fitting = [most for most in _LORA_RANKS if most >= rank]
    if not fitting:
        raise SettingsError(f"adapters: {folder} has rank {rank}: vLLM takes at most {_LORA_RANKS[-1]}")
    return fitting[0]
