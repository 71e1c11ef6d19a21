"""Finds a model's checkpoint (a folder, or a download from the hub), checks its files, and computes its digest."""

from __future__ import annotations

import json
import logging
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from hashlib import blake2b
from http.client import HTTPException
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import SettingsError, first_line
from lmpool.protocol.tensors import TIED_HEAD, TensorType, read_types, whole_tensors
from lmpool.settings import shown

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

HUB_TIMEOUT_S = 4.0
"""Max seconds to wait until the hub answers a test request; `huggingface_hub` itself would wait much longer."""

# Suffixes of weight files, most preferred first: engines load the first format that exists.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# Suffixes of weight files to download: the first that the repository has. For GGUF, the user must name the file.
_HUB_WEIGHTS = _WEIGHTS[:3]
MODEL_CONFIGS = ("config.json", "params.json")
"""Files that describe a model's architecture, in the formats of transformers and of Mistral."""

_CONFIGS = ("config.json", "adapter_config.json", "hf_quant_config.json", "quant_config.json", "quantize_config.json")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "tekken.json", "vocab.json")

_VOLATILE = {
    "_name_or_path", "_attn_implementation", "_commit_hash", "attn_implementation", "base_model_name_or_path", "dtype",
    "torch_dtype", "transformers_version",
}  # fmt: skip
"""Config fields that do not change a row, and are therefore left out of digests."""

# Files of a hub repository that no engine reads.
_UNUSED = ("original/*", "onnx/*", "*.onnx", "*.h5", "*.msgpack", "*.ot", "*.tflite")

_MAX_CONFIG_BYTES = 1 << 26  # Max size of a config file, 64 MiB: no real config is that large.
_MAX_NAMED = 3  # Max folders that an error message suggests.
_MAX_LISTED = 1000  # Max folder entries that are compared with a misspelt name.

_ROW = 512  # Words in a row of a table: a digest views files as tables of 64-bit words (2 MiB, to fit the CPU's cache).
_TABLE = _ROW * _ROW

# Nanoseconds after a change of a file until its digest is kept: file systems store times rounded to milliseconds, so a
# second change right after the first may leave the time as it is.
_SETTLED_NS = 2_000_000_000


def checkpoint_folder(
    field: str, model: str, revision: str | None = None, *, only: Sequence[str] = (), gguf_file: str | None = None
) -> Path:
    """The folder of a checkpoint: `model` itself, or its copy in the hub's cache, which is downloaded if needed.

    Args:
        field: name of the setting that names the checkpoint, for error messages.
        model: folder or hub name.
        revision: branch, tag or commit on the hub.
        only: files to download; empty for all files that engines may read.
        gguf_file: name of the GGUF file to load, which includes the config.
    """
    folder = local_path(field, model)
    if field == "model":
        check_model_folder(model, has_gguf=gguf_file is not None)
    if _is_folder(folder):
        if revision is not None:
            raise SettingsError(f"revision: {shown(revision)} needs a name on the hub, and {model} is a folder")
        if gguf_file is not None and not (folder / gguf_file).is_file():
            raise SettingsError(f"gguf_file: {gguf_file} of {model} cannot be loaded: there is no such file")
        return folder.resolve()
    if not is_on_hub(model):
        raise _not_found(field, model)
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    problem = hub_problem()
    wanted = [gguf_file] if gguf_file is not None else [*only] or None
    try:
        for suffix in _HUB_WEIGHTS:
            unwanted = [*_UNUSED, *(f"*{other}" for other in _WEIGHTS if other != suffix)] if wanted is None else None
            options: dict[str, Any] = {"allow_patterns": wanted, "ignore_patterns": unwanted}
            folder = Path(snapshot_download(model, revision=revision, local_files_only=bool(problem), **options))
            if wanted is not None or _weights(folder):
                break
        return folder
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = first_line(error)
        if problem and isinstance(error, LocalEntryNotFoundError):
            remedy = f"Name a folder with the model's files, or run `hf download {model}` where the hub can be reached"
            reason = f"{problem}, and its cache {constants.HF_HUB_CACHE} has no copy. {remedy}"
        text = f"{field}: {shown(model)} is no folder here, and the hub cannot provide it: {reason}"
        raise SettingsError(text + _nearest(field, model)) from error


def checkpoint_source(model: str) -> str:
    """The name by which clients can load the same checkpoint: a hub name, or the absolute path of a folder."""
    folder = Path(model).expanduser()
    return str(folder.resolve()) if _is_folder(folder) else model


def checkpoint_revision(folder: Path, also: Mapping[str, Any] | None = None) -> str:
    """Digest of a checkpoint: equal on every machine, and different if a single weight differs.

    The digest includes name, size and sums of 64-bit words of each weight file. Each word is in a row sum and a column
    sum, so swapped words change the digest too. Each file is read once, and then is in the page cache for the engine.

    Args:
        folder: folder with weights and `config.json` (or `adapter_config.json`).
        also: options that change the values of rows.

    Returns:
        Digest: 32 hexadecimal digits.
    """
    configs = [folder / name for name in _CONFIGS if (folder / name).is_file()]
    found = [(path, path.stat()) for path in [*configs, *_weights(folder)]]
    files = tuple((path, status.st_size, status.st_ctime_ns) for path, status in found)
    is_settled = all(time.time_ns() - changed_ns > _SETTLED_NS for *_, changed_ns in files)
    state: blake2b = (_digest if is_settled else _digest.__wrapped__)(files).copy()
    if also:
        state.update(json.dumps(dict(also), sort_keys=True, default=str).encode())
    return state.hexdigest()


