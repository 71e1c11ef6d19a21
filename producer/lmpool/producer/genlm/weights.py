"""Weights as callers hold them, made into checked arrays of numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import InvalidWeights
from lmpool.settings import shown
from lmpool.trie.weights import nan_found


def as_rows(batch: Any, n_items: int) -> NDArray[Any]:
    """Read a batch of weight vectors.

    Args:
        batch: a 2-D array or tensor, or any iterable of 1-D arrays, tensors and lists of real numbers.
        n_items: the length that every vector must have.

    Returns:
        an array of shape (B, n_items) of integers or floats.

    Raises:
        InvalidWeights: a vector has another length, or something that is no number in it.
    """
    if hasattr(batch, "ndim") and batch.ndim == 2:
        rows = _host(batch)
    elif isinstance(batch, Iterable):
        vectors = [as_vector(vector, n_items) for vector in batch]
        rows = np.stack(vectors) if vectors else np.empty((0, n_items), np.float32)
    else:
        raise InvalidWeights(f"the weights are {shown(batch, 120)}: a batch is a list of vectors or a 2-D array")
    return _checked(rows, n_items)


def as_vector(weights: Any, n_items: int) -> NDArray[Any]:
    """Read one weight vector: shape (n_items,), integers or floats.

    Raises:
        InvalidWeights: as `as_rows`.
    """
    vector = _host(weights)
    if vector.ndim != 1:
        raise InvalidWeights(f"the weights have shape {vector.shape}: one vector has shape ({n_items},)")
    _checked(vector[None], n_items)
    return vector


def _checked(rows: NDArray[Any], n_items: int) -> NDArray[Any]:
    if rows.shape[1] != n_items:
        raise InvalidWeights(f"{rows.shape[1]} weights for a vocabulary of {n_items} items: give one for each")
    if rows.dtype.kind not in "fiub":
        raise InvalidWeights(f"the weights' dtype is {rows.dtype}: they must be real numbers")
    # The minimum is NaN when any of them is, and needs no second array.
    if rows.size and np.isnan(rows.min()):
        raise nan_found(rows)
    return rows


def _host(weights: Any) -> NDArray[Any]:
    """A numpy array; tensors are known by what they can do, for torch may not be installed."""
    if hasattr(weights, "detach") and hasattr(weights, "cpu"):
        weights = weights.detach().cpu()
        if "bfloat16" in str(weights.dtype):
            weights = weights.float()
        return np.asarray(weights.numpy())
    try:
        return np.asarray(weights)
    except (TypeError, ValueError) as error:
        raise InvalidWeights(f"the weights are {shown(weights, 120)}: {error}") from error
