"""Replaces the weights of a model that SGLang has loaded, in place, with SGLang's own loader."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from sglang.srt.model_executor.model_runner_components import weight_updater
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.model_loader.utils import set_default_torch_dtype
from torch.distributed import ReduceOp, all_reduce

from lmpool.errors import first_line
from lmpool.workers.backends.checkpoint import NewWeights


class RankWeights:
    """The weights of a rank. Takes the place of SGLang's updater, which loads whole checkpoints only.

    Args:
        runner: SGLang's model runner.
        group: SGLang's group of ranks.
    """

    def __init__(self, runner: Any, group: Any) -> None:
        self._runner, self._group = runner, group

    def update_weights_from_disk(self, model_path: str, *_: Any, **__: Any) -> tuple[bool, str]:
        """Load a `NewWeights`, given as JSON in place of a path; returns whether all ranks have, and the error."""
        message = ""
        try:
            self._load(msgspec.json.decode(model_path, type=NewWeights))
        except Exception as error:  # noqa: BLE001  The worker raises the error.
            message = first_line(error)
        failed = torch.tensor(int(bool(message)))
        all_reduce(failed, ReduceOp.MAX, self._group.cpu_group)
        return not failed, message or "another rank has failed"

    def _load(self, new: NewWeights) -> None:
        model, device = self._runner.model, torch.device(self._runner.device)
        find_error: Any = getattr(weight_updater, "_unsupported_derived_weight_cache_error", lambda _: None)
        if error := find_error(model):
            raise ValueError(error)
        with set_default_torch_dtype(self._runner.model_config.dtype), _plain_names(model):
            DefaultModelLoader.restore_weights_before_loading(model, device)
            DefaultModelLoader.load_weights_and_postprocess(model, new.tensors(), device)


@contextmanager
def _plain_names(model: torch.nn.Module) -> Iterator[None]:
    """In this context, parameters of layers that can have adapters have the names that they have in a checkpoint too.

    SGLang ignores a tensor if the model has no parameter of its name.
    """
    added = []
    for layer in model.modules():
        base = getattr(layer, "base_layer", None)
        if isinstance(base, torch.nn.Module):
            for name, parameter in base.named_parameters(recurse=False):
                if not hasattr(layer, name):
                    layer.register_parameter(name, parameter)
                    added.append((layer, name))
    try:
        yield
    finally:
        for layer, name in added:
            delattr(layer, name)
