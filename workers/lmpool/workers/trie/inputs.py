"""What trie queries name: tries, weights and rows, fetched from the server and kept in caches bounded by bytes."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from lmpool.broker.connection import reply_timeout
from lmpool.broker.registries import MAX_BYTES, unpack_known
from lmpool.broker.server import Server
from lmpool.errors import InvalidWeights, LMPoolError, UnknownVocabulary
from lmpool.protocol.job import Failure
from lmpool.protocol.keys import Keys
from lmpool.protocol.query import TrieQuery
from lmpool.protocol.row import Row, Values
from lmpool.rows.cache import Source, Sources
from lmpool.rows.connection import RowConnections
from lmpool.rows.shared_memory import SegmentReader
from lmpool.trie.kernels import Kernels, open_kernels
from lmpool.trie.kernels.plan import most_bytes
from lmpool.trie.trie import Trie
from lmpool.vocabulary import Vocabulary
from lmpool.workers.execution.contract import BackendJob
from lmpool.workers.metrics.counters import WorkerCounters
from lmpool.workers.settings import WorkerSettings

K = TypeVar("K", bound=Hashable)
T = TypeVar("T", bound="SupportsNbytes")

_BYTES_A_NODE = 25
_BYTES_A_TOKEN = 16


class SupportsNbytes(Protocol):
    """What takes memory."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes; does not change."""
        ...


