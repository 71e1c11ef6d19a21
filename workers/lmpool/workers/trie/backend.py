"""The backend of trie workers: answers trie jobs in batches, in the backend's thread."""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import LMPoolError, SettingsError
from lmpool.protocol.model_info import TRIE_SERVICE, ModelInfo
from lmpool.protocol.query import Op
from lmpool.protocol.row import Values, VectorBlock
from lmpool.settings import check_number, count_threads
from lmpool.trie.kernels import Kernels, open_kernels
from lmpool.trie.trie import Trie
from lmpool.vocabulary import Vocabulary
from lmpool.workers.execution.contract import (
    QUERY_ERRORS,
    Backend,
    BackendJob,
    BackendStats,
    Finished,
    WithoutAdapters,
    failure_of,
)
from lmpool.workers.trie.inputs import TrieInput, input_of

REVISION: Final = "1"
"""Changes whenever the numbering of nodes or the meaning of an operation changes."""

_log = logging.getLogger("lmpool.worker")

_Batch = dict[bytes, TrieInput]

_OUT_OF_MEMORY = "OutOfMemoryError"  # The name of torch's error: a trie worker may have no torch to import it from.


@dataclass(frozen=True, slots=True)
class TrieSettings:
    """Settings of a trie worker.

    Raises:
        SettingsError: a value is malformed.
    """

    device: str = field(default="cpu", metadata={"help": 'Device of the kernels: "cpu", "cuda" or "cuda:N".'})
    max_batch: int = field(default=128, metadata={"help": "Max jobs per step."})

    def __post_init__(self) -> None:
        if self.device != "cpu" and self.device.partition(":")[0] != "cuda":
            raise SettingsError(f"device: {self.device!r} is not one of cpu, cuda, cuda:N")
        check_number("max_batch", self.max_batch, least=1, most=4096)

    @property
    def served_as(self) -> str:
        """The name of all trie workers."""
        return TRIE_SERVICE

    def open(self) -> Backend:
        """Create the backend; see `TrieBackend`."""
        return TrieBackend(self)


class TrieBackend(WithoutAdapters):
    """Answers trie jobs, whose inputs come with them. See `Backend` for the methods.

    Raises:
        SettingsError: the libraries of the device, or the device, are missing.
    """

    def __init__(self, settings: TrieSettings) -> None:
        self._settings = settings
        self._jobs: OrderedDict[bytes, TrieInput] = OrderedDict()
        self._stats = BackendStats()
        warm_up(settings.device)
        threads = count_threads()
        _log.info("computing on %s; CPU threads: %d", settings.device, threads, extra={"threads": threads})

    @property
    def info(self) -> ModelInfo:
        """See `Backend.info`."""
        return ModelInfo(
            name=TRIE_SERVICE,
            backend="trie",
            vocab_size=1,
            max_prompt_tokens=1,
            revision=REVISION,
            dtype="float32",
            note="answers trie jobs for any vocabulary",
        )

    @property
    def batch(self) -> int:
        """See `Backend.batch`."""
        return self._settings.max_batch

    @property
    def device(self) -> str:
        """See `Backend.device`."""
        return self._settings.device

    def vocabulary(self) -> Vocabulary | None:
        """See `Backend.vocabulary`."""
        return None

    def capacity(self) -> int:
        """See `Backend.capacity`."""
        return 2 * self._settings.max_batch - len(self._jobs)

    def submit(self, jobs: Iterable[BackendJob]) -> None:
        """See `Backend.submit`."""
        for job in jobs:
            self._jobs[job.digest] = input_of(job)

    def step(self) -> Finished:
        """See `Backend.step`."""
        batch = dict(islice(self._jobs.items(), self._settings.max_batch))
        answers, failures = answer(batch)
        for digest in batch:
            del self._jobs[digest]
        stats = self._stats
        self._stats = stats._replace(steps=stats.steps + 1, rows=stats.rows + len(batch) - len(failures))
        return Finished([], failures, answers)

    def abort(self, digests: Collection[bytes]) -> None:
        """See `Backend.abort`."""
        for digest in digests:
            self._jobs.pop(digest, None)

    def stats(self) -> BackendStats:
        """See `Backend.stats`."""
        return self._stats

    def close(self) -> None:
        """See `Backend.close`."""
        self._jobs.clear()


def warm_up(device: str) -> None:
    """Compile the kernels before the first job needs them.

    Raises:
        SettingsError: the libraries of the device, or the device, are missing.
    """
    open_kernels(Trie([b"a", b"b"]), device)


def answer(jobs: Mapping[bytes, TrieInput]) -> tuple[VectorBlock | None, dict[bytes, str]]:
    """Answer trie queries in batches of one vocabulary and operation.

    Args:
        jobs: digest of the answer -> query with its inputs.

    Returns:
        the answers, and digest -> reason (the name of the error and its text) for the other jobs.
    """
    batches: dict[tuple[str, Op, bool], _Batch] = defaultdict(dict)
    for digest, job in jobs.items():
        batches[job.query.vocabulary, job.query.op, job.values is not None][digest] = job
    answers: dict[bytes, Values] = {}
    failures: dict[bytes, str] = {}
    for batch in batches.values():
        _answer_batch(batch, answers, failures)
    return (VectorBlock(list(answers), list(answers.values())) if answers else None), failures


