"""LoRA adapters of a model of transformers, by peft: any number loaded, one at a time at work."""

from __future__ import annotations

import copy
import logging
import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from lmpool.errors import SettingsError
from lmpool.protocol.adapter import qualify
from lmpool.workers.backends.checkpoint import checkpoint_revision, checkpoint_source
from lmpool.workers.backends.hf.forward import Forward
from lmpool.workers.backends.lora import WEIGHTS, adapter_folder, check_places, places_of
from lmpool.workers.backends.requirements import first_line, require

_log = logging.getLogger(__name__)

# What peft and safetensors raise for adapters that do not fit or cannot be read; there is no common type.
_LOAD_ERRORS = (
    ValueError, TypeError, KeyError, RuntimeError, OSError, AttributeError, NotImplementedError, ImportError,
    MemoryError, AssertionError, IndexError, SafetensorError,
)  # fmt: skip
# Ways to begin that leave the model's own weights as they are; the others are undone by converting the adapter.
_HARMLESS_BEGINNINGS = (True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class _Loaded:
    """An adapter in the model: what peft calls it, and where it came from."""

    handle: str
    source: str


class HfAdapters:
    """The adapters of one model; none is at work at first.

    Args:
        forward: runs the model.
        name: of the model, for messages.
    """

    def __init__(self, forward: Forward, name: str) -> None:
        self._forward = forward
        self._model: PreTrainedModel = forward.model
        self._name = name
        self._places = places_of(self._model.state_dict())
        self._bare: PreTrainedModel | None = None
        self._peft: Any = None
        self._loaded: dict[str, _Loaded] = {}
        self._numbers = count()
        self._at_work = ""

    @property
    def sources(self) -> dict[str, str]:
        """The adapters: "name@revision" -> folder or hub name."""
        return {adapter: loaded.source for adapter, loaded in self._loaded.items()}

    def load(self, name: str, source: str) -> str:
        """Load an adapter; returns its revision.

        Raises:
            SettingsError: peft is missing, or the adapter cannot be had, does not fit the model or is no plain LoRA.
        """
        require("adapters", "lmpool[lora]", "peft")
        folder = adapter_folder(source)
        check_places(folder, self._places, self._name)
        revision = checkpoint_revision(folder)
        adapter = qualify(name, revision)
        if adapter in self._loaded:
            return revision
        # Not the adapter's name: peft's may have no dots.
        handle = f"a{next(self._numbers)}"
        try:
            self._insert(folder, handle)
            self._loaded[adapter] = _Loaded(handle, checkpoint_source(source))
            self._try(adapter, folder)
            if checkpoint_revision(folder) != revision:
                raise SettingsError(f"adapters: {folder} was changed while it was loaded")
        except _LOAD_ERRORS as error:
            self._loaded.pop(adapter, None)
            self._delete(handle)
            if isinstance(error, SettingsError):
                raise
            raise SettingsError(f"adapters: {folder} does not fit {self._name}: {first_line(error)}") from error
        finally:
            if self._peft is not None:
                self.use("", anew=True)
        return revision

    def drop(self, adapter: str) -> None:
        """Forget an adapter."""
        if (loaded := self._loaded.pop(adapter, None)) is not None:
            self._delete(loaded.handle)
            self.use("", anew=True)

    def use(self, adapter: str, *, anew: bool = False) -> None:
        """Put an adapter ("name@revision") to work, or none ("").

        Args:
            adapter: the adapter.
            anew: whatever was at work before.
        """
        if adapter == self._at_work and not anew:
            return
        self._at_work = adapter
        if adapter:
            self._peft.base_model.enable_adapter_layers()
            self._peft.set_adapter(self._loaded[adapter].handle, inference_mode=True)
        else:
            _disable_all(self._model)

    def _insert(self, folder: Path, handle: str) -> None:
        """Have peft put an adapter into the model."""
        from peft import PeftConfig, PeftModel

        config: Any = PeftConfig.from_pretrained(str(folder))
        _check_config(folder, config)
        config.inference_mode, config.init_lora_weights = True, True
        if self._bare is None:
            self._bare = _without_memory(self._model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # What it warns of is checked here.
            _check_size(folder, self._bare, config)
            if self._peft is None:
                self._peft = PeftModel(self._model, config, handle)
            else:
                self._peft.add_adapter(handle, config)
            result = self._peft.load_adapter(str(folder), handle, torch_device=str(self._forward.device))
        if strangers := [*result.unexpected_keys, *result.missing_keys]:
            raise SettingsError(
                f"adapters: {folder} does not fit {self._name}: {len(strangers)} of its weights have no place or are "
                f"missing, such as {strangers[0]}"
            )
        # What was inserted is in training mode, with dropout.
        self._model.train(mode=False)

    @torch.inference_mode()
    def _try(self, adapter: str, folder: Path) -> None:
        self.use(adapter, anew=True)
        if not bool(self._forward.logits([[0]]).isfinite().any()):
            raise SettingsError(f"adapters: with {folder} the model's logits are no numbers")

    def _delete(self, handle: str) -> None:
        if self._peft is not None and handle in self._peft.peft_config:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # That another adapter is made active: `use` says which.
                self._peft.delete_adapter(handle)


def _check_config(folder: Path, config: Any) -> None:
    """Refuse what is no plain LoRA: it would change rows of prompts that do not name it, or need more than a name."""
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA":
        raise SettingsError(f"adapters: {folder} is of the kind {kind}: this backend serves LORA")
    if config.bias != "none" or getattr(config, "lora_bias", False) not in (False, None):
        raise SettingsError(f"adapters: {folder} changes biases of the model itself (bias={config.bias!r})")
    if config.init_lora_weights not in _HARMLESS_BEGINNINGS:
        raise SettingsError(
            f"adapters: {folder} belongs to a model whose weights it has changed (init_lora_weights="
            f"{config.init_lora_weights!r}): save it with peft's path_initial_model_for_weight_conversion"
        )
    if getattr(config, "alora_invocation_tokens", None):
        raise SettingsError(f"adapters: {folder} is at work after certain tokens only (aLoRA)")


def _check_size(folder: Path, bare: PreTrainedModel, config: Any) -> None:
    """Refuse an adapter for which peft would reserve more than its file has weights for.

    Args:
        folder: of the adapter.
        bare: the model without adapters and memory (`_without_memory`).
        config: of the adapter, as peft reads it. A copy is used: peft completes it for the model.
    """
    from peft import PeftModel

    with safe_open(folder / WEIGHTS, framework="pt") as file:  # It refuses shapes that the file has no bytes for.
        held = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    with torch.device("meta"):  # peft makes weights where tensors are made, and then moves them to the model's device.
        tried = PeftModel(_without_memory(bare), copy.deepcopy(config), "tried")
    # Apart: of trainable tokens peft keeps the model's own as buffers, which no file has.
    for kind, before, after in (
        ("parameters", bare.parameters(), tried.parameters()),
        ("buffers", bare.buffers(), tried.buffers()),
    ):
        asked = _numbers(after) - _numbers(before)
        if asked > held:
            raise SettingsError(
                f"adapters: {folder} does not fit itself: its config asks for {asked} numbers ({kind}), and {WEIGHTS} "
                f"holds {held}: some weights are missing; write both anew with peft's save_pretrained"
            )


def _numbers(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _without_memory(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model whose parameters and buffers are on the device "meta": they have shapes alone."""
    memo: dict[int, Any] = {}
    for tensor in chain(model.parameters(), model.buffers()):
        bare = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        if isinstance(tensor, nn.Parameter):
            bare = nn.Parameter(bare, requires_grad=False)
            # By what quantised weights have there, peft tells how they were made.
            vars(bare).update(vars(tensor))
        memo[id(tensor)] = bare
    return copy.deepcopy(model, memo)


def _disable_all(model: PreTrainedModel) -> None:
    """Have every layer that peft has put in give what the layer that it replaced gives."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    # Not by peft's model: after a failure it may not know of all that it has put in.
    for module in model.modules():
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            module.enable_adapters(False)
