"""Where a model may lie, and one sentence about each place that holds none."""

from __future__ import annotations

import json
import ssl
import threading
from difflib import get_close_matches
from http.client import HTTPException
from itertools import islice
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from lmpool.errors import SettingsError
from lmpool.workers.backends.requirements import first_line

HUB_PATIENCE_S = 4.0
"""How long the hub may take to say anything at all."""

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_CONFIGS = ("config.json", "params.json")
"""What tells the architecture: transformers' file, and Mistral's own."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "tekken.json", "vocab.json")
_MOST_NAMED = 3
_MOST_LOOKED_AT = 1000


def hub_trouble() -> str:
    """Why the hub cannot be asked now; "" when it can.

    The hub's own package finds out by trying each file for half a minute. Any answer counts, an error too: what it
    means is told by whoever asks for a file.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    found: list[str] = []
    # In a thread, for no timeout of a socket bounds the look for a name, nor the number of addresses that are tried.
    look = threading.Thread(target=lambda: found.append(_knock(constants.ENDPOINT)), name="lmpool-hub", daemon=True)
    look.start()
    look.join(HUB_PATIENCE_S)
    reason = found[0] if found else f"no answer within {HUB_PATIENCE_S:g} s"
    return f"{constants.ENDPOINT} cannot be reached ({reason})" if reason else ""


def _knock(endpoint: str) -> str:
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


def not_on_hub(model: str, trouble: str) -> str:
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


def cached_folder(model: str, file: str, revision: str | None) -> Path | None:
    """The folder of the copy of a model in the hub's cache; None if that lacks the file.

    Raises:
        ValueError: it is no name of a model on the hub.
    """
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, file, revision=revision)
    return Path(found).parents[len(Path(file).parts) - 1] if isinstance(found, str) else None


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


def nearest_folders(model: str) -> str:
    """Folders that a name that is none may mean, as the end of a sentence; "" if there are none."""
    place = Path(model).expanduser()
    parent = place.parent
    try:
        names = [one.name for one in islice(parent.iterdir(), _MOST_LOOKED_AT) if one.is_dir()]
    except OSError:
        return ""
    visible = sorted(name for name in names if not name.startswith("."))
    found = get_close_matches(place.name, visible, n=_MOST_NAMED)
    # A bare name says nothing of where to look: then only what is spelt like it is worth a word.
    if not found and "/" in model:
        found = visible
    if not found:
        return ""
    more = len(found) - _MOST_NAMED
    shown = ", ".join(str(parent / name) for name in found[:_MOST_NAMED])
    return f"; there is {shown}{f' and {more} more' if more > 0 else ''}"


def check_model_folder(model: str, *, has_gguf: bool = False) -> None:
    """Refuse a place that is there and holds no model, in one sentence; what is not there is left to others.

    Args:
        model: a path.
        has_gguf: a GGUF file in it is named, which has everything in it.

    Raises:
        SettingsError: it is a file, or a folder without a model.
    """
    place = local_path("model", model)
    try:
        reason = _why_no_file(place) if place.is_file() else ""
        if place.is_dir() and not has_gguf:
            reason = _why_no_model(place)
    except OSError as error:
        reason = first_line(error)
    if reason:
        raise SettingsError(f"model: {model} cannot be loaded: {reason}")


def _why_no_file(file: Path) -> str:
    folder = file.absolute().parent
    if file.suffix == ".gguf":
        return (
            "it is a GGUF file, which only --backend hf serves. For an engine, load it with transformers' "
            "from_pretrained(folder, gguf_file=…) and save_pretrained it, with its tokenizer, in a folder of its own"
        )
    what = "a file of weights" if file.suffix in _WEIGHTS else "a file"
    if any((folder / name).is_file() for name in _CONFIGS):
        return f"it is {what}, and a model is a folder: name {folder}"
    return (
        f"it is {what}, and a model is a folder with config.json, weights and tokenizer. {folder} has no config.json: "
        "take the whole folder that the file comes from"
    )


def _why_no_model(folder: Path) -> str:
    if any((folder / name).is_file() for name in _CONFIGS):
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
        return f"it has no config.json. Models are in {', '.join(map(str, inside[:_MOST_NAMED]))}"
    return "it has no config.json: it is not the folder of a model"


def _base_of(folder: Path) -> str:
    try:
        base = json.loads((folder / "adapter_config.json").read_text()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""
    return f" {base}" if isinstance(base, str) and 0 < len(base) < 200 else ""
