"""Starts vLLM's engine core in this process, and captures rows and values at positions inside the engine core.

Rows and values are captured for both of vLLM's model runners, V1 and V2. A logits processor captures rows. V1 reports
changes of its batch by index (`update_state`); V2 gives each request a slot (`add_request`). Both runners pass float32
logits of whole batches to the processor before a token is sampled, also of partly computed prompts.

Values at positions are computed from a step's hidden states, just before vLLM computes its own `prompt_logprobs`.
`prompt_logprobs` provide less: the top-k or all tokens sorted, and no last position. With LoRA, `prompt_logprobs` are
wrong or fail, because the output head expects one adapter per prompt (`punica_wrapper.sampler_indices`), not per token.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from torch import Tensor
from vllm import __version__ as vllm_version
from vllm import envs
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.plugins import DEFAULT_PLUGINS_GROUP
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.executor import Executor
from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP, MoveDirectionality
from vllm.v1.sample.logits_processor import LogitsProcessor as LogitsProcessorV1
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as LogitsProcessorV2

from lmpool.errors import SettingsError, WorkerError, first_line
from lmpool.protocol.row import RowBlock
from lmpool.workers.backends import lora
from lmpool.workers.backends.checkpoint import checkpoint_dtype, checkpoint_revision
from lmpool.workers.backends.row_encoder import Piece, PositionAnswers, RowEncoder
from lmpool.workers.backends.settings import VLLM_DISTRIBUTIONS, VllmSettings, check_engine_args, parse_engine_args

# Exceptions of vLLM for bad options, broken weights, and missing kernels, devices or memory; they have no common type.
_ERRORS = (
    ValueError, TypeError, RuntimeError, OSError, MemoryError, NotImplementedError, ImportError, KeyError,
    AttributeError, AssertionError, SafetensorError, WorkerError,
)  # fmt: skip

KEY = "lmpool"
"""The entry of `SamplingParams.extra_args` that holds a prompt's digest."""

_MAX_LOGITS = 1 << 25
"""Max logits of positions that are computed at once (128 MiB in float32)."""

_log = logging.getLogger(__name__)

_CPU_KV_BYTES = 1 << 30  # Default bytes for keys and values on a CPU, where vLLM would take most of the memory.
_CPU_BLOCK = 32  # Tokens per block of keys and values on a CPU; vLLM's CPU kernels need a multiple of 32.
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # Values that vLLM accepts for `max_lora_rank`.
_PARALLEL = {
    **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "nnodes"), 1),
    "distributed_executor_backend": "uni",
}

# Dtypes of keys and values with fewer than 16 bits. With fp8, rows of vLLM 0.32.0 on a CPU were off by 1.1 to 1.6.
_NARROW_KV = re.compile("fp8|nvfp4|int[48]_|turboquant|ultraquant")

_REFUSED = {
    "model": "it is the MODEL of the command",
    **dict.fromkeys(("tokenizer", "skip_tokenizer_init"), "prompts are token ids"),
    "logits_processors": "rows are captured by one; name installed ones with --logits-processors",
    **dict.fromkeys(("enable_lora", "lora_modules"), "name adapters with --adapters name=folder"),
    "speculative_config": "each request computes one row, so there is nothing to speculate on",
    "logprobs_mode": "rows are captured before it applies",
    "generation_config": "the sampling parameters of a checkpoint must not change its rows",
    **dict.fromkeys(("runner", "convert"), "rows come from models that generate"),
}

# Options that change rows only by rounding. Workers that differ only in these options may serve the same model.
_HARMLESS = {
    "async_scheduling", "attention_backend", "attention_config", "block_size", "compilation_config", "cpu_offload_gb",
    "cudagraph_capture_sizes", "disable_cascade_attn", "disable_log_stats", "download_dir", "enable_chunked_prefill",
    "enable_prefix_caching", "enforce_eager", "gpu_memory_utilization", "kv_cache_memory_bytes",
    "long_prefill_token_threshold", "max_cpu_loras", "max_cudagraph_capture_size", "max_long_partial_prefills",
    "max_lora_rank", "max_loras", "max_model_len", "max_num_active_seqs", "max_num_batched_tokens",
    "max_num_partial_prefills", "max_num_seqs", "num_gpu_blocks_override", "optimization_level",
    "safetensors_load_strategy", "scheduling_policy", "use_tqdm_on_load", *_PARALLEL,
}  # fmt: skip


def _check_shape(logits: Tensor, count: int, vocab_size: int, unit: str) -> None:
    if logits.shape != (count, vocab_size):
        raise WorkerError(f"vLLM gave logits of shape {tuple(logits.shape)} for {count} {unit} and V = {vocab_size}")


