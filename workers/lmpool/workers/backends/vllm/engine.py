"""From the settings to vLLM's engine core in this process: its arguments, and one clear line for whatever is wrong."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
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

from lmpool.errors import SettingsError
from lmpool.protocol.adapter import qualify, revision_of
from lmpool.settings import shown
from lmpool.trie.kernels import torch_device
from lmpool.workers.backends.checkpoint import (
    checkpoint_dtype,
    checkpoint_folder,
    checkpoint_revision,
    checkpoint_source,
)
from lmpool.workers.backends.lora import LATER_RANK, adapter_folder, check_adapter, ranks_of, read_adapter_config
from lmpool.workers.backends.requirements import first_line, named_plugins, other_plugins
from lmpool.workers.backends.row_encoder import RowEncoder
from lmpool.workers.backends.settings import (
    ONE_PROCESS,
    VLLM_DISTRIBUTIONS,
    VllmSettings,
    check_engine_args,
    check_one_process,
    parse_engine_args,
)
from lmpool.workers.backends.vllm.capture import Captured, CaptureProcessor
from lmpool.workers.backends.vllm.positions import PositionCapture

Adapters = dict[str, tuple[LoRARequest, str]]
"""Adapter ("name@revision") -> what a request names it by, and its folder or hub name."""

# What options that do not fit, broken weights, missing kernels, devices and memory end in: vLLM has no type for them.
START_ERRORS = (
    ValueError, TypeError, RuntimeError, OSError, MemoryError, NotImplementedError, ImportError, KeyError,
    AttributeError, AssertionError, SafetensorError,
)  # fmt: skip

_log = logging.getLogger(__name__)

_CPU_KV_BYTES = 1 << 30
_CPU_BLOCK = 32
_MANY = 1 << 30
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "nnodes")

# Kinds of keys and values of fewer than 16 bits. With fp8 on a CPU rows were off by 1.1 to 1.6 (0.32.0).
_NARROW_KV = re.compile("fp8|nvfp4|int[48]_|turboquant|ultraquant")

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


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine core that is ready to be stepped.

    Attributes:
        core: the client of the engine core in this process.
        captured: where its rows are.
        positions: where what is wanted of positions is; None if nothing can be told of them.
        vocab_size: V.
        dtype: of the computation.
        max_prompt_tokens: the longest prompt that leaves room for the token that vLLM samples.
        max_batch: prompts that run together.
        sessions: sessions that have a place beside them.
        kv_tokens: tokens whose keys and values fit.
        block_size: tokens of a block of them.
        revision: digest of the weights, and of the options and plugins that change rows.
        source: folder or hub name.
        adapters: "name@revision" -> what a request names it by, and its folder or hub name.
        folder: of the checkpoint.
        adapter_slots: adapters that may be loaded at once.
        adapter_ids: what vLLM numbers the adapters to come by.
    """

    core: InprocClient
    captured: Captured
    positions: PositionCapture | None
    vocab_size: int
    dtype: str
    max_prompt_tokens: int
    max_batch: int
    sessions: int
    kv_tokens: int
    block_size: int
    revision: str
    source: str
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
    """Load what the settings name.

    Raises:
        SettingsError: no such model, adapter or option, no device, or too little memory.
    """
    torch_device.settle()
    processors = named_plugins("logits_processors", LOGITSPROCS_GROUP, settings.logits_processors)
    given = user_arguments(settings)
    folder = checkpoint_folder("model", settings.model, settings.revision)
    adapters = find_adapters(settings, folder)
    # vLLM makes the processor's instance itself, so each engine needs a class that knows where rows go.
    processor: type[CaptureProcessor] = type("LmpoolCapture", (CaptureProcessor,), {})
    arguments = engine_arguments(settings, folder, adapters, given)
    try:
        config = EngineArgs(**arguments, logits_processors=[processor]).create_engine_config(UsageContext.LLM_CLASS)
    except START_ERRORS as error:
        raise refusal(settings, "cannot serve", error) from error
    _check_kv(config)
    model = config.model_config
    encoder = RowEncoder(model.dtype, lossy=settings.encoding == "f16")
    processor.captured = captured = Captured(model.get_vocab_size(), encoder)
    also = row_deciding(given)
    if processors:
        also["logits_processors"] = processors
    if plugins := other_plugins(DEFAULT_PLUGINS_GROUP, VLLM_DISTRIBUTIONS, envs.VLLM_PLUGINS):
        also["plugins"] = plugins
    if config.load_config.load_format == "dummy":
        also["seed"] = model.seed
    revision = checkpoint_revision(folder, also)
    core = _start(settings, config, adapters)
    scheduling = config.scheduler_config
    places = scheduling.max_num_active_seqs or scheduling.max_num_seqs
    sessions = fitting_sessions(settings, places)
    return Engine(
        core=core,
        captured=captured,
        positions=_positions(core, config, bool(processors)),
        vocab_size=model.get_vocab_size(),
        dtype=_DTYPES.get(model.dtype, str(model.dtype)),
        max_prompt_tokens=model.max_model_len - 1,
        max_batch=places - sessions,
        sessions=sessions,
        kv_tokens=(config.cache_config.num_gpu_blocks or 0) * config.cache_config.block_size,
        block_size=config.cache_config.block_size,
        revision=revision,
        source=checkpoint_source(settings.model),
        adapters=adapters,
        folder=folder,
        adapter_slots=adapter_slots(settings),
        adapter_ids=count(len(adapters) + 1),
    )


