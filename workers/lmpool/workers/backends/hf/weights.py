"""Replaces the weights of a transformers model in place, while the model stays loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lmpool.protocol.tensors import TensorType, Types, map_tensors, new_changes
from lmpool.workers.backends.checkpoint import replaceable_tensors, torch_tensor
from lmpool.workers.backends.hf.placement import is_offloaded
from lmpool.workers.backends.settings import HfSettings

_SAMPLES = 16  # Min numbers of a tensor that are compared with the tensor in the checkpoint.

_log = logging.getLogger(__name__)


class ReplaceableWeights:
    """A model's weights, by the names of the tensors in its checkpoint.

    Make this object before adapters are loaded, because peft renames weights.

    Attributes:
        types: the types of the checkpoint's tensors; empty if the weights cannot be replaced.
    """

    def __init__(self, model: PreTrainedModel, folder: Path, settings: HfSettings) -> None:
        self._folder = folder
        is_plain = settings.gguf_file is None and settings.quantization is None and not is_offloaded(model)
        self.types: Types = replaceable_tensors(folder) if is_plain else {}
        self._weights = _weights_by_name(model, self.types)
        if self.types and (reason := _difference(model, folder, self.types, self._weights)):
            _log.info("the weights cannot be replaced while the worker runs: %s", reason)
            self.types = {}

    @torch.no_grad()
    def load(self, full: Path | None, sparse: Sequence[Path], held: int) -> None:
        """See `ChangesWeights.load_weights`; drops nothing that was computed from the old weights."""
        for name, changes in new_changes(full or self._folder, sparse, held, self.types).items():
            if (weight := self._weights.get(name)) is None:
                continue  # The model does not use the tensor.
            for indices, values in changes:
                new = torch_tensor(values, self.types[name].dtype)
                if indices is None:
                    weight.copy_(new)
                else:
                    weight.put_(torch.from_numpy(indices).to(weight.device), new.to(weight))


def _weights_by_name(model: PreTrainedModel, types: Types) -> dict[str, Tensor]:
    """Name of each tensor of the checkpoint that the model uses -> the model's weight."""
    own, prefix = model.state_dict(), model.base_model_prefix
    named = {name: own.get(name, own.get(f"{prefix}.{name}")) for name in types}
    return {name: weight for name, weight in named.items() if weight is not None}


def _difference(
    model: PreTrainedModel, folder: Path, types: Mapping[str, TensorType], weights: Mapping[str, Tensor]
) -> str:
    """Why weights are not those of the checkpoint's tensors with their names; "" if they are.

    transformers renames, joins or splits the tensors of some checkpoints, and some models change weights in memory.
    """
    addresses = {weight.data_ptr() for weight in weights.values()}
    for name, weight in model.state_dict().items():
        if weight.data_ptr() not in addresses:
            return f"the checkpoint has no tensor {name}"
    if len(addresses) < len(weights):
        return "the checkpoint has several tensors for one weight of the model"
    tensors = map_tensors(folder)
    for name, weight in weights.items():
        if tuple(weight.shape) != types[name].shape:
            return f"the tensor {name} has another shape in the model"
        step = max(1, weight.numel() // _SAMPLES)
        new = torch_tensor(tensors[name].numbers, types[name].dtype).reshape(-1)[::step].to(weight)
        if not torch.equal(new, weight.reshape(-1)[::step]):
            return f"the tensor {name} has other numbers in the model"
    return ""
