"""Starts vLLM's engine core in this process, with options that leave its rows exact."""

from __future__ import annotations

import logging
import platform
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from importlib.metadata import EntryPoint, entry_points
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

from lmpool.errors import SettingsError, WorkerError, first_line
from lmpool.workers.backends import lora
from lmpool.workers.backends.checkpoint import checkpoint_dtype, checkpoint_folder, checkpoint_revision
from lmpool.workers.backends.engines import row_deciding
from lmpool.workers.backends.output_head import OutputHead
from lmpool.workers.backends.row_encoder import RowEncoder
from lmpool.workers.backends.settings import VLLM_DISTRIBUTIONS, VllmSettings, check_engine_args, parse_engine_args
from lmpool.workers.backends.vllm import ranks
from lmpool.workers.backends.vllm.capture import Captured, CaptureProcessor, PositionCapture, compute_wanted_positions
from lmpool.workers.backends.vllm.head import HeadPart

# Exceptions of vLLM for bad options, broken weights, and missing kernels, devices or memory; they have no common type.
_ERRORS = (
    ValueError, TypeError, RuntimeError, OSError, MemoryError, NotImplementedError, ImportError, KeyError,
    AttributeError, AssertionError, SafetensorError, WorkerError,
)  # fmt: skip

_log = logging.getLogger(__name__)

_CPU_KV_BYTES = 1 << 30  # Default bytes for keys and values on a CPU, where vLLM would take most of the memory.
_CPU_BLOCK = 32  # Tokens per block of keys and values on a CPU; vLLM's CPU kernels need a multiple of 32.
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # Values that vLLM accepts for `max_lora_rank`.

# Dtypes of keys and values with fewer than 16 bits. With fp8, rows of vLLM 0.32.0 on a CPU were off by 1.1 to 1.6.
_NARROW_KV = re.compile("fp8|nvfp4|int[48]_|turboquant|ultraquant")

# Online quantisation that leaves all other layers as they are: without experts, only the fingerprint would change.
_EXPERTS_ONLY = ("int8_per_channel_weight_only", "nvfp4_per_token", "experts_int8")

_REFUSED = {
    "model": "it is the MODEL of the command",
    **dict.fromkeys(("tokenizer", "skip_tokenizer_init"), "prompts are token ids"),
    "logits_processors": "rows are captured by one; name installed ones with --logits-processors",
    **dict.fromkeys(("enable_lora", "lora_modules"), "name adapters with --adapters name=folder"),
    "speculative_config": "each request computes one row, so there is nothing to speculate on",
    "logprobs_mode": "rows are captured before it applies",
    "generation_config": "the sampling parameters of a checkpoint must not change its rows",
    **dict.fromkeys(("runner", "convert"), "rows come from models that generate"),
    "tensor_parallel_size": "use --tensor-parallel-size",
    "pipeline_parallel_size": "use --pipeline-parallel-size",
    "enable_expert_parallel": "use --enable-expert-parallel",
    "data_parallel_size": "start more workers instead",
    **dict.fromkeys(("distributed_executor_backend", "worker_cls", "worker_extension_cls"), "lmpool sets it"),
    **dict.fromkeys(
        ("enable_batch_sharded_sampling", "prefill_context_parallel_size", "decode_context_parallel_size"),
        "rows are captured in one rank",
    ),
}

# Options that change rows only by rounding. Workers that differ only in these options may serve the same model.
_HARMLESS = {
    "async_scheduling", "attention_backend", "attention_config", "block_size", "compilation_config", "cpu_offload_gb",
    "cudagraph_capture_sizes", "disable_cascade_attn", "disable_log_stats", "download_dir", "enable_chunked_prefill",
    "enable_prefix_caching", "enforce_eager", "gpu_memory_utilization", "kv_cache_memory_bytes",
    "long_prefill_token_threshold", "max_cpu_loras", "max_cudagraph_capture_size", "max_long_partial_prefills",
    "max_lora_rank", "max_loras", "max_model_len", "max_num_active_seqs", "max_num_batched_tokens",
    "max_num_partial_prefills", "max_num_seqs", "num_gpu_blocks_override", "optimization_level",
    "safetensors_load_strategy", "scheduling_policy", "use_tqdm_on_load", "nnodes", "node_rank", "master_addr",
    "master_port",
}  # fmt: skip


