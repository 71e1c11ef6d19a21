"""LoRA adapters of a transformers model, by peft: several are loaded, and at most one is active."""

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
from lmpool.protocol.adapter import qualify
from lmpool.workers.backends.checkpoint import checkpoint_revision, checkpoint_source
from lmpool.workers.backends.hf.forward import Forward
from lmpool.workers.backends.lora import BASE_WEIGHT, HARMLESS_INITS, WEIGHTS, adapter_folder, check_fit, weights_of
from lmpool.workers.backends.settings import require

_log = logging.getLogger(__name__)

# Exceptions of peft and safetensors for adapters that do not fit or cannot be read; they have no common type.
_LOAD_ERRORS = (
    ValueError, TypeError, KeyError, RuntimeError, OSError, AttributeError, NotImplementedError, ImportError,
    MemoryError, AssertionError, IndexError, SafetensorError,
)  # fmt: skip


class HfAdapters:
    """The adapters of one model; at first none is active.

    Attributes:
        sources: the adapters: "name@revision" -> folder or hub name.
        active: the active adapter, or "".
    """

    def __init__(self, forward: Forward, name: str) -> None:
        self._forward = forward
        self._model: PreTrainedModel = forward.model
        self._name = name
        self._weights = weights_of(self._model.state_dict())  # Names change when peft inserts an adapter.
        self._skeleton: PreTrainedModel | None = None
        self._peft: Any = None
        self.sources: dict[str, str] = {}
        self.active = ""
        self._handles: dict[str, str] = {}  # The names of the adapters in peft, which must not contain dots.
        self._handle_numbers = count()

    def load(self, name: str, source: str) -> str:
        """Load an adapter; returns its revision.

        Raises:
            SettingsError: peft is missing, or the adapter is missing, does not fit the model or is no plain LoRA.
        """
        require("adapters", "lmpool[lora]", "peft")
        folder = adapter_folder(source)
        check_fit(folder, self._weights, self._name)
        revision = checkpoint_revision(folder)
        adapter = qualify(name, revision)
        if adapter in self.sources:
            return revision
        handle = self._handles[adapter] = f"a{next(self._handle_numbers)}"
        try:
            self._insert(folder, handle)
            with torch.inference_mode():  # Adapters that were loaded at the start are inference tensors.
                self.activate(adapter, force=True)
                if not bool(self._forward.logits([[0]]).isfinite().any()):
                    raise SettingsError(f"adapters: with {folder} the model's logits are no numbers")
            if checkpoint_revision(folder) != revision:
                raise SettingsError(f"adapters: {folder} was changed while it was loaded")
            self.sources[adapter] = checkpoint_source(source)
        except _LOAD_ERRORS as error:
            self._delete(adapter)
            if isinstance(error, SettingsError):
                raise
            raise SettingsError(f"adapters: {folder} does not fit {self._name}: {first_line(error)}") from error
        finally:
            if self._peft is not None:
                self.activate("", force=True)
        return revision

    def drop(self, adapter: str) -> None:
        """Remove an adapter. If peft cannot remove it, its weights stay in memory unused."""
        if self.sources.pop(adapter, None) is not None:
            self._delete(adapter)
            self.activate("", force=True)

    def activate(self, adapter: str, *, force: bool = False) -> None:
        """Activate an adapter for the next forwards, or none (""); with `force` even if it is active already."""
        if adapter == self.active and not force:
            return
        self.active = adapter
        if adapter:
            self._peft.base_model.enable_adapter_layers()
            self._peft.set_adapter(self._handles[adapter], inference_mode=True)
            return
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils import AuxiliaryTrainingWrapper

        # Not through peft's model: after a failure, it may not list all inserted layers.
        for module in self._model.modules():
            if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
                module.enable_adapters(False)

    def _insert(self, folder: Path, handle: str) -> None:
        """Have peft put an adapter into the model."""
        from peft import PeftConfig, PeftModel, set_peft_model_state_dict
        from peft.utils import load_peft_weights

        config: Any = PeftConfig.from_pretrained(str(folder))
        _check_config(folder, config)
        config.inference_mode, config.init_lora_weights = True, True
        if self._skeleton is None:
            self._skeleton = _on_meta_device(self._model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The causes of its warnings are checked here.
            _check_size(folder, self._skeleton, config)
            if self._peft is None:
                self._peft = PeftModel(self._model, config, handle)
            else:
                if not self._peft.active_adapters:
                    # All others were removed. peft activates the active adapters again, and fails if there are none.
                    self._peft.base_model.active_adapter = handle
                self._peft.add_adapter(handle, config)
            weights = load_peft_weights(str(folder), str(self._forward.device))
            # Leave out copies of the model's own weights: peft would write them into the model, rounded as saved.
            weights = {key: weight for key, weight in weights.items() if not key.endswith(BASE_WEIGHT)}
            result: Any = set_peft_model_state_dict(self._peft, weights, handle)
        # `missing_keys` also lists the weights of the model and of other adapters.
        missing = [key for key in result.missing_keys if "lora_" in key and handle in key.split(".")]
        if unfitting := [*result.unexpected_keys, *missing]:
            raise SettingsError(
                f"adapters: {folder} does not fit {self._name}: {len(unfitting)} of its weights have no place or are "
                f"missing, such as {unfitting[0]}"
            )
        # New modules are in training mode, with dropout.
        self._model.train(mode=False)

    def _delete(self, adapter: str) -> None:
        handle = self._handles.pop(adapter)
        if self._peft is None or handle not in self._peft.peft_config:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft warns that it activates another adapter; `activate` decides that.
            # peft cannot delete an adapter from modules that have copies for several adapters and none active.
            with suppress(*_LOAD_ERRORS):
                self._peft.set_adapter(handle, inference_mode=True)
            try:
                self._peft.delete_adapter(handle)
            except _LOAD_ERRORS as error:
                text = "the adapter %r cannot be removed: it stays in memory until the worker ends"
                _log.warning(text, adapter, exc_info=error)


def _check_config(folder: Path, config: Any) -> None:
    """Refuse adapters that are no plain LoRA: they change rows of other prompts, or need more than a name."""
    if config.bias != "none" or getattr(config, "lora_bias", False) not in (False, None):
        raise SettingsError(f"adapters: {folder} changes biases of the model itself (bias={config.bias!r})")
    if config.init_lora_weights not in HARMLESS_INITS:
        raise SettingsError(
            f"adapters: {folder} belongs to a model whose weights it has changed (init_lora_weights="
            f"{config.init_lora_weights!r}): save it with peft's path_initial_model_for_weight_conversion"
        )
    if getattr(config, "alora_invocation_tokens", None):
        raise SettingsError(f"adapters: {folder} is applied after certain tokens only (aLoRA)")


def _check_size(folder: Path, skeleton: PreTrainedModel, config: Any) -> None:
    """Refuse an adapter whose config makes peft reserve more memory than its file has weights.

    `skeleton` is a copy of the model without adapters and without memory (`_on_meta_device`).
    """
    from peft import PeftModel

    with safe_open(folder / WEIGHTS, framework="pt") as file:  # It refuses shapes that exceed the file.
        held = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    with torch.device("meta"):  # peft makes weights on the default device, and then moves them to the model's.
        trial = PeftModel(_on_meta_device(skeleton), copy.deepcopy(config), "tried")
    # Parameters and buffers separately: peft keeps the model's own trainable tokens as buffers, which no file has.
    for kind in ("parameters", "buffers"):
        before, after = (sum(each.numel() for each in getattr(model, kind)()) for model in (skeleton, trial))
        if after - before > held:
            raise SettingsError(
                f"adapters: {folder} does not fit itself: its config asks for {after - before} numbers ({kind}), and "
                f"{WEIGHTS} holds {held}: some weights are missing; write both anew with peft's save_pretrained"
            )


def _on_meta_device(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model with parameters and buffers on the device "meta": they have shapes and no memory."""
    memo: dict[int, Any] = {}
    for tensor in chain(model.parameters(), model.buffers()):
        skeleton = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        if isinstance(tensor, nn.Parameter):
            skeleton = nn.Parameter(skeleton, requires_grad=False)
            # peft recognises the kind of quantised weights by these attributes.
            vars(skeleton).update(vars(tensor))
        memo[id(tensor)] = skeleton
    return copy.deepcopy(model, memo)
