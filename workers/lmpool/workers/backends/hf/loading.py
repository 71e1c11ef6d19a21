"""Loading a model of transformers: its limits, a digest of its weights, and one clear line for whatever is wrong."""

from __future__ import annotations

import json
import logging
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from lmpool.errors import SettingsError
from lmpool.trie import torch_device
from lmpool.workers.backends.checkpoint import (
    cached_folder,
    check_model_folder,
    checkpoint_folder,
    hub_trouble,
    is_on_hub,
    nearest_folders,
    unavailable,
    why_not_cached,
)
from lmpool.workers.backends.requirements import first_line
from lmpool.workers.backends.row_encoder import log_threads, pick_device
from lmpool.workers.backends.settings import HfSettings

UNLIMITED = 1 << 20
"""Longest prompt of a model that states no limit."""

_LIMITS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx", "seq_length")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# What a config says beside what decides rows.
_VOLATILE = {
    "_name_or_path",
    "_attn_implementation",
    "_commit_hash",
    "attn_implementation",
    "dtype",
    "torch_dtype",
    "transformers_version",
}

_SAMPLES = 1024
"""Elements of a tensor that its digest takes as they are, at least."""

_CHUNK = 1 << 24
"""Elements that are summed at once."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run.

    Attributes:
        model: in evaluation mode, on its device.
        max_prompt_tokens: the longest prompt to take.
        revision: digest of the weights.
    """

    model: PreTrainedModel
    max_prompt_tokens: int
    revision: str


@torch.inference_mode(mode=False)  # Weights that are made in inference mode cannot be replaced.
@torch.no_grad()
def load_model(settings: HfSettings) -> LoadedModel:
    """Load what the settings name.

    Raises:
        SettingsError: no such model, file, device or prompt limit, or it is not a causal language model.
    """
    torch_device.settle()
    device = pick_device(settings.device)
    path, is_local = _find(settings)
    log_threads(str(device))
    # It writes to standard error by itself, beside the worker's log: twice, and not as the log is wanted.
    logging.getLogger("huggingface_hub").handlers.clear()
    if not sys.stderr.isatty():
        # Progress bars make a mess of a log.
        disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers is partly untyped
    arguments: dict[str, Any] = {
        "revision": settings.revision,
        "trust_remote_code": settings.trust_remote_code,
        "dtype": _DTYPES.get(settings.dtype, "auto"),
        "output_loading_info": True,
        "local_files_only": is_local,
    }
    if settings.gguf_file is not None:
        arguments["gguf_file"] = settings.gguf_file
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, **arguments)
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, struct.error) as error:
        # transformers has no exception type of its own: these are what missing files, unknown
        # architectures, missing packages, broken checkpoints and broken GGUF files end in.
        _refuse(settings, error)
    model, report = loaded
    missing = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if missing:
        raise SettingsError(
            f"model: {settings.model} has no weights for {', '.join(missing[:3])}"
            f"{f' and {len(missing) - 3} more' if len(missing) > 3 else ''}: is it a causal language model?"
        )
    limit = prompt_limit(model.config.get_text_config(decoder=True), settings.max_prompt_tokens)
    try:
        if device.type == "cpu":
            own_weights(model)
        model.to(device).eval()
    except (RuntimeError, ValueError) as error:
        # Too little memory, or quantised weights that cannot be moved.
        raise SettingsError(f"device: {settings.model} cannot be put on {device}: {first_line(error)}") from error
    try:
        # Before the first forward: some models (RWKV) rescale their weights in it.
        revision = weights_revision(model)
    except RuntimeError as error:  # NotImplementedError is one: quantised tensors lack operations.
        raise SettingsError(f"model: the weights of {settings.model} cannot be read: {first_line(error)}") from error
    return LoadedModel(model, limit, revision)


def own_weights(model: PreTrainedModel) -> None:
    """Copy a model's weights out of the checkpoint's files into memory of this process.

    transformers maps the files into memory, and on a CPU it computes with the mapped pages. A file that is overwritten
    would change the rows of a running worker, and a file that gets shorter would end the worker by SIGBUS. Tensors are
    copied one after another: next to the copy there are only pages that the system can discard at any time.

    Raises:
        RuntimeError: there is too little memory.
    """
    for tensor in chain(model.parameters(), model.buffers()):  # Tied weights are one parameter, and are copied once.
        tensor.data = tensor.data.clone()


