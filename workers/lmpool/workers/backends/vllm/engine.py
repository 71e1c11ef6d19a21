"""vLLM's engine core in this process, with one clear line for everything that can be wrong with making it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
from vllm.plugins import DEFAULT_PLUGINS_GROUP
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.executor import Executor
from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP

from lmpool.errors import SettingsError
from lmpool.protocol.adapter import revision_of
from lmpool.trie.kernels import vector_math
from lmpool.workers.backends.checkpoint import checkpoint_folder, checkpoint_revision, checkpoint_source
from lmpool.workers.backends.plugins import named_plugins, other_plugins
from lmpool.workers.backends.requirements import first_line
from lmpool.workers.backends.row_encoder import RowEncoder
from lmpool.workers.backends.vllm.arguments import (
    Adapters,
    adapter_places,
    engine_arguments,
    find_adapters,
    fitting_sessions,
    read_adapter,
    row_deciding,
    user_arguments,
)
from lmpool.workers.backends.vllm.capture import Captured, CaptureProcessor
from lmpool.workers.backends.vllm.settings import DISTRIBUTIONS, VllmSettings

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}

# What options that do not fit, broken weights, missing kernels, devices and memory end in: vLLM has no type for them.
START_ERRORS = (
    ValueError, TypeError, RuntimeError, OSError, MemoryError, NotImplementedError, ImportError, KeyError,
    AttributeError, AssertionError, SafetensorError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine core that is ready to be stepped.

    Attributes:
        core: the client of the engine core in this process.
        captured: where its rows are.
        vocab_size: V.
        dtype: of the computation.
        max_prompt_tokens: the longest prompt that leaves room for the token that vLLM samples.
        max_batch: prompts that run together.
        sessions: sessions that have a place beside them.
        kv_tokens: tokens whose keys and values fit.
        block: tokens of a block of them.
        revision: digest of the weights, and of the options and plugins that change rows.
        source: folder or hub name.
        adapters: "name@revision" -> what a request names it by, and its folder or hub name.
        folder: of the checkpoint.
        places: adapters that may be loaded at once.
        numbers: of adapters to come.
    """

    core: InprocClient
    captured: Captured
    vocab_size: int
    dtype: str
    max_prompt_tokens: int
    max_batch: int
    sessions: int
    kv_tokens: int
    block: int
    revision: str
    source: str
    adapters: Adapters
    folder: Path
    places: int
    numbers: Iterator[int]

    def load_adapter(self, name: str, source: str) -> str:
        """Load an adapter; returns its revision.

        Raises:
            SettingsError: it cannot be had, does not fit the model, or there is no room for it.
        """
        adapter, request = read_adapter(name, source, next(self.numbers), self.folder)
        if adapter not in self.adapters:
            if len(self.adapters) >= self.places:
                raise SettingsError(
                    f"adapters: this worker has room for {self.places}, and {name!r} would be one more: start the "
                    "workers anew with --max-adapters"
                )
            try:
                _load_adapter(self.core, request)
            except START_ERRORS as error:
                raise SettingsError(f"adapters: vLLM {vllm_version} cannot load {name}: {first_line(error)}") from error
            self.adapters[adapter] = (request, checkpoint_source(source))
        return revision_of(adapter)

    def drop_adapter(self, adapter: str) -> None:
        """Forget an adapter that no request names any more."""
        if (found := self.adapters.pop(adapter, None)) is not None:
            self.core.remove_lora(found[0].lora_int_id)


def open_engine(settings: VllmSettings) -> Engine:
    """Load what the settings name.

    Raises:
        SettingsError: no such model, adapter or option, no device, or too little memory.
    """
    vector_math.settle()
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
    model = config.model_config
    encoder = RowEncoder(model.dtype, lossy=settings.encoding == "f16")
    processor.captured = captured = Captured(model.get_vocab_size(), encoder)
    also = row_deciding(given)
    if processors:
        also["logits_processors"] = processors
    if plugins := other_plugins(DEFAULT_PLUGINS_GROUP, DISTRIBUTIONS, envs.VLLM_PLUGINS):
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
        vocab_size=model.get_vocab_size(),
        dtype=_DTYPES.get(model.dtype, str(model.dtype)),
        max_prompt_tokens=model.max_model_len - 1,
        max_batch=places - sessions,
        sessions=sessions,
        kv_tokens=(config.cache_config.num_gpu_blocks or 0) * config.cache_config.block_size,
        block=config.cache_config.block_size,
        revision=revision,
        source=checkpoint_source(settings.model),
        adapters=adapters,
        folder=folder,
        places=adapter_places(settings),
        numbers=count(len(adapters) + 1),
    )


def _allow_tiles() -> None:
    """Ask the system for the processor's matrix tiles (Intel AMX).

    vLLM's attention in bfloat16 on a CPU uses them where the processor has them and leaves asking to whoever came
    before; without permission the first use ends the process with an illegal instruction.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def _start(settings: VllmSettings, config: Any, adapters: Adapters) -> InprocClient:
    _allow_tiles()
    try:
        core = InprocClient(config, Executor.get_class(config), log_stats=False)
    except START_ERRORS as error:
        raise refusal(settings, "cannot load", error) from error
    for name, (request, _) in adapters.items():
        # Now: an adapter that does not fit would end the engine with its first prompt.
        try:
            _load_adapter(core, request)
        except START_ERRORS as error:
            core.shutdown()
            raise SettingsError(f"adapters: vLLM {vllm_version} cannot load {name}: {first_line(error)}") from error
    return core


def _load_adapter(core: InprocClient, request: LoRARequest) -> None:
    if not core.add_lora(request):
        raise RuntimeError("it does not fit the model")


def refusal(settings: VllmSettings, what: str, error: BaseException) -> SettingsError:
    """What vLLM could not do with the model, in one line."""
    return SettingsError(f"model: vLLM {vllm_version} {what} {settings.model}: {_reason(error)}")


def _reason(error: BaseException) -> str:
    """What is wrong, in one line; pydantic, which checks vLLM's configuration, begins with one that counts errors."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        text = str(first["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
        return first_line(ValueError(f"{where}: {text}" if where else text))
    return first_line(error)
