"""The sglang backend: passes prompts to SGLang's scheduler, returns results, and prepares adapters and options."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from lmpool.errors import SettingsError, first_line
from lmpool.protocol.row import Encoding, VectorBlock
from lmpool.protocol.tensors import TensorType, new_changes
from lmpool.settings import shown
from lmpool.workers.backends import checkpoint, lora
from lmpool.workers.backends.engines import EngineBackend, row_deciding
from lmpool.workers.backends.row_encoder import RowEncoder, log_threads, pick_device
from lmpool.workers.backends.settings import LOOPBACK, SglangSettings, check_engine_args, importing, parse_engine_args
from lmpool.workers.execution.contract import BackendJob, BackendStats, Finished

if TYPE_CHECKING:
    from lmpool.workers.backends.sglang.engine import EngineBatch, SglangEngine

FOLLOWER = [sys.executable, "-P", "-m", "lmpool.workers.backends.sglang.follower"]
"""Command of a rank above 0; -P keeps modules of the current folder from replacing installed modules."""

RESERVED_TOKENS = 7
"""Tokens of SGLang's context that a prompt cannot use, because SGLang reserves them for sampled tokens."""

_CPU_KV_BYTES = 1 << 30  # Default bytes for keys and values on a CPU, where SGLang would take most of the memory.
_FOREVER_S = 1e9  # Timeout in seconds of SGLang's watchdog: so large that the watchdog never acts.
_ITEM_SIZES = {"float32": 4, "fp8_e5m2": 1, "fp8_e4m3": 1}  # Bytes per number in keys and values; 2 for other dtypes.

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
    "use --tensor-parallel-size": ("tp_size",),
    "use --expert-parallel-size": ("ep_size",),
    "start more workers for more copies of a model": ("dp_size",),
    "all ranks of a model run on the worker's machine": ("nnodes", "node_rank", "use_ray"),
    "one rank must have the whole rows of all prompts; spread a model with --tensor-parallel-size only": (
        "pp_size", "dcp_size", "dwdp_size", "attn_cp_size", "attn_dp_size", "moe_dp_size", "enable_dp_attention",
        "enable_dp_lm_head", "enable_prefill_cp", "enable_tp_lm_head_all_to_all", "elastic_ep_backend",
    ),
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
_DEFERRED_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

# Last part of a module's name -> the first of the modules that SGLang joins with this module.
_JOINED = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj", "w3": "w1"}

# Options that change rows only by rounding. Workers that differ only in these options may serve the same model.
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
    "trust_remote_code", "weight_loader_disable_mmap",
}  # fmt: skip


# Fields of an adapter's config that SGLang silently ignores, or does not support.
_UNSERVED = (
    "use_dora", "lora_bias", "modules_to_save", "target_parameters", "trainable_token_indices",
    "alora_invocation_tokens", "use_qalora", "use_bdlora",
)  # fmt: skip


