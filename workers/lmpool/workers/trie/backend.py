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
"""Changes when the numbering of nodes or the meaning of an operation does."""

_log = logging.getLogger("lmpool.worker")

_Batch = dict[bytes, TrieInput]

_OUT_OF_MEMORY = "OutOfMemoryError"


@dataclass(frozen=True, slots=True)
class TrieSettings:
    """Settings of a trie worker.

    Raises:
        SettingsError: a value is malformed.
    """

    device: str = field(default="cpu", metadata={"help": 'Where it computes: "cpu", "cuda" or "cuda:N".'})
    max_batch: int = field(default=128, metadata={"help": "Jobs in one step."})

    def __post_init__(self) -> None:
        if self.device != "cpu" and self.device.partition(":")[0] != "cuda":
            raise SettingsError(f"device: {self.device!r} is not one of cpu, cuda, cuda:N")
        check_number("max_batch", self.max_batch, least=1, most=4096)

    @property
    def served_as(self) -> str:
        """The name of all trie workers."""
        return TRIE_SERVICE

    def open(self) -> Backend:
        """Make the backend; see `TrieBackend`."""
        return TrieBackend(self)


class TrieBackend(WithoutAdapters):
    """Answers jobs that come with all that they need.

    Args:
        settings: see `TrieSettings`.

    Raises:
        SettingsError: what the device needs is not installed or not there.
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
        SettingsError: what the device needs is not installed or not there.
    """
    open_kernels(Trie([b"a", b"b"]), device)


def answer(jobs: Mapping[bytes, TrieInput]) -> tuple[VectorBlock | None, dict[bytes, str]]:
    """Answer trie queries, mixed into batches by vocabulary and operation.

    Args:
        jobs: digest of the answer -> query with its inputs.

    Returns:
        the answers, and digest -> reason of those that have none: the kind of the error and its text.
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
    swept: Mapping[bytes, Values]
    if first.values is None:
        swept = _sweep(trie, kernels, batch, failures)
    else:
        swept = {digest: job.values for digest, job in batch.items() if job.values is not None}
    for digest, values in swept.items():
        try:
            answers[digest] = _select(trie, batch[digest], values)
        except (LMPoolError, *QUERY_ERRORS) as error:
            failures[digest] = _reason(error)


def _sweep(trie: Trie, kernels: Kernels, batch: _Batch, failures: dict[bytes, str]) -> dict[bytes, Values]:
    """The values of jobs of one vocabulary and operation: [M inner values | V weights], or just the inner ones."""
    # A row that several jobs are about is swept once.
    sources: dict[tuple[str, bytes], list[bytes]] = defaultdict(list)
    for digest, job in batch.items():
        sources[(job.query.rows, job.query.source) if job.query.rows else ("", digest)].append(digest)
    groups = list(sources.values())
    try:
        return _compute(trie, kernels, batch, groups)
    except (LMPoolError, *QUERY_ERRORS) as error:
        reason = _reason(error, f"a single row of {trie.n_tokens} weights does not fit: free some of it")
        # One at a time: what one client sent must not fail the others. For want of memory: half as many.
        size = (len(groups) + 1) // 2 if _is_out_of_memory(error) else 1
    # Not inside of the handlers: an exception keeps what its frames hold on the device.
    if len(groups) == 1:
        failures |= dict.fromkeys(batch, reason)
        return {}
    swept: dict[bytes, Values] = {}
    for at in range(0, len(groups), size):
        part = {digest: batch[digest] for digest in chain.from_iterable(groups[at : at + size])}
        swept |= _sweep(trie, kernels, part, failures)
    return swept


def _compute(trie: Trie, kernels: Kernels, batch: _Batch, groups: list[list[bytes]]) -> dict[bytes, Values]:
    """The values of jobs by groups that have the same weights."""
    weights = np.empty((len(groups), trie.n_tokens), np.float32)
    for out, digests in zip(weights, groups, strict=True):
        _weigh(batch[digests[0]], out)
    inner = kernels.inner(batch[groups[0][0]].query.op, weights)
    computed: dict[bytes, Values] = {}
    for inner_values, row, digests in zip(inner, weights, groups, strict=True):
        if all(batch[digest].query.select == "inner" for digest in digests):
            computed |= dict.fromkeys(digests, inner_values)
            continue
        # An array of its own: one that is kept must not keep the whole batch in memory.
        values = np.concatenate((inner_values, row))
        job = batch[digests[0]]
        query = job.query
        if query.rows:
            job.trie.values.put((query.op, query.rows, query.source, query.vocabulary), values)
        computed |= dict.fromkeys(digests, values)
    return computed


def _reason(error: Exception, too_large: str = "") -> str:
    """Why a job has no answer, beginning with the kind of the error.

    Args:
        error: what computing it has raised.
        too_large: what does not fit when memory runs out.

    Raises:
        Exception: the given one, if the device is broken.
    """
    if isinstance(error, LMPoolError):
        return f"{type(error).__name__}: {error}"
    if not _is_out_of_memory(error):
        return failure_of(error)
    return f"{_OUT_OF_MEMORY}: the device has run out of memory, {too_large}, or run the trie worker on the CPU"


def _is_out_of_memory(error: Exception) -> bool:
    """Whether it is what torch raises when a device runs out of memory. By name: the worker may have no torch."""
    return type(error).__name__ == _OUT_OF_MEMORY


def _weigh(job: TrieInput, out: NDArray[np.float32]) -> None:
    """The weights of a job: as they were sent, or the probabilities of a row."""
    assert job.vector is not None
    if job.query.rows and job.query.op != "logsumexp":
        np.exp(job.vector, out=out)
    else:
        out[:] = job.vector


def _select(trie: Trie, job: TrieInput, values: Values) -> Values:
    """What the job wants of the values.

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
