"""LoRA adapters on disk: checks of their files before an engine reads them.

Engines trust the files of an adapter: peft reserves memory for any rank that the config names, treats names of modules
as regular expressions, and ignores weights that do not fit. Clients may name adapters that others have written, so
workers check both files first.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from hashlib import blake2b
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import SettingsError
from lmpool.protocol.adapter import MAX_ADAPTERS, check_adapter_name, check_source
from lmpool.settings import check_texts, shown
from lmpool.workers.backends.checkpoint import checkpoint_folder, read_config

MAX_RANK = 1024
"""Max rank of an adapter; larger ones are hardly smaller than the weights that they change."""

LATER_RANK = 64
"""Max rank of adapters that vLLM and SGLang load while they serve; they reserve memory for it when they start."""

_CONFIG = "adapter_config.json"

WEIGHTS = "adapter_model.safetensors"
"""The file with an adapter's weights."""

FILES = (_CONFIG, WEIGHTS)
"""The files of an adapter that workers read; weights in other formats may be pickles."""

_DEFAULT_RANK = 8  # Of a config that names none, in peft.
_MAX_CONFIG_BYTES = 1 << 20  # Max size of an adapter's config; typical ones have 1 KB.
_MAX_HEADER_BYTES = 1 << 28  # Max size of the header of a model's weights; mixtures of experts have some 10 MB.
_MAX_ADAPTER_HEADER_BYTES = 1 << 25  # Max size of the header of an adapter's weights; each tensor takes 150 bytes.
_FACTORS = (".lora_A.weight", ".lora_B.weight")

PEFT_PREFIX = "base_model.model."
"""The prefix that peft writes before the names of a model's modules."""

HARMLESS_INITS = (True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that do not change the model's own weights; others need a converted adapter."""

BASE_WEIGHT = ".base_layer.weight"
"""Suffix of a weight of the model itself: peft saves heads and embeddings with an adapter that targets them."""

_COMPARED_ROWS = 1024  # Rows of a base weight that are compared at once; some 20 MB of a large head.

# Max relative difference of a copy that was saved in bfloat16, which has 8 significant bits.
_COPY_TOLERANCE = 2.0**-8

# The smallest number of float16 above 0: max absolute difference of a copy that was saved in it.
_MIN_FLOAT16 = 2.0**-24

# Types of numbers in safetensors files, as numpy reads them; numpy has no bfloat16, the upper half of a float32.
_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}

ReadRows = Callable[[int, int], NDArray[np.float32]]
"""Reads rows [first, last) of a weight (n, m), as float32."""

WeightOf = Callable[[str], ReadRows | None]
"""Finds the weight of a module by its name; None if the model has none that can be read."""

# Their first dimension is the rank.
_FIRST_FACTORS = (".lora_A.weight", ".lora_embedding_A")

# Parts of a module's name that are compared, such as layers.0.self_attn.q_proj; prefixes may differ.
_MODULE_PARTS = 4

# Other names could be regular expressions. A dot in a name matches any character, which is harmless.
_MODULE = re.compile(r"[A-Za-z0-9_.-]{1,300}")

_ALL_LINEAR = "all-linear"

# Fields that list modules, and max names in each: peft compares each name with each module of the model.
_MODULE_LISTS = {
    "target_modules": 4096, "exclude_modules": 4096, "target_parameters": 4096, "modules_to_save": 64,
    "layers_pattern": 16,
}  # fmt: skip

_MAX_PATTERNS = 1024  # Max names in rank_pattern and alpha_pattern.

# Fields that make peft copy layers of the model, import any Python module, or load other adapters.
_REFUSED = ("layer_replication", "megatron_config", "arrow_config")


def read_adapter_folders(given: Sequence[str]) -> dict[str, str]:
    """Read texts of the form name=source: name -> folder or hub name.

    Raises:
        SettingsError: a text has another form, a name is invalid or occurs twice, or there are too many.
    """
    check_texts("adapters", given)
    folders: dict[str, str] = {}
    for text in given:
        name, equals, folder = text.partition("=")
        if not equals or not folder:
            raise SettingsError(f"adapters: {shown(text)} is not name=folder")
        check_adapter_name("adapters", name)
        if name in folders:
            raise SettingsError(f"adapters: {name!r} is given twice")
        folders[name] = check_source("adapters", folder)
    if len(folders) > MAX_ADAPTERS:
        raise SettingsError(f"adapters: {len(folders)} are too many: one model may have {MAX_ADAPTERS}")
    return folders


