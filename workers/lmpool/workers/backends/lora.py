"""Checks the files of a LoRA adapter on disk before an engine reads them.

Engines trust the files of an adapter: peft reserves memory for any rank that the config names, treats names of modules
as regular expressions, and ignores weights that do not fit. A client may name an adapter from an untrusted author, so
the worker checks the adapter's config and weights first.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

from lmpool.errors import LMPoolError, SettingsError, first_line
from lmpool.protocol.adapter import MAX_ADAPTERS, check_adapter_name, check_source
from lmpool.settings import check_number, check_texts, shown
from lmpool.workers.backends.checkpoint import checkpoint_folder, read_config

MAX_RANK = 1024
"""Max rank of an adapter; an adapter of a larger rank is hardly smaller than the weights that it changes."""

DEFERRED_RANK = 64
"""Max rank of adapters that vLLM and SGLang load after their start; at the start they reserve memory for this rank."""

CONFIG = "adapter_config.json"
"""The file with an adapter's config, in JSON."""

WEIGHTS = "adapter_model.safetensors"
"""The file with an adapter's weights. Other formats are refused, because they may be pickles, which run code."""

_DEFAULT_RANK = 8  # The rank that peft uses for a config without a rank.
_MAX_CONFIG_BYTES = 1 << 20  # Max size of an adapter's config; a typical config has 1 KB.
_MAX_FLOAT = sys.float_info.max  # Max absolute value of an adapter's alpha, which must be finite.
_FACTORS = (".lora_A.weight", ".lora_B.weight")

PEFT_PREFIX = "base_model.model."
"""The prefix that peft writes before the names of a model's modules."""

