"""Inputs of trie queries: tries, weights and rows, fetched from the server and cached within limits of bytes."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from lmpool.broker.connection import reply_timeout
from lmpool.broker.registries import MAX_BYTES, unpack_known
from lmpool.broker.server import Server
from lmpool.errors import (
    CorruptRow,
    InvalidWeights,
    LMPoolError,
    ProtocolError,
    ServerError,
    SourceMissing,
    UnknownVocabulary,
)
from lmpool.protocol.job import Failure
from lmpool.protocol.keys import Keys
from lmpool.protocol.query import SECRET_SIZE, TrieQuery, weights_name
from lmpool.protocol.row import Encoding, Row, Values, check_row, decode_row, encoded_size
from lmpool.rows.cache import RowConnection, RowConnections, cut_chunks
from lmpool.rows.shared_memory import SegmentReader, is_reference, unpack_reference
from lmpool.trie.kernels import Kernels, open_kernels
from lmpool.trie.plan import max_kernel_bytes
from lmpool.trie.trie import Trie
from lmpool.vocabulary import Vocabulary
from lmpool.workers.execution.contract import BackendJob
from lmpool.workers.metrics.counters import WorkerCounters
from lmpool.workers.settings import WorkerSettings

K = TypeVar("K", bound=Hashable)
T = TypeVar("T", bound="SupportsNbytes")

_BYTES_A_NODE = 25  # Of a trie's arrays; a trie has at most one node for each byte of its vocabulary.
_BYTES_A_TOKEN = 16  # Of a trie's arrays.


class SupportsNbytes(Protocol):
    """An object that knows its size."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory; constant."""
        ...


