"""How much memory the kernels of a trie take at most, told from its vocabulary: before the trie is built."""

from __future__ import annotations

from lmpool.trie.kernels.cores import count_threads
from lmpool.vocabulary import Vocabulary

WIDEST = 8
"""Rows that go through the loops of the CPU kernels side by side, at most."""


def most_bytes(vocabulary: Vocabulary, device: str) -> int:
    """What `Kernels.nbytes` grows to at most.

    Args:
        vocabulary: of the trie.
        device: as `lmpool.trie.kernels.open_kernels` takes it.
    """
    tokens, nodes = len(vocabulary), len(vocabulary.data) + 1
    # Each inner node parts tokens from one another or from itself: there are no more of them than tokens.
    inner = tokens
    if device != "cpu":
        blocks = 2 * tokens.bit_length() * inner
        return 8 * (tokens + inner + 1 + nodes) + 16 * blocks
    plan = 4 * (2 * tokens + 3 * inner + 1 + nodes)
    places = min(int(vocabulary.lengths.max()), inner) + 2
    a_lane = 4 * tokens + (4 + 8) * (inner + tokens) + 8 * places
    return plan + count_threads() * WIDEST * a_lane
