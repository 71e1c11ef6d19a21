"""What trie jobs name: tries, weights and rows, fetched, and kept by bytes."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from lmpool.broker.connection import reply_timeout
from lmpool.broker.registries import MOST_BYTES, unpack_known
from lmpool.broker.server import Server
from lmpool.errors import InvalidWeights, LMPoolError, UnknownVocabulary
from lmpool.protocol.job import Failure
from lmpool.protocol.keys import Keys
from lmpool.protocol.query import TrieQuery
from lmpool.rows.cache import Row, Source, Sources
from lmpool.rows.connection import RowConnections
from lmpool.trie.kernels import Kernels, open_kernels
from lmpool.trie.kernels.plan import most_bytes
from lmpool.trie.trie import Trie
from lmpool.vocabulary import Vocabulary
from lmpool.workers.backend.contract import BackendJob
from lmpool.workers.metrics.counters import Counters
from lmpool.workers.settings import WorkerSettings

Values = NDArray[np.float32]


class TrieInput(NamedTuple):
    """One trie job with all that it needs.

    Attributes:
        query: what is wanted.
        trie: the trie, built when it is first used.
        vector: float32 (V,): the weights, or the row that the ask names; None when `values` is there.
        values: float32 (M + V,): the values of that row, when they have been computed before.
    """

    query: TrieQuery
    trie: Shelved
    vector: Values | None
    values: Values | None = None


def inputs_of(job: BackendJob) -> TrieInput:
    """What a trie job comes with."""
    assert isinstance(job.payload, TrieInput)
    return job.payload


class Sized(Protocol):
    """Something that takes memory."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes; does not change."""
        ...


_BYTES_A_NODE = 25
_BYTES_A_TOKEN = 16

K = TypeVar("K", bound=Hashable)
T = TypeVar("T", bound=Sized)


class ByteLRU(Generic[K, T]):
    """Things by name, least recently used out first; used by the event loop and by the backend's thread.

    Args:
        limit: bytes that they may take together; the newest stays whatever it takes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._things: OrderedDict[K, T] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def get(self, name: K) -> T | None:
        """The thing, or None; what is found is the last to go."""
        with self._lock:
            found = self._things.get(name)
            if found is not None:
                self._things.move_to_end(name)
            return found

    def put(self, name: K, thing: T) -> None:
        """Keep a thing, and drop the oldest as long as the limit asks for it."""
        with self._lock:
            old = self._things.pop(name, None)
            self._size += thing.nbytes - (old.nbytes if old is not None else 0)
            self._things[name] = thing
            while self._size > self._limit and len(self._things) > 1:
                self._size -= self._things.popitem(last=False)[1].nbytes


ValuesCache = ByteLRU[tuple[str, str, bytes, str], NDArray[np.float32]]
"""(op, fingerprint of the model, digest of the prompt, digest of the vocabulary) -> [M inner values | V weights]."""


class Shelved:
    """A vocabulary, and its trie once somebody has used it.

    Args:
        vocabulary: the byte strings.
        device: where its kernels run.
        values: where computed values of rows are kept.

    Attributes:
        nbytes: what it takes at most once the trie is built and its kernels have run: a node for every byte.
    """

    def __init__(self, vocabulary: Vocabulary, device: str, values: ValuesCache) -> None:
        self.vocabulary = vocabulary
        self.values = values
        self.nbytes = (
            vocabulary.nbytes * (1 + _BYTES_A_NODE) + len(vocabulary) * _BYTES_A_TOKEN + most_bytes(vocabulary, device)
        )
        self._device = device
        self._opened: tuple[Trie, Kernels] | None = None
        self._lock = threading.Lock()

    def open(self) -> tuple[Trie, Kernels]:
        """The trie and its kernels; takes some tenths of a second the first time."""
        with self._lock:
            if self._opened is None:
                trie = Trie(self.vocabulary)
                self._opened = trie, open_kernels(trie, self._device)
            return self._opened


TrieCache = ByteLRU[str, Shelved]


class TrieInputs:
    """Brings what trie jobs need, and keeps what other jobs may need too.

    Args:
        server: the pool's Redis.
        keys: the deployment's key names.
        device: where kernels run.
        settings: say how much memory tries and computed values may take.
        counters: counts what is fetched.
    """

    def __init__(
        self, server: Server, keys: Keys, device: str, settings: WorkerSettings, counters: Counters | None = None
    ) -> None:
        self._keys = keys
        self._device = device
        self._tries = TrieCache(settings.trie_mb * 2**20)
        # A link for each size: what others have stored as a row or as weights is not to be as large as a vocabulary.
        self._sources = Sources(server, keys, reply_timeout(settings.lease_s))
        self._vocabularies = RowConnections(server, MOST_BYTES, reply_timeout(settings.lease_s))
        self._counters = counters or Counters()
        self._values = ValuesCache(settings.trie_values_mb * 2**20)

    async def fill(
        self, asks: Mapping[bytes, TrieQuery], rows: Mapping[bytes, Row] | None = None, vocab_size: int | None = None
    ) -> tuple[dict[bytes, TrieInput], dict[bytes, Failure]]:
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
        inputs: dict[bytes, TrieInput] = {}
        wanted: dict[bytes, Source] = {}
        tries = await self._find_tries({query.vocabulary for query in asks.values()})
        for name, query in asks.items():
            trie = tries[query.vocabulary]
            if isinstance(trie, Shelved) and vocab_size not in (None, len(trie.vocabulary)):
                text = f"rows of V = {vocab_size} for a vocabulary of {len(trie.vocabulary)} tokens"
                failures[name] = _failure(InvalidWeights(text))
            elif isinstance(trie, LMPoolError):
                failures[name] = _failure(trie)
            else:
                values = (
                    self._values.get((query.op, query.rows, query.source, query.vocabulary)) if query.rows else None
                )
                inputs[name] = TrieInput(query, trie, known.get(query.source), values)
                if values is None and query.source not in known:
                    wanted[name] = Source(query.rows, query.source, len(trie.vocabulary))
        found = await self._find_vectors(list(dict.fromkeys(wanted.values()))) if wanted else {}
        for name, source in wanted.items():
            vector = found[source]
            if isinstance(vector, LMPoolError):
                failures[name] = _failure(vector)
                del inputs[name]
            else:
                one = inputs[name]
                inputs[name] = TrieInput(one.query, one.trie, vector)
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
        self._counters.fetched_bytes += size
        return found

    def close(self) -> None:
        """Close the connections."""
        self._sources.close()
        self._vocabularies.close()


def _failure(error: LMPoolError) -> Failure:
    return Failure(type(error).__name__, str(error))