HARMLESS_INITS = (True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the model's own weights unchanged; other values need a converted adapter."""

BASE_WEIGHT = ".base_layer.weight"
"""Name suffix of a copy of the model's own weight, which peft saves with an adapter of the head or the embedding."""

_COMPARED_ROWS = 1024  # Rows of a base weight that are compared at once: about 20 MB of a large head.
_COMPARED_DTYPES = ("F64", "F32", "F16", "BF16")  # Dtypes of safetensors in which peft saves weights.
_UNPACKED = (*_COMPARED_DTYPES, "F8_E4M3")  # Dtypes of weights that have the shape of the module's matrix.

# Max relative difference between a weight and its copy that was saved in bfloat16, which has 8 significant bits.
_COPY_TOLERANCE = 2.0**-8

# Max absolute difference between a weight and its copy saved in float16: the smallest float16 number above 0.
_MIN_FLOAT16 = 2.0**-24

# Name parts of the LoRA weights whose first dimension is the adapter's rank.
_FIRST_FACTORS = (".lora_A.weight", ".lora_embedding_A")

# Number of last parts of modules' names that are compared (layers.0.self_attn.q_proj); earlier parts may differ.
_MODULE_PARTS = 4

# Accepted names of modules; any other name could be a regular expression. A dot in a regular expression is harmless.
_MODULE = re.compile(r"[A-Za-z0-9_.-]{1,300}")

# Config fields that list modules -> max names in the field, because peft compares each name with each module.
_MODULE_LISTS = {
    "target_modules": 4096, "exclude_modules": 4096, "target_parameters": 4096, "modules_to_save": 64,
    "layers_pattern": 16, "trainable_token_indices": 64, "rank_pattern": 1024, "alpha_pattern": 1024,
}  # fmt: skip

# Fields of `_MODULE_LISTS` whose value is a JSON object with names of modules as keys.
_MODULE_KEYS = ("trainable_token_indices", "rank_pattern", "alpha_pattern")

# Config fields that are refused: they make peft copy layers, import any Python module, or load other adapters.
_REFUSED = ("layer_replication", "megatron_config", "arrow_config")


def read_adapter_folders(given: Sequence[str]) -> dict[str, str]:
    """Read texts of the form name=source; returns name -> folder or hub name.

    Raises:
        SettingsError: a text is not name=folder, a name is invalid or occurs twice, or there are too many adapters.
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
    """The folder of an adapter: `source` itself, or the local copy of a hub repository; else a SettingsError."""
    return checkpoint_folder("adapters", source, only=(CONFIG, WEIGHTS))


def content_digest(place: Path) -> str:
    """Digest of a file, or of the files in a folder and their names: 32 hexadecimal digits.

    Raises:
        SettingsError: there is no file, or a file cannot be read.
    """
    state, is_folder = blake2b(digest_size=16), place.is_dir()
    try:
        files = sorted(path for path in place.iterdir() if path.is_file()) if is_folder else [place]
        for path in files:
            content = path.read_bytes()
            state.update(f"{path.name if is_folder else ''} {len(content)} ".encode())
            state.update(content)
    except OSError as error:
        raise SettingsError(f"adapters: {shown(str(place))} cannot be read: {error.strerror or error}") from error
    if not files:
        raise SettingsError(f"adapters: {shown(str(place))} is an empty folder")
    return state.hexdigest()


def check_adapter(source: str | Path, model: Path, weights: Mapping[str, Sequence[Any]] | None = None) -> Path:
    """The folder of an adapter. Refuses a dangerous config, and weights that do not fit the model.

    Engines ignore changed weights of the model itself in an adapter's file, so such an adapter is refused. An equal
    copy is accepted: peft saves the model's head or embedding with each adapter that targets that layer.

    Args:
        source: folder or hub name of the adapter.
        model: folder of the model, or its hub name if `weights` is given.
        weights: the model's weights (`weights_of`), by default from its safetensors files. If there are no weights,
            all names of weights are accepted.
    """
    folder, own = adapter_folder(str(source)), weights_in(model) if weights is None else weights
    if not (folder / CONFIG).is_file():
        raise SettingsError(f"adapters: {folder} holds no {CONFIG}: is it a LoRA adapter of peft?")
    config = read_adapter_config(folder)
    try:
        _check_names(config)
        ranks = ranks_of(config)
        for name, alpha in {"lora_alpha": config.get("lora_alpha", 1), **(config.get("alpha_pattern") or {})}.items():
            check_number(f"the alpha {shown(name, 60)}", alpha, -_MAX_FLOAT, _MAX_FLOAT, whole=False)
    except SettingsError as error:
        raise SettingsError(f"adapters: {folder / CONFIG}: {error}") from None
    if not (folder / WEIGHTS).is_file():
        raise SettingsError(
            f"adapters: {folder} holds no {WEIGHTS}; other formats may be pickles: convert it with peft"
        )
    tensors, misfit = _tensors(folder / WEIGHTS), f"adapters: {folder} does not fit"
    names = [name.removesuffix(end) for name in tensors for end in _FACTORS if end in name]
    unknown = [name for name in names if own and module_key(f"{name}.weight") not in own]
    if unknown or not names:
        raise SettingsError(f"{misfit} {model}, which has no place for {(unknown or ['any LoRA weights'])[0]}")
    for name, tensor in tensors.items():
        held = (tensor.get_shape() or [0])[0]
        # The file's rank must equal the config's rank, for which engines reserve memory. Tensors may stack experts.
        is_stacked = config.get("target_parameters") and held and any(held % rank == 0 for rank in ranks)
        if any(part in name for part in _FIRST_FACTORS) and held not in ranks and not is_stacked:
            named = ", ".join(map(str, sorted(ranks)[:5]))
            raise SettingsError(f"{misfit} itself: {name} has rank {held}, and {CONFIG} says {named}: save it anew")
        module = name.removesuffix(BASE_WEIGHT).removeprefix(PEFT_PREFIX)
        copied = own.get(module_key(f"{module}.weight"), ())
        if name.endswith(BASE_WEIGHT) and not any(_is_copy(tensor, weight) for weight in copied):
            remedy = "save it with save_embedding_layers=False"
            raise SettingsError(f"{misfit} {model}: it has other weights for {module}; {remedy}")
    for module in names if weights is None else ():  # peft checks the shapes of the factors, and engines do not.
        down, up = ([*tensors[name].get_shape()] if (name := module + end) in tensors else [] for end in _FACTORS)
        shapes = _shapes(module, own)
        if not (down and up):
            raise SettingsError(f"{misfit} itself: it has only one LoRA factor of {module}")
        if shapes and not (len(down) == len(up) == 2 and down[0] == up[1] and [up[0], down[1]] in shapes):
            text = f"the LoRA factors of {module} have the shapes {down} and {up}, and its weight has {shapes[0]}"
            raise SettingsError(f"{misfit} {model}: {text}")
    return folder


def _shapes(module: str, weights: Mapping[str, Sequence[Any]]) -> list[list[int]]:
    """Shapes (out, in) of the model's matrices that an adapter's module may belong to; empty if they are packed."""
    own = [weight for weight in weights.get(module_key(f"{module}.weight"), ()) if weight.get_dtype() in _UNPACKED]
    shapes = [[*weight.get_shape()] for weight in own if len(weight.get_shape()) == 2]
    # GPT-2 stores these matrices as (in, out).
    return [*shapes, *(shape[::-1] for shape in shapes)] if ".c_" in module else shapes


def _is_copy(saved: Any, own: Any) -> bool:
    """Whether the saved matrix is a copy of the model's weight `own`."""
    import torch

    shape = saved.get_shape()
    if len(shape) != 2:
        return False
    if saved.get_dtype() not in _COMPARED_DTYPES:
        return False  # Do not read a tensor of another dtype: reading may fail with exceptions of several kinds.
    # Compare one row beyond the saved weight, to notice that the model's weight has more rows.
    for first in range(0, shape[0] + 1, _COMPARED_ROWS):
        left, right = (weight[first : first + _COMPARED_ROWS].float().cpu() for weight in (saved, own))
        if left.shape != right.shape or not torch.allclose(left, right, rtol=_COPY_TOLERANCE, atol=_MIN_FLOAT16):
            return False
    return True


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """The config of an adapter."""
    return read_config(folder / CONFIG, "adapters", _MAX_CONFIG_BYTES)


def scale_of(config: Mapping[str, Any], module: str, rank: int) -> float:
    """The factor by which peft multiplies the output of an adapter of rank `rank` at the module `module`."""
    alphas = config.get("alpha_pattern") or {}
    # Choose the alpha as peft does: by the first pattern that matches the end of the module's name.
    pattern = next((key for key in alphas if re.match(rf"(.*\.)?({key})$", module)), None)
    alpha = config.get("lora_alpha", _DEFAULT_RANK) if pattern is None else alphas[pattern]
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def head_factors(folder: Path, head: str) -> tuple[Any, Any] | str | None:
    """The LoRA factors that an adapter has for the output head; None if it leaves the head unchanged.

    `head` is the last part of the name of the head's module.

    Returns:
        float32 tensors (r, d) and (V, r), the second multiplied by the adapter's scale. A text if the adapter changes
        the head in another way: the reason why clients cannot compute its rows from hidden states.
    """
    tensors, config = _tensors(folder / WEIGHTS), read_adapter_config(folder)
    of_head = {name for name in tensors if head in name.split(".") and not name.endswith(BASE_WEIGHT)}
    if not of_head:
        return None
    if len(of_head) != len(_FACTORS) or not all(name.endswith(_FACTORS) for name in of_head):
        return f"the adapter {folder.name} has more for the head than LoRA factors, such as {min(of_head)}"
    down, up = (tensors[name][:].float() for name in sorted(of_head))
    module = min(of_head).removeprefix(PEFT_PREFIX).removesuffix(_FACTORS[0])
    return down, up * scale_of(config, module, len(down))


def weights_in(model: Path) -> dict[str, list[Any]]:
    """`weights_of` the safetensors files in the folder of a model, read from disk only when they are sliced."""
    return weights_of(item for path in model.glob("*.safetensors") for item in _tensors(path).items())


def weights_of(tensors: Iterable[tuple[str, Any]]) -> dict[str, list[Any]]:
    """`module_key` of each module -> the tensors named weight of all modules with this key."""
    found: dict[str, list[Any]] = {}
    for name, tensor in tensors:
        found.setdefault(module_key(name), []).extend([tensor] if name.endswith(".weight") else [])
    return found


def ranks_of(config: Mapping[str, Any]) -> set[int]:
    """All ranks in the config of an adapter that `_check_names` has accepted."""
    if (kind := config.get("peft_type", "LORA")) != "LORA":
        raise SettingsError(f"it is of the kind {shown(kind, 40)}: workers serve LORA")
    ranks = {"r": config.get("r", _DEFAULT_RANK), **(config.get("rank_pattern") or {})}
    for name, rank in ranks.items():
        check_number(f"the rank {shown(name, 60)}", rank, 1, MAX_RANK, note=": train it with a smaller rank")
    return set(ranks.values())


def _check_names(config: Mapping[str, Any]) -> None:
    """Refuse regular expressions in place of modules' names: a match can block the interpreter for years."""
    for field in _REFUSED:
        if config.get(field):
            raise SettingsError(f"{field} is set, and workers serve no adapters that use it: train it without")
    for field, most in _MODULE_LISTS.items():
        names = config.get(field)
        if field == "layers_pattern" and names and isinstance(names, str):
            names = [names]  # In `layers_pattern`, a string is a name; in other fields, a string is a pattern.
        is_all = field == "target_modules" and isinstance(names, str) and names.lower() == "all-linear"
        # A list in `trainable_token_indices` holds tokens of the embedding, and no names of modules.
        if not names or is_all or (field == "trainable_token_indices" and isinstance(names, list)):
            continue
        if not isinstance(names, dict if field in _MODULE_KEYS else list):
            raise SettingsError(f"{field} is {shown(names, 60)}, a pattern: workers take lists of names; list them")
        if len(names) > most:
            raise SettingsError(f"{field} has {len(names)} names: {most} are taken; name modules by their last parts")
        for name in names:
            if not isinstance(name, str) or not _MODULE.fullmatch(name):
                raise SettingsError(f"{field} names {shown(name, 60)}: a module's name must match {_MODULE.pattern}")


def module_key(tensor: str) -> str:
    """The last parts of the name of the module that a tensor belongs to; equal in a model and in its adapters."""
    return ".".join(tensor.removeprefix(PEFT_PREFIX).split(".")[:-1][-_MODULE_PARTS:])


@contextmanager
def reading(source: str) -> Iterator[None]:
    """Raise SettingsError if files of an adapter are removed or overwritten while the block reads them."""
    from safetensors import SafetensorError

    try:
        yield
    except LMPoolError:
        raise
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise SettingsError(f"adapters: {shown(source)} cannot be read: {first_line(error)}") from error


def _tensors(path: Path) -> dict[str, Any]:
    """Name -> tensor of a safetensors file, read from disk only when it is sliced; empty if the file is not valid."""
    from safetensors import SafetensorError, safe_open

    try:
        file: Any = safe_open(path, framework="pt")  # safe_open refuses tensors that exceed the file's size.
        return {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError):
        return {}  # The engine will report why the file is not valid.
