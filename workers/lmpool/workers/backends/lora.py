"""LoRA adapters on disk, and whether one fits a model: engines leave out what does not fit without a word."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from pathlib import Path

from lmpool.errors import SettingsError

_WEIGHTS = "adapter_model.safetensors"
_FACTORS = (".lora_A.weight", ".lora_B.weight")
# Such as layers.0.self_attn.q_proj; what comes before differs between a checkpoint and the model made from it.
_TELLING_PARTS = 4
_MOST_HEADER_BYTES = 1 << 28


def check_adapter(folder: Path, model: Path) -> None:
    """Refuse an adapter whose weights have no place in a model: its rows would be the model's own.

    Args:
        folder: with `adapter_config.json`, as peft writes it.
        model: folder of the model. Checkpoints that are not safetensors cannot be looked into and pass.

    Raises:
        SettingsError: no adapter, or one of another model.
    """
    names = (name for path in model.glob("*.safetensors") for name in _tensor_names(path))
    check_places(folder, places_of(names), str(model))


def places_of(tensors: Iterable[str]) -> set[str]:
    """The modules of a model, from the names of its weights."""
    return {_place(name) for name in tensors}


def check_places(folder: Path, places: Collection[str], model: str) -> None:
    """As `check_adapter`, for the places (`places_of`) of a model; none where they are not known."""
    if not (folder / "adapter_config.json").is_file():
        raise SettingsError(f"adapters: {folder} holds no adapter_config.json: is it a LoRA adapter of peft?")
    if not places or not (folder / _WEIGHTS).is_file():
        return
    names = [name.removesuffix(end) for name in _tensor_names(folder / _WEIGHTS) for end in _FACTORS if end in name]
    strangers = [name for name in names if _place(f"{name}.weight") not in places]
    if strangers or not names:
        missing = strangers[0] if strangers else "any LoRA weights"
        raise SettingsError(f"adapters: {folder} does not fit {model}, which has no place for {missing}")


def _place(tensor: str) -> str:
    """Which module of a model a tensor belongs to, by the last parts of its name."""
    return ".".join(tensor.split(".")[:-1][-_TELLING_PARTS:])


def _tensor_names(path: Path) -> list[str]:
    """The names in the header of a safetensors file; none when it has no header."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 0 < size <= _MOST_HEADER_BYTES:
            return []
        try:
            header = json.loads(file.read(size))
        except ValueError:
            return []  # The engine says what is wrong with it.
    return [name for name in header if name != "__metadata__"]
