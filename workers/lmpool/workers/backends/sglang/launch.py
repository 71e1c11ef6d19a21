"""From the settings to an engine that runs, with one clear line for everything that can be wrong."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmpool.errors import LMPoolError, SettingsError
from lmpool.protocol.adapter import qualify
from lmpool.trie.kernels import vector_math
from lmpool.workers.backends.checkpoint import checkpoint_folder, checkpoint_revision, checkpoint_source
from lmpool.workers.backends.device import pick_device
from lmpool.workers.backends.engine_args import parse_engine_args
from lmpool.workers.backends.lora import adapter_folder, check_adapter
from lmpool.workers.backends.requirements import first_line, require_version
from lmpool.workers.backends.sglang.options import (
    context_length,
    engine_options,
    kv_tokens,
    row_deciding,
    user_options,
)
from lmpool.workers.backends.sglang.settings import BELOW, DISTRIBUTIONS, LEAST, SglangSettings

if TYPE_CHECKING:
    from lmpool.workers.backends.sglang.engine import Engine

_TOO_LITTLE_MEMORY = re.compile("(?i)out of memory|not enough memory|allocate memory|memory pool|memory capacity")


@dataclass(frozen=True, slots=True)
class Launched:
    """An engine that runs.

    Attributes:
        engine: the engine.
        max_prompt_tokens: the longest prompt to take.
        revision: digest of the checkpoint and of the options that decide rows.
        adapters: "name@revision" -> folder or hub name.
        device: where the model lies: "cpu", or a torch device such as "cuda:0".
    """

    engine: Engine
    max_prompt_tokens: int
    revision: str
    adapters: dict[str, str]
    device: str


def launch(settings: SglangSettings) -> Launched:
    """Load what the settings name and start SGLang's event loop.

    Raises:
        SettingsError: no such model, device, option or adapter, too little memory, or SGLang cannot run it.
    """
    vector_math.settle()
    version = require_version("backend", DISTRIBUTIONS, LEAST, BELOW)
    folder = checkpoint_folder("model", settings.model, settings.revision)
    places = {name: _adapter_folder(place, folder) for name, place in settings.adapter_folders.items()}
    # By the qualified name: SGLang tells prefixes of different adapters apart by it.
    adapters = {qualify(name, checkpoint_revision(place)): place for name, place in places.items()}
    sources = dict(zip(adapters, map(checkpoint_source, settings.adapter_folders.values()), strict=True))
    device = str(pick_device(str(parse_engine_args(settings.engine_args).get("device", settings.device))))
    _prepare(device)
    try:
        from lmpool.workers.backends.sglang.engine import Engine
        from lmpool.workers.backends.sglang.scheduler import known_options, read_facts
    except (ImportError, OSError, RuntimeError) as error:
        # RuntimeError is how its kernels say that they are not made for this machine.
        raise SettingsError(f"backend: SGLang {version} cannot be imported: {first_line(error)}") from error
    known = known_options()
    given = user_options(settings, known, version)
    options = engine_options(settings, folder, device, adapters) | given
    if given.get("log_level"):
        logging.getLogger("sglang").setLevel(str(given["log_level"]).upper())
    try:
        facts = read_facts(folder, settings.trust_remote_code)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, ImportError) as error:
        raise SettingsError(f"model: {settings.model} cannot be loaded: {first_line(error)}") from error
    tokens = kv_tokens(settings, options, facts.layers * facts.kv_numbers)
    if tokens is not None:
        options.setdefault("max_total_tokens", tokens)
    options.setdefault("context_length", context_length(settings.max_prompt_tokens, facts.positions))
    revision = checkpoint_revision(folder, also=row_deciding(given))
    engine = Engine(options)
    try:
        if (trouble := engine.wait()) is not None:
            raise _explained(trouble, f"SGLang {version} cannot serve {settings.model}") from trouble
        most = _prompt_limit(settings.max_prompt_tokens, engine.facts.max_prompt_tokens)
        return Launched(engine, most, revision, sources, _place(options))
    except BaseException:
        engine.close()
        raise


def _explained(error: BaseException, what: str) -> LMPoolError:
    """SGLang checks its options and models with whatever exception is at hand."""
    if isinstance(error, LMPoolError):
        return error
    is_too_little = isinstance(error, MemoryError) or _TOO_LITTLE_MEMORY.search(str(error)) is not None
    return SettingsError(f"{'kv_cache_bytes' if is_too_little else 'model'}: {what}: {first_line(error)}")


def _prompt_limit(wanted: int | None, most: int) -> int:
    if most < (wanted or 1):
        raise SettingsError(
            f"max_prompt_tokens: {wanted or 1} is more than the {most} tokens of a prompt that SGLang has room for"
        )
    return most if wanted is None else wanted


def _place(options: Mapping[str, Any]) -> str:
    """The device that SGLang is told, with its number; the CPU has none."""
    kind = str(options["device"]).partition(":")[0]
    return kind if kind == "cpu" else f"{kind}:{options['base_gpu_id']}"


def _adapter_folder(place: str, model: Path) -> Path:
    folder = adapter_folder(place)
    check_adapter(folder, model)
    return folder


def _prepare(device: str) -> None:
    """What must be settled before SGLang is imported."""
    if device == "cpu":
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    logging.getLogger("sglang").setLevel(logging.WARNING)
    # It warns of every model whose code needs a package that is missing, whichever model is served.
    logging.getLogger("sglang.srt.models.registry").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"sglang\.")