class SglangBackend(EngineBackend):
    """Serves one model of SGLang; see `lmpool.workers.execution.contract.Backend`."""

    _settings: SglangSettings

    def __init__(self, settings: SglangSettings) -> None:
        super().__init__(settings)
        self._folder = checkpoint.checkpoint_folder("model", settings.model, settings.revision)
        self._engine = self._launch()
        is_plain = not self._options.get("quantization") and self._options.get("load_format") != "dummy"
        self._tensors = checkpoint.replaceable_tensors(self._folder) if is_plain else {}
        model, limit = self._engine.scheduler.model_config, self._engine.scheduler.max_req_input_len - 1
        self.batch = self._engine.scheduler.max_running_requests
        self._encoder = RowEncoder(model.dtype, lossy=settings.encoding == "f16")
        if limit < (least := settings.max_prompt_tokens or 1):
            self.close()
            raise SettingsError(f"max_prompt_tokens: {least} is more than the {limit} tokens SGLang has memory for")
        self._prepare(
            model.dtype,
            vocab_size=model.vocab_size,
            max_prompt_tokens=settings.max_prompt_tokens or limit,
            revision=self._revision,
            positions=self._engine.answers_positions,
        )
        log_threads(self.device)

    def _launch(self) -> SglangEngine:
        """Import SGLang and start its engine; sets `device` and `_revision`."""
        settings, folder = self._settings, self._folder
        adapters = list[dict[str, Any]]()
        for source in settings.adapter_folders.values():
            with lora.reading(source):
                adapters.append(plain_adapter(lora.check_adapter(source, folder), folder)[1])
        device = str(pick_device(str(parse_engine_args(settings.engine_args).get("device", settings.device))))
        for name, value in LOOPBACK.items():
            os.environ.setdefault(name, value)
        # Set the variable before the import, during which SGLang reads the environment and loads its kernels.
        if device == "cpu":
            os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        if device == "cpu" and (groups := settings.expert_parallel_size) > 1:
            reason = "on a CPU, SGLang computes experts only if each process has all of them"
            raise SettingsError(f"expert_parallel_size: {groups} cannot be used: {reason}. Use 1")
        if settings.ranks > 1:
            # Share no memory between ranks for broadcasts: a worker that is killed would leave it behind.
            os.environ.setdefault("SGLANG_USE_MESSAGE_QUEUE_BROADCASTER", "0")
            os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", cores_of_ranks(settings.ranks))
        set_log_level("warning")
        try:
            with importing():
                from sglang.version import __version__ as version

                from lmpool.workers.backends.sglang import engine
        except (ImportError, OSError, RuntimeError) as error:  # RuntimeError: SGLang's kernels do not fit this machine.
            raise SettingsError(f"backend: SGLang cannot be imported: {first_line(error)}") from error
        given = user_options(settings, engine.known_options(), version, engine.option_names())
        options = engine_options(settings, folder, device, adapters) | given
        set_log_level(str(options["log_level"]))
        try:
            positions, numbers = engine.read_facts(folder, settings.trust_remote_code, settings.ranks)
        except (OSError, ValueError, KeyError, AttributeError, TypeError, ImportError) as error:
            raise SettingsError(f"model: {settings.model} cannot be loaded: {first_line(error)}") from error
        if (tokens := kv_tokens(settings, options, numbers)) is not None:
            options.setdefault("max_total_tokens", tokens)
        method = str(options.get("quantization") or checkpoint.quantisation_of(folder))
        if device == "cpu" and engine.lacks_quantised_kernels(method):
            text = f"SGLang {version} computes quantised weights ({method}) on a CPU only with its AMX kernels"
            raise SettingsError(f"model: {text}, which are not installed here; use --backend hf or vllm")
        wanted = settings.max_prompt_tokens
        if wanted is not None and wanted > positions:
            raise SettingsError(f"max_prompt_tokens: {wanted} is more than the {positions} positions of the model")
        options.setdefault("context_length", min((wanted or positions) + RESERVED_TOKENS, positions))
        self.device, self._options = device_of(options), options
        self._revision = checkpoint.checkpoint_revision(folder, also=row_deciding(given, _HARMLESS))
        return engine.SglangEngine(options, f"SGLang {version} cannot serve {settings.model}", FOLLOWER)

    def _set_info(self, dtype: object, encoding: Encoding = Encoding.F32, **facts: Any) -> None:
        self._head = self._engine.head  # None before the first forward.
        super()._set_info(dtype, encoding, **facts)

    def submit(self, jobs: Iterable[BackendJob]) -> None:
        """Submit jobs that are not in flight to the engine, which computes them in its own thread."""
        # Copy the jobs: the worker changes the tokens of a continuation, and may submit it again after an abort.
        if new := {job.digest: job._replace() for job in jobs if job.digest not in self._held}:
            self._held |= new
            self._engine.submit(list(new.values()))

    def abort(self, digests: Collection[bytes]) -> None:
        """Drop jobs in flight."""
        if dropped := {digest for digest in digests if self._held.pop(digest, None)}:
            self._engine.drop(dropped)

    @torch.inference_mode()
    def step(self) -> Finished:
        """Wait for a forward of the engine, and return all results since the last call.

        The result is empty if the forward has completed no prompt; the caller can then submit new jobs.
        """
        finished, vectors = Finished([], {}), dict[bytes, NDArray[np.float32]]()
        if self._held:
            for batch in self._engine.results():
                self._add(batch, finished, vectors)
        return finished._replace(answers=VectorBlock(list(vectors), list(vectors.values())) if vectors else None)

    def _add(self, batch: EngineBatch, finished: Finished, vectors: dict[bytes, NDArray[np.float32]]) -> None:
        """Add the results of a forward to `finished` and `vectors`, except results of aborted jobs."""
        finished.failures.update((job.digest, text) for job, text in batch.failures.items() if self._take(job))
        answered = {job.digest: values for job, values in batch.positions.items() if self._take(job)}
        vectors.update(answered)
        rows = [row for row, job in enumerate(batch.prompts) if self._take(job)]
        digests = [batch.prompts[row].digest for row in rows]
        failed = 0
        if rows and batch.logits is not None:
            if batch.computed is not None:
                torch.cuda.current_stream(batch.logits.device).wait_event(batch.computed)
            logits = batch.logits if len(rows) == len(batch.prompts) else batch.logits[rows]
            encoded = self._encoder.encode(digests, logits)
            finished.failures.update(encoded.failures)
            failed = len(encoded.failures)
            if encoded.block is not None:
                finished.blocks.append(encoded.block)
        steps, before, tokens, reused = self._stats
        results = before + len(rows) - failed + len(answered)
        self._stats = BackendStats(steps + 1, results, tokens + batch.tokens, reused + batch.reused)

    def _take(self, job: BackendJob) -> bool:
        """Remove a job that has a result; returns False if the job was aborted, even if it was submitted again."""
        is_held = self._held.get(job.digest) is job
        if is_held:
            del self._held[job.digest]
        return is_held

    def _load(self, adapter: str, folder: Path) -> None:
        tensors, config = plain_adapter(folder, self._folder)
        with TemporaryDirectory(prefix="lmpool-adapters-") as copy:
            save_file(tensors, Path(copy) / lora.WEIGHTS)
            (Path(copy) / lora.CONFIG).write_text(json.dumps(config), "utf-8")
            self._engine.load_adapter(adapter, Path(copy))

    def _unload(self, adapter: str) -> None:
        self._engine.drop_adapter(adapter)

    @property
    def devices(self) -> list[str]:
        """See `TellsDevices.devices`."""
        return [device_of(self._options, rank) for rank in range(self._settings.ranks)]

    def when_broken(self, report: Callable[[BaseException], object]) -> None:
        """See `TellsEnd.when_broken`."""
        # An end that came first is reported at once.
        self._engine.end.add_done_callback(lambda end: report(end.result()))

    def tensors(self) -> Mapping[str, TensorType]:
        """See `ChangesWeights.tensors`."""
        return self._tensors

    def load_weights(self, full: Path | None, sparse: Sequence[Path], held: int) -> None:
        """See `ChangesWeights.load_weights`."""
        full = full or self._folder
        names = [*new_changes(full, sparse, held, self._tensors)]
        if names and self._engine.packs_weights:
            names = [*self._tensors]
        self._engine.load_weights(checkpoint.NewWeights(str(full), [*map(str, sparse)], names, self._tensors))

    def close(self) -> None:
        """End the engine and free its memory. The backend cannot be used afterwards."""
        self._held.clear()
        self._engine.close()