def adapter_folder(source: str) -> Path:
    """The folder of an adapter: `source` itself, or that of the hub's copy.

    Raises:
        SettingsError: there is no folder, and the hub has no copy.
    """
    return checkpoint_folder("adapters", source, only=FILES)


def content_digest(place: Path) -> str:
    """Digest of a file, or of the files in a folder and their names: 32 hexadecimal digits.

    Raises:
        SettingsError: there is no file, or it cannot be read.
    """
    state = blake2b(digest_size=16)
    try:
        files = sorted(path for path in place.iterdir() if path.is_file()) if place.is_dir() else [place]
        for path in files:
            content = path.read_bytes()
            state.update(f"{path.name if place.is_dir() else ''} {len(content)} ".encode())
            state.update(content)
    except OSError as error:
        raise SettingsError(f"adapters: {shown(str(place))} cannot be read: {error.strerror or error}") from error
    if not files:
        raise SettingsError(f"adapters: {shown(str(place))} is an empty folder")
    return state.hexdigest()


def check_adapter(folder: Path, model: Path) -> None:
    """Refuse an adapter that no engine should read, or whose weights do not fit a model.

    Args:
        folder: with `adapter_config.json`, as peft writes it.
        model: folder of the model; without safetensors in it, all names of weights are accepted.

    Raises:
        SettingsError: no adapter, an adapter of another model, or a config with patterns or numbers beyond the limits.
    """
    files = {name: path for path in model.glob("*.safetensors") for name in _header(path, _MAX_HEADER_BYTES)}
    check_fit(folder, modules_of(files), str(model))
    names = {_module_of(name): name for name in files if name.endswith(".weight")}

    def weight_of(module: str) -> ReadRows | None:
        name = names.get(_module_of(f"{module}.weight"))
        return None if name is None else _read_rows(files[name], name, _MAX_HEADER_BYTES)

    check_base_weights(folder, weight_of, str(model))


def check_fit(folder: Path, modules: Collection[str], model: str) -> None:
    """As `check_adapter`, with the modules of a model (`modules_of`); an empty collection accepts all."""
    if not (folder / _CONFIG).is_file():
        raise SettingsError(f"adapters: {folder} holds no {_CONFIG}: is it a LoRA adapter of peft?")
    config = read_config(folder / _CONFIG, "adapters", _MAX_CONFIG_BYTES)
    try:
        ranks = ranks_of(config)
        _check_names(config)
        _check_numbers(config)
    except SettingsError as error:
        raise SettingsError(f"adapters: {folder / _CONFIG}: {error}") from None
    if not (folder / WEIGHTS).is_file():
        raise SettingsError(
            f"adapters: {folder} holds no {WEIGHTS}, and weights in other formats are not read (they may be pickles): "
            "write it anew with peft's save_pretrained"
        )
    tensors = _header(folder / WEIGHTS, _MAX_ADAPTER_HEADER_BYTES)
    names = [name.removesuffix(end) for name in tensors for end in _FACTORS if end in name]
    unknown = [name for name in names if modules and _module_of(f"{name}.weight") not in modules]
    if unknown or not names:
        missing = unknown[0] if unknown else "any LoRA weights"
        raise SettingsError(f"adapters: {folder} does not fit {model}, which has no place for {missing}")
    _check_ranks(folder, tensors, ranks, is_stacked=bool(config.get("target_parameters")))