def _answer_batch(batch: _Batch, answers: dict[bytes, Values], failures: dict[bytes, str]) -> None:
    first = next(iter(batch.values()))
    try:
        trie, kernels = first.trie.open()
    except (LMPoolError, *QUERY_ERRORS) as error:
        failures |= dict.fromkeys(batch, _reason(error, "the trie does not fit: free some of it"))
        return
    values: Mapping[bytes, Values]
    if first.values is None:
        values = _sweep(trie, kernels, batch, failures)
    else:
        values = {digest: job.values for digest, job in batch.items() if job.values is not None}
    for digest, of_nodes in values.items():
        try:
            answers[digest] = _select(trie, batch[digest], of_nodes)
        except (LMPoolError, *QUERY_ERRORS) as error:
            failures[digest] = _reason(error)


def _sweep(trie: Trie, kernels: Kernels, batch: _Batch, failures: dict[bytes, str]) -> dict[bytes, Values]:
    """The values of jobs of one vocabulary and operation: [M inner values | V weights], or only the inner ones."""
    # Jobs about the same row share one sweep.
    sources: dict[tuple[str, bytes], list[bytes]] = defaultdict(list)
    for digest, job in batch.items():
        sources[(job.query.rows, job.query.source) if job.query.rows else ("", digest)].append(digest)
    groups = list(sources.values())
    try:
        return _compute(trie, kernels, batch, groups)
    except (LMPoolError, *QUERY_ERRORS) as error:
        reason = _reason(error, f"a single row of {trie.n_tokens} weights does not fit: free some of it")
        # Halve the batch when memory runs out. Otherwise one at a time: the input of one client must not fail others.
        size = (len(groups) + 1) // 2 if _is_out_of_memory(error) else 1
    # Outside of the handler: an exception keeps the device memory of its frames.
    if len(groups) == 1:
        failures |= dict.fromkeys(batch, reason)
        return {}
    values: dict[bytes, Values] = {}
    for at in range(0, len(groups), size):
        part = {digest: batch[digest] for digest in chain.from_iterable(groups[at : at + size])}
        values |= _sweep(trie, kernels, part, failures)
    return values


def _compute(trie: Trie, kernels: Kernels, batch: _Batch, groups: list[list[bytes]]) -> dict[bytes, Values]:
    """The values of jobs, in groups that have the same weights."""
    weights = np.empty((len(groups), trie.n_tokens), np.float32)
    for out, digests in zip(weights, groups, strict=True):
        _weigh(batch[digests[0]], out)
    inner = kernels.inner(batch[groups[0][0]].query.op, weights)
    computed: dict[bytes, Values] = {}
    for inner_values, row, digests in zip(inner, weights, groups, strict=True):
        if all(batch[digest].query.select == "inner" for digest in digests):
            computed |= dict.fromkeys(digests, inner_values)
            continue
        # A copy: a cached array must not keep the whole batch in memory.
        values = np.concatenate((inner_values, row))
        job = batch[digests[0]]
        query = job.query
        if query.rows:
            job.trie.values.put((query.op, query.rows, query.source, query.vocabulary), values)
        computed |= dict.fromkeys(digests, values)
    return computed


def _reason(error: Exception, too_large: str = "") -> str:
    """The reason for no answer, beginning with the name of the error.

    Args:
        error: the error of the computation.
        too_large: what does not fit, for an error of memory.

    Raises:
        Exception: `error` itself, if the device is broken.
    """
    if isinstance(error, LMPoolError):
        return f"{type(error).__name__}: {error}"
    if not _is_out_of_memory(error):
        return failure_of(error)
    return f"{_OUT_OF_MEMORY}: the device has run out of memory, {too_large}, or run the trie worker on the CPU"


def _is_out_of_memory(error: Exception) -> bool:
    return type(error).__name__ == _OUT_OF_MEMORY


def _weigh(job: TrieInput, out: NDArray[np.float32]) -> None:
    """Write the weights of a job: its own weights, or the probabilities of its row."""
    assert job.vector is not None
    if job.query.rows and job.query.op != "logsumexp":
        np.exp(job.vector, out=out)
    else:
        out[:] = job.vector


def _select(trie: Trie, job: TrieInput, values: Values) -> Values:
    """The values that the job requests.

    Raises:
        UnknownNode: it names a node that the trie does not have.
    """
    query = job.query
    if query.select == "inner":
        return values[: trie.n_inner]
    if query.select == "values":
        return values
    nodes = np.frombuffer(query.nodes, "<i4")
    if query.select == "under":
        trie.check_node(int(nodes[0]))
        nodes = trie.children(int(nodes[0]))
    else:
        trie.check_nodes(nodes)
    chosen: Values = values[trie.value_of[nodes]]
    return chosen
