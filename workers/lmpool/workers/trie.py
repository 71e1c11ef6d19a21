"""Trie workers: fetch the inputs of trie jobs, cache these inputs within byte limits, and answer the jobs in batches.

The event loop fetches tries, weights and rows (`TrieInputs`). The backend's thread computes answers (`answer`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from lmpool import errors
from lmpool.broker.connection import reply_timeout
from lmpool.broker.registries import MAX_BYTES, unpack_known
from lmpool.broker.server import Server
from lmpool.protocol.job import Failure
from lmpool.protocol.keys import Keys
from lmpool.protocol.model_info import TRIE_SERVICE, ModelInfo
from lmpool.protocol.query import SECRET_SIZE, Op, TrieQuery, weights_name
from lmpool.protocol.row import Encoding, Row, Values, VectorBlock, check_row, decode_row, encoded_size
from lmpool.rows.cache import RowConnection, RowConnections, cut_chunks
from lmpool.rows.shared_memory import SegmentReader, is_reference
from lmpool.settings import check_numbers, count_threads, option
from lmpool.trie.kernels import Kernels, open_kernels
from lmpool.trie.trie import Trie, max_kernel_bytes
from lmpool.vocabulary import Vocabulary
from lmpool.workers.execution import contract
from lmpool.workers.metrics.counters import WorkerCounters
from lmpool.workers.settings import WorkerSettings

REVISION: Final = "1"
"""Revision of trie answers: changes whenever the numbering of nodes or the meaning of an operation changes."""

_BYTES_A_NODE = 25  # Bytes of a trie's arrays per node; a trie has at most one node for each byte of its vocabulary.
_BYTES_A_TOKEN = 16  # Bytes of a trie's arrays per token.
_OUT_OF_MEMORY = "OutOfMemoryError"  # Name of torch's error class, which a trie worker without torch cannot import.

_log = logging.getLogger("lmpool.worker")


# Inputs of trie jobs


K = TypeVar("K", bound=Hashable)
T = TypeVar("T", bound="NDArray[Any] | LazyTrie")


class ByteLRU(Generic[K, T]):
    """A thread-safe cache that evicts the least recently used values beyond a limit of bytes.

    The newest value stays in the cache, even if it alone exceeds the limit.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._size = limit, 0
        self._values: OrderedDict[K, T] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K) -> T | None:
        """The value of a key, which becomes the most recently used value; None if the key has no value."""
        with self._lock:
            if (value := self._values.get(key)) is not None:
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
"""Cache: (op, model's fingerprint, prompt's digest, vocabulary's digest) -> values of M inner nodes and V weights."""


class LazyTrie:
    """A vocabulary whose trie is built at the first use, with a cache of values computed for this trie.

    `nbytes` is an upper limit for the bytes of the vocabulary, its trie and its kernels.
    """

    def __init__(self, vocabulary: Vocabulary, device: str, values: ValuesCache) -> None:
        self.vocabulary, self.values, self._device = vocabulary, values, device
        trie_bytes = vocabulary.nbytes * _BYTES_A_NODE + len(vocabulary) * _BYTES_A_TOKEN
        self.nbytes = vocabulary.nbytes + trie_bytes + max_kernel_bytes(vocabulary, device)
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
    """A trie query with its inputs."""

    query: TrieQuery
    trie: LazyTrie
    vector: Values | None
    """float32 (V,): the weights, or the row that the query names; None if `values` is given."""
    values: Values | None = None
    """float32 (M + V,): cached values of the row that the query names, or None."""


Jobs = Mapping[bytes, TrieInput]
"""Digest of an answer -> the query and its inputs."""

Found = Row | errors.LMPoolError
"""A row or weights, or the reason why they cannot be used."""


class _Source(NamedTuple):
    """A row or weights that a trie job names."""

    fingerprint: str  # Fingerprint of the model of the row; "" for weights.
    name: bytes  # Digest of the prompt, or name of the weights.
    length: int  # Number of entries that the row or the weights must have.

    @property
    def max_bytes(self) -> int:
        """Max bytes to read: one more than the value can have, to notice a value that is too long."""
        return SECRET_SIZE + encoded_size(self.length, Encoding.F32) + 1

    def decode(self, value: Any) -> Found:
        """Decode the stored value; returns an error instead of raising it."""
        kind, verb = ("row of prompt", "is") if self.fingerprint else ("weights", "are")
        label = f"the {kind} {self.name.hex()}"
        if isinstance(value, bytes):
            value = np.frombuffer(value, np.uint8)
        if not isinstance(value, np.ndarray):
            return errors.SourceMissing(f"{label} {verb} not in the cache")
        try:
            if self.fingerprint:
                return check_row(decode_row(value, self.length))
            if weights_name(value[:SECRET_SIZE].tobytes()) != self.name:
                return errors.SourceMissing(f"{label} are not in the cache: another client has overwritten them")
            return decode_row(value[SECRET_SIZE:], self.length)
        except errors.ProtocolError as error:
            return errors.CorruptRow(f"{label}: {error}")