def check_base_weights(folder: Path, weight_of: WeightOf, model: str) -> None:
    """Refuse an adapter that changes weights of the model itself, because engines ignore those.

    peft saves a copy of the model's head or embedding with each adapter that targets it. An equal copy is harmless.

    Args:
        folder: of the adapter.
        weight_of: reads the model's own weights.
        model: the model, for messages.

    Raises:
        SettingsError: a weight in the file is not the model's own.
    """
    for name, entry in _header(folder / WEIGHTS, _MAX_ADAPTER_HEADER_BYTES).items():
        if not name.endswith(BASE_WEIGHT):
            continue
        module = name.removesuffix(BASE_WEIGHT).removeprefix(PEFT_PREFIX)
        saved, own = _read_rows(folder / WEIGHTS, name, _MAX_ADAPTER_HEADER_BYTES), weight_of(module)
        if not saved or not own or not _is_copy(saved, own, entry["shape"][0]):
            raise SettingsError(
                f"adapters: {folder} has weights of its own for {module}, which differ from those of {model}: save it "
                "without them (peft's save_pretrained with save_embedding_layers=False) if it was not trained with them"
            )


def _is_copy(saved: ReadRows, own: ReadRows, rows: int) -> bool:
    # One row more than the saved weight has, because the model's may have more.
    for first in range(0, rows + 1, _COMPARED_ROWS):
        left, right = saved(first, first + _COMPARED_ROWS), own(first, first + _COMPARED_ROWS)
        if left.shape != right.shape or not np.allclose(left, right, rtol=_COPY_TOLERANCE, atol=_MIN_FLOAT16):
            return False
    return True


def _read_rows(path: Path, name: str, most_header_bytes: int) -> ReadRows | None:
    """Reads a tensor (n, m) of a safetensors file; None if it has another shape or no float type."""
    entry: Any = _header(path, most_header_bytes).get(name)
    try:
        dtype = np.dtype(_DTYPES[entry["dtype"]])
        rows, columns = map(index, entry["shape"])
        begin = index(entry["data_offsets"][0])
        with path.open("rb") as file:
            offset = 8 + int.from_bytes(file.read(8), "little") + begin
            is_whole = min(rows, columns, begin + 1) > 0
            is_whole = is_whole and rows * columns * dtype.itemsize <= file.seek(0, os.SEEK_END) - offset
    except (KeyError, IndexError, TypeError, ValueError, OSError):
        return None

    def read(first: int, last: int) -> NDArray[np.float32]:
        first, last = min(first, rows), min(last, rows)
        count, skipped = (last - first) * columns, first * columns * dtype.itemsize
        part = np.fromfile(path, dtype, count, offset=offset + skipped).reshape(-1, columns)
        return (part.astype("<u4") << 16).view("<f4") if entry["dtype"] == "BF16" else part.astype("<f4")

    return read if is_whole else None


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """The config of an adapter that `check_fit` has accepted."""
    return read_config(folder / _CONFIG, "adapters", _MAX_CONFIG_BYTES)


def write_adapter_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write a config as peft does."""
    (folder / _CONFIG).write_text(json.dumps(config), "utf-8")


def scale_of(config: Mapping[str, Any], module: str, rank: int) -> float:
    """The factor by which peft multiplies the output of an adapter for a module.

    Args:
        config: of the adapter.
        module: its name in the model.
        rank: of its weights.
    """
    alphas = config.get("alpha_pattern") or {}
    # As peft: the first pattern that matches the end of the name.
    pattern = next((key for key in alphas if re.match(rf"(.*\.)?({key})$", module)), None)
    alpha = config.get("lora_alpha", _DEFAULT_RANK) if pattern is None else alphas[pattern]
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def modules_of(tensors: Iterable[str]) -> set[str]:
    """The modules of a model, by the names of its weights."""
    return {_module_of(name) for name in tensors}


def ranks_of(config: Mapping[str, Any]) -> set[int]:
    """The ranks that an adapter's config names."""
    if (kind := config.get("peft_type", "LORA")) != "LORA":
        raise SettingsError(f"it is of the kind {shown(kind, 40)}: workers serve LORA")
    ranks = {"r": config.get("r", _DEFAULT_RANK), **_pattern(config, "rank_pattern")}
    for name, rank in ranks.items():
        if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= MAX_RANK:
            raise SettingsError(
                f"the rank {shown(rank, 40)} ({shown(name, 60)}) is no whole number from 1 to {MAX_RANK}: "
                "train it with a smaller rank, or merge it into the model"
            )
    return set(ranks.values())


