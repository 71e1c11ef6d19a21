"""What a trie job works on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmpool.protocol.query import TrieAsk
from lmpool.workers.backend.contract import BackendJob
from lmpool.workers.trie.cache import Shelved

Values = NDArray[np.float32]


class TrieInputs(NamedTuple):
    """One trie job with all that it needs.

    Attributes:
        ask: what is wanted.
        trie: the trie, built when it is first used.
        vector: float32 (V,): the weights, or the row that the ask names; None when `values` is there.
        values: float32 (M + V,): the values of that row, when they have been computed before.
    """

    ask: TrieAsk
    trie: Shelved
    vector: Values | None
    values: Values | None = None


def inputs_of(job: BackendJob) -> TrieInputs:
    """What a trie job comes with."""
    assert isinstance(job.payload, TrieInputs)
    return job.payload
