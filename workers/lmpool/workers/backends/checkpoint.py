"""A model's checkpoint before any engine loads it: its folder or its copy of the hub, its digest."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from hashlib import blake2b
from http.client import HTTPException
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import numpy as np

from lmpool.errors import SettingsError
from lmpool.settings import shown
from lmpool.workers.backends.requirements import first_line

HUB_PATIENCE_S = 4.0
"""How long the hub may take to say anything at all."""

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Formats of weights. Where a folder holds several, engines load the first."""

_MODEL_CONFIGS = ("config.json", "params.json")
"""What tells the architecture: transformers' file, and Mistral's own."""

_CONFIGS = ("config.json", "adapter_config.json", "hf_quant_config.json", "quant_config.json", "quantize_config.json")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "tekken.json", "vocab.json")

# What a config says beside what decides rows.
_VOLATILE = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "base_model_name_or_path"}

# Copies of the weights for other programs.
_UNWANTED = ["original/*", "onnx/*", "*.pth", "*.onnx", "*.h5", "*.msgpack", "*.ot", "*.tflite"]

_MAX_CONFIG_BYTES = 1 << 26
_MAX_NAMED = 3
_MAX_LOOKED_AT = 1000

# 64-bit words whose sums a digest takes together: a table of rows, which fits a processor's cache.
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
        raise _not_there(field, model)
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
        raise unavailable(field, model, why_not_cached(model, trouble) if trouble else first_line(error)) from error
    except (HFValidationError, HfHubHTTPError, OSError) as error:
        raise unavailable(field, model, first_line(error)) from error


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


def checkpoint_files(model: str, gguf_file: str | None = None) -> list[Path]:
    """The files that engines read of a model's folder: configs, weights, tokenizer.

    Args:
        model: folder or hub name. Copies of the hub are under names of their content, so these have no files here.
        gguf_file: the one file of the folder that is read, if it is named.

    Raises:
        OSError: the folder cannot be read.
    """
    folder = Path(model).expanduser()
    if not model or not _is_folder(folder):
        return []
    names = (*_MODEL_CONFIGS, *_CONFIGS, *_TOKENIZERS)
    read = [path for path in sorted(folder.iterdir()) if path.name in names or path.suffix in _WEIGHTS]
    return [path for path in read if path.is_file()] if gguf_file is None else [folder / gguf_file]


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


def check_model_folder(model: str, *, has_gguf: bool = False) -> None:
    """Refuse a place that is there and holds no model, in one sentence; what is not there is left to others.

    Args:
        model: a path.
        has_gguf: a GGUF file in it is named, which has everything in it.

    Raises:
        SettingsError: it is a file, or a folder without a model.
    """
    path = local_path("model", model)
    try:
        reason = _why_no_file(path) if path.is_file() else ""
        if path.is_dir() and not has_gguf:
            reason = _why_no_model(path)
    except OSError as error:
        reason = first_line(error)
    if reason:
        raise SettingsError(f"model: {model} cannot be loaded: {reason}")


def check_model_path(model: str, *, has_gguf: bool = False) -> None:
    """Refuse what is written as a path and is no model here, before anything heavy is imported or started.

    Args:
        model: folder or hub name; what may be a name on the hub is left to the backend.
        has_gguf: a GGUF file in it is named.

    Raises:
        SettingsError: there is no such folder or file, or it holds no model.
    """
    check_model_folder(model, has_gguf=has_gguf)
    if not is_on_hub(model) and not _is_folder(local_path("model", model)):
        raise _not_there("model", model)


def read_config(path: Path, field: str = "model", most_bytes: int = _MAX_CONFIG_BYTES) -> dict[str, Any]:
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


def local_path(field: str, text: str) -> Path:
    """A path as a person writes it, with ~ for a home.

    Args:
        field: the setting that has it.
        text: the path; a name on the hub stays as it is.

    Raises:
        SettingsError: there is no such home.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise SettingsError(f"{field}: {text} cannot be loaded: {error}") from error


def is_on_hub(model: str) -> bool:
    """Whether it is a name on the hub: no folder here, and not written as one."""
    return not model.startswith(("/", ".", "~")) and model.count("/") < 2 and not _is_folder(Path(model))


def hub_trouble() -> str:
    """Why the hub cannot be asked now; "" when it can.

    The hub's own package finds out by trying each file for half a minute. Any answer counts, an error too: what it
    means is told by whoever asks for a file.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    reasons: list[str] = []
    # In a thread, for no timeout of a socket bounds the look for a name, nor the number of addresses that are tried.
    thread = threading.Thread(
        target=lambda: reasons.append(_why_unreachable(constants.ENDPOINT)), name="lmpool-hub", daemon=True
    )
    thread.start()
    thread.join(HUB_PATIENCE_S)
    reason = reasons[0] if reasons else f"no answer within {HUB_PATIENCE_S:g} s"
    return f"{constants.ENDPOINT} cannot be reached ({reason})" if reason else ""


def cached_folder(model: str, file: str, revision: str | None) -> Path | None:
    """The folder of the copy of a model in the hub's cache; None if that lacks the file.

    Raises:
        ValueError: it is no name of a model on the hub.
    """
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(model, file, revision=revision)
    return Path(path).parents[len(Path(file).parts) - 1] if isinstance(path, str) else None


