"""Loads LoRA adapters into a transformers model with peft: several adapters are loaded, and at most one is active."""

from __future__ import annotations

import copy
import logging
import math
import warnings
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from lmpool.errors import SettingsError, first_line
from lmpool.workers.backends.hf.forward import Forward
from lmpool.workers.backends.lora import BASE_WEIGHT, HARMLESS_INITS, WEIGHTS
from lmpool.workers.backends.settings import require

_log = logging.getLogger(__name__)

# Exceptions of peft and safetensors for an adapter that does not fit or cannot be read; they have no common type.
_LOAD_ERRORS = (
    ValueError, TypeError, KeyError, RuntimeError, OSError, AttributeError, NotImplementedError, ImportError,
    MemoryError, AssertionError, IndexError, SafetensorError,
)  # fmt: skip


class HfAdapters:
    """The adapters of one model; at first no adapter is active.

    Attributes:
        active: the adapter that forwards use, "name@revision"; "" for the model without an adapter.
    """

    def __init__(self, forward: Forward, name: str) -> None:
        self._forward = forward
        self._model: PreTrainedModel = forward.model
        self._name = name
        self._skeleton: PreTrainedModel | None = None
        self._peft: Any = None
        self.active = ""
        self._handles: dict[str, str] = {}  # "name@revision" -> name of the adapter in peft, which allows no dots.
        self._handle_numbers = count()

    def load(self, adapter: str, folder: Path) -> None:
        """Load an adapter ("name@revision"); refuses an adapter that does not fit or is no plain LoRA."""
        require("adapters", "lmpool[lora]", "peft")
        handle = self._handles[adapter] = f"a{next(self._handle_numbers)}"
        try:
            self._insert(folder, handle)
            with torch.inference_mode():  # Adapters loaded at the start have inference tensors.
                self.activate(adapter, force=True)
                if not bool(self._forward.logits([[0]]).isfinite().any()):
                    raise SettingsError(f"adapters: with {folder} the model's logits are no numbers")
        except _LOAD_ERRORS as error:
            self.drop(adapter)
            if isinstance(error, SettingsError):
                raise
            raise SettingsError(f"adapters: {folder} does not fit {self._name}: {first_line(error)}") from error
        finally:
            if self._peft is not None:
                self.activate("", force=True)

    def activate(self, adapter: str, *, force: bool = False) -> None:
        """Activate an adapter, or none (""), for the next forwards; with `force` even if it is active already."""
        if adapter == self.active and not force:
            return
        self.active = adapter
        if adapter:
            self._peft.base_model.enable_adapter_layers()
            self._peft.set_adapter(self._handles[adapter], inference_mode=True)
            return
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils import AuxiliaryTrainingWrapper

        # Disable the layers one by one: after a failure, peft's model may not list all inserted layers.
        for module in self._model.modules():
            if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
                module.enable_adapters(False)

    def replaces_head(self, adapter: str) -> bool:
        """Whether an adapter has a head, or some of its rows, of its own; "" for no adapter."""
        layer: Any = self._model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if not adapter or not hasattr(layer, "original_module"):
            return False
        # A wrapper of whole modules has the adapters that replace the head. A wrapper of rows has no such list.
        return self._handles[adapter] in getattr(layer, "modules_to_save", self._handles.values())

    def _insert(self, folder: Path, handle: str) -> None:
        """Have peft insert the adapter in a folder into the model, under the name `handle`."""
        from peft import PeftConfig, PeftModel, set_peft_model_state_dict
        from peft.utils import load_peft_weights

        config: Any = PeftConfig.from_pretrained(str(folder))
        # Refuse adapters that are no plain LoRA: they would change rows of other prompts, or need a changed model.
        if config.bias != "none" or getattr(config, "lora_bias", None):
            raise SettingsError(f"adapters: {folder} changes biases of the model itself (bias={config.bias!r})")
        if config.init_lora_weights not in HARMLESS_INITS:
            text = f"has changed weights of its model (init_lora_weights={config.init_lora_weights!r})"
            raise SettingsError(f"adapters: {folder} {text}: save it with path_initial_model_for_weight_conversion")
        if getattr(config, "alora_invocation_tokens", None):
            raise SettingsError(f"adapters: {folder} is applied after certain tokens only (aLoRA)")
        config.inference_mode, config.init_lora_weights = True, True
        if self._skeleton is None:
            self._skeleton = _on_meta_device(self._model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft warns about weights that do not fit, which are checked below.
            _check_size(folder, self._skeleton, config)
            if self._peft is None:
                self._peft = PeftModel(self._model, config, handle)
            else:
                if not self._peft.active_adapters:
                    # All other adapters were removed. Set the new adapter as active, else `add_adapter` fails.
                    self._peft.base_model.active_adapter = handle
                self._peft.add_adapter(handle, config)
            weights = load_peft_weights(str(folder), str(self._forward.device))
            # Leave out copies of the model's own weights: peft would overwrite the model with the rounded copies.
            weights = {key: weight for key, weight in weights.items() if not key.endswith(BASE_WEIGHT)}
            result: Any = set_peft_model_state_dict(self._peft, weights, handle)
        # Ignore the weights of the model and of other adapters, which `missing_keys` lists too.
        missing = [key for key in result.missing_keys if "lora_" in key and handle in key.split(".")]
        if unfitting := [*result.unexpected_keys, *missing]:
            text = f"{len(unfitting)} of its weights have no place or are missing, such as {unfitting[0]}"
            raise SettingsError(f"adapters: {folder} does not fit {self._name}: {text}")
        # Switch to evaluation mode: modules that peft has added are in training mode, with dropout.
        self._model.train(mode=False)

    def drop(self, adapter: str) -> None:
        """Remove an adapter. If peft cannot remove the adapter, its weights stay in memory unused."""
        handle = self._handles.pop(adapter)
        if self._peft is None or handle not in self._peft.peft_config:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Hide peft's warning that another adapter becomes active.
            # Activate the adapter first: peft cannot delete it from modules with copies per adapter if none is active.
            with suppress(*_LOAD_ERRORS):
                self._peft.set_adapter(handle, inference_mode=True)
            try:
                self._peft.delete_adapter(handle)
            except _LOAD_ERRORS as error:
                text = "the adapter %r cannot be removed: it stays in memory until the worker ends"
                _log.warning(text, adapter, exc_info=error)
        self.activate("", force=True)


def _check_size(folder: Path, skeleton: PreTrainedModel, config: Any) -> None:
    """Refuse an adapter whose config makes peft reserve memory for more numbers than the adapter's file holds.

    `skeleton` is a copy of the model without adapters and without memory (`_on_meta_device`).
    """
    from peft import PeftModel

    with safe_open(folder / WEIGHTS, framework="pt") as file:  # safe_open refuses tensors that exceed the file's size.
        held = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    with torch.device("meta"):  # peft first creates weights on the default device; "meta" allocates no memory.
        trial = PeftModel(_on_meta_device(skeleton), copy.deepcopy(config), "tried")
    # Count parameters and buffers separately: peft copies the model's trainable tokens to buffers, which no file has.
    for kind in ("parameters", "buffers"):
        before, after = (sum(each.numel() for each in getattr(model, kind)()) for model in (skeleton, trial))
        if after - before > held:
            text = f"its config asks for {after - before} numbers ({kind}), and {WEIGHTS} holds {held}"
            raise SettingsError(f"adapters: {folder} does not fit itself: {text}: save it anew with peft")


def _on_meta_device(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model with parameters and buffers on the device "meta", where tensors have shapes and no memory."""
    memo: dict[int, Any] = {}
    for tensor in chain(model.parameters(), model.buffers()):
        skeleton = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        if isinstance(tensor, nn.Parameter):
            skeleton = nn.Parameter(skeleton, requires_grad=False)
            # Copy the parameter's attributes, by which peft recognises the kind of quantised weights.
            vars(skeleton).update(vars(tensor))
        memo[id(tensor)] = skeleton
    return copy.deepcopy(model, memo)