@lru_cache
def _digest(files: tuple[tuple[Path, int, int], ...]) -> blake2b:
    """The state of a digest over config and weight files, each with its size and the time of its last change.

    A worker needs the digest several times, and reads the files once.
    """
    state = blake2b(digest_size=16)
    for path, size, _ in files:
        if path.name in _CONFIGS:
            state.update(json.dumps(stable(read_config(path)), sort_keys=True).encode())
            continue
        state.update(f"\n{path.name} {size} ".encode())
        words = size // 8 // _ROW * _ROW
        mapped = np.memmap(path, np.dtype("<u8"), "r", shape=(words,)) if words else np.empty(0)
        for at in range(0, words, _TABLE):
            table = mapped[at : at + _TABLE].reshape(-1, _ROW)
            state.update(table.sum(axis=0, dtype="<u8"))
            state.update(table.sum(axis=1, dtype="<u8"))
        with path.open("rb") as file:  # Add the bytes after the last whole row of words.
            file.seek(8 * words)
            state.update(file.read())
    return state


def checkpoint_files(model: str, gguf_file: str | None = None) -> list[Path]:
    """The files in a model's folder that engines read. Empty for a hub name: the hub's cache never overwrites files."""
    folder = Path(model).expanduser()
    if not model or not _is_folder(folder):
        return []
    if gguf_file is not None:
        return [folder / gguf_file]
    names = (*MODEL_CONFIGS, *_CONFIGS, *_TOKENIZERS)
    read = [path for path in sorted(folder.iterdir()) if path.name in names or path.suffix in _WEIGHTS]
    return [path for path in read if path.is_file()]


def checkpoint_dtype(folder: Path, wanted: str) -> str:
    """The dtype to compute in: `wanted`, or for "auto" the dtype that the checkpoint's config states, else "auto"."""
    if wanted != "auto" or not (folder / "config.json").is_file():
        return wanted
    config = read_config(folder / "config.json")
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    stated = [part.get("dtype") or part.get("torch_dtype") for part in parts]
    return next((dtype for dtype in stated if dtype in ("float32", "bfloat16", "float16")), "auto")


def quantisation_of(folder: Path) -> str:
    """The method by which a checkpoint is quantised, such as "gptq"; "" if its config states none."""
    config = read_config(folder / "config.json") if (folder / "config.json").is_file() else {}
    stated = config.get("quantization_config")
    return str(stated.get("quant_method") or "") if isinstance(stated, dict) else ""


def replaceable_tensors(folder: Path) -> dict[str, TensorType]:
    """The types of a checkpoint's tensors, for `ChangesWeights.tensors`; empty, with a log line, if it is not plain."""
    if method := quantisation_of(folder):
        _log.info("the weights cannot be replaced while the worker runs: they are quantised (%s)", method)
        return {}
    try:
        types = read_types(folder)
    except SettingsError as error:
        _log.info("the weights cannot be replaced while the worker runs: %s", error)
        return {}
    config = read_config(folder / "config.json") if (folder / "config.json").is_file() else {}
    if config.get("tie_word_embeddings"):
        types.pop(TIED_HEAD, None)  # A copy of the embedding, which engines do not read.
    return types


class NewWeights(NamedTuple):
    """Tensors that an engine must load, in a form that can be sent to its processes."""

    full: str  # Path of the full set of tensors.
    sparse: list[str]  # Paths of the sparse files with changes of the full set, oldest first.
    names: list[str]  # Names of the tensors.
    types: dict[str, TensorType]  # Types of all tensors of the model.

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors; see `whole_tensors`."""
        sparse = [Path(path) for path in self.sparse]
        for name, dtype, numbers in whole_tensors(Path(self.full), sparse, self.names, self.types):
            yield name, torch_tensor(numbers, dtype)


def torch_tensor(numbers: NDArray[Any], dtype: str) -> Tensor:
    """The torch tensor of a `MappedTensor` with this dtype of safetensors, in the same memory."""
    import torch

    bits = {"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool}
    tensor = torch.from_numpy(numbers)
    return tensor.view(bits[dtype]) if dtype in bits else tensor


def check_model_folder(model: str, *, has_gguf: bool = False) -> None:
    """Refuse a path that exists and holds no model. With `has_gguf`, the folder needs no config.json."""
    path = local_path("model", model)
    try:
        reason = _why_no_model(path, has_gguf)
    except OSError as error:
        reason = first_line(error)
    if reason:
        raise SettingsError(f"model: {model} cannot be loaded: {reason}")


def check_model_path(model: str, *, has_gguf: bool = False) -> None:
    """Refuse a path that holds no model or does not exist. Accept a name that may be on the hub."""
    check_model_folder(model, has_gguf=has_gguf)
    if not is_on_hub(model) and not _is_folder(local_path("model", model)):
        raise _not_found("model", model)


def read_config(path: Path, field: str = "model", most_bytes: int = _MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Read the object in a JSON file of at most `most_bytes` bytes. `field` is the setting that error messages name."""
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
    """Expand ~ in a path; a hub name is returned unchanged. `field` is the setting that error messages name."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise SettingsError(f"{field}: {text} cannot be loaded: {error}") from error


def hub_sizes(model: str) -> dict[str, int]:
    """Name -> bytes of each file of a model on the hub; {} if the hub does not answer."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    # OSError, and the base class of the errors of the hub's HTTP library, which depends on the release.
    errors: Any = HfHubHTTPError.__bases__
    try:
        files = HfApi().model_info(model, files_metadata=True, timeout=HUB_TIMEOUT_S).siblings or ()
    except errors:
        return {}
    return {file.rfilename: file.size or 0 for file in files if "/" not in file.rfilename}