@contextmanager
def refusing(context: str, *passed: type[Exception]) -> Iterator[None]:
    """Raise vLLM's errors, except those of the types `passed`, as a `SettingsError` of one line with this context."""
    unchanged: tuple[type[Exception], ...] = (SettingsError, *passed)
    try:
        yield
    except unchanged:
        raise
    except _ERRORS as error:
        reason: BaseException = error
        if isinstance(error, ValidationError):  # Name the first error: pydantic's message begins with the count.
            found = error.errors()[0]
            reason = ValueError(": ".join([*map(str, found["loc"]), str(found["msg"]).removeprefix("Value error, ")]))
        # Leave out the long lists of accepted values.
        text = first_line(reason).partition(" Must be one of [")[0]
        if "EADDRINUSE" in text:
            text = "another program has the port master_port: start all machines again, with another master_port"
        raise SettingsError(f"{context}: {text}") from error


class VllmEngine:
    """An engine core in this process, loaded and ready to run steps."""

    def __init__(self, settings: VllmSettings, folder: Path) -> None:
        processors = _allowed_processors(settings.logits_processors)
        given = user_arguments(settings)
        # vLLM creates the logits processor from a class, so each engine needs its own class with its `Captured`.
        processor: type[CaptureProcessor] = type("LmpoolCapture", (CaptureProcessor,), {})
        capture = {"logits_processors": [processor]} if settings.ranks == 1 else ranks.RANK_ARGUMENTS
        self.config: Any = make_config(settings, folder, engine_arguments(settings, folder) | given | capture)
        if rank := self.config.parallel_config.node_rank:
            raise SettingsError(f"engine_args: node_rank={rank} serves no prompts: use it with `lmpool worker` only")
        model = self.config.model_config
        encoder = RowEncoder(model.dtype, lossy=settings.encoding == "f16")
        self.captured = processor.captured = Captured(model.get_vocab_size(), encoder)
        also = row_deciding(given, _HARMLESS)
        plugins = _foreign_plugins()
        also |= {name: found for name, found in (("logits_processors", processors), ("plugins", plugins)) if found}
        if self.config.load_config.load_format == "dummy":
            also["seed"] = model.seed
        self.revision = checkpoint_revision(folder, also)
        # Request Intel AMX (matrix tiles) from the operating system. vLLM's bfloat16 attention on a CPU uses AMX
        # without this request, and the process would crash with an illegal instruction.
        if torch.cpu._is_amx_tile_supported():
            torch.cpu._init_amx()
        is_recast = model.quantization == "torchao" and settings.dtype != "auto"
        remedy = f" in {settings.dtype} (try --dtype auto for weights of torchao)" if is_recast else ""
        self.loras: dict[str, LoRARequest] = {}  # "name@revision" -> vLLM's handle of the loaded adapter, for requests.
        self.positions: PositionCapture | ranks.PositionsOfRanks
        with refusing(f"model: vLLM {vllm_version} cannot load {settings.model}{remedy}"):
            if settings.ranks == 1:
                self.core = InprocClient(self.config, Executor.get_class(self.config), log_stats=False)
                self.positions = PositionCapture(model.get_vocab_size(), self._lora_id)
            else:
                self.core = ranks.start_core(self.config)
                self.positions = ranks.PositionsOfRanks(self._lora_id)
            try:
                self.has_positions = self.capture_positions(not processors)
            except BaseException:
                self.core.shutdown()
                raise

    def _lora_id(self, adapter: str) -> int:
        return int(self.loras[adapter].lora_int_id)

    def capture_positions(self, is_possible: bool = True) -> bool:
        """Start to capture values at positions; False if vLLM does not compute all positions as it computes rows.

        Sets `head`.
        """
        core: Any = self.core.engine_core
        self.head: OutputHead | None = None
        found: OutputHead | HeadPart | str = ""
        # Fast prefill skips positions in the last layers, and transferred keys and values skip positions in all layers.
        if self.config.cache_config.kv_sharing_fast_prefill or self.config.kv_transfer_config is not None:
            is_possible = False
        try:
            if is_possible:
                compute_wanted_positions(core.scheduler, self.positions)
            if isinstance(self.positions, ranks.PositionsOfRanks):
                positions = self.positions if is_possible else None
                found = core.model_executor.attach(core.scheduler, self.captured, positions)
            elif is_possible:
                self.positions.attach(core.model_executor.driver_worker.worker.model_runner)
                found = self.positions.find_head()
        except AttributeError as error:
            _log.warning("vLLM %s: values at positions are computed as rows: %s", vllm_version, first_line(error))
            return False
        if is_possible and isinstance(found, str):
            _log.info("the hidden states are not served: %s", found)
        elif not isinstance(found, str):
            self.head = found.head if isinstance(found, HeadPart) else found
        return is_possible

    @property
    def ranks(self) -> ranks.RanksExecutor | None:
        """The processes of the model; None if it runs in this process."""
        executor = self.core.engine_core.model_executor
        return executor if isinstance(executor, ranks.RanksExecutor) else None


