"""A checkpoint on disk: where it lies, and a digest of it, for engines that keep weights in forms of their own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from lmpool.errors import SettingsError

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_CONFIGS = ("config.json", "adapter_config.json")
_VOLATILE = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "base_model_name_or_path"}
_SAMPLES = 4096
_CHUNK = 1 << 24


def checkpoint_folder(field: str, model: str, revision: str | None = None) -> Path:
    """The folder of a checkpoint: `model` itself, or where the hub's copy of it lies.

    Args:
        field: the setting that names it.
        model: folder or hub name.
        revision: branch, tag or commit on the hub.

    Raises:
        SettingsError: there is no such folder, nor such a copy, nor can one be had.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise SettingsError(f"{field}: {model} cannot be loaded: there is no such folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, ignore_patterns=["original/*", "*.pth", "*.onnx"]))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise SettingsError(
            f"{field}: {model} is no folder here and cannot be had from the hub: {reason[:300]}"
        ) from error


def checkpoint_revision(folder: Path, also: Mapping[str, Any] | None = None) -> str:
    """Digest of a checkpoint: the same on every machine, another one as soon as one weight differs.

    Of each file of weights it takes name, size, the sum of its 64-bit words and a sample of them. Reading is all
    that this costs, and what was read the engine need not read from disk again.

    Args:
        folder: with weights and `config.json` (or `adapter_config.json`).
        also: options that decide a row's value too.

    Returns:
        32 hexadecimal digits.
    """
    state = blake2b(digest_size=16)
    for name in _CONFIGS:
        if (folder / name).is_file():
            config = json.loads((folder / name).read_text("utf-8"))
            stable = {key: value for key, value in config.items() if key not in _VOLATILE}
            state.update(json.dumps(stable, sort_keys=True).encode())
    for path in sorted(path for path in folder.iterdir() if path.suffix in _WEIGHTS):
        state.update(f"\n{path.name} {path.stat().st_size} ".encode())
        _add_words(state, path)
    if also:
        state.update(json.dumps(dict(also), sort_keys=True, default=str).encode())
    return state.hexdigest()


def _add_words(state: blake2b, path: Path) -> None:
    size = path.stat().st_size
    words = size // 8
    if words:
        mapped = np.memmap(path, np.dtype("<u8"), "r", shape=(words,))
        total = sum(int(mapped[at : at + _CHUNK].sum(dtype=np.uint64)) for at in range(0, words, _CHUNK))
        state.update(f"{total % (1 << 64)} ".encode())
        state.update(mapped[:: max(1, words // _SAMPLES)].tobytes())
    with path.open("rb") as file:
        file.seek(8 * words)
        state.update(file.read())


def checkpoint_dtype(folder: Path, wanted: str) -> str:
    """The dtype to compute in: the wanted one; for "auto" the checkpoint's, where its config states one."""
    if wanted != "auto" or not (folder / "config.json").is_file():
        return wanted
    config = json.loads((folder / "config.json").read_text("utf-8"))
    for part in (config, config.get("text_config") or {}):
        stated = part.get("dtype") or part.get("torch_dtype")
        if stated in ("float32", "bfloat16", "float16"):
            return str(stated)
    return "auto"