@dataclass(eq=False)
class TrieInputs:
    """Fetches the inputs of trie jobs, and caches inputs that other jobs may need too."""

    server: Server
    keys: Keys
    device: str
    settings: WorkerSettings
    segments: SegmentReader
    counters: WorkerCounters

    def __post_init__(self) -> None:
        self._tries = ByteLRU[str, LazyTrie](self.settings.trie_mb * 2**20)
        self._values = ValuesCache(self.settings.trie_values_mb * 2**20)
        # After these errors, each value is fetched alone: a source that cannot be read must not fail other jobs.
        apart = errors.ServerError, errors.ProtocolError
        self._connections = RowConnections(self.server, reply_timeout(self.settings.lease_s), apart)

    async def fill(
        self, queries: Mapping[bytes, TrieQuery], rows: Mapping[bytes, Row] | None = None, vocab_size: int | None = None
    ) -> tuple[dict[bytes, TrieInput], dict[bytes, Failure]]:
        """Fetch the inputs of trie queries, given as digest of the answer -> query. Raises `ServerError`.

        `rows`: prompt's digest -> row (V,) that is not fetched. `vocab_size`: V if all queries are about one model.

        Returns two mappings by the digest of the answer: the inputs, and the failures of queries without inputs.
        """
        known = rows or {}
        failed: dict[bytes, errors.LMPoolError] = {}
        inputs: dict[bytes, TrieInput] = {}
        sources: dict[bytes, _Source] = {}
        tries = {digest: await self._get_trie(digest) for digest in {query.vocabulary for query in queries.values()}}
        for digest, query in queries.items():
            trie = tries[query.vocabulary]
            if isinstance(trie, errors.LMPoolError):
                failed[digest] = trie
            elif vocab_size not in (None, len(trie.vocabulary)):
                text = f"rows of V = {vocab_size} for a vocabulary of {len(trie.vocabulary)} tokens"
                failed[digest] = errors.InvalidWeights(text)
            else:
                key = (query.op, query.rows, query.source, query.vocabulary)
                values = self._values.get(key) if query.rows else None
                inputs[digest] = TrieInput(query, trie, known.get(query.source), values)
                if values is None and query.source not in known:
                    sources[digest] = _Source(query.rows, query.source, len(trie.vocabulary))
        vectors = await self._get_vectors(sources.values())
        for digest, source in sources.items():
            vector = vectors[source]
            if isinstance(vector, errors.LMPoolError):
                failed[digest] = vector
                del inputs[digest]
            else:
                inputs[digest] = inputs[digest]._replace(vector=vector)
        return inputs, {digest: Failure(type(error).__name__, str(error)) for digest, error in failed.items()}

    async def rows(self, fingerprint: str, prompts: Iterable[bytes], vocab_size: int) -> dict[bytes, Found]:
        """Rows of a model from the cache: digest of the prompt -> row, or the reason why there is no row.

        Raises `ServerError` when the server cannot be used.
        """
        rows = await self._get_vectors(_Source(fingerprint, prompt, vocab_size) for prompt in prompts)
        return {source.name: row for source, row in rows.items()}

    async def _get_trie(self, digest: str) -> LazyTrie | errors.UnknownVocabulary:
        if (trie := self._tries.get(digest)) is not None:
            return trie
        key = self.keys.vocabulary(digest)
        ((connection, _),) = await self._connections.split([key])
        (data,) = await connection.get([key], [MAX_BYTES], by_getrange=True)
        packed = bytes(data) if isinstance(data, (bytes, np.ndarray)) else b""
        try:
            # Unpack in a thread: a large vocabulary would block the event loop.
            vocabulary = await asyncio.to_thread(unpack_known, packed, digest)
        except errors.UnknownVocabulary as error:
            return error
        # Check the cache again: a concurrent `fill` may have fetched this vocabulary too.
        trie = self._tries.get(digest) or LazyTrie(vocabulary, self.device, self._values)
        self._tries.put(digest, trie)
        return trie

    async def _get_vectors(self, sources: Iterable[_Source]) -> dict[_Source, Found]:
        """Weights and rows, or the reasons why they cannot be used."""
        rows: dict[_Source, Found] = {}
        wanted = list(dict.fromkeys(sources))
        sizes = [source.max_bytes for source in wanted]
        keys = [
            (self.keys.row(source.fingerprint) if source.fingerprint else self.keys.weights()) + source.name
            for source in wanted
        ]

        async def read(connection: RowConnection, part: Sequence[int]) -> None:
            values = await connection.get([keys[at] for at in part], [sizes[at] for at in part])
            for at, value in zip(part, values, strict=True):
                source, row = wanted[at], None
                if source.fingerprint and isinstance(value, bytes) and is_reference(value):
                    row, value = self.segments.follow(value, source.name, source.length), None
                elif isinstance(value, (bytes, np.ndarray)):
                    self.counters.fetched_bytes += len(value)
                rows[source] = source.decode(value) if row is None else row

        split = await self._connections.split(keys) if keys else []
        parts = [(to, indices[part]) for to, indices in split for part in cut_chunks([sizes[at] for at in indices])]
        await asyncio.gather(*(read(*part) for part in parts))
        return rows

    def close(self) -> None:
        """Close the connections."""
        self._connections.close()