class ByteLRU(Generic[K, T]):
    """A thread-safe cache that evicts the least recently used values.

    Args:
        limit: max bytes of all values together; the newest value stays whatever its size.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: OrderedDict[K, T] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def get(self, key: K) -> T | None:
        """The value, which becomes the most recently used one."""
        with self._lock:
            value = self._values.get(key)
            if value is not None:
                self._values.move_to_end(key)
            return value

    def put(self, key: K, value: T) -> None:
        """Store a value."""
        with self._lock:
            old = self._values.pop(key, None)
            self._size += value.nbytes - (old.nbytes if old is not None else 0)
            self._values[key] = value
            while self._size > self._limit and len(self._values) > 1:
                self._size -= self._values.popitem(last=False)[1].nbytes


ValuesCache = ByteLRU[tuple[str, str, bytes, str], Values]
"""(op, fingerprint of the model, digest of the prompt, digest of the vocabulary) -> [M inner values | V weights]."""


class LazyTrie:
    """A vocabulary whose trie is built at its first use.

    Args:
        vocabulary: the byte strings.
        device: the device of its kernels.
        values: the cache of computed values.

    Attributes:
        nbytes: max bytes of the vocabulary, its trie and its kernels.
    """

    def __init__(self, vocabulary: Vocabulary, device: str, values: ValuesCache) -> None:
        self.vocabulary = vocabulary
        self.values = values
        trie_bytes = vocabulary.nbytes * _BYTES_A_NODE + len(vocabulary) * _BYTES_A_TOKEN
        self.nbytes = vocabulary.nbytes + trie_bytes + max_kernel_bytes(vocabulary, device)
        self._device = device
        self._opened: tuple[Trie, Kernels] | None = None
        self._lock = threading.Lock()

    def open(self) -> tuple[Trie, Kernels]:
        """The trie and its kernels; the first call takes some tenths of a second."""
        with self._lock:
            if self._opened is None:
                trie = Trie(self.vocabulary)
                self._opened = trie, open_kernels(trie, self._device)
            return self._opened


class TrieInput(NamedTuple):
    """A trie query with its inputs.

    Attributes:
        query: the query.
        trie: the trie.
        vector: float32 (V,): the weights, or the row that the query names; None when `values` is known.
        values: float32 (M + V,): cached values of that row, or None.
    """

    query: TrieQuery
    trie: LazyTrie
    vector: Values | None
    values: Values | None = None


def input_of(job: BackendJob) -> TrieInput:
    """The input of a trie job."""
    assert isinstance(job.payload, TrieInput)
    return job.payload


class _Source(NamedTuple):
    """A row or weights that a trie job names.

    Attributes:
        fingerprint: the model of the row; "" for weights.
        name: digest of the prompt, or name of the weights.
        length: number of entries that it must have.
    """

    fingerprint: str
    name: bytes
    length: int

    @property
    def max_bytes(self) -> int:
        """Bytes to read: one more than it can have, so that a value that is too long is noticed."""
        return SECRET_SIZE + encoded_size(self.length, Encoding.F32) + 1

    def decode(self, value: Any) -> Row | LMPoolError:
        """Read the stored value; an error is a value here."""
        kind, verb = ("row of prompt", "is") if self.fingerprint else ("weights", "are")
        label = f"the {kind} {self.name.hex()}"
        if isinstance(value, bytes):
            value = np.frombuffer(value, np.uint8)
        if not isinstance(value, np.ndarray):
            return SourceMissing(f"{label} {verb} not in the cache")
        try:
            if self.fingerprint:
                return check_row(decode_row(value, self.length))
            if weights_name(value[:SECRET_SIZE].tobytes()) != self.name:
                return SourceMissing(f"{label} are not in the cache: another client has overwritten them")
            return decode_row(value[SECRET_SIZE:], self.length)
        except ProtocolError as error:
            return CorruptRow(f"{label}: {error}")


class TrieInputs:
    """Fetches the inputs of trie jobs, and caches the ones that other jobs may need too.

    Args:
        server: the pool's Redis.
        keys: the deployment's key names.
        device: the device of the kernels.
        settings: limits of the memory of tries and of computed values.
        segments: reads rows in shared memory.
        counters: counts fetched bytes.
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
        self._segments = segments
        self._tries = ByteLRU[str, LazyTrie](settings.trie_mb * 2**20)
        # A source that this worker may not read must not keep it from the sources of other jobs.
        apart = ServerError, ProtocolError
        self._connections = RowConnections(server, reply_timeout(settings.lease_s), apart)
        self._counters = counters or WorkerCounters()
        self._values = ValuesCache(settings.trie_values_mb * 2**20)

    async def fill(
        self, queries: Mapping[bytes, TrieQuery], rows: Mapping[bytes, Row] | None = None, vocab_size: int | None = None
    ) -> tuple[dict[bytes, TrieInput], dict[bytes, Failure]]:
        """Fetch the inputs of trie queries.

        Args:
            queries: digest of the answer -> query.
            rows: digest of a prompt -> its row, float32 (V,), for rows that need not be fetched.
            vocab_size: V of the rows, when all queries are about rows of one model.

        Returns:
            digest of the answer -> inputs, and digest -> the reason for no answer.

        Raises:
            ServerError: the server cannot be used.
        """
        known = rows or {}
        failures: dict[bytes, Failure] = {}
        inputs: dict[bytes, TrieInput] = {}
        sources: dict[bytes, _Source] = {}
        tries = await self._get_tries({query.vocabulary for query in queries.values()})
        for digest, query in queries.items():
            trie = tries[query.vocabulary]
            if isinstance(trie, LMPoolError):
                failures[digest] = _failure(trie)
            elif vocab_size not in (None, len(trie.vocabulary)):
                text = f"rows of V = {vocab_size} for a vocabulary of {len(trie.vocabulary)} tokens"
                failures[digest] = _failure(InvalidWeights(text))
            else:
                key = (query.op, query.rows, query.source, query.vocabulary)
                values = self._values.get(key) if query.rows else None
                inputs[digest] = TrieInput(query, trie, known.get(query.source), values)
                if values is None and query.source not in known:
                    sources[digest] = _Source(query.rows, query.source, len(trie.vocabulary))
        vectors = await self._get_vectors(list(dict.fromkeys(sources.values())))
        for digest, source in sources.items():
            vector = vectors[source]
            if isinstance(vector, LMPoolError):
                failures[digest] = _failure(vector)
                del inputs[digest]
            else:
                inputs[digest] = inputs[digest]._replace(vector=vector)
        return inputs, failures

    async def rows(self, fingerprint: str, prompts: Iterable[bytes], vocab_size: int) -> dict[bytes, Row | LMPoolError]:
        """Rows of a model from the cache: digest of the prompt -> row, or the reason for no row.

        Raises:
            ServerError: the server cannot be used.
        """
        rows = await self._get_vectors([_Source(fingerprint, prompt, vocab_size) for prompt in prompts])
        return {source.name: row for source, row in rows.items()}

    async def _get_tries(self, digests: Iterable[str]) -> dict[str, LazyTrie | LMPoolError]:
        tries: dict[str, LazyTrie | LMPoolError] = {}
        for digest in digests:
            trie = self._tries.get(digest)
            if trie is None:
                try:
                    vocabulary = await self._fetch_vocabulary(digest)
                except UnknownVocabulary as error:
                    tries[digest] = error
                    continue
                # A concurrent `fill` may have fetched it too.
                trie = self._tries.get(digest) or LazyTrie(vocabulary, self._device, self._values)
                self._tries.put(digest, trie)
            tries[digest] = trie
        return tries

    async def _fetch_vocabulary(self, digest: str) -> Vocabulary:
        key = self._keys.vocabulary(digest)
        ((connection, _),) = await self._connections.split([key])
        data = await connection.get_range(key, MAX_BYTES)
        packed = bytes(data) if isinstance(data, (bytes, np.ndarray)) else b""
        # In a thread: unpacking a large vocabulary takes long.
        return await asyncio.to_thread(unpack_known, packed, digest)

    async def _get_vectors(self, sources: Sequence[_Source]) -> dict[_Source, Row | LMPoolError]:
        """Weights and rows, or the reasons why they cannot be used; each source once."""
        if not sources:
            return {}
        parts: list[tuple[RowConnection, list[_Source]]] = []
        for connection, indices in await self._connections.split([self._key(source) for source in sources]):
            held = [sources[index] for index in indices]
            parts += [(connection, held[part]) for part in cut_chunks([source.max_bytes for source in held])]
        chunks = await asyncio.gather(*(self._read(connection, part) for connection, part in parts))
        return {source: row for chunk in chunks for source, row in chunk.items()}

    async def _read(self, connection: RowConnection, part: Sequence[_Source]) -> dict[_Source, Row | LMPoolError]:
        keys, sizes = [self._key(source) for source in part], [source.max_bytes for source in part]
        values: list[Any] = list(await connection.get(keys, sizes))
        self._counters.fetched_bytes += sum(len(value) for value in values if isinstance(value, (bytes, np.ndarray)))
        rows: dict[_Source, Row | LMPoolError] = {}
        for source, value in zip(part, values, strict=True):
            row = None
            if source.fingerprint and is_reference(value):
                reference, value = unpack_reference(value), None
                row = reference and self._segments.read(reference, source.name, source.length)
            rows[source] = source.decode(value) if row is None else row
        return rows

    def _key(self, source: _Source) -> bytes:
        prefix = self._keys.row(source.fingerprint) if source.fingerprint else self._keys.weights()
        return prefix + source.name

    def close(self) -> None:
        """Close the connections."""
        self._connections.close()


def _failure(error: LMPoolError) -> Failure:
    return Failure(type(error).__name__, str(error))