class Captured:
    """Stores captured rows until the backend takes them. If a prompt has several rows, the last row is kept."""

    def __init__(self, vocab_size: int, encoder: RowEncoder) -> None:
        self._vocab_size = vocab_size
        self.encoder = encoder
        self.device = "cpu"
        # Digest of a prompt -> (block that contains its row, index of the row), or the reason of its failure.
        self._captured: dict[bytes, tuple[RowBlock, int] | str] = {}

    def add(self, digests: list[bytes], logits: Tensor) -> None:
        """Encode and store the rows of prompts from logits (n, V), float32; the caller may reuse the logits' memory."""
        _check_shape(logits, len(digests), self._vocab_size, "prompts")
        self.device = str(logits.device)
        block, failures = self.encoder.encode(digests, logits)
        self._captured.update(failures)
        if block is not None:
            self._captured.update((digest, (block, row)) for row, digest in enumerate(block.digests))

    def drop(self, digest: bytes) -> None:
        """Discard a prompt's row."""
        self._captured.pop(digest, None)

    def take(self, digests: list[bytes]) -> tuple[list[RowBlock], dict[bytes, str]]:
        """Remove the results of finished prompts; returns blocks of rows, and digest -> reason of each failure."""
        failures: dict[bytes, str] = {}
        blocks: dict[int, tuple[RowBlock, list[int]]] = {}
        for digest in digests:
            match self._captured.pop(digest, None):
                case None:
                    raise WorkerError("vLLM has ended a prompt without giving its logits")
                case str() as reason:
                    failures[digest] = reason
                case block, row:
                    blocks.setdefault(id(block), (block, []))[1].append(row)
        parts = []
        for block, rows in blocks.values():
            if len(rows) < len(block.digests):  # Copy the rows only if other rows of the block are not taken.
                log_z, taken = None if block.log_z is None else block.log_z[rows], [block.digests[row] for row in rows]
                block = RowBlock(taken, block.numbers[rows], log_z, block.encoding)
            parts.append(block)
        return parts, failures


class CaptureProcessor(LogitsProcessorV1, LogitsProcessorV2):  # type: ignore[misc]  # vllm has no types here
    """Passes logits from vLLM to `captured`. A subclass sets `captured`, because vLLM itself makes the instance."""

    captured: Captured

    def __init__(self, config: Any, *more: Any) -> None:
        # vLLM's runner V1 passes two more arguments (device and is_pin_memory), V2 one (the state of its requests).
        self._requests: Any = more[0] if len(more) == 1 else None
        self._digests: dict[int, bytes] = {}

    def is_argmax_invariant(self) -> bool:
        """Return False although logits do not change: runner V1 skips invariant processors for greedy requests."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Update the batch; called by vLLM's runner V1: first requests were removed, then added, then moved."""
        if batch_update is None:
            return
        digests = self._digests
        for index in batch_update.removed:
            digests.pop(index, None)
        for index, params, _, _ in batch_update.added:
            self.add_request(index, params)
        for source, target, direction in batch_update.moved:
            moved, other = digests.pop(source, None), digests.pop(target, None)
            if moved is not None:
                digests[target] = moved
            if other is not None and direction == MoveDirectionality.SWAP:
                digests[source] = other

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Return whether to capture a request's row; called by runner V2 when the request gets the slot `req_idx`."""
        digest = (sampling_params.extra_args or {}).get(KEY)
        if digest is None:
            self._digests.pop(req_idx, None)
        else:
            self._digests[req_idx] = digest
        return digest is not None

    def apply(self, logits: Tensor, ctx: Any = None) -> Tensor:
        """Capture a step's logits, and return them unchanged."""
        if ctx is None:  # For runner V1, capture rows of incomplete prompts too; a later step replaces these rows.
            rows = sorted(index for index in self._digests if index < len(logits))
            digests = [self._digests[row] for row in rows]
        else:
            slots = ctx.idx_mapping_np
            complete = ctx.seq_lens_upper_bound_np >= self._requests.prefill_len.np[slots]
            rows = [row for row, slot in enumerate(slots.tolist()) if complete[row] and slot in self._digests]
            digests = [self._digests[int(slots[row])] for row in rows]
        if rows:
            chosen = logits if rows == list(range(len(logits))) else logits[torch.tensor(rows, device=logits.device)]
            self.captured.add(digests, chosen)
        return logits


