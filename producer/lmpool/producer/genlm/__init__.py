"""Replacements for genlm-backend's classes: a language model whose rows come from a pool, and tries on fast kernels.

The model needs `lmpool[genlm]` and works in programs of genlm-control, genlm-bytes and llamppl:

    from lmpool.producer.genlm import PooledLM

    llm = PooledLM.from_name("smollm2")  # instead of genlm.backend.load_model_by_name(...)

The tries have the names, the node numbers and the results of genlm-backend's tries. The tries compute in the calling
process and need `lmpool[trie]`. Pass such a trie wherever a program expects a trie of genlm-backend:

    from lmpool.producer.genlm import AsyncTokenCharacterTrie, ParallelTokenCharacterTrie

    trie = AsyncTokenCharacterTrie(ParallelTokenCharacterTrie(llm.byte_vocab))
    masses = await trie.weight_sum(weights)
    masses[trie.trie.root]
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lmpool.producer.genlm.numbering import Token
from lmpool.producer.genlm.tries import AsyncTokenCharacterTrie, ParallelTokenCharacterTrie, TokenCharacterTrie

if TYPE_CHECKING:
    from lmpool.producer.genlm.language_model import PooledLM, UnknownLora, load_model_by_name

__all__ = [
    "AsyncTokenCharacterTrie",
    "ParallelTokenCharacterTrie",
    "PooledLM",
    "Token",
    "TokenCharacterTrie",
    "UnknownLora",
    "load_model_by_name",
]


def __getattr__(name: str) -> Any:
    """Import the language model at its first use: it needs torch and genlm-backend; tries need these only to draw."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("lmpool.producer.genlm.language_model"), name)