def nearest_folders(model: str) -> str:
    """Folders that a name that is none may mean, as the end of a sentence; "" if there are none."""
    path = Path(model).expanduser()
    parent = path.parent
    try:
        entries = list(islice(parent.iterdir(), _MAX_LOOKED_AT))
        names = [entry.name for entry in entries if entry.is_dir() or entry.suffix == path.suffix == ".gguf"]
    except OSError:
        return ""
    visible = sorted(name for name in names if not name.startswith("."))
    if nearest := get_close_matches(path.name, visible, n=_MAX_NAMED):
        return f"; did you mean {' or '.join(str(parent / name) for name in nearest)}?"
    # A bare name says nothing of where to look: then only what is spelt like it is worth a word.
    if not visible or "/" not in model:
        return ""
    more = len(visible) - _MAX_NAMED
    listed = ", ".join(str(parent / name) for name in visible[:_MAX_NAMED])
    return f"; there is {listed}{f' and {more} more' if more > 0 else ''}"


def why_not_cached(model: str, trouble: str) -> str:
    """Why a name that is no folder cannot be loaded, where the hub cannot be asked and its cache has no copy.

    Args:
        model: the name.
        trouble: what `hub_trouble` said.
    """
    from huggingface_hub import constants

    return (
        f"{trouble}, and its cache {constants.HF_HUB_CACHE} has no copy. Name a folder with the model's files, or "
        f"fetch it where the hub can be reached (`hf download {model}`)"
    )


def unavailable(field: str, model: str, reason: str) -> SettingsError:
    """The refusal of a name that is no folder and cannot be had from the hub."""
    nearest = _nearest_models(field, model)
    return SettingsError(f"{field}: {shown(model)} is no folder here and cannot be had from the hub: {reason}{nearest}")


def _not_there(field: str, model: str) -> SettingsError:
    """The refusal of a path where there is nothing."""
    path = local_path(field, model)
    what = "file" if path.suffix == ".gguf" else "folder"
    # A name that begins at the root or at a home says all; what others offer is told nothing of this machine.
    looked_at = f" ({path.absolute()})" if field == "model" and not path.is_absolute() else ""
    nearest = _nearest_models(field, model)
    return SettingsError(f"{field}: {model} cannot be loaded: there is no such {what}{looked_at}{nearest}")


def _nearest_models(field: str, model: str) -> str:
    # What else lies on a worker's machine is not for those who offer adapters.
    return nearest_folders(model) if field == "model" else ""


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # Too long for a path.
        return False


def _why_unreachable(endpoint: str) -> str:
    try:
        urlopen(Request(endpoint, method="HEAD"), timeout=HUB_PATIENCE_S).close()
    except HTTPError as error:
        error.close()
    except (HTTPException, ValueError, OSError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        # Something answers; the hub's package may trust other certificates than Python does.
        if not isinstance(reason, ssl.SSLError):
            return first_line(reason) if isinstance(reason, BaseException) else str(reason)
    return ""


def _why_no_file(file: Path) -> str:
    folder = file.absolute().parent
    if file.suffix == ".gguf":
        return (
            "it is a GGUF file, which only --backend hf serves. For an engine, load it with transformers' "
            "from_pretrained(folder, gguf_file=…) and save_pretrained it, with its tokenizer, in a folder of its own"
        )
    kind = "a file of weights" if file.suffix in _WEIGHTS else "a file"
    if any((folder / name).is_file() for name in _MODEL_CONFIGS):
        return f"it is {kind}, and a model is a folder: name {folder}"
    return (
        f"it is {kind}, and a model is a folder with config.json, weights and tokenizer. {folder} has no config.json: "
        "take the whole folder that the file comes from"
    )


def _why_no_model(folder: Path) -> str:
    if any((folder / name).is_file() for name in _MODEL_CONFIGS):
        return ""
    entries = sorted(folder.iterdir())
    names = {entry.name for entry in entries}
    if "adapter_config.json" in names:
        return (
            f"it holds a LoRA adapter and no model. Serve its base model{_base_of(folder)}, with "
            f"--adapters {folder.absolute().name}={folder.absolute()}"
        )
    if not entries:
        return "the folder is empty"
    if ggufs := [name for name in sorted(names) if name.endswith(".gguf")]:
        return f"it has no config.json. To serve a GGUF file with --backend hf, name the file: {folder / ggufs[0]}"
    if any(entry.suffix in _WEIGHTS for entry in entries):
        return "it has weights and no config.json, which says what they are of: take it from where they come from"
    if names & set(_TOKENIZERS):
        return "it holds a tokenizer and no model: config.json and weights are missing"
    inside = [entry for entry in entries if entry.is_dir() and (entry / "config.json").is_file()]
    if inside:
        return f"it has no config.json. Models are in {', '.join(map(str, inside[:_MAX_NAMED]))}"
    return "it has no config.json: it is not the folder of a model"


def _base_of(folder: Path) -> str:
    try:
        base = json.loads((folder / "adapter_config.json").read_text()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""
    return f" {base}" if isinstance(base, str) and 0 < len(base) < 200 else ""


def _weights(folder: Path) -> list[Path]:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    kinds = ([path for path in files if path.suffix == suffix] for suffix in _WEIGHTS)
    return next((kind for kind in kinds if kind), [])


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