class PositionCapture(PositionAnswers):
    """Answers of positions queries, computed from the hidden states of the steps of an engine core in this process."""

    def __init__(self, vocab_size: int, loras: Mapping[str, LoRARequest]) -> None:
        super().__init__()
        self._vocab_size = vocab_size
        self._loras = loras  # "name@revision" -> vLLM's handle of the loaded adapter.

    def attach(self, core: Any) -> None:
        """Hook into an engine core, so that each step passes its hidden states to this object.

        Raises:
            AttributeError: this release of vLLM lacks one of the methods to replace. No method was replaced.
        """
        self._runner = runner = core.model_executor.driver_worker.worker.model_runner
        modules = runner.get_model().modules()
        self._head = next((module for module in modules if isinstance(module, LogitsProcessorWithLoRA)), None)
        worker, manager = getattr(runner, "prompt_logprobs_worker", None), core.scheduler.kv_cache_manager
        self._find_cached = manager.get_computed_blocks
        if worker is None:
            self._original = runner._get_prompt_logprobs_dict
            runner._get_prompt_logprobs_dict = self._after_step_of_v1
        else:
            self._original = worker.compute_prompt_logprobs
            worker.compute_prompt_logprobs = self._after_step_of_v2
        manager.get_computed_blocks = self._find_cached_before_wanted

    def _find_cached_before_wanted(self, request: Any) -> Any:
        """Look up a prompt in the prefix cache, but only up to the first position whose values are missing."""
        first = self.first_missing(request.request_id)
        # Include the first missing position: vLLM never takes the last token of a prompt from its cache.
        return self._find_cached(request if first is None else _Beginning(request, first + 1))

    def _after_step_of_v1(self, hidden: Tensor, scheduled: dict[str, int]) -> Any:
        runner, pieces = self._runner, list[Piece]()
        for name, count in scheduled.items() if self._open else ():
            at, place = runner.requests[name].num_computed_tokens, runner.input_batch.req_id_to_index[name]
            pieces += self.wanted(name, range(at, at + count), int(runner.query_start_loc.np[place]))
        self._add_all(hidden, pieces)
        return self._original(hidden, scheduled)

    def _after_step_of_v2(self, compute_logits: Any, hidden: Tensor, batch: Any, *more: Any) -> Any:
        pieces = list[Piece]()
        for place, name in enumerate(batch.req_ids if self._open else ()):
            at, count = int(batch.num_computed_prefill_tokens_np[place]), int(batch.num_scheduled_tokens[place])
            pieces += self.wanted(name, range(at, at + count), int(batch.query_start_loc_np[place]))
        self._add_all(hidden, pieces)
        return self._original(compute_logits, hidden, batch, *more)

    def _add_all(self, hidden: Tensor, wanted: Iterable[Piece]) -> None:
        """Compute the logits of a step's wanted positions, one adapter after another, and add values to the answers."""
        by_adapter: dict[str, list[Piece]] = {}
        for piece in wanted:
            by_adapter.setdefault(self._open[piece.request].job.adapter, []).append(piece)
        for adapter, found in by_adapter.items():
            pieces, rows = list[Piece](), list[int]()
            for piece in found:
                pieces.append(piece._replace(row=len(rows)))
                rows += range(piece.row, piece.row + len(piece.positions))
            if self._head is not None:
                slots = self._runner.lora_manager._adapter_manager.lora_index_to_id
                slot = slots.index(self._loras[adapter].lora_int_id) if adapter else None
                original, self._head.punica_wrapper = self._head.punica_wrapper, _OneAdapter(slot)
            try:
                first = 0
                rows_at_once = max(1, _MAX_LOGITS // self._vocab_size)
                for part in torch.split(torch.tensor(rows, device=hidden.device), rows_at_once):
                    self.add(pieces, first, self._logits(hidden[part]))
                    first += len(part)
            finally:
                if self._head is not None:
                    self._head.punica_wrapper = original

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._runner.model.compute_logits(hidden)
        _check_shape(logits, len(hidden), self._vocab_size, "positions")
        return logits


class _OneAdapter:
    """Applies one adapter to all rows, in place of vLLM's punica wrapper, which applies each prompt's adapter."""

    def __init__(self, slot: int | None) -> None:
        self._slot = slot

    def add_lora_logits(self, logits: Tensor, hidden: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
        """Add the adapter's part to logits (n, V or more). Shapes: `down` (slots, 1, r, d), `up` (slots, 1, V, r)."""
        # Skip adapters that do not change the output head: all their factors are zero.
        if self._slot is not None and bool(down[self._slot].any()):
            factors = down[self._slot, 0].float(), up[self._slot, 0].float()
            added = hidden.float() @ factors[0].T @ factors[1].T * scale
            logits[:, : added.shape[1]] += added.to(logits.dtype)
        return logits


class _Beginning:
    """Proxy of a request with a smaller `num_tokens`; all other attributes come from the request."""

    def __init__(self, request: Any, num_tokens: int) -> None:
        self._request = request
        self.num_tokens = num_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


@contextmanager
def refusing(context: str) -> Iterator[None]:
    """Raise vLLM's errors as a `SettingsError` of one line that begins with `context`."""
    try:
        yield
    except SettingsError:
        raise
    except _ERRORS as error:
        reason: BaseException = error
        if isinstance(error, ValidationError):  # Name the first error: pydantic's message begins with the count.
            found = error.errors()[0]
            reason = ValueError(": ".join([*map(str, found["loc"]), str(found["msg"])]))
        raise SettingsError(f"{context}: {first_line(reason)}") from error


class VllmEngine:
    """An engine core in this process, loaded and ready to run steps."""

    def __init__(self, settings: VllmSettings, folder: Path) -> None:
        processors = _allowed_processors(settings.logits_processors)
        given = user_arguments(settings)
        # vLLM creates the logits processor from a class, so each engine needs its own class with its `Captured`.
        processor: type[CaptureProcessor] = type("LmpoolCapture", (CaptureProcessor,), {})
        arguments = engine_arguments(settings, folder) | given | {"logits_processors": [processor]}
        with refusing(f"model: vLLM {vllm_version} cannot serve {settings.model}"):
            self.config: Any = EngineArgs(**arguments).create_engine_config(UsageContext.LLM_CLASS)
        model, kv_dtype = self.config.model_config, self.config.cache_config.cache_dtype
        if kv_dtype == "auto" and getattr(self.config.quant_config, "kv_cache_scheme", None):
            kv_dtype = "fp8"  # vLLM treats every `kv_cache_scheme` of a checkpoint as fp8.
        if current_platform.is_cpu() and _NARROW_KV.match(kv_dtype):
            remedy = "Leave it out; if the checkpoint sets it, use kv_cache_dtype=bfloat16"
            raise SettingsError(f"engine_args: kv_cache_dtype={kv_dtype} gives wrong rows on a CPU. {remedy}")
        encoder = RowEncoder(model.dtype, lossy=settings.encoding == "f16")
        self.captured = processor.captured = Captured(model.get_vocab_size(), encoder)
        also = row_deciding(given)
        plugins = _foreign_plugins()
        also |= {name: found for name, found in (("logits_processors", processors), ("plugins", plugins)) if found}
        if self.config.load_config.load_format == "dummy":
            also["seed"] = model.seed
        self.revision = checkpoint_revision(folder, also)
        # Request Intel AMX (matrix tiles) from the operating system. vLLM's bfloat16 attention on a CPU uses AMX
        # without this request, and the process would crash with an illegal instruction.
        if torch.cpu._is_amx_tile_supported():
            torch.cpu._init_amx()
        with refusing(f"model: vLLM {vllm_version} cannot load {settings.model}"):
            self.core = InprocClient(self.config, Executor.get_class(self.config), log_stats=False)
        self.loras: dict[str, LoRARequest] = {}  # "name@revision" -> vLLM's handle of the loaded adapter, for requests.
        self.positions = PositionCapture(model.get_vocab_size(), self.loras)
        self.has_positions = not processors and self.capture_positions()

    def capture_positions(self) -> bool:
        """Start to capture values at positions; False if vLLM does not compute all positions as it computes rows."""
        # Fast prefill skips positions in the last layers, and transferred keys and values skip positions in all layers.
        if self.config.cache_config.kv_sharing_fast_prefill or self.config.kv_transfer_config is not None:
            return False
        try:
            self.positions.attach(self.core.engine_core)
        except AttributeError as error:
            _log.warning("vLLM %s: values at positions are computed as rows: %s", vllm_version, first_line(error))
            return False
        return True


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
    check_engine_args(given, known, _REFUSED, _PARALLEL, f"vLLM {vllm_version}")
    return given


def row_deciding(given: dict[str, Any]) -> dict[str, Any]:
    """The user's options that may change rows by more than rounding; the model's fingerprint includes them."""
    return {name: value for name, value in given.items() if name not in _HARMLESS}


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
    }
    if current_platform.is_cpu():
        memory = settings.kv_cache_bytes or _CPU_KV_BYTES
        arguments |= {"enforce_eager": True, "block_size": _CPU_BLOCK, "kv_cache_memory_bytes": memory}
    if slots := settings.adapter_slots:
        ranks = {lora.DEFERRED_RANK} if settings.max_adapters else set[int]()
        for source in settings.adapter_folders.values():
            ranks |= lora.ranks_of(lora.read_adapter_config(lora.check_adapter(source, folder)))
        if (rank := max(ranks)) > _LORA_RANKS[-1]:
            raise SettingsError(f"adapters: one has rank {rank}: vLLM takes at most {_LORA_RANKS[-1]}")
        # Reserve one slot more than adapters: otherwise, on a CPU, prompts without an adapter get an adapter's rows.
        rank = next(each for each in _LORA_RANKS if each >= rank)
        arguments |= {"enable_lora": True, "max_loras": slots + 1, "max_cpu_loras": slots + 1, "max_lora_rank": rank}
    return arguments
