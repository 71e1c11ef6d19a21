"""Continuations: tokens drawn one after another where the rows are computed, without the queue between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import ProtocolError, WorkerError
from lmpool.protocol.query import Continuation, GenerateQuery, drawn_at, pack_continuation, sample
from lmpool.protocol.row import Encoding, NewRows, Row, RowBlock, VectorBlock, check_row
from lmpool.workers.execution.contract import QUERY_ERRORS, BackendJob, Finished, failure_of

# Of one block of rows.
_MAX_PARTS = 4


@dataclass(slots=True)
class _Growing:
    """A continuation that grows.

    Attributes:
        job: what the backend computes now: the row of the prompt and the tokens so far.
        query: what is wanted.
        ends: tokens that end it, as little-endian uint32.
        stops: sequences of several tokens that do.
        tokens: those drawn so far.
        logprobs: what they have in their rows.
    """

    job: BackendJob
    query: GenerateQuery
    ends: frozenset[bytes]
    stops: tuple[bytes, ...]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[np.float32] = field(default_factory=list)

    def draw(self, row: Row) -> bool:
        """Draw the next token; whether that was the last.

        Raises:
            WorkerError: the backend has made something else than a row.
        """
        try:
            check_row(row)
        except ProtocolError as error:
            raise WorkerError(f"the backend has answered what is no row: {error}") from error
        token = sample(row, drawn_at(self.query.how, len(self.tokens)))
        self.tokens.append(token)
        self.logprobs.append(row[token])
        encoded = token.to_bytes(4, "little")
        ids = self.job.ids + encoded
        self.job = self.job._replace(ids=ids)
        if len(self.tokens) == self.query.most or encoded in self.ends:
            return True
        # Of the tokens that were drawn only: a prompt may end with half of what ends a continuation.
        return ids[-4 * len(self.tokens) :].endswith(self.stops)

    @property
    def answer(self) -> NDArray[np.float32]:
        """It, as it travels."""
        made = Continuation(np.array(self.tokens, np.int64), np.array(self.logprobs, np.float32))
        return pack_continuation(made, self.query.most)


class Continuations:
    """The continuations that a backend computes rows for. All of it happens in the backend's thread.

    Each row is that of a longer prompt, under the digest of the first: so a backend reuses the keys and values of the
    prompt, and batches it with whatever else there is.
    """

    def __init__(self) -> None:
        self._running: dict[bytes, _Growing] = {}

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._running

    def count_new(self, job: BackendJob) -> int:
        """How many tokens the backend must compute for a job: of a continuation that has begun, the last one."""
        growing = self._running.get(job.digest)
        return 1 if growing is not None and growing.tokens else len(job.ids) // 4

    def begin(self, jobs: Sequence[BackendJob]) -> Sequence[BackendJob]:
        """The jobs as the backend is to have them: the row of the prompt where a continuation is wanted."""
        if all(job.generate is None for job in jobs):
            return jobs
        return [job if job.generate is None else self._begin(job, job.generate) for job in jobs]

    def _begin(self, job: BackendJob, query: GenerateQuery) -> BackendJob:
        first = job._replace(generate=None)
        stops = query.stops
        ends = frozenset(stop for stop in stops if len(stop) == 4)
        self._running[job.digest] = _Growing(first, query, ends, tuple(stop for stop in stops if len(stop) > 4))
        return first

    def drop(self, digests: Iterable[bytes]) -> None:
        """Forget those that the backend does not compute any more."""
        for digest in digests:
            self._running.pop(digest, None)

    def promote(self, digests: Iterable[bytes]) -> None:
        """Somebody else than bulk clients waits for these now: they yield to nobody any more."""
        for digest in digests:
            if (growing := self._running.get(digest)) is not None:
                growing.job = growing.job._replace(bulk=False)

    def advance(self, finished: Finished) -> tuple[Finished, list[BackendJob]]:
        """Draw from the rows of a step that are of continuations.

        Returns:
            what the step brought for others, with the continuations that have ended; and what to compute next.
        """
        self.drop(finished.failures)
        blocks: list[RowBlock] = []
        answers: dict[bytes, NDArray[np.float32]] = {}
        failures = dict(finished.failures)
        longer: list[BackendJob] = []
        for block in finished.blocks:
            others = [index for index, digest in enumerate(block.digests) if digest not in self._running]
            if len(others) == len(block.digests):
                blocks.append(block)
                continue
            for index, digest in enumerate(block.digests):
                if (growing := self._running.get(digest)) is None:
                    continue
                try:
                    if growing.draw(block.row(index)):
                        answers[digest] = self._running.pop(digest).answer
                    else:
                        longer.append(growing.job)
                except QUERY_ERRORS as error:
                    failures[digest] = failure_of(error)
                    self.drop([digest])
            blocks += _only(block, others)
        if finished.answers is not None:
            answers.update(zip(finished.answers.digests, finished.answers.vectors, strict=True))
        vectors = VectorBlock(list(answers), list(answers.values())) if answers else None
        return finished._replace(blocks=blocks, failures=failures, answers=vectors), longer

    def leaving_out(self, new_rows: NewRows, held: Mapping[bytes, object]) -> NewRows:
        """Memory for rows that clients read: none where the backend has continuations only, whose rows nobody reads.

        In a step that computes others too, theirs take some of it in vain: it is asked for by the step.

        Args:
            new_rows: has it.
            held: the prompts that the backend holds, at any time.
        """

        def memory(count: int, vocab_size: int, encoding: Encoding) -> NDArray[Any] | None:
            is_in_vain = bool(self._running) and held.keys() <= self._running.keys()
            return None if is_in_vain else new_rows(count, vocab_size, encoding)

        return memory


def _only(block: RowBlock, rows: Sequence[int]) -> list[RowBlock]:
    """Some rows of a block, ascending: where they are, unless that makes many blocks, for each is published."""
    runs: list[range] = []
    for row in rows:
        if runs and runs[-1].stop == row:
            runs[-1] = range(runs[-1].start, row + 1)
        else:
            runs.append(range(row, row + 1))
    return [block.part(run) for run in runs] if len(runs) <= _MAX_PARTS else [block.select(rows)]