def _check_names(config: Mapping[str, Any]) -> None:
    """Refuse regular expressions in place of names: one can block the interpreter for years."""
    for field in _REFUSED:
        if config.get(field):
            raise SettingsError(f"{field} is set, and workers serve no adapters that use it: train it without")
    for field, most in _MODULE_LISTS.items():
        if not (value := config.get(field)):
            continue
        if field == "target_modules" and isinstance(value, str) and value.lower() == _ALL_LINEAR:
            continue
        # layers_pattern may be a single name; in the other fields a text is a regular expression.
        names = [value] if field == "layers_pattern" and isinstance(value, str) else value
        _check_modules(field, names, most)
    tokens = config.get("trainable_token_indices")
    if isinstance(tokens, dict):
        _check_modules("trainable_token_indices", list(tokens), _MODULE_LISTS["modules_to_save"])


def _check_modules(field: str, names: object, most: int) -> None:
    if not isinstance(names, list):
        raise SettingsError(
            f"{field} is {shown(names, 60)}, a pattern: workers take lists of modules' names alone; list them"
        )
    if len(names) > most:
        raise SettingsError(f"{field} has {len(names)} names: {most} are taken; name modules by their last parts")
    for name in names:
        if not isinstance(name, str) or not _MODULE.fullmatch(name):
            raise SettingsError(
                f"{field} names {shown(name, 60)}: a module's name has 1 to 300 letters, digits, _, - and dots, and "
                "patterns are not taken; list the modules by name"
            )


def _pattern(config: Mapping[str, Any], field: str) -> dict[str, Any]:
    """`rank_pattern` or `alpha_pattern`: module -> value."""
    values = config.get(field) or {}
    if not isinstance(values, dict):
        raise SettingsError(f"{field} is {shown(values, 60)}: expected an object of modules' names")
    _check_modules(field, list(values), _MAX_PATTERNS)
    return values


def _check_numbers(config: Mapping[str, Any]) -> None:
    for name, alpha in {"lora_alpha": config.get("lora_alpha", 1), **_pattern(config, "alpha_pattern")}.items():
        if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not _is_finite(alpha):
            raise SettingsError(f"the alpha {shown(alpha, 40)} ({shown(name, 60)}) is no finite number: write it anew")


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # An int that is too large for a float.
        return False


def _check_ranks(folder: Path, tensors: Mapping[str, Any], ranks: Collection[int], *, is_stacked: bool) -> None:
    """Refuse weights of other ranks than the config names, because engines reserve memory for the latter.

    Args:
        folder: of the adapter.
        tensors: the header of its weights.
        ranks: in its config.
        is_stacked: the factors of several experts may be one tensor.
    """
    for name, tensor in tensors.items():
        if not any(part in name for part in _FIRST_FACTORS):
            continue
        shape = tensor.get("shape") if isinstance(tensor, dict) else None
        held = shape[0] if isinstance(shape, list) and shape and isinstance(shape[0], int) else 0
        if held not in ranks and not (is_stacked and held and any(held % rank == 0 for rank in ranks)):
            named = ", ".join(map(str, sorted(ranks)[:5]))
            raise SettingsError(
                f"adapters: {folder} does not fit itself: {name} in {WEIGHTS} has rank {held}, and {_CONFIG} says "
                f"{named}: write both anew with peft's save_pretrained"
            )


def _module_of(tensor: str) -> str:
    """The module that a tensor belongs to, by the last parts of its name."""
    return ".".join(tensor.removeprefix(PEFT_PREFIX).split(".")[:-1][-_MODULE_PARTS:])


def _header(path: Path, most_bytes: int) -> dict[str, Any]:
    """The header of a safetensors file: name -> entry of a tensor; empty if there is no valid header."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 0 < size <= most_bytes:
            return {}
        try:
            header = json.loads(file.read(size))
        except (ValueError, RecursionError):
            return {}  # The engine reports the error.
    return {name: entry for name, entry in header.items() if name != "__metadata__"} if isinstance(header, dict) else {}