def plain_adapter(folder: Path, model: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights and the config of an adapter, changed so that SGLang computes the same rows as peft.

    SGLang supports one rank for all modules. SGLang scales modules by lora_alpha / r, without rsLoRA and alpha_pattern.
    SGLang joins the modules q, k and v, and gate and up, and fails in a forward if an adapter has no q or no gate.

    `folder` and `model` are the folders of the adapter and of the model.
    """
    config = lora.read_adapter_config(folder)
    unserved = [field for field in _UNSERVED if config.get(field)]
    unserved += [] if config.get("bias", "none") == "none" else ["bias"]
    unserved += [] if config.get("init_lora_weights", True) in lora.HARMLESS_INITS else ["init_lora_weights"]
    if unserved:
        raise _unserved(folder, f"{unserved[0]}={shown(config[unserved[0]], 60)}")
    factors = _factors(folder, load_file(folder / lora.WEIGHTS))
    own = lora.weights_in(model)
    for name, (down, up) in [*factors.items()]:
        layer, _, last = name.rpartition(".")
        first = f"{layer}.{_JOINED.get(last)}"
        if first in factors or (own and lora.module_key(f"{first}.weight") not in own):
            continue
        if last in ("k_proj", "v_proj"):
            raise _unserved(folder, f"weights for {name} and none for {first}")
        factors[first] = torch.zeros_like(down), torch.zeros_like(up)
    rank = max(len(down) for down, _ in factors.values())
    modules = {name: name.removeprefix(lora.PEFT_PREFIX) for name in factors}
    scales = {name: lora.scale_of(config, module, len(factors[name][0])) for name, module in modules.items()}
    # Leave one scale in the config. Most adapters have one scale for all modules, so their weights stay unchanged.
    common = next((scale for scale in scales.values() if scale), 1.0)
    plain: dict[str, Tensor] = {}
    for name, (down, up) in factors.items():
        if scales[name] != common:
            up = up.float() * (scales[name] / common)
        missing = rank - len(down)
        plain[f"{name}.lora_A.weight"] = torch.nn.functional.pad(down, (0, 0, 0, missing)).contiguous()
        plain[f"{name}.lora_B.weight"] = torch.nn.functional.pad(up, (0, missing)).contiguous()
    targets = sorted({name.rpartition(".")[2] for name in factors})
    return plain, {"peft_type": "LORA", "r": rank, "lora_alpha": common * rank, "target_modules": targets}


def _factors(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Name of each module -> its two LoRA factors, (r, in) and (out, r). Ignores copies of the model's own weights."""
    strange = {name for name in tensors if not name.endswith(lora.BASE_WEIGHT)}
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    for name in sorted(name for name in tensors if name.endswith(".lora_A.weight")):
        module = name.removesuffix(".lora_A.weight")
        if (other := f"{module}.lora_B.weight") in tensors:
            factors[module] = tensors[name], tensors[other]
            strange -= {name, other}
    if strange:
        raise _unserved(folder, f"weights that are no pair of LoRA factors, such as {min(strange)}")
    for module, (down, up) in factors.items():
        if module.rpartition(".")[2] == "lm_head":
            # SGLang 0.5.23 on a CPU applies the head of one prompt's adapter to the rows of other prompts.
            raise _unserved(folder, f"weights for the head, {module.removeprefix(lora.PEFT_PREFIX)}")
        if down.ndim != 2 or up.ndim != 2 or len(down) != up.shape[1]:
            raise _unserved(folder, f"factors of {module} with the shapes {tuple(down.shape)} and {tuple(up.shape)}")
    return factors


def _unserved(folder: Path, found: str) -> SettingsError:
    """The error for an adapter whose rows SGLang would compute wrongly."""
    return SettingsError(f"adapters: {folder} has {found}, which SGLang cannot serve: use --backend hf, or merge it")


def user_options(
    settings: SglangSettings, known: Mapping[str, bool], version: str, names: Mapping[str, str] = {}
) -> dict[str, Any]:
    """Check and return the user's engine options.

    `known`: SGLang's options -> whether the option takes a text. `names`: name of an option on SGLang's command line ->
    its name in `known`.
    """
    given = {names.get(name, name): value for name, value in parse_engine_args(settings.engine_args).items()}
    sampled = {name: _ONE_ROW for name in known if name.startswith(("speculative_", "decoupled_spec_"))}
    if settings.quantization is not None:
        sampled["quantization"] = "--quantization sets it"
    check_engine_args(given, known, _REFUSED | sampled, f"SGLang {version}")
    # Write TOML tables as JSON for options that take a text.
    tables = {name: value for name, value in given.items() if known[name] and isinstance(value, dict)}
    if settings.quantization is not None:
        given["quantization"] = settings.quantization
    return given | {name: json.dumps(table) for name, table in tables.items()}


def engine_options(settings: SglangSettings, folder: Path, device: str, adapters: Iterable[Any]) -> dict[str, Any]:
    """Default options that follow from the backend's settings; the user's options override them.

    `adapters` holds the configs, as `plain_adapter` returns them, of the adapters that are loaded at the start.
    """
    kind, _, index = device.partition(":")
    options: dict[str, Any] = {
        "model_path": str(folder),
        "skip_tokenizer_init": True,
        "trust_remote_code": settings.trust_remote_code,
        "dtype": checkpoint.checkpoint_dtype(folder, settings.dtype),
        "device": kind,
        "base_gpu_id": int(index or 0),
        "tp_size": settings.tensor_parallel_size,
        "ep_size": settings.expert_parallel_size,
        "max_running_requests": settings.max_batch,
        "disable_overlap_schedule": True,
        "watchdog_timeout": _FOREVER_S,
        "sampling_backend": "pytorch",  # No token is sampled; "pytorch" needs no warm-up.
        "grammar_backend": "none",
        "disable_decode_cuda_graph": True,  # No token is decoded, and CUDA graphs take long to build.
        "log_level": "warning",
    }
    if settings.max_batch_tokens is not None:
        options |= dict.fromkeys(("chunked_prefill_size", "max_prefill_tokens"), settings.max_batch_tokens)
    if slots := settings.adapter_slots:
        later = [{"r": lora.DEFERRED_RANK, "target_modules": _DEFERRED_MODULES}] if settings.max_adapters else []
        reserved = [*later, *adapters]
        options |= {
            "enable_lora": True,
            "max_loras_per_batch": slots + 1,  # Prompts without an adapter need a slot too.
            "lora_strict_loading": True,
            "max_lora_rank": max(config["r"] for config in reserved),
            "lora_target_modules": sorted({module for config in reserved for module in config["target_modules"]}),
        }
    if kind == "cpu":
        options |= {"attention_backend": "torch_native", "lora_backend": "torch_native"}
    return options


def kv_tokens(settings: SglangSettings, options: Mapping[str, Any], numbers: int) -> int | None:
    """Max tokens whose keys and values fit into the memory of a process; None for SGLang's default.

    `numbers`: how many numbers of a token's keys and values a process has.
    """
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


def set_log_level(level: str) -> None:
    """Let SGLang log entries of a level, such as "warning"; call this function before SGLang is imported."""
    logging.getLogger("sglang").setLevel(level.upper())
    # Hide SGLang's warnings about each model architecture whose packages are missing.
    logging.getLogger("sglang.srt.models.registry").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"sglang\.")


def cores_of_ranks(ranks: int) -> str:
    """The cores of each rank on a CPU, as SGLang reads them: it binds the threads of each rank to other cores."""
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[rank * len(cores) // ranks : (rank + 1) * len(cores) // ranks] for rank in range(ranks)]
    return "|".join(",".join(map(str, share or cores)) for share in shares)


def device_of(options: Mapping[str, Any], rank: int = 0) -> str:
    """The device that a rank uses: "cpu", or another kind with its index, such as "cuda:0"."""
    kind = str(options["device"]).partition(":")[0]
    index = options["base_gpu_id"] + rank * options.get("gpu_id_step", 1)
    return kind if kind == "cpu" else f"{kind}:{index}"
