"""Divergences as their definitions say, in float64 over whole rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]


def log_softmax(logits: Any, temperature: float = 1.0) -> Doubles:
    scaled = np.asarray(logits, np.float64) / temperature
    scaled = scaled - scaled.max(axis=1, keepdims=True)
    logprobs: Doubles = scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))
    return logprobs


def kl(p: Doubles, q: Doubles) -> Doubles:
    """KL(p || q) of log-probabilities; a token without probability in p counts 0."""
    with np.errstate(invalid="ignore"):
        values: Doubles = np.where(p == -np.inf, 0.0, np.exp(p) * (p - q)).sum(axis=1)
    return values


def divergence(teacher: Any, student: Any, beta: float, temperature: float = 1.0) -> Doubles:
    p, q = log_softmax(teacher, temperature), log_softmax(student, temperature)
    if beta in (0, 1):
        return kl(p, q) if beta == 0 else kl(q, p)
    mixture = np.logaddexp(p + np.log(beta), q + np.log1p(-beta))
    return beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)
