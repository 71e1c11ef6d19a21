"""Where the logits of a teacher or a student come from: rows in memory, or hidden states and a head."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lmpool.protocol.row import Head

Array = Any
"""A numpy array or a torch tensor: without torch, a type checker cannot name the second."""


@dataclass(frozen=True, slots=True, eq=False)
class States:
    """Hidden states and the head that turns them into logits, in place of an array of logits (n, V).

    `States.of(await producer.hidden(ids), await producer.head())` is a teacher. `States(hidden, model.lm_head.weight)`
    is a student; gradients reach the hidden states, the weights and the bias.

    Attributes:
        hidden: (n, d), the input of the head.
        weights: (V, d); each tile of weights is converted to the dtype of the product when it is used.
        bias: (V,), or None.
        scale: factor of the logits after the product with the weights.
        soft_cap: c if the last step turns logits into c * tanh(logits / c); else None.
        dtype: "float32", "bfloat16", "float16" or "float64", in which each operation is computed and rounded. None: the
            dtype of `hidden` for tensors, float32 for numpy arrays. numpy computes in float32 and rounds to `dtype`.
        down: (r, d), the first LoRA factor of the head, or None.
        up: (V, r), the second LoRA factor times its scale, or None.
    """

    hidden: Array
    weights: Array
    bias: Array | None = None
    scale: float = 1.0
    soft_cap: float | None = None
    dtype: str | None = None
    down: Array | None = None
    up: Array | None = None

    @classmethod
    def of(cls, hidden: Array, head: Head) -> States:
        """The states of a model whose head a pool has sent."""
        return cls(hidden, head.weights, head.bias, head.scale, head.soft_cap, head.dtype, head.down, head.up)

    @property
    def shape(self) -> tuple[int, int]:
        """(n, V)."""
        return self.hidden.shape[0], self.weights.shape[0]

    @property
    def width(self) -> int:
        """d: the numbers that a tile needs for each of its tokens."""
        return int(self.hidden.shape[1])

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(name for name in ("hidden", "weights", "bias", "down", "up") if getattr(self, name) is not None)

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays that gradients may reach."""
        return tuple(getattr(self, name) for name in self._names)

    @property
    def is_finite(self) -> bool:
        """Whether no logit can be -inf: only a bias can exclude a token."""
        return self.bias is None

    def with_arrays(self, *arrays: Array) -> States:
        """The same head with other arrays."""
        return replace(self, **dict(zip(self._names, arrays, strict=True)))

    def places(self, rows: slice, columns: slice) -> tuple[slice, ...]:
        """For each array, the part that a tile of the logits needs."""
        return tuple({"hidden": rows, "down": slice(None)}.get(name, columns) for name in self._names)

    def logits(self, *arrays: Array) -> Array:
        """The logits of parts of the arrays."""
        given: dict[str, Any] = dict.fromkeys(("bias", "down", "up")) | dict(zip(self._names, arrays, strict=True))
        hidden, weights, bias, down, up = (given[name] for name in ("hidden", "weights", "bias", "down", "up"))
        if isinstance(hidden, np.ndarray):
            head = Head(weights, bias, self.scale, self.soft_cap, self.dtype or "float32", down, up)
            return head.logits(hidden)
        torch = sys.modules["torch"]
        # The dtype of this product is the head's, in the forward and in the backward.
        with torch.autocast(hidden.device.type, enabled=False):
            hidden = hidden.to(getattr(torch, self.dtype)) if self.dtype else hidden
            bias = None if bias is None else bias.to(hidden.dtype)
            logits = torch.nn.functional.linear(hidden, weights.to(hidden.dtype), bias)
            if down is not None:
                logits = (logits + hidden.to(down.dtype) @ down.T @ up.T).to(hidden.dtype)
            if self.scale != 1:
                logits = logits * self.scale
            return logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Logits or log-probabilities in memory, (n, V); its methods are those of `States`."""

    numbers: Array

    @property
    def shape(self) -> tuple[int, int]:
        """(n, V)."""
        count, size = self.numbers.shape
        return count, size

    @property
    def width(self) -> int:
        """See `States.width`."""
        return 1

    @property
    def arrays(self) -> tuple[Array]:
        """The array that gradients may reach."""
        return (self.numbers,)

    @property
    def is_finite(self) -> bool:
        """Whether no entry can be -inf: rows may contain tokens without probability."""
        return False

    def with_arrays(self, numbers: Array) -> Rows:
        """Rows over another array."""
        return Rows(numbers)

    def places(self, rows: slice, columns: slice) -> tuple[tuple[slice, slice]]:
        """The part of the array that is a tile."""
        return ((rows, columns),)

    def logits(self, numbers: Array) -> Array:
        """The logits of a part of the array."""
        return numbers


Source = States | Rows
