"""Answering trie jobs: the heavy part, for a thread of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import LMPoolError
from lmpool.kernels import Op
from lmpool.rows import VectorBlock
from lmpool.trie import Trie
from lmpool.workers.tries.inputs import TrieInputs, Values

_Batch = dict[bytes, TrieInputs]


def answer(jobs: Mapping[bytes, TrieInputs]) -> tuple[VectorBlock | None, dict[bytes, str]]:
    """Answer jobs, mixed into batches by vocabulary and operation.

    Args:
        jobs: name of the answer -> job.

    Returns:
        the answers, and name -> reason of the jobs that have none.
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
    trie, _ = first.trie.open()
    swept: Mapping[bytes, Values]
    if first.values is None:
        swept = _sweep(batch, failures)
    else:
        swept = {digest: job.values for digest, job in batch.items() if job.values is not None}
    for digest, values in swept.items():
        try:
            answers[digest] = _select(trie, batch[digest], values)
        except LMPoolError as error:
            failures[digest] = str(error)


def _sweep(batch: _Batch, failures: dict[bytes, str]) -> dict[bytes, Values]:
    """The values of jobs of one vocabulary and operation: [M inner values | V weights], or just the inner ones."""
    first = next(iter(batch.values()))
    trie, kernels = first.trie.open()
    # A row that several jobs are about is swept once.
    sources: dict[tuple[str, bytes], list[bytes]] = defaultdict(list)
    for digest, job in batch.items():
        sources[(job.ask.rows, job.ask.source) if job.ask.rows else ("", digest)].append(digest)
    weights = np.empty((len(sources), trie.n_tokens), np.float32)
    for out, digests in zip(weights, sources.values(), strict=True):
        _weigh(batch[digests[0]], out)
    try:
        inner = kernels.inner(first.ask.op, weights)
    except LMPoolError as error:
        if len(sources) == 1:
            failures |= dict.fromkeys(batch, str(error))
            return {}
        # One at a time: what one client sent must not fail the others.
        parts = [_sweep({digest: batch[digest] for digest in ours}, failures) for ours in sources.values()]
        return {digest: values for part in parts for digest, values in part.items()}
    found: dict[bytes, Values] = {}
    for own, row, ((rows, source), digests) in zip(inner, weights, sources.items(), strict=True):
        if all(batch[digest].ask.select == "inner" for digest in digests):
            found |= dict.fromkeys(digests, own)
            continue
        values = np.concatenate((own, row))
        if rows:
            first.trie.values.put((first.ask.op, rows, source, first.ask.vocabulary), values)
        found |= dict.fromkeys(digests, values)
    return found


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
