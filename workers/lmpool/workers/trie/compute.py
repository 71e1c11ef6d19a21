"""Answering trie jobs: the heavy part, for a thread of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import LMPoolError
from lmpool.protocol.row import VectorBlock
from lmpool.trie.kernels import Kernels, Op
from lmpool.trie.trie import Trie
from lmpool.workers.trie.trie_inputs import TrieInputs, Values

_Batch = dict[bytes, TrieInputs]


def answer(jobs: Mapping[bytes, TrieInputs]) -> tuple[VectorBlock | None, dict[bytes, str]]:
    """Answer jobs, mixed into batches by vocabulary and operation.

    Args:
        jobs: name of the answer -> job.

    Returns:
        the answers, and name -> reason of the jobs that have none: the kind of the error and its text.
    """
    batches: dict[tuple[str, Op, bool], _Batch] = defaultdict(dict)
    for digest, job in jobs.items():
        batches[job.ask.vocabulary, job.ask.op, job.values is not None][digest] = job
    answers: dict[bytes, Values] = {}
    failures: dict[bytes, str] = {}
    for batch in batches.values():
        _answer_batch(batch, answers, failures)
    return (VectorBlock(list(answers), list(answers.values())) if answers else None), failures


def _answer_batch(batch: _Batch, answers: dict[bytes, Values], failures: dict[bytes, str]) -> None:
    first = next(iter(batch.values()))
    try:
        trie, kernels = first.trie.open()
    except (LMPoolError, RuntimeError) as error:
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
        except LMPoolError as error:
            failures[digest] = _reason(error)


def _sweep(trie: Trie, kernels: Kernels, batch: _Batch, failures: dict[bytes, str]) -> dict[bytes, Values]:
    """The values of jobs of one vocabulary and operation: [M inner values | V weights], or just the inner ones."""
    # A row that several jobs are about is swept once.
    sources: dict[tuple[str, bytes], list[bytes]] = defaultdict(list)
    for digest, job in batch.items():
        sources[(job.ask.rows, job.ask.source) if job.ask.rows else ("", digest)].append(digest)
    groups = list(sources.values())
    try:
        return _compute(trie, kernels, batch, groups)
    except LMPoolError as error:
        # One at a time: what one client sent must not fail the others.
        reason, size = _reason(error), 1
    except RuntimeError as error:
        reason = _reason(error, f"a single row of {trie.n_tokens} weights does not fit: free some of it")
        size = (len(groups) + 1) // 2
    # Not inside of the handlers: an exception keeps what its frames hold on the device.
    if len(groups) == 1:
        failures |= dict.fromkeys(batch, reason)
        return {}
    found: dict[bytes, Values] = {}
    for at in range(0, len(groups), size):
        part = {digest: batch[digest] for digest in chain.from_iterable(groups[at : at + size])}
        found |= _sweep(trie, kernels, part, failures)
    return found


def _compute(trie: Trie, kernels: Kernels, batch: _Batch, groups: list[list[bytes]]) -> dict[bytes, Values]:
    """The values of jobs by groups that have the same weights."""
    weights = np.empty((len(groups), trie.n_tokens), np.float32)
    for out, digests in zip(weights, groups, strict=True):
        _weigh(batch[digests[0]], out)
    inner = kernels.inner(batch[groups[0][0]].ask.op, weights)
    found: dict[bytes, Values] = {}
    for own, row, digests in zip(inner, weights, groups, strict=True):
        if all(batch[digest].ask.select == "inner" for digest in digests):
            found |= dict.fromkeys(digests, own)
            continue
        # An array of its own: one that is kept must not keep the whole batch in memory.
        values = np.concatenate((own, row))
        job = batch[digests[0]]
        if job.ask.rows:
            job.trie.values.put((job.ask.op, job.ask.rows, job.ask.source, job.ask.vocabulary), values)
        found |= dict.fromkeys(digests, values)
    return found


def _reason(error: Exception, too_large: str = "") -> str:
    """Why a job has no answer, beginning with the kind of the error.

    Args:
        error: of this package, or what torch raises when a device runs out of memory; any other is raised again.
        too_large: what does not fit when memory runs out.
    """
    kind = type(error).__name__
    if isinstance(error, LMPoolError):
        return f"{kind}: {error}"
    # By name: the worker may be one without torch.
    if kind != "OutOfMemoryError":
        raise error
    return f"{kind}: the device has run out of memory, {too_large}, or run the trie worker on the CPU"


def _weigh(job: TrieInputs, out: NDArray[np.float32]) -> None:
    """The weights of a job: as they were sent, or the probabilities of a row."""
    assert job.vector is not None
    if job.ask.rows and job.ask.op != "logsumexp":
        np.exp(job.vector, out=out)
    else:
        out[:] = job.vector


def _select(trie: Trie, job: TrieInputs, values: Values) -> Values:
    """What the job wants of the values.

    Raises:
        UnknownNode: it names a node that the trie does not have.
    """
    ask = job.ask
    if ask.select == "inner":
        return values[: trie.n_inner]
    if ask.select == "values":
        return values
    nodes = np.frombuffer(ask.nodes, "<i4")
    if ask.select == "under":
        trie.check_node(int(nodes[0]))
        nodes = trie.children(int(nodes[0]))
    else:
        trie.check_nodes(nodes)
    chosen: Values = values[trie.value_of[nodes]]
    return chosen
