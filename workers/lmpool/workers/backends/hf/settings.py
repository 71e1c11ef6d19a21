"""What the hf backend is told: which model, where it runs, how much memory it may use."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lmpool.errors import SettingsError
from lmpool.settings import check_choice, check_name, check_number
from lmpool.workers.backend.contract import Backend
from lmpool.workers.backends.adapter_folders import read_adapter_folders
from lmpool.workers.backends.engine_settings import DTYPES, ENCODINGS, open_backend
from lmpool.workers.backends.places import local_path
from lmpool.workers.backends.requirements import require


@dataclass(frozen=True, slots=True)
class HfSettings:
    """Settings of one hf backend.

    Raises:
        SettingsError: a value is malformed, or a package that it needs is not installed.
    """

    model: str = field(metadata={"help": "Hub name or folder of the model, or a GGUF file."})
    name: str = field(default="", metadata={"help": 'What it is served as; "" means the last part of `model`.'})
    gguf_file: str | None = field(
        default=None, metadata={"help": "A GGUF file in the model's folder or repository, dequantised when loaded."}
    )
    revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit on the hub."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run Python code that comes with the model."})
    device: str = field(default="auto", metadata={"help": '"auto", or a torch device such as "cpu" or "cuda:1".'})
    dtype: str = field(
        default="auto", metadata={"help": '"auto" (the checkpoint\'s), "float32", "bfloat16" or "float16".'}
    )
    encoding: str = field(
        default="exact",
        metadata={"help": '"exact", or "f16" to send rows that would travel as float32 as float16, which loses bits.'},
    )
    max_batch: int = field(default=64, metadata={"help": "Prompts that run together."})
    max_batch_tokens: int = field(
        default=8192, metadata={"help": "Tokens that are computed in one forward, padding included."}
    )
    chunked_prefill_size: int | None = field(
        default=None,
        metadata={
            "help": "Tokens of a longer prompt that one forward computes, so that others go between; None means 512 on "
            "a CPU, 2,048 elsewhere."
        },
    )
    kv_cache_bytes: int = field(
        default=1 << 30,
        metadata={
            "help": "Memory for the keys and values of recent prompts, 0 for none. A step gathers at most as much "
            "again."
        },
    )
    max_prompt_tokens: int | None = field(
        default=None, metadata={"help": "Longest prompt to take; None means the model's limit, which it cannot exceed."}
    )
    adapters: list[str] = field(
        default_factory=list,
        metadata={
            "help": "LoRA adapters, as name=folder; may be given several times. Others can be loaded while it serves."
        },
    )

    def __post_init__(self) -> None:
        for name in ("model", "gguf_file", "revision", "device"):
            _check_text(name, getattr(self, name), optional=name in ("gguf_file", "revision"))
        self._take_gguf_path()
        check_name("name", self.served_as)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("encoding", self.encoding, ENCODINGS)
        check_number("max_batch", self.max_batch, least=1, most=65_536)
        check_number("max_batch_tokens", self.max_batch_tokens, least=1)
        check_number("kv_cache_bytes", self.kv_cache_bytes, least=0)
        for name in ("max_prompt_tokens", "chunked_prefill_size"):
            if (value := getattr(self, name)) is not None:
                check_number(name, value, least=1)
        require("model", "lmpool[hf]", "torch", "transformers")
        if self.gguf_file is not None:
            require("gguf_file", "lmpool[gguf]", "gguf", "accelerate")
        if self.adapter_folders:
            require("adapters", "lmpool[lora]", "peft")

    def _take_gguf_path(self) -> None:
        """Take the path of a GGUF file as its folder and its name."""
        path = local_path("model", self.model)
        with suppress(OSError):  # What may not be looked at is refused when it is loaded, with the reason.
            if self.gguf_file is None and path.suffix == ".gguf" and path.is_file():
                object.__setattr__(self, "name", self.name or path.stem)
                object.__setattr__(self, "model", str(path.parent))
                object.__setattr__(self, "gguf_file", path.name)

    @property
    def served_as(self) -> str:
        """`name`, or the last part of `model`."""
        return self.name or Path(self.model).name or self.model

    @property
    def adapter_folders(self) -> dict[str, str]:
        """Adapter -> its folder or hub name."""
        return read_adapter_folders(self.adapters)

    def open(self) -> Backend:
        """Make the backend; see `HfBackend`."""
        return open_backend("lmpool.workers.backends.hf.backend:HfBackend", self)


def _check_text(field: str, value: object, *, optional: bool) -> None:
    if optional and value is None:
        return
    if not isinstance(value, str) or not value.strip():
        raise SettingsError(f"{field}: {value!r} is not a name")
