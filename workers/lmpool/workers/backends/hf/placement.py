"""Places a model's layers on several devices, in the memory of the CPU or on the disk, with accelerate (--device-map).

accelerate adds a hook to each module. Before a module runs, its hook moves the inputs to the module's device, and
copies offloaded weights there. Offloaded weights have no memory between steps: they are tensors on the device "meta".
"""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lmpool.errors import SettingsError
from lmpool.workers.backends.row_encoder import pick_device
from lmpool.workers.backends.settings import HfSettings
from lmpool.workers.execution.folders import locked_folder

_log = logging.getLogger(__name__)


def placement_options(settings: HfSettings) -> tuple[dict[str, Any], TemporaryDirectory[str] | None]:
    """Options of `from_pretrained` that place the layers, and the folder for offloaded weights that it uses."""
    if settings.device_map is None:
        return {}, None
    for place in settings.memory_per_device or {}:
        pick_device("cpu" if place == "cpu" else f"cuda:{place}")  # Refuse a device that this machine does not have.
    folder = None
    if settings.offload_folder is not None:
        parent = Path(settings.offload_folder).expanduser()
        try:
            parent.mkdir(parents=True, exist_ok=True)
            folder = locked_folder("lmpool-offload-", parent)
        except OSError as error:
            raise SettingsError(f"offload_folder: {parent} cannot be written: {error.strerror or error}") from error
    options = {"device_map": settings.device_map, "max_memory": settings.memory_per_device}
    return options | ({} if folder is None else {"offload_folder": folder.name}), folder


def check_placement(model: PreTrainedModel, name: str) -> None:
    """Log where the weights are. Refuse an architecture whose rows would be wrong."""
    if not is_spread(model):
        return
    architecture, reason = type(model).__name__, ""
    devices = ", ".join(sorted({str(device) for device in getattr(model, "hf_device_map", {}).values()}))
    if not model._no_split_modules:
        # accelerate would split layers anywhere; some models (XLNet) then run with weights that were never loaded.
        reason = f"{architecture} names no modules that must stay on one device (_no_split_modules)"
    elif is_offloaded(model) and hasattr(model.base_model, "_rescale_layers"):
        # RWKV divides its weights before the first prompt. Offloaded weights stay as they are in the file.
        reason = f"{architecture} changes its weights in memory, and some would be offloaded"
    if reason:
        raise SettingsError(f"device_map: {name} cannot be spread over {devices}: {reason}; serve it on one device")
    _log.info("the layers are on %s", devices)
    sizes: Counter[bool] = Counter()
    for weight in model.parameters():
        sizes[weight.is_meta] += weight.nbytes
    if sizes[True]:
        text = "%.0f %% of the weights (%.2f GiB) are offloaded: each step copies them to the device, so rows are slow"
        _log.warning(text, 100 * sizes[True] / sizes.total(), sizes[True] / 2**30)


def is_spread(model: PreTrainedModel) -> bool:
    """Whether accelerate runs the model, because its weights are on several devices or offloaded."""
    return hasattr(model, "_hf_hook")


def is_offloaded(model: PreTrainedModel) -> bool:
    """Whether weights of the model are in the CPU's memory or on the disk while no step uses them."""
    return any(weight.is_meta for weight in model.parameters())


def input_device(model: PreTrainedModel) -> torch.device:
    """The device of the model's inputs and logits."""
    hook: Any = getattr(model, "_hf_hook", None)
    return model.device if hook is None else torch.device(hook.execution_device)


def drop_addresses(model: PreTrainedModel) -> None:
    """Have accelerate find no tied weights by their addresses in memory, because the weights have been moved.

    Else accelerate would take an offloaded weight that is read to the earlier address of a tied weight for that weight.
    """
    if is_spread(model):
        hook: Any = model._hf_hook
        hook.tied_params_map.clear()  # All modules share this dictionary.


def loaded(model: nn.Module, name: str, weight: Tensor) -> Tensor:
    """The weight `name` of a model; if the weight is offloaded, its copy in the CPU's memory."""
    if not weight.is_meta:
        return weight
    from accelerate.utils import align_module_device

    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    with align_module_device(module, torch.device("cpu")):
        copy: Tensor = getattr(module, last)
    return copy
