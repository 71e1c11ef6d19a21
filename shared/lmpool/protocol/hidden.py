"""Hidden states, and the head that turns them into rows: for clients that have a device of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import ProtocolError
from lmpool.protocol.row import widen_bf16

FACTS = 3
"""Numbers that say how a head goes on from its product: scale, soft-cap, and 1 if it has a bias."""

_DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def width_of(numbers: int, dtype: str) -> int:
    """So many float32 numbers carry so many of a model's dtype.

    Raises:
        ProtocolError: hidden states are not told in that dtype.
    """
    if dtype not in _DTYPES:
        raise ProtocolError(f"hidden states in {dtype}: expected one of {', '.join(_DTYPES)}")
    return -(-numbers * int(np.dtype(_DTYPES[dtype]).itemsize) // 4)


def pack_numbers(numbers: NDArray[Any]) -> NDArray[np.float32]:
    """Arrays (n, m) of a model's numbers, bfloat16 as uint16, as an answer travels: the bits as float32 (n, width)."""
    if numbers.dtype == np.float32:
        return numbers
    if numbers.shape[1] % 2:
        numbers = np.pad(numbers, ((0, 0), (0, 1)))
    return np.ascontiguousarray(numbers).view(np.float32)


def unpack_numbers(answer: NDArray[np.float32], count: int, size: int, dtype: str) -> NDArray[Any]:
    """Read what `pack_numbers` made of n = `count` times `size` numbers.

    Returns:
        float32 or float16 (n, size); float32 of bfloat16 too, which numpy does not have.

    Raises:
        ProtocolError: one is NaN or infinite.
    """
    numbers = np.ascontiguousarray(answer).reshape(count, -1).view(_DTYPES[dtype])[:, :size]
    values: NDArray[Any] = widen_bf16(np.ascontiguousarray(numbers)) if dtype == "bfloat16" else numbers
    if not np.isfinite(values).all():
        raise ProtocolError(f"of {count} times {size} numbers in {dtype} some are not finite")
    return values


@dataclass(frozen=True, slots=True)
class Head:
    """What turns the last hidden states of a model into its rows.

    Attributes:
        weights: (V, d), float32, or float16 of a float16 model; those of a bfloat16 model are in float32.
        bias: float32 (V,), or None.
        scale: what the product is multiplied by.
        soft_cap: c where logits are c * tanh(logits / c) in the end; None for as they are.
        dtype: of the model: what it rounds each step's result to.
    """

    weights: NDArray[Any]
    bias: NDArray[np.float32] | None
    scale: float
    soft_cap: float | None
    dtype: str

    def logits(self, hidden: NDArray[Any]) -> NDArray[np.float32]:
        """The logits of hidden states: of (n, d) float32 (n, V)."""
        logits: NDArray[np.float32] = hidden.astype(np.float32) @ self.weights.astype(np.float32, copy=False).T
        if self.bias is not None:
            logits += self.bias
        logits = self._rounded(logits)
        if self.scale != 1:
            logits = self._rounded(logits * np.float32(self.scale))
        if self.soft_cap is not None:
            cap = np.float32(self.soft_cap)
            logits = self._rounded(cap * self._rounded(np.tanh(self._rounded(logits / cap))))
        return logits

    def logprobs(self, hidden: NDArray[Any]) -> NDArray[np.float32]:
        """The rows of hidden states: of (n, d) float32 log-probabilities (n, V)."""
        logits = self.logits(hidden)
        logits -= logits.max(axis=1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True, dtype=np.float64)).astype(np.float32)
        return logits

    def _rounded(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """As the model has it between two steps: rows are made of what it has rounded."""
        if self.dtype == "bfloat16":
            bits = np.ascontiguousarray(values).view(np.uint32)
            # To the nearest, and halfway to the even one.
            return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
        return values.astype(np.float16).astype(np.float32) if self.dtype == "float16" else values


def pack_facts(scale: float, soft_cap: float | None, has_bias: bool) -> NDArray[np.float32]:
    """How a head goes on from its product, as an answer travels: float32 of shape (FACTS,)."""
    return np.array([scale, 0 if soft_cap is None else soft_cap, has_bias], np.float32)