class ByteLRU(Generic[K, T]):
    """A cache of values that drops the least recently used; for the event loop and the backend's thread.

    Args:
        limit: bytes that the values may take together; the newest stays whatever it takes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: OrderedDict[K, T] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def get(self, key: K) -> T | None:
        """The value, or None; one that is read is the last to go."""
        with self._lock:
            value = self._values.get(key)
            if value is not None:
                self._values.move_to_end(key)
            return value

    def put(self, key: K, value: T) -> None:
        """Keep a value, and drop the oldest ones as long as the limit asks for it."""
        with self._lock:
            old = self._values.pop(key, None)
            self._size += value.nbytes - (old.nbytes if old is not None else 0)
            self._values[key] = value
            while self._size > self._limit and len(self._values) > 1:
                self._size -= self._values.popitem(last=False)[1].nbytes


ValuesCache = ByteLRU[tuple[str, str, bytes, str], Values]
"""(op, fingerprint of the model, digest of the prompt, digest of the vocabulary) -> [M inner values | V weights]."""


class LazyTrie:
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


class TrieInput(NamedTuple):
    """One trie query with all that its answer needs.

    Attributes:
        query: what is wanted.
        trie: the trie, built when it is first used.
        vector: float32 (V,): the weights, or the row that the query names; None when `values` is there.
        values: float32 (M + V,): the values of that row, when they have been computed before.
    """

    query: TrieQuery
    trie: LazyTrie
    vector: Values | None
    values: Values | None = None


def input_of(job: BackendJob) -> TrieInput:
    """What a trie job comes with."""
    assert isinstance(job.payload, TrieInput)
    return job.payload


class TrieInputs:
    """Brings what trie jobs need, and keeps what other jobs may need too.

    Args:
        server: the pool's Redis.
        keys: the deployment's key names.
        device: where kernels run.
        settings: say how much memory tries and computed values may take.
        segments: reads rows in shared memory.
        counters: counts what is fetched.
    """

    def __init__(
        self,
        server: Server,
        keys: Keys,
        device: str,
        settings: WorkerSettings,
        segments: SegmentReader,
        counters: WorkerCounters | None = None,
    ) -> None:
        self._keys = keys
        self._device = device
        self._tries = ByteLRU[str, LazyTrie](settings.trie_mb * 2**20)
        # Apart from the vocabularies: what is stored as a row or as weights may not be as large as these.
        self._sources = Sources(server, keys, reply_timeout(settings.lease_s), segments)
        self._vocabularies = RowConnections(server, MAX_BYTES, reply_timeout(settings.lease_s))
        self._counters = counters or WorkerCounters()
        self._values = ValuesCache(settings.trie_values_mb * 2**20)

    async def fill(
        self, queries: Mapping[bytes, TrieQuery], rows: Mapping[bytes, Row] | None = None, vocab_size: int | None = None
    ) -> tuple[dict[bytes, TrieInput], dict[bytes, Failure]]:
        """Bring what trie queries need.

        Args:
            queries: digest of the answer -> query.
            rows: digest of a prompt -> its row, float32 (V,), of those that need not be fetched.
            vocab_size: V of the rows, when the queries are about rows of one model.

        Returns:
            digest of the answer -> inputs, and digest -> the reason why there is no answer.

        Raises:
            ServerError: the server cannot be used.
        """
        known = rows or {}
        failures: dict[bytes, Failure] = {}
        inputs: dict[bytes, TrieInput] = {}
        sources: dict[bytes, Source] = {}
        tries = await self._get_tries({query.vocabulary for query in queries.values()})
        for digest, query in queries.items():
            trie = tries[query.vocabulary]
            if isinstance(trie, LazyTrie) and vocab_size not in (None, len(trie.vocabulary)):
                text = f"rows of V = {vocab_size} for a vocabulary of {len(trie.vocabulary)} tokens"
                failures[digest] = _failure(InvalidWeights(text))
            elif isinstance(trie, LMPoolError):
                failures[digest] = _failure(trie)
            else:
                key = (query.op, query.rows, query.source, query.vocabulary)
                values = self._values.get(key) if query.rows else None
                inputs[digest] = TrieInput(query, trie, known.get(query.source), values)
                if values is None and query.source not in known:
                    sources[digest] = Source(query.rows, query.source, len(trie.vocabulary))
        vectors = await self._get_vectors(list(dict.fromkeys(sources.values()))) if sources else {}
        for digest, source in sources.items():
            vector = vectors[source]
            if isinstance(vector, LMPoolError):
                failures[digest] = _failure(vector)
                del inputs[digest]
            else:
                inputs[digest] = inputs[digest]._replace(vector=vector)
        return inputs, failures

    async def rows(self, fingerprint: str, prompts: Iterable[bytes], vocab_size: int) -> dict[bytes, Row | LMPoolError]:
        """Rows of a model from the cache: digest of the prompt -> row, or why there is none.

        Raises:
            ServerError: the server cannot be used.
        """
        rows = await self._get_vectors([Source(fingerprint, prompt, vocab_size) for prompt in prompts])
        return {source.name: row for source, row in rows.items()}

    async def _get_tries(self, digests: Iterable[str]) -> dict[str, LazyTrie | LMPoolError]:
        """Digest of the vocabulary -> its trie, or why there is none."""
        tries: dict[str, LazyTrie | LMPoolError] = {}
        for digest in digests:
            trie = self._tries.get(digest)
            if trie is None:
                vocabulary = await self._fetch_vocabulary(digest)
                if isinstance(vocabulary, LMPoolError):
                    tries[digest] = vocabulary
                    continue
                # Another fill may have brought it meanwhile.
                trie = self._tries.get(digest) or LazyTrie(vocabulary, self._device, self._values)
                self._tries.put(digest, trie)
            tries[digest] = trie
        return tries

    async def _fetch_vocabulary(self, digest: str) -> Vocabulary | LMPoolError:
        key = self._keys.vocabulary(digest)
        ((connection, _),) = await self._vocabularies.of([key])
        # Not GET: a value that is too large would end the connection.
        (data,) = await connection.get_ranges([key], [MAX_BYTES])
        packed = bytes(data) if isinstance(data, (bytes, np.ndarray)) else b""
        try:
            # In a thread, for a large one takes long.
            return await asyncio.to_thread(unpack_known, packed, digest)
        except UnknownVocabulary as error:
            return error

    async def _get_vectors(self, sources: Sequence[Source]) -> dict[Source, Row | LMPoolError]:
        """Weights and rows by name, or why they cannot be used."""
        vectors, size = await self._sources.get_many(sources)
        self._counters.fetched_bytes += size
        return vectors

    def close(self) -> None:
        """Close the connections."""
        self._sources.close()
        self._vocabularies.close()


def _failure(error: LMPoolError) -> Failure:
    return Failure(type(error).__name__, str(error))
