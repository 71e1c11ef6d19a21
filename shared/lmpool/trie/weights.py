"""Weights of a vocabulary's tokens: checked once, where they come in."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import InvalidWeights
from lmpool.settings import shown

_MOST_SHOWN = 120


def check_weights(weights: Any, n_tokens: int, *, batch: bool) -> NDArray[np.float32]:
    """Check the weights of all tokens; nothing is copied when they are C-contiguous already.

    Args:
        weights: float32 array (numpy, or torch on the CPU) of shape (V,), or (B, V) when `batch`.
        n_tokens: V.
        batch: whether there are several rows.

    Returns:
        the same numbers, C-contiguous and aligned: float32 of shape (V,) or (B, V). They may share the caller's memory.

    Raises:
        InvalidWeights: not such an array, of another length or dtype, or with NaN among them.
    """
    values = check_layout(weights, n_tokens, batch=batch)
    # A minimum is NaN when any number is, and costs a fifth of looking at each.
    if values.size and np.isnan(values.min()):
        raise nan_found(values)
    return values


def check_layout(weights: Any, n_tokens: int, *, batch: bool) -> NDArray[np.float32]:
    """As `check_weights`, without looking at the numbers: for those who look at them anyway."""
    if not hasattr(weights, "__array__"):
        raise InvalidWeights(
            f"the weights are {shown(weights, _MOST_SHOWN)} ({type(weights).__name__}): "
            "pass a float32 array, for a list numpy.asarray(weights, numpy.float32)"
        )
    try:
        values = np.asarray(weights)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidWeights(f"the weights, a {type(weights).__name__}, cannot be read as an array: {error}") from error
    if values.dtype != np.float32:
        raise InvalidWeights(f"the weights have dtype {values.dtype}: convert with numpy.asarray(w, numpy.float32)")
    check_shape(values.shape, n_tokens, batch=batch)
    return np.require(values, requirements=("C", "A"))


def check_shape(shape: tuple[int, ...], n_tokens: int, *, batch: bool) -> None:
    """Refuse a shape other than (V,), or (B, V) when `batch`.

    Raises:
        InvalidWeights: with both.
    """
    if len(shape) != 1 + batch:
        wanted = f"a batch has shape (B, {n_tokens})" if batch else f"one vector has shape ({n_tokens},)"
        raise InvalidWeights(f"the weights have shape {shape}: {wanted}")
    if shape[-1] != n_tokens:
        raise InvalidWeights(f"{shape[-1]} weights for {n_tokens} tokens")


def nan_found(values: NDArray[np.float32]) -> InvalidWeights:
    """The error for weights, of shape (V,) or (B, V), that hold NaN somewhere: it names the first."""
    place = np.unravel_index(int(np.argmax(np.isnan(values))), values.shape)
    where = f"weight {place[-1]}" if values.ndim == 1 else f"weight {place[1]} of row {place[0]}"
    return InvalidWeights(f"{where} is NaN: every weight must be a number, or an infinity")
