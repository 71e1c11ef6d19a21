"""A checkpoint on disk: where it lies, and a digest of it, for engines that keep weights in forms of their own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from lmpool.errors import SettingsError
from lmpool.settings import shown
from lmpool.workers.backends.places import (
    check_model_folder,
    hub_trouble,
    local_path,
    nearest_folders,
    not_on_hub,
)
from lmpool.workers.backends.requirements import first_line

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Formats of weights. Where a folder holds several, engines load the first."""

_CONFIGS = ("config.json", "adapter_config.json", "hf_quant_config.json", "quant_config.json", "quantize_config.json")
# Copies of the weights for other programs.
_UNWANTED = ["original/*", "onnx/*", "*.pth", "*.onnx", "*.h5", "*.msgpack", "*.ot", "*.tflite"]
_VOLATILE = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "base_model_name_or_path"}
_MOST_CONFIG_BYTES = 1 << 26
_ROW = 512
_TABLE = _ROW * _ROW


def checkpoint_folder(
    field: str, model: str, revision: str | None = None, *, only: Sequence[str] | None = None, has_gguf: bool = False
) -> Path:
    """The folder of a checkpoint: `model` itself, or where the hub's copy of it lies.

    Args:
        field: the setting that names it.
        model: folder or hub name.
        revision: branch, tag or commit on the hub.
        only: the files that are fetched from the hub; None for all that engines may read.
        has_gguf: a GGUF file in it is named, so that it needs no others.

    Raises:
        SettingsError: there is no such folder, it holds no model, or there is no such copy, nor can one be had.
    """
    folder = local_path(field, model)
    if field == "model":
        check_model_folder(model, has_gguf=has_gguf)
    if _is_folder(folder):
        if revision is not None:
            raise SettingsError(f"revision: {shown(revision)} is for names on the hub, and {model} is a folder")
        return folder.resolve()
    if not is_on_hub(model):
        raise SettingsError(f"{field}: {model} cannot be loaded: there is no such folder{_nearest(field, model)}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    trouble = hub_trouble()
    try:
        return Path(
            snapshot_download(
                model,
                revision=revision,
                allow_patterns=None if only is None else [*only],
                ignore_patterns=_UNWANTED,
                local_files_only=bool(trouble),
            )
        )
    except LocalEntryNotFoundError as error:
        raise not_had(field, model, not_on_hub(model, trouble) if trouble else first_line(error)) from error
    except (HFValidationError, HfHubHTTPError, OSError) as error:
        raise not_had(field, model, first_line(error)) from error


def not_had(field: str, model: str, reason: str) -> SettingsError:
    """The refusal of a name that is no folder and cannot be had from the hub."""
    return SettingsError(
        f"{field}: {shown(model)} is no folder here and cannot be had from the hub: {reason}{_nearest(field, model)}"
    )


def _nearest(field: str, model: str) -> str:
    # What else lies on a worker's machine is not for those who offer adapters.
    return nearest_folders(model) if field == "model" else ""


def is_on_hub(model: str) -> bool:
    """Whether it is a name on the hub: no folder here, and not written as one."""
    return not model.startswith(("/", ".", "~")) and model.count("/") < 2 and not _is_folder(Path(model))


def _is_folder(place: Path) -> bool:
    try:
        return place.is_dir()
    except OSError:  # Too long for a path.
        return False


def checkpoint_source(model: str) -> str:
    """How a client finds the same checkpoint: a hub name as it is, a folder from the root, for theirs is another."""
    folder = Path(model).expanduser()
    return str(folder.resolve()) if _is_folder(folder) else model


def checkpoint_revision(folder: Path, also: Mapping[str, Any] | None = None) -> str:
    """Digest of a checkpoint: the same on every machine, another one as soon as one weight differs.

    Of each file of weights it takes name, size, and sums of its 64-bit words, of so many different parts that words
    that change places are noticed too. Reading is all that this costs, and what was read the engine need not read
    from disk again.

    Args:
        folder: with weights and `config.json` (or `adapter_config.json`).
        also: options that decide a row's value too.

    Returns:
        32 hexadecimal digits.
    """
    state = blake2b(digest_size=16)
    for name in _CONFIGS:
        if (folder / name).is_file():
            state.update(json.dumps(_stable(read_config(folder / name)), sort_keys=True).encode())
    for path in _weights(folder):
        state.update(f"\n{path.name} {path.stat().st_size} ".encode())
        _add_words(state, path)
    if also:
        state.update(json.dumps(dict(also), sort_keys=True, default=str).encode())
    return state.hexdigest()


def _weights(folder: Path) -> list[Path]:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    kinds = ([path for path in files if path.suffix == suffix] for suffix in _WEIGHTS)
    return next((kind for kind in kinds if kind), [])


def read_config(path: Path, field: str = "model", most_bytes: int = _MOST_CONFIG_BYTES) -> dict[str, Any]:
    """The object in a JSON file.

    Args:
        path: the file.
        field: the setting that names its folder.
        most_bytes: how large it may be.

    Raises:
        SettingsError: it is larger, cannot be read, or holds something else.
    """
    try:
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
        config = json.loads(data) if len(data) <= most_bytes else None
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"{field}: {path} cannot be read: {first_line(error)}") from error
    if len(data) > most_bytes:
        raise SettingsError(f"{field}: {path} has more than {most_bytes} bytes: no config is that large; mend it")
    if not isinstance(config, dict):
        raise SettingsError(f"{field}: {path} holds {shown(config, 60)}: expected an object")
    return config


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _stable(item) for key, item in value.items() if key not in _VOLATILE}
    return value


def _add_words(state: blake2b, path: Path) -> None:
    """Add the sums of rows and columns of tables that fit a processor's cache, and what fills no row as it is."""
    tables = path.stat().st_size // 8 // _ROW * _ROW
    if tables:
        mapped = np.memmap(path, np.dtype("<u8"), "r", shape=(tables,))
        for at in range(0, tables, _TABLE):
            table = mapped[at : at + _TABLE].reshape(-1, _ROW)
            state.update(table.sum(axis=0, dtype="<u8"))
            state.update(table.sum(axis=1, dtype="<u8"))
    with path.open("rb") as file:
        file.seek(8 * tables)
        state.update(file.read())


def checkpoint_dtype(folder: Path, wanted: str) -> str:
    """The dtype to compute in: the wanted one; for "auto" the checkpoint's, where its config states one."""
    if wanted != "auto" or not (folder / "config.json").is_file():
        return wanted
    config = read_config(folder / "config.json")
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, dict) else {}):
        stated = part.get("dtype") or part.get("torch_dtype")
        if stated in ("float32", "bfloat16", "float16"):
            return str(stated)
    return "auto"
