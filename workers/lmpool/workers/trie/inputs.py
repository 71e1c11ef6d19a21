"""Fetching what trie jobs name: vocabularies, weights, rows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from lmpool.broker.line import RowLines, reply_timeout
from lmpool.broker.server import Server
from lmpool.broker.vocabulary_registry import MOST_BYTES, unpack_known
from lmpool.errors import InvalidWeights, LMPoolError, UnknownVocabulary
from lmpool.protocol.job import Failure
from lmpool.protocol.keys import Keys
from lmpool.protocol.query import TrieAsk
from lmpool.rows.cache import Row, Source, Sources
from lmpool.vocabulary import Vocabulary
from lmpool.workers.metrics.counters import Figures
from lmpool.workers.settings import WorkerSettings
from lmpool.workers.trie.cache import Shelved, TrieShelf, ValuesShelf
from lmpool.workers.trie.trie_inputs import TrieInputs


class Larder:
    """Brings what trie jobs need, and keeps what other jobs may need too.

    Args:
        server: the pool's Redis.
        keys: the deployment's key names.
        device: where kernels run.
        settings: say how much memory tries and computed values may take.
        figures: counts what is fetched.
    """

    def __init__(
        self, server: Server, keys: Keys, device: str, settings: WorkerSettings, figures: Figures | None = None
    ) -> None:
        self._keys = keys
        self._device = device
        self._tries = TrieShelf(settings.trie_mb * 2**20)
        # A link for each size: what others have stored as a row or as weights is not to be as large as a vocabulary.
        self._sources = Sources(server, keys, reply_timeout(settings.lease_s))
        self._vocabularies = RowLines(server, MOST_BYTES, reply_timeout(settings.lease_s))
        self._figures = figures or Figures()
        self._values = ValuesShelf(settings.trie_values_mb * 2**20)

    async def fill(
        self, asks: Mapping[bytes, TrieAsk], rows: Mapping[bytes, Row] | None = None, vocab_size: int | None = None
    ) -> tuple[dict[bytes, TrieInputs], dict[bytes, Failure]]:
        """Bring what jobs need.

        Args:
            asks: name of the answer -> ask.
            rows: digest of a prompt -> its row, of those that need not be fetched.
            vocab_size: V of the rows, when the asks are about rows of one model.

        Returns:
            name of the answer -> inputs, or the reason why it cannot be answered.

        Raises:
            ServerError: the server cannot be used.
        """
        known = rows or {}
        failures: dict[bytes, Failure] = {}
        inputs: dict[bytes, TrieInputs] = {}
        wanted: dict[bytes, Source] = {}
        tries = await self._find_tries({ask.vocabulary for ask in asks.values()})
        for name, ask in asks.items():
            trie = tries[ask.vocabulary]
            if isinstance(trie, Shelved) and vocab_size not in (None, len(trie.vocabulary)):
                text = f"rows of V = {vocab_size} for a vocabulary of {len(trie.vocabulary)} tokens"
                failures[name] = _failure(InvalidWeights(text))
            elif isinstance(trie, LMPoolError):
                failures[name] = _failure(trie)
            else:
                values = self._values.get((ask.op, ask.rows, ask.source, ask.vocabulary)) if ask.rows else None
                inputs[name] = TrieInputs(ask, trie, known.get(ask.source), values)
                if values is None and ask.source not in known:
                    wanted[name] = Source(ask.rows, ask.source, len(trie.vocabulary))
        found = await self._find_vectors(list(dict.fromkeys(wanted.values()))) if wanted else {}
        for name, source in wanted.items():
            vector = found[source]
            if isinstance(vector, LMPoolError):
                failures[name] = _failure(vector)
                del inputs[name]
            else:
                one = inputs[name]
                inputs[name] = TrieInputs(one.ask, one.trie, vector)
        return inputs, failures

    async def rows(self, fingerprint: str, prompts: Iterable[bytes], vocab_size: int) -> dict[bytes, Row | LMPoolError]:
        """Rows of a model from the cache: digest of the prompt -> row, or why there is none.

        Raises:
            ServerError: the server cannot be used.
        """
        found = await self._find_vectors([Source(fingerprint, prompt, vocab_size) for prompt in prompts])
        return {source.name: row for source, row in found.items()}

    async def _find_tries(self, digests: Iterable[str]) -> dict[str, Shelved | LMPoolError]:
        found: dict[str, Shelved | LMPoolError] = {}
        for digest in digests:
            trie = self._tries.get(digest)
            if trie is None:
                vocabulary = await self._fetch_vocabulary(digest)
                if isinstance(vocabulary, LMPoolError):
                    found[digest] = vocabulary
                    continue
                # Another fill may have brought it meanwhile.
                trie = self._tries.get(digest) or Shelved(vocabulary, self._device, self._values)
                self._tries.put(digest, trie)
            found[digest] = trie
        return found

    async def _fetch_vocabulary(self, digest: str) -> Vocabulary | LMPoolError:
        key = self._keys.vocabulary(digest)
        ((line, _),) = await self._vocabularies.of([key])
        # Not GET: a value that is too large would end the connection.
        (data,) = await line.get_ranges([key], [MOST_BYTES])
        packed = bytes(data) if isinstance(data, (bytes, np.ndarray)) else b""
        try:
            # In a thread, for a large one takes long.
            return await asyncio.to_thread(unpack_known, packed, digest)
        except UnknownVocabulary as error:
            return error

    async def _find_vectors(self, sources: Sequence[Source]) -> dict[Source, Row | LMPoolError]:
        """Weights and rows by name, or why they cannot be used."""
        found, size = await self._sources.get_many(sources)
        self._figures.fetched_bytes += size
        return found

    def close(self) -> None:
        """Close the connections."""
        self._sources.close()
        self._vocabularies.close()


def _failure(error: LMPoolError) -> Failure:
    return Failure(type(error).__name__, str(error))
