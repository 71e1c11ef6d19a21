"""Inputs for both sides of the trie measures: a real vocabulary, and weights of its tokens.

The module imports only numpy and the standard library, because programs without lmpool use it too (`benchmarks/peers`).
"""

from __future__ import annotations

import base64
import json
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

N_TOKENS = 131_072  # Number of tokens in the vocabulary.
N_ROWS = 64  # Number of distinct rows of weights.

_FILE = "tekken_240911.json"
_SPREAD = 3.0  # Standard deviation of the logits, similar to the logits of a language model.


class Inputs(NamedTuple):
    """A vocabulary, and rows of token weights.

    Attributes:
        tokens: V byte strings by token id.
        weights: float32 (N_ROWS, V); each row is a distribution, the softmax of normal numbers times 3.
    """

    tokens: list[bytes]
    weights: NDArray[np.float32]

    def batches(self, size: int) -> list[NDArray[np.float32]]:
        """Return the weights in batches of `size` rows; rows repeat if `size` exceeds N_ROWS."""
        rows = len(self.weights)
        wanted = np.arange(max(size, rows - rows % size)).reshape(-1, size) % rows
        return [self.weights[batch] for batch in wanted]


def write_inputs(folder: Path) -> Path:
    """Write the first 131,072 entries of Mistral's tekken vocabulary and random weights to a file for both sides.

    Raises:
        OSError: the package mistral-common is not installed, or lacks the file of the vocabulary.
    """
    spec = find_spec("mistral_common")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the package mistral-common, which has the vocabulary, is missing. Install it.")
    entries = json.loads((Path(spec.origin).parent / "data" / _FILE).read_text())["vocab"][:N_TOKENS]
    tokens = [base64.b64decode(entry["token_bytes"]) for entry in entries]
    logits = _SPREAD * np.random.default_rng(0).standard_normal((N_ROWS, len(tokens)), np.float32)
    masses = np.exp(logits)
    path = folder / "tekken.npz"
    np.savez(
        path,
        lengths=np.array([len(token) for token in tokens], np.uint32),
        data=np.frombuffer(b"".join(tokens), np.uint8),
        weights=masses / masses.sum(axis=1, keepdims=True),
    )
    return path


def read_inputs(path: str) -> Inputs:
    """Read the inputs that `write_inputs` wrote."""
    with np.load(path) as arrays:
        data, ends = arrays["data"].tobytes(), np.cumsum(arrays["lengths"]).tolist()
        weights = arrays["weights"]
    return Inputs([data[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)], weights)
