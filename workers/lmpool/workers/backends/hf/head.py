"""The head of a model: what goes into it, and whether that and its weights make the model's logits."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from lmpool.protocol.query import HeadQuery
from lmpool.protocol.row import pack_facts, pack_numbers

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_log = logging.getLogger(__name__)


class OutputHead:
    """The last linear layer of a model, and what its logits go through behind it.

    Args:
        layer: the linear layer.
        scale: what its product is multiplied by.
        soft_cap: c where logits are c * tanh(logits / c), or None.
    """

    def __init__(self, layer: torch.nn.Linear, scale: float, soft_cap: float | None) -> None:
        self._layer = layer
        self._scale = scale
        self._soft_cap = soft_cap

    @property
    def size(self) -> int:
        """d, the numbers of a hidden state."""
        return self._layer.in_features

    @contextmanager
    def hidden_in_place_of_logits(self, kept: int) -> Iterator[list[Tensor]]:
        """While it is open, forwards give the hidden states (n, kept, d) of the last positions to the list it yields.

        Their own logits are of one position only: the product is the greater part of what they would cost.
        """
        taken: list[Tensor] = []

        def take(_: torch.nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
            taken.append(given[0][:, -kept:].clone())
            return (given[0][:, -1:], *given[1:])

        handle = self._layer.register_forward_pre_hook(take)
        try:
            yield taken
        finally:
            handle.remove()

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits of hidden states, computed from the weights that clients get."""
        logits = self._layer(hidden)
        if self._scale != 1:
            logits = logits * self._scale
        return logits if self._soft_cap is None else self._soft_cap * torch.tanh(logits / self._soft_cap)

    def answer(self, query: HeadQuery) -> NDArray[np.float32]:
        """What a query wants of it."""
        bias = self._layer.bias
        if query.part == "facts":
            return pack_facts(self._scale, self._soft_cap, bias is not None)
        if query.part == "bias":
            # Asked by whoever likes, of models that have none too.
            numbers = torch.zeros(self._layer.out_features) if bias is None else bias.detach().float().cpu()
            return np.asarray(numbers.numpy())
        weights = self._layer.weight[query.first : query.first + query.count].detach().cpu().contiguous()
        return pack_numbers(numbers_of(weights)).ravel()


def numbers_of(tensor: Tensor) -> NDArray[Any]:
    """A tensor of one of a model's dtypes for numpy: bfloat16 as its bits."""
    return (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


def find_head(model: PreTrainedModel, vocab_size: int) -> OutputHead | None:
    """The head of a model, if its hidden states and weights make its logits; else None, and the log says why."""
    head = _stated_head(model, vocab_size)
    if head is None:
        _log.info("the model has no plain linear head: its hidden states are not told")
        return None
    ids = torch.tensor([[0, vocab_size // 2, vocab_size - 1]], device=model.device)
    with torch.inference_mode():
        expected = model(input_ids=ids).logits.float()
        with head.hidden_in_place_of_logits(3) as taken:
            model(input_ids=ids)
        found = head.logits(taken[0]).float() if len(taken) == 1 else expected[:, :0]
    # Against the spread of the logits: an untrained model's are tiny.
    limit = _TOLERANCE[model.dtype] * expected.std()
    if found.shape != expected.shape or not (found - expected).abs().max() <= limit:
        _log.info("the model's logits are not those of its hidden states by its head: these are not told")
        return None
    return head


def _stated_head(model: PreTrainedModel, vocab_size: int) -> OutputHead | None:
    """The head as the model and its config state it."""
    layer: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # transformers is partly untyped
    config = model.config.get_text_config(decoder=True)
    if type(layer) is not torch.nn.Linear or layer.out_features != vocab_size or layer.weight.dtype not in _DTYPES:
        return None
    if layer.weight.dtype is not model.dtype:
        return None
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    return OutputHead(layer, scale, getattr(config, "final_logit_softcapping", None))