def is_on_hub(model: str) -> bool:
    """Whether `model` can only be a hub name: no folder of this name exists, and it is not written as a path."""
    return not model.startswith(("/", ".", "~")) and model.count("/") < 2 and not _is_folder(Path(model))


def hub_problem() -> str:
    """Why the hub cannot be used now; "" if the hub answers with any HTTP status."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=HUB_TIMEOUT_S).close()
    except HTTPError as error:
        error.close()
    except (HTTPException, ValueError, OSError) as error:
        reason = getattr(error, "reason", error)
        # If Python does not trust the hub's certificate, the hub did answer, and `huggingface_hub` may trust it.
        if not isinstance(reason, ssl.SSLError):
            return f"{constants.ENDPOINT} cannot be reached ({reason})"
    return ""


def _not_found(field: str, model: str) -> SettingsError:
    path = local_path(field, model)
    kind = "file" if path.suffix == ".gguf" else "folder"
    # Show the absolute path for a model only: clients see errors about adapters, and must not see this machine's paths.
    place = f" ({path.absolute()})" if field == "model" and not path.is_absolute() else ""
    nearest = _nearest(field, model)
    return SettingsError(f"{field}: {model} cannot be loaded: there is no such {kind}{place}{nearest}")


def _nearest(field: str, model: str) -> str:
    """End of an error message about a model that suggests folders of similar names; "" if there are none."""
    path = Path(model).expanduser()
    try:
        entries = list(islice(path.parent.iterdir(), _MAX_LISTED)) if field == "model" else []
        names = [entry.name for entry in entries if entry.is_dir() or entry.suffix == path.suffix == ".gguf"]
    except OSError:
        return ""
    nearest = get_close_matches(path.name, sorted(names), n=_MAX_NAMED)
    return f"; did you mean {' or '.join(str(path.parent / name) for name in nearest)}?" if nearest else ""


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # The model's name is too long for a path.
        return False


def _why_no_model(path: Path, has_gguf: bool) -> str:
    """Why an existing path holds no model; "" if the path may hold a model, or does not exist."""
    folder = path.absolute().parent if path.is_file() else path
    has_config = any((folder / name).is_file() for name in MODEL_CONFIGS)
    if path.is_file() and path.suffix == ".gguf":
        return "it is a GGUF file, which only --backend hf serves: save_pretrained it in a folder with its tokenizer"
    if path.is_file():
        found = f": name {folder}" if has_config else ""
        return f"it is a file, and a model is a folder with config.json, weights and tokenizer{found}"
    if has_config or has_gguf or not path.is_dir():
        return ""
    if (folder / "adapter_config.json").is_file():
        base = read_config(folder / "adapter_config.json").get("base_model_name_or_path")
        adapter = f"{folder.absolute().name}={folder.absolute()}"
        return f"it holds a LoRA adapter and no model: serve its base model {shown(base)}, with --adapters {adapter}"
    entries = sorted(folder.iterdir())
    if ggufs := [entry for entry in entries if entry.suffix == ".gguf"]:
        return f"it has no config.json. To serve a GGUF file with --backend hf, name the file: {ggufs[0]}"
    models = [str(entry) for entry in entries if (entry / "config.json").is_file()]
    return "it has no config.json" + (f". Models are in {', '.join(models[:_MAX_NAMED])}" if models else "")


def _weights(folder: Path) -> list[Path]:
    """The weight files that engines load: all files of the first format in `_WEIGHTS` that exists."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return next((found for suffix in _WEIGHTS if (found := [path for path in files if path.suffix == suffix])), [])


def stable(value: Any) -> Any:
    """A copy of a config without the fields that do not change a row (`_VOLATILE`)."""
    if isinstance(value, dict):
        return {str(key): stable(item) for key, item in value.items() if key not in _VOLATILE}
    return [stable(item) for item in value] if isinstance(value, (list, tuple)) else value