def make_config(settings: VllmSettings, folder: Path, arguments: dict[str, Any]) -> Any:
    """vLLM's config from its arguments. Refuses options that give wrong rows."""
    with refusing(f"model: vLLM {vllm_version} cannot serve {settings.model}"):
        config: Any = EngineArgs(**arguments).create_engine_config(UsageContext.LLM_CLASS)
    model, kv_dtype = config.model_config, config.cache_config.cache_dtype
    if kv_dtype == "auto" and getattr(config.quant_config, "kv_cache_scheme", None):
        kv_dtype = "fp8"  # vLLM treats every `kv_cache_scheme` of a checkpoint as fp8.
    if current_platform.is_cpu() and _NARROW_KV.match(kv_dtype):
        remedy = "Leave it out; if the checkpoint sets it, use kv_cache_dtype=bfloat16"
        raise SettingsError(f"engine_args: kv_cache_dtype={kv_dtype} gives wrong rows on a CPU. {remedy}")
    lacks_vnni = platform.machine() == "x86_64" and not torch.cpu._is_vnni_supported()
    if current_platform.is_cpu() and lacks_vnni and _has_integers(config.quant_config):
        # vLLM 0.32.0 has no kernels for 4 bits without AVX-512, and without VNNI its sums for 8 bits overflow.
        text = f"vLLM {vllm_version} computes integer weights ({model.quantization}) on a CPU only with AVX-512 VNNI"
        raise SettingsError(f"model: {text}, which this CPU does not have; use --backend hf")
    if model.quantization in _EXPERTS_ONLY and not model.is_moe:
        text = f"{model.quantization} quantises only experts, and {settings.model} has none"
        raise SettingsError(f"quantization: {text}; use fp8_per_channel, or leave it out")
    if settings.ranks > 1 and (config.kv_transfer_config or config.ec_transfer_config):
        text = "kv_transfer_config, ec_transfer_config and kv_offloading_size need a model in one process"
        raise SettingsError(f"engine_args: {text}: leave them out, or leave out the parallel sizes")
    return config


def _has_integers(quantization: Any) -> bool:
    """Whether vLLM's config of a quantisation has integer weights."""
    schemes = getattr(quantization, "target_scheme_map", {}).values()  # In configs of compressed-tensors.
    types = [getattr(scheme["weights"], "type", "") for scheme in schemes]
    return "int" in types or hasattr(quantization, "weight_bits")


def follow(settings: VllmSettings, on_ready: Callable[[], object]) -> None:
    """Run this machine's part of a model until the worker on the machine with `node_rank` 0 has ended.

    Calls `on_ready` when the part is loaded.

    Raises:
        SettingsError: vLLM cannot load the part.
        WorkerError: a process of this machine's part has ended.
    """
    folder = checkpoint_folder("model", settings.model, settings.revision)
    arguments = engine_arguments(settings, folder) | user_arguments(settings) | ranks.RANK_ARGUMENTS
    config = make_config(settings, folder, arguments)
    parallel = config.parallel_config
    if parallel.node_rank >= parallel.nnodes:
        text = f"node_rank={parallel.node_rank} needs nnodes={parallel.node_rank + 1} or more"
        raise SettingsError(f"engine_args: {text}: add nnodes and master_addr, the same on all machines")
    leader = parallel.master_addr
    _log.info("this process serves no prompts: it runs a part of the model for the worker on %s", leader)
    with refusing(f"model: vLLM {vllm_version} cannot load {settings.model}"), ranks.starting():
        executor = ranks.RanksExecutor(config)
    on_ready()
    ranks.wait_for_worker(executor)
    _log.info("the worker on %s has ended", leader)


