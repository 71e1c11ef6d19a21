"""Settings that the engines share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import cast

from lmpool.errors import SettingsError
from lmpool.protocol.adapter import MAX_ADAPTERS
from lmpool.settings import check_choice, check_name, check_number, check_texts, shown
from lmpool.workers.backend.contract import Backend, BackendSettings
from lmpool.workers.backends.adapter_folders import read_adapter_folders

DTYPES = ("auto", "float32", "bfloat16", "float16")
ENCODINGS = ("exact", "f16")


def open_backend(name: str, settings: BackendSettings) -> Backend:
    """Make a backend that is imported only now, for that brings its engine in.

    Args:
        name: its class, as "lmpool.workers.backends.engine.backend:EngineBackend".
        settings: what it is told.

    Raises:
        ImportError: a package that it needs is not installed, or not as it must be.
    """
    make = cast("Callable[[BackendSettings], Backend]", resolve_name(name))
    return make(settings)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of an engine that runs inside the worker.

    Raises:
        SettingsError: a value is malformed.
    """

    model: str = field(metadata={"help": "Hub name or folder of the model."})
    name: str = field(default="", metadata={"help": 'What it is served as; "" means the last part of `model`.'})
    revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit on the hub."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run Python code that comes with the model."})
    dtype: str = field(
        default="auto", metadata={"help": '"auto" (the checkpoint\'s), "float32", "bfloat16" or "float16".'}
    )
    encoding: str = field(
        default="exact",
        metadata={"help": '"exact", or "f16" to send rows that would travel as float32 as float16, which loses bits.'},
    )
    max_batch: int = field(default=256, metadata={"help": "Prompts that run together."})
    max_batch_tokens: int | None = field(
        default=None,
        metadata={"help": "Tokens that are computed in one forward; None means what the engine thinks best."},
    )
    kv_cache_bytes: int | None = field(
        default=None,
        metadata={"help": "Memory for keys and values; None means what the engine thinks best, 1 GiB on a CPU."},
    )
    max_prompt_tokens: int | None = field(
        default=None, metadata={"help": "Longest prompt to take; None means the model's limit, which it cannot exceed."}
    )
    adapters: list[str] = field(
        default_factory=list, metadata={"help": "LoRA adapters, as name=folder; may be given several times."}
    )
    max_adapters: int = field(
        default=0, metadata={"help": "Further adapters that there is to be room for, to be loaded while it serves."}
    )
    engine_args: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Any other options of the engine, as key=value (several divided by spaces) or a TOML file; may be "
            "given several times."
        },
    )

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model.strip():
            raise SettingsError(f"model: {shown(self.model)} is not a name")
        check_name("name", self.served_as)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("encoding", self.encoding, ENCODINGS)
        check_texts("engine_args", self.engine_args)
        _ = self.adapter_folders  # Malformed ones are refused now.
        check_number("max_adapters", self.max_adapters, least=0, most=MAX_ADAPTERS)
        check_number("max_batch", self.max_batch, least=1, most=65_536)
        for name in ("max_batch_tokens", "kv_cache_bytes", "max_prompt_tokens"):
            if (value := getattr(self, name)) is not None:
                check_number(name, value, least=1)

    @property
    def served_as(self) -> str:
        """`name`, or the last part of `model`."""
        return self.name or Path(self.model).name or self.model

    @property
    def adapter_folders(self) -> dict[str, str]:
        """Adapter -> its folder or hub name."""
        return read_adapter_folders(self.adapters)
