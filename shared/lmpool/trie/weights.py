"""Weights of a vocabulary's tokens: checked once, where they come in; and how they travel to trie workers."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import InvalidWeights
from lmpool.protocol.prompt import DIGEST_SIZE
from lmpool.settings import shown

SECRET_SIZE = 16
"""Bytes of the secret that is stored before the encoding of weights."""

_MOST_SHOWN = 120


@dataclass(frozen=True, slots=True)
class SentWeights:
    """The weights of one trie job, stored where any client of the pool may write and only trie workers may read.

    Jobs can be read by every client, so every client knows the name. Since it is the digest of a secret that is stored
    with the weights, trie workers see whether somebody else has written there.

    Attributes:
        values: float32 (V,), C-contiguous.
        secret: random bytes, used once.
    """

    values: NDArray[np.float32]
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET_SIZE))

    @property
    def name(self) -> bytes:
        """The name under which they are stored, and by which the job names them."""
        return name_of(self.secret)


def name_of(secret: bytes) -> bytes:
    """The name of weights that are stored with a secret: its 128-bit BLAKE2b."""
    return hashlib.blake2b(secret, digest_size=DIGEST_SIZE).digest()


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