# Answers of trie jobs


def warm_up(device: str) -> None:
    """Compile the kernels before the first job needs them; raises the `SettingsError` of `open_kernels`."""
    open_kernels(Trie([b"a", b"b"]), device)


def answer(jobs: Jobs) -> tuple[VectorBlock | None, dict[bytes, str]]:
    """Answer trie queries, given as digest of the answer -> inputs, in batches of one vocabulary and operation.

    Returns the answers, and digest -> reason (the name of the error and its text) for the jobs without an answer.
    """
    batches: dict[tuple[str, Op, bool], dict[bytes, TrieInput]] = defaultdict(dict)
    for digest, job in jobs.items():
        batches[job.query.vocabulary, job.query.op, job.values is not None][digest] = job
    answers: dict[bytes, Values] = {}
    failures: dict[bytes, str] = {}
    for batch in batches.values():
        values = {digest: job.values for digest, job in batch.items() if job.values is not None}
        try:
            trie, kernels = next(iter(batch.values())).trie.open()
        except (errors.LMPoolError, *contract.QUERY_ERRORS) as error:
            failures |= dict.fromkeys(batch, _reason(error, "the trie does not fit: free some of it"))
            continue
        for digest, of_nodes in (values or _sweep(trie, kernels, batch, failures)).items():
            try:
                answers[digest] = _select(trie, batch[digest].query, of_nodes)
            except (errors.LMPoolError, *contract.QUERY_ERRORS) as error:
                failures[digest] = _reason(error)
    return (VectorBlock(list(answers), list(answers.values())) if answers else None), failures


def _sweep(trie: Trie, kernels: Kernels, batch: Jobs, failures: dict[bytes, str]) -> dict[bytes, Values]:
    """The values of jobs of one vocabulary and operation: M values of inner nodes, followed by V weights or nothing."""
    # Compute all jobs about one row in one sweep over the trie.
    sources: dict[tuple[str, bytes], list[bytes]] = defaultdict(list)
    for digest, job in batch.items():
        sources[(job.query.rows, job.query.source) if job.query.rows else ("", digest)].append(digest)
    groups = list(sources.values())
    try:
        return _compute(trie, kernels, batch, groups)
    except (errors.LMPoolError, *contract.QUERY_ERRORS) as error:
        reason = _reason(error, f"a single row of {trie.n_tokens} weights does not fit: free some of it")
    # Continue outside of the `except` block: an exception that exists keeps the device memory of its frames.
    if len(groups) == 1:
        failures |= dict.fromkeys(batch, reason)
        return {}
    # Halve the batch: each half may fit in memory, and the input of one client must not fail other clients' jobs.
    middle, values = (len(groups) + 1) // 2, dict[bytes, Values]()
    for half in (groups[:middle], groups[middle:]):
        values |= _sweep(trie, kernels, {digest: batch[digest] for digest in chain(*half)}, failures)
    return values


