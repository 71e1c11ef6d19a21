"""A model's output head, which turns hidden states into logits, and hidden states as the numbers that clients get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmpool.protocol.query import HeadQuery
from lmpool.protocol.row import pack_facts, pack_numbers

_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Dtype -> largest difference of the head's and the model's logits, as a share of their standard deviation."""


@dataclass(frozen=True, slots=True)
class OutputHead:
    """A model's last linear layer, a factor of its output, and the cap c in c * tanh(logits / c).

    Attributes:
        size: d, the numbers of a hidden state.
        weights: function that returns rows `first` to `first + count` of the weights (V, d), in the model's dtype.
        bias: (V,), or None.
        scale: factor of the logits after the product with the weights.
        soft_cap: the cap c, or None.
    """

    size: int
    weights: Callable[[int, int], Tensor]
    bias: Tensor | None
    scale: float
    soft_cap: float | None

    def logits(self, hidden: Tensor, vocab_size: int) -> Tensor:
        """The logits (n, V) of hidden states (n, d), computed as clients compute logits."""
        bias = None if self.bias is None else self.bias.to(hidden)
        return self.finished(torch.nn.functional.linear(hidden, self.weights(0, vocab_size).to(hidden.device), bias))

    def finished(self, logits: Tensor) -> Tensor:
        """The logits, computed from the output of the linear layer."""
        if self.scale != 1:
            logits = logits * self.scale
        return logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)

    def reproduces(self, expected: Tensor, hidden: Tensor) -> bool:
        """Whether hidden states (n, d) and this head give the logits (n, V) that the model computes from these states.

        False for dtypes that clients cannot read.
        """
        if hidden.dtype not in _TOLERANCE or hidden.shape[-1] != self.size:
            return False
        expected = expected.float()
        found = self.logits(hidden, expected.shape[-1]).float().to(expected.device)
        # Compare relative to the standard deviation, because the logits of an untrained model are tiny.
        return bool((found - expected).abs().max() <= _TOLERANCE[hidden.dtype] * expected.std())

    def answer(self, query: HeadQuery, vocab_size: int) -> NDArray[np.float32]:
        """The part of the head that a query requests, as float32 numbers."""
        if query.part == "facts":
            return pack_facts(self.scale, self.soft_cap, self.bias is not None)
        if query.part == "bias":
            # A client may request the bias of a head without a bias; return zeros.
            return np.zeros(vocab_size, np.float32) if self.bias is None else self.bias.float().cpu().numpy()
        return pack_states(self.weights(query.first, query.count)).ravel()


def pack_states(tensor: Tensor) -> NDArray[np.float32]:
    """Hidden states or weights (n, d) as `pack_numbers` encodes them; the client decodes the model's dtype."""
    tensor = tensor.detach().cpu().contiguous()
    # numpy has no bfloat16, so take the bits.
    numbers: NDArray[Any] = (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
    return pack_numbers(numbers)