def _allowed_processors(named: Sequence[str]) -> list[str]:
    """Descriptions of the installed logits processors, in load order. Refuses processors that the user did not name."""
    entries = list(entry_points(group=LOGITSPROCS_GROUP))
    for entry in entries:
        if entry.name not in named:
            remedy = f"Uninstall it, or name it with --logits-processors {entry.name}, for the model's fingerprint"
            raise SettingsError(f"logits_processors: {_described(entry)} is installed and may change rows. {remedy}")
    if missing := sorted({*named} - {entry.name for entry in entries}):
        raise SettingsError(f"logits_processors: no entry point {missing[0]!r} of {LOGITSPROCS_GROUP} is installed")
    return [_described(entry) for entry in entries]


def _foreign_plugins() -> list[str]:
    """Describe and log the general plugins of other packages, which vLLM runs at its start."""
    plugins = [
        _described(entry)
        for entry in entry_points(group=DEFAULT_PLUGINS_GROUP)
        if (envs.VLLM_PLUGINS is None or entry.name in envs.VLLM_PLUGINS)
        and (entry.dist is None or entry.dist.name not in VLLM_DISTRIBUTIONS)
    ]
    if plugins:
        _log.warning("vLLM runs plugins of other packages, which the fingerprint includes: %s", ", ".join(plugins))
    return plugins


def _described(entry: EntryPoint) -> str:
    origin = f" of {entry.dist.name} {entry.dist.version}" if entry.dist is not None else ""
    return f"{entry.name!r} ({entry.value}{origin})"


def user_arguments(settings: VllmSettings) -> dict[str, Any]:
    """Check and return the user's engine options."""
    given = parse_engine_args(settings.engine_args)
    known = {field.name for field in fields(EngineArgs)}
    chosen = {} if settings.quantization is None else {"quantization": settings.quantization}
    check_engine_args(given, known, _REFUSED | dict.fromkeys(chosen, "--quantization sets it"), f"vLLM {vllm_version}")
    return given | chosen


def engine_arguments(settings: VllmSettings, folder: Path) -> dict[str, Any]:
    """Default arguments of vLLM that follow from the backend's settings; the user's options override them."""
    places = settings.max_batch + settings.sessions
    arguments: dict[str, Any] = {
        "model": str(folder),
        "trust_remote_code": settings.trust_remote_code,
        "dtype": checkpoint_dtype(folder, settings.dtype),
        # vLLM requires that a step's token limit is at least the number of slots of the batch.
        "max_num_seqs": min(places, settings.max_batch_tokens or places),
        "max_num_batched_tokens": settings.max_batch_tokens,
        # Add one position, because vLLM samples one token for every prompt.
        "max_model_len": None if settings.max_prompt_tokens is None else settings.max_prompt_tokens + 1,
        "kv_cache_memory_bytes": settings.kv_cache_bytes,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "disable_log_stats": True,
        "use_tqdm_on_load": sys.stderr.isatty(),  # Show progress bars only in a terminal.
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "enable_expert_parallel": settings.enable_expert_parallel,
    }
    if current_platform.is_cpu():
        memory = settings.kv_cache_bytes or _CPU_KV_BYTES
        arguments |= {"enforce_eager": True, "block_size": _CPU_BLOCK, "kv_cache_memory_bytes": memory}
    if slots := settings.adapter_slots:
        lora_ranks = {lora.DEFERRED_RANK} if settings.max_adapters else set[int]()
        for source in settings.adapter_folders.values():
            lora_ranks |= lora.ranks_of(lora.read_adapter_config(lora.check_adapter(source, folder)))
        if (rank := max(lora_ranks)) > _LORA_RANKS[-1]:
            raise SettingsError(f"adapters: one has rank {rank}: vLLM takes at most {_LORA_RANKS[-1]}")
        # Reserve one slot more than adapters: otherwise, on a CPU, prompts without an adapter get an adapter's rows.
        rank = next(each for each in _LORA_RANKS if each >= rank)
        arguments |= {"enable_lora": True, "max_loras": slots + 1, "max_cpu_loras": slots + 1, "max_lora_rank": rank}
    return arguments