def _compute(trie: Trie, kernels: Kernels, batch: Jobs, groups: list[list[bytes]]) -> dict[bytes, Values]:
    """The values of jobs, which are grouped by equal weights."""
    weights = np.empty((len(groups), trie.n_tokens), np.float32)
    for out, digests in zip(weights, groups, strict=True):
        job = batch[digests[0]]
        assert job.vector is not None
        if job.query.rows and job.query.op != "logsumexp":  # Compute probabilities.
            np.exp(job.vector, out=out)
        else:
            out[:] = job.vector
    inner = kernels.inner(batch[groups[0][0]].query.op, weights)
    computed: dict[bytes, Values] = {}
    for inner_values, row, digests in zip(inner, weights, groups, strict=True):
        values = inner_values
        if any(batch[digest].query.select != "inner" for digest in digests):
            # Copy the values: a cached array must not keep the whole batch in memory.
            values = np.concatenate((inner_values, row))
            query = batch[digests[0]].query
            if query.rows:
                batch[digests[0]].trie.values.put((query.op, query.rows, query.source, query.vocabulary), values)
        computed |= dict.fromkeys(digests, values)
    return computed


def _reason(error: Exception, too_large: str = "") -> str:
    """Why a job has no answer: the name of the error and a text. Raises `error` itself if the device is broken.

    `too_large` is the text for an out-of-memory error: what does not fit, and what to do.
    """
    if isinstance(error, errors.LMPoolError):
        return f"{type(error).__name__}: {error}"
    if type(error).__name__ != _OUT_OF_MEMORY:
        return contract.failure_of(error)
    return f"{_OUT_OF_MEMORY}: the device has run out of memory, {too_large}, or run the trie worker on the CPU"


def _select(trie: Trie, query: TrieQuery, values: Values) -> Values:
    """The requested values; raises `UnknownNode` for a node that the trie does not have."""
    if query.select in ("inner", "values"):
        return values[: trie.n_inner] if query.select == "inner" else values
    nodes = np.frombuffer(query.nodes, "<i4")
    nodes = trie.children(int(nodes[0])) if query.select == "under" else trie.check_nodes(nodes)
    return values[trie.value_of[nodes]]


# The backend of trie workers


@dataclass(frozen=True, slots=True)
class TrieSettings:
    """Settings of a trie worker; raises `SettingsError` for a malformed value."""

    device: str = option('Device of the kernels: "cpu", "cuda" or "cuda:N".', "cpu")
    max_batch: int = option("Max jobs per step.", 128, 1, 4096)

    def __post_init__(self) -> None:
        if self.device != "cpu" and self.device.partition(":")[0] != "cuda":
            raise errors.SettingsError(f"device: {self.device!r} is not one of cpu, cuda, cuda:N")
        check_numbers(self)

    @property
    def served_as(self) -> str:
        """The name under which all trie workers serve."""
        return TRIE_SERVICE

    def open(self) -> contract.Backend:
        """Create the backend; see `TrieBackend`."""
        return TrieBackend(self)


class TrieBackend(contract.WithoutAdapters):
    """The backend of trie workers: jobs contain their inputs (`TrieInput`). See `Backend` for the methods.

    Raises `SettingsError` if the libraries of the device, or the device, are missing.
    """

    def __init__(self, settings: TrieSettings) -> None:
        self.batch, self.device = settings.max_batch, settings.device
        self.info = ModelInfo(TRIE_SERVICE, "trie", 1, 1, REVISION, "float32", note="answers jobs of any vocabulary")
        self._jobs, self._stats = OrderedDict[bytes, TrieInput](), contract.BackendStats()
        warm_up(settings.device)
        threads = count_threads()
        _log.info("computing on %s; CPU threads: %d", settings.device, threads, extra={"threads": threads})

    def vocabulary(self) -> Vocabulary | None:
        """See `Backend.vocabulary`."""
        return None

    def capacity(self) -> int:
        """See `Backend.capacity`."""
        return 2 * self.batch - len(self._jobs)

    def submit(self, jobs: Iterable[contract.BackendJob]) -> None:
        """See `Backend.submit`."""
        for job in jobs:
            assert isinstance(job.payload, TrieInput)
            self._jobs[job.digest] = job.payload

    def step(self) -> contract.Finished:
        """See `Backend.step`."""
        batch = dict(islice(self._jobs.items(), self.batch))
        answers, failures = answer(batch)
        for digest in batch:
            del self._jobs[digest]
        stats = self._stats
        self._stats = stats._replace(steps=stats.steps + 1, rows=stats.rows + len(batch) - len(failures))
        return contract.Finished([], failures, answers)

    def abort(self, digests: Collection[bytes]) -> None:
        """See `Backend.abort`."""
        for digest in digests:
            self._jobs.pop(digest, None)

    def stats(self) -> contract.BackendStats:
        """See `Backend.stats`."""
        return self._stats

    def close(self) -> None:
        """See `Backend.close`."""
        self._jobs.clear()
