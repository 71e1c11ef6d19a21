"""Computes results from a row: the largest entries, samples, and masses of sets of tokens."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import NoProbability
from lmpool.protocol.row import Row

_FEW, _FEW_MORE = 1024, 4  # Number of largest weights tried first for `top_p`; factor of the number in each next try.
_BLOCK = 256  # Weights per block: to draw a token, first blocks are summed, and then one block is searched.


class TopK(NamedTuple):
    """The largest entries of one row, or of several rows.

    Attributes:
        values: float32 log-probabilities of shape (k,) or (n, k), largest first; equal values in order of their ids.
        ids: int64 token ids of the values, in the same shape.
    """

    values: NDArray[np.float32]
    ids: NDArray[np.int64]


class Sampling(NamedTuple):
    """The parameters of the draw of one token."""

    temperature: float  # Divides the log-probabilities; 0 takes the most likely token.
    top_p: float  # Draws among the most likely tokens: the fewest whose probabilities sum to at least `top_p`.
    seed: int  # 0 to `MAX_SEED`; equal seeds draw equal tokens from equal rows.


class _Drawing(Protocol):
    """A `Sampling`, or a query with the same fields."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def seed(self) -> int: ...


def top(row: Row, k: int, allowed: NDArray[np.int64] | None = None) -> TopK:
    """The `k` largest entries of a row of shape (V,), only of the tokens `allowed` (ascending ids) if given."""
    values = row if allowed is None else row[allowed]
    ids = _largest(values, k)
    return TopK(values[ids], ids if allowed is None else allowed[ids])


def kept(row: Row, temperature: float, top_p: float) -> tuple[NDArray[np.int64] | None, NDArray[np.float32]]:
    """The tokens of a row of shape (V,) that `sample` draws from. At least one entry must be above -inf.

    Returns the ids, (m,), largest weight first, equal weights in the order of their ids, or None for the whole row; and
    the weights, (m,), which are proportional to the probabilities of being drawn. The largest weight is 1.
    """
    if temperature == 0:
        return np.array([row.argmax()]), np.ones(1, np.float32)
    # Subtract the largest entry first: otherwise exp of all entries could be 0 at a small temperature.
    weights = row - np.maximum.reduce(row)
    if temperature != 1:
        with np.errstate(over="ignore"):  # A tiny temperature overflows all but the largest entry to -inf.
            # A temperature beyond these bounds gives the same result as the bound, which float32 can represent.
            weights /= np.float32(min(max(temperature, 1e-30), 1e30))
    np.exp(weights, out=weights)  # float32 is as exact as the row; sums of weights use float64.
    if top_p == 1:
        return None, weights
    # Keep the fewest tokens whose weights sum to at least `top_p` of the total.
    wanted, few = top_p * weights.sum(dtype=np.float64), _FEW
    while True:
        ids = _largest(weights, min(few, len(weights)))
        mass = np.cumsum(weights[ids], dtype=np.float64)
        if mass[-1] >= wanted or few >= len(weights):
            ids = ids[: int(np.searchsorted(mass, wanted)) + 1]
            return ids, weights[ids]
        few *= _FEW_MORE


def sample(row: Row, how: _Drawing, allowed: NDArray[np.int64] | None = None) -> int:
    """A token drawn from a row of shape (V,), only from the tokens `allowed` (ascending ids) if given.

    Raises `NoProbability` if all allowed tokens have probability 0.
    """
    if allowed is not None:
        values = row[allowed]
        if values.max() == -np.inf:
            raise NoProbability(f"none of the {len(allowed)} allowed tokens has a probability above 0")
        return int(allowed[sample(values, how)])
    if how.temperature == 0:  # `argmax` is faster than `kept`, with the same result.
        return int(row.argmax())
    ids, weights = kept(row, how.temperature, how.top_p)
    # Hash the seed to a number in [0, 1): a generator of numpy takes ten times as long.
    drawn = hashlib.blake2b(how.seed.to_bytes(8, "little"), digest_size=8).digest()
    share = (int.from_bytes(drawn, "little") >> 11) * 2.0**-53
    # Find the first token at which the cumulative weight exceeds `share` of the total. Sum blocks first: a
    # cumulative sum over a large vocabulary takes four times as long.
    sums = np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK), dtype=np.float64)
    mass = sums.cumsum()
    wanted = share * mass[-1]
    block = _first_above(mass, wanted, sums)
    part = weights[block * _BLOCK : (block + 1) * _BLOCK]
    rest = wanted - mass[block - 1] if block else wanted
    place = block * _BLOCK + _first_above(part.cumsum(dtype=np.float64), rest, part)
    return place if ids is None else int(ids[place])


def _first_above(mass: NDArray[np.float64], wanted: float, weights: NDArray[np.floating]) -> int:
    """The first index at which `mass`, the cumulative sum of the weights, is above `wanted`."""
    place = int(mass.searchsorted(wanted, side="right"))
    # Rounding can make `wanted` equal to the whole sum: then take the last token with a weight above 0.
    return place if place < len(mass) else int(np.flatnonzero(weights)[-1])


def mass_of(row: Row, ids: NDArray[np.int64]) -> np.float32:
    """The logarithm of the sum of the probabilities of the tokens `ids`; -inf if the sum is 0."""
    values = row[ids]
    if (most := values.max()) == -np.inf:
        return np.float32(most)
    return np.float32(most + np.log(np.exp(values - most).sum(dtype=np.float64)))


def logsumexp(logits: Row) -> Row:
    """The log-sum-exp of each row of logits (n, V): float32 (n,)."""
    highest = logits.max(axis=1, keepdims=True)
    highest = np.where(np.isneginf(highest), 0, highest)  # A row of -inf has the sum 0.
    with np.errstate(divide="ignore"):
        sums = np.log(np.exp(logits - highest).sum(axis=1, dtype=np.float64))
    return np.asarray(highest[:, 0] + sums, np.float32)


def tempered(rows: Row, temperature: float) -> Row:
    """The log-probabilities (n, V) of logits divided by a temperature; for 1, `rows`, which are log-probabilities."""
    if temperature == 1:
        return rows
    # Subtract the largest entry first: float32 has too few digits for the sum of the quotients of a small temperature.
    rows = (rows - rows.max(axis=1, keepdims=True)) / np.float32(temperature)
    rows -= logsumexp(rows)[:, None]
    return rows


def _largest(values: NDArray[Any], k: int) -> NDArray[np.int64]:
    """The ids of the `k` largest values, largest first; equal values in the order of their ids."""
    least = np.partition(values, len(values) - k)[len(values) - k]
    above = np.flatnonzero(values > least)
    # Of the values equal to the smallest chosen value, choose the lowest ids, which `partition` does not ensure.
    ids = np.concatenate((above, np.flatnonzero(values == least)[: k - len(above)]))
    ordered: NDArray[np.int64] = ids[np.lexsort((ids, -values[ids]))]
    return ordered