def user_arguments(settings: VllmSettings) -> dict[str, Any]:
    """The options that are handed on, checked.

    Raises:
        SettingsError: vLLM has no such option, or it cannot be set here.
    """
    given = parse_engine_args(settings.engine_args)
    check_engine_args(given, {field.name for field in fields(EngineArgs)}, _REFUSED, f"vLLM {vllm_version}")
    check_one_process(given, _PARALLEL)
    if (executor := given.get("distributed_executor_backend", "uni")) != "uni":
        raise SettingsError(
            f"engine_args: distributed_executor_backend must be 'uni', not {shown(executor)}: {ONE_PROCESS}"
        )
    return given


def _check_kv(config: Any) -> None:
    """Refuse keys and values, named by an option or by the checkpoint, with which rows would be wrong."""
    dtype = config.cache_config.cache_dtype
    if dtype == "auto" and getattr(config.quant_config, "kv_cache_scheme", None):
        dtype = "fp8"  # What vLLM makes of every scheme.
    if current_platform.is_cpu() and _NARROW_KV.match(dtype):
        raise SettingsError(
            f"engine_args: kv_cache_dtype={dtype} cannot be served on a CPU: vLLM's rows would be off by more than 1. "
            "Leave it out; where the checkpoint asks for it, set kv_cache_dtype=bfloat16"
        )


def row_deciding(given: dict[str, Any]) -> dict[str, Any]:
    """The user's options that may change rows by more than rounding: they are part of the fingerprint."""
    return {name: value for name, value in given.items() if name not in _HARMLESS}


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
        most = adapter_slots(settings) + 1
        rank = max(_rank(Path(request.lora_path)) for request, _ in adapters.values()) if adapters else 0
        rank = max(rank, LATER_RANK if settings.max_adapters else 0)
        arguments |= {"enable_lora": True, "max_loras": most, "max_cpu_loras": most, "max_lora_rank": rank}
    return arguments | given


def adapter_slots(settings: VllmSettings) -> int:
    """Adapters that may be loaded at once."""
    return max(settings.max_adapters, len(settings.adapters))


def fitting_sessions(settings: VllmSettings, places: int) -> int:
    """Sessions that may wait when the engine has so many places for prompts: those wanted, but at most half."""
    return min(settings.sessions, places // 2)


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
    """What vLLM could not do with the model, in one line."""
    return SettingsError(f"model: vLLM {vllm_version} {failing} {settings.model}: {_reason(error)}")


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


def _positions(core: InprocClient, config: Any, has_processors: bool) -> PositionCapture | None:
    """What answers for positions, unless they have no logits that are those of the rows."""
    # Logits processors never see them. Fast prefill leaves them out in the last layers, and keys and values that come
    # from elsewhere skip them.
    if has_processors or config.cache_config.kv_sharing_fast_prefill or config.kv_transfer_config is not None:
        return None
    try:
        return PositionCapture(core.engine_core, config.model_config.get_vocab_size())
    except AttributeError as error:
        _log.warning("vLLM %s does not tell of positions, which come from rows: %s", vllm_version, first_line(error))
        return None


def _load_adapter(core: InprocClient, name: str, request: LoRARequest) -> None:
    try:
        if not core.add_lora(request):
            raise RuntimeError("it does not fit the model")
    except START_ERRORS as error:
        raise SettingsError(f"adapters: vLLM {vllm_version} cannot load {name}: {first_line(error)}") from error


def _allow_tiles() -> None:
    """Ask the system for the processor's matrix tiles (Intel AMX).

    vLLM's attention in bfloat16 on a CPU uses them where the processor has them and leaves asking to whoever came
    before; without permission the first use ends the process with an illegal instruction.
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


def _reason(error: BaseException) -> str:
    """What is wrong, in one line; pydantic, which checks vLLM's configuration, begins with one that counts errors."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        text = str(first["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
        return first_line(ValueError(f"{where}: {text}" if where else text))
    return first_line(error)
