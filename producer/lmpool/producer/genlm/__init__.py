"""Tries with the names, the node numbers and the results of genlm-backend's, on lmpool's trie and kernels.

They compute in the calling process and need `lmpool[trie]`. genlm-control's samplers take them in place of those:

    from lmpool.producer.genlm import AsyncTokenCharacterTrie, ParallelTokenCharacterTrie

    trie = AsyncTokenCharacterTrie(ParallelTokenCharacterTrie(llm.byte_vocab))
    masses = await trie.weight_sum(weights)
    masses[trie.trie.root]
"""

from lmpool.producer.genlm.asynchronous import AsyncTokenCharacterTrie
from lmpool.producer.genlm.token import Token
from lmpool.producer.genlm.tries import ParallelTokenCharacterTrie, TokenCharacterTrie

__all__ = ["AsyncTokenCharacterTrie", "ParallelTokenCharacterTrie", "Token", "TokenCharacterTrie"]