def prompt_limit(config: PreTrainedConfig, wanted: int | None) -> int:
    """The longest prompt to take: the model's limit, or less if so wanted.

    Raises:
        SettingsError: more is wanted than the model has positions for.
    """
    stated = [value for name in _LIMITS if type(value := getattr(config, name, None)) is int and value > 0]
    limit = stated[0] if stated else None
    if wanted is None:
        return limit or UNLIMITED
    if limit is not None and wanted > limit:
        raise SettingsError(f"max_prompt_tokens: {wanted} is more than the {limit} positions of the model")
    return wanted


def weights_revision(model: PreTrainedModel) -> str:
    """Digest of every parameter and persistent buffer and of what the config says of the architecture.

    Of each tensor it takes name, shape, dtype, the sum of its bit patterns and a sample of its elements. Sums
    of integers do not depend on the order of addition, so neither device nor number of threads matter.

    Returns:
        32 hexadecimal digits.
    """
    state = blake2b(digest_size=16)
    config = json.dumps(_stable(model.config.to_diff_dict()), sort_keys=True, default=str)
    state.update(config.encode())
    for name, tensor in sorted(chain.from_iterable(map(_stored, model.state_dict().items()))):
        bits = tensor.detach().reshape(-1)
        if bits.is_complex():
            bits = torch.view_as_real(bits).reshape(-1)
        bits = bits.view(_INTEGERS[bits.element_size()])
        state.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {_total(bits)}\n".encode())
        state.update(bits[:: max(1, len(bits) // _SAMPLES)].cpu().numpy().tobytes())
    return state.hexdigest()


def _stored(named: tuple[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """What is stored of a weight: itself, or the plain tensors that a quantised one of torchao consists of."""
    name, tensor = named
    if not hasattr(tensor, "__tensor_flatten__"):
        yield named
        return
    inner, _ = tensor.__tensor_flatten__()
    yield from chain.from_iterable(_stored((f"{name}.{part}", getattr(tensor, part))) for part in inner)


def _find(settings: HfSettings) -> tuple[str, bool]:
    """Folder or hub name to load, and whether the hub is to be left alone; a model that is nowhere is refused."""
    model, file = settings.model, settings.gguf_file
    check_model_folder(model, has_gguf=file is not None)
    if not is_on_hub(model):
        folder = checkpoint_folder("model", model, settings.revision, has_gguf=file is not None)
        if file is not None and not (folder / file).is_file():
            raise SettingsError(f"gguf_file: {file} of {model} cannot be loaded: there is no such file")
        return str(folder), True
    if not (trouble := hub_trouble()):
        return model, False
    try:
        copy = cached_folder(model, file or "config.json", settings.revision)
    except ValueError as error:
        raise unavailable("model", model, first_line(error)) from error
    if copy is None:
        raise unavailable("model", model, why_not_cached(model, trouble))
    # By its name transformers would ask the hub all the same, for an adapter's config.
    return str(copy), True


def _refuse(settings: HfSettings, error: Exception) -> NoReturn:
    field, name = "model", settings.model
    if settings.gguf_file is not None:
        field, name = "gguf_file", f"{settings.gguf_file} of {settings.model}"
    nearest = nearest_folders(settings.model) if is_on_hub(settings.model) else ""
    damaged = "the file is damaged or cut short: " if isinstance(error, struct.error) else ""
    # Quantised checkpoints need packages that no extra of this project brings.
    missing = error.name.partition(".")[0] if isinstance(error, ModuleNotFoundError) and error.name else ""
    install = f"; install it with: pip install {missing}" if missing else ""
    raise SettingsError(f"{field}: {name} cannot be loaded: {damaged}{first_line(error)}{install}{nearest}") from error


def _total(bits: Tensor) -> int:
    """The sum modulo 2^64; in chunks, because widening a large tensor at once could take all memory."""
    total = 0
    for chunk in torch.split(bits, _CHUNK):
        total += int(chunk.sum(dtype=torch.int64))
    return total % (1 << 64)


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _stable(item) for key, item in value.items() if key not in _VOLATILE}
    if isinstance(value, (list, tuple)):
        return [_stable(item) for item in value]
    return value
