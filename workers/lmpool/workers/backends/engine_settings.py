"""Settings that the engines share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from lmpool.adapters import MAX_ADAPTERS
from lmpool.checks import check_choice, check_name, check_number, check_texts, shown
from lmpool.errors import SettingsError
from lmpool.workers.backends.adapter_folders import read_adapter_folders

DTYPES = ("auto", "float32", "bfloat16", "float16")
ENCODINGS = ("exact", "f16")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of an engine that runs inside the worker.

    Attributes:
        model: hub name or folder of the model.
        name: what it is served as; "" means the last part of `model`.
        revision: branch, tag or commit on the hub.
        trust_remote_code: run Python code that comes with the model.
        dtype: "auto" (the checkpoint's), "float32", "bfloat16" or "float16".
        encoding: "exact", or "f16" to send rows that would travel as float32 as float16, which loses bits.
        max_batch: prompts that run together.
        max_batch_tokens: tokens that are computed in one forward; None means what the engine thinks best.
        kv_cache_bytes: memory for keys and values; None means what the engine thinks best, 1 GiB on a CPU.
        max_prompt_tokens: longest prompt to take; None means the model's limit, which it cannot exceed.
        adapters: LoRA adapters, as name=folder; may be given several times.
        max_adapters: further adapters that there is to be room for, to be loaded while it serves.
        engine_args: any other options of the engine, as key=value (several divided by spaces) or a TOML file;
            may be given several times.

    Raises:
        SettingsError: a value is malformed.
    """

    model: str
    name: str = ""
    revision: str | None = None
    trust_remote_code: bool = False
    dtype: str = "auto"
    encoding: str = "exact"
    max_batch: int = 256
    max_batch_tokens: int | None = None
    kv_cache_bytes: int | None = None
    max_prompt_tokens: int | None = None
    adapters: list[str] = field(default_factory=list)
    max_adapters: int = 0
    engine_args: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model.strip():
            raise SettingsError(f"model: {shown(self.model)} is not a name")
        check_name("name", self.served_as)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("encoding", self.encoding, ENCODINGS)
        check_texts("engine_args", self.engine_args)
        _ = self.adapter_folders  # Malformed ones are refused now.
        check_number(self, "max_adapters", least=0, most=MAX_ADAPTERS)
        check_number(self, "max_batch", least=1, most=65_536)
        for name in ("max_batch_tokens", "kv_cache_bytes", "max_prompt_tokens"):
            if getattr(self, name) is not None:
                check_number(self, name, least=1)

    @property
    def served_as(self) -> str:
        """`name`, or the last part of `model`."""
        return self.name or Path(self.model).name or self.model

    @property
    def adapter_folders(self) -> dict[str, str]:
        """Adapter -> its folder or hub name."""
        return read_adapter_folders(self.adapters)
