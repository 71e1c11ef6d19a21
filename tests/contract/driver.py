"""Calls a backend in a test as a worker's engine thread does: submits jobs, runs steps, and collects results."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from lmpool.protocol.adapter import name_of
from lmpool.protocol.job import digest_of, encode_prompt
from lmpool.protocol.query import HeadQuery, PositionsQuery
from lmpool.protocol.row import FACTS, Encoding, Head, Row, RowBlock, decode_row, unpack_numbers
from lmpool.workers.execution.contract import Backend, BackendJob, MapsMemory, TellsHead, WritesInPlace
from tests.contract.model import V, reference_row, reference_rows
from tests.contract.subjects import Subject

DEADLINE_S = 120.0
"""Max seconds between two results. The total time has no limit, because it depends on the machine."""
_numbers = itertools.count()


def prompt(draw: random.Random, length: int) -> list[int]:
    """A random prompt."""
    return [draw.randrange(V) for _ in range(length)]


class Slots:
    """Provides memory for rows, with gaps between the rows, as shared memory does.

    Attributes:
        given: the blocks of memory that the backend has requested.
    """

    _BYTES = 16 * 2**20
    # Never free the memory, because a GPU may still write to it.
    _all: ClassVar[list[memoryview]] = []

    def __init__(self) -> None:
        self.given: list[NDArray[Any]] = []
        self._fd = os.memfd_create("slots")
        os.ftruncate(self._fd, self._BYTES)
        self._memory = mmap.mmap(self._fd, self._BYTES)
        self._left = memoryview(self._memory)
        self._all.append(self._left)

    def lend(self, backend: WritesInPlace) -> None:
        """Have a backend write rows into this memory, as a worker does."""
        if isinstance(backend, MapsMemory):
            backend.map_memory(self._fd, self._memory)
        backend.write_to(self)

    def __call__(self, count: int, vocab_size: int, encoding: Encoding) -> NDArray[Any]:
        """See `NewRows`."""
        stride = (vocab_size + 5) * encoding.dtype.itemsize
        memory = np.frombuffer(self._left[: count * stride], np.uint8)
        self._left = self._left[count * stride :]
        memory[:] = 7
        self.given.append(memory.view(encoding.dtype).reshape(count, vocab_size + 5)[:, :vocab_size])
        return self.given[-1]

    def have(self, block: RowBlock) -> bool:
        """Whether a block's rows are in memory that this object has provided."""
        return any(np.shares_memory(block.numbers, memory) for memory in self.given)


class Opened:
    """A subject's backend, created when the context is entered, and all its results.

    Attributes:
        subject: describes the backend.
        rows: digest of each job with a row -> its row.
        failures: digest of each failed job -> message.
        scores: digest of each job with a positions query -> its values.
        blocks: blocks of rows of the last step that returned rows.
        version: the version of the model whose weights the backend should have.
        is_expended: whether a test has ended the backend.
    """

    def __init__(self, subject: Subject, model: Path, dtype: str, adapters: dict[str, Path]) -> None:
        self.subject = subject
        self.rows: dict[bytes, Row] = {}
        self.failures: dict[bytes, str] = {}
        self.scores: dict[bytes, Row] = {}
        self.blocks: Sequence[RowBlock] = ()
        self.is_expended = False
        self.version = 0
        self._make: Callable[[], Backend] = lambda: subject.make(model, dtype, adapters if subject.has_adapters else {})

    def __enter__(self) -> Self:
        self.backend = self._make()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.backend.close()

    def job(self, ids: Sequence[int], adapter: str = "") -> BackendJob:
        """A job with a unique digest, so that the backend cannot mistake it for an earlier job.

        Args:
            ids: token ids of the prompt.
            adapter: name of an adapter, or "" for no adapter.
        """
        info = self.backend.info
        data = encode_prompt(list(ids), vocab_size=info.vocab_size, max_tokens=info.max_prompt_tokens).ids
        return BackendJob(digest_of(data, f"{next(_numbers)}"), data, self.qualified(adapter))

    def qualified(self, adapter: str) -> str:
        """The qualified name "name@revision" of an adapter, or "" for no adapter."""
        return (
            next(full_name for full_name in self.backend.adapters if name_of(full_name) == adapter) if adapter else ""
        )

    def submit(self, prompts: Iterable[Sequence[int]], adapter: str = "") -> list[bytes]:
        """Submit prompts; returns the digests of their jobs."""
        jobs = [self.job(ids, adapter) for ids in prompts]
        self.backend.submit(jobs)
        return [job.digest for job in jobs]

    def step(self) -> None:
        """Run one step, and record its results."""
        finished = self.backend.step()
        self.failures.update(finished.failures)
        if finished.answers is not None:
            assert not self.scores.keys() & set(finished.answers.digests), "a prompt was scored twice"
            self.scores.update(zip(finished.answers.digests, finished.answers.vectors, strict=True))
        self.blocks = finished.blocks or self.blocks
        for block in finished.blocks:
            for index, digest in enumerate(block.digests):
                assert digest not in self.rows, "a prompt was answered twice"
                data = np.frombuffer(block.encode(index), np.uint8)
                self.rows[digest] = decode_row(data, self.backend.info.vocab_size)

    def finish(self, digests: Sequence[bytes]) -> list[Row]:
        """Run steps until all jobs with these digests have results; returns their rows."""
        self._step_until(lambda: all(digest in self.rows or digest in self.failures for digest in digests))
        failed = [self.failures[digest] for digest in digests if digest in self.failures]
        assert not failed, failed
        return [self.rows[digest] for digest in digests]

    def _step_until(self, is_done: Callable[[], bool]) -> None:
        """Run steps until a condition holds; fail when no result arrives for `DEADLINE_S`."""
        answered, since = 0, time.monotonic()
        while not is_done():
            assert time.monotonic() < since + DEADLINE_S, f"no answer within {DEADLINE_S} s"
            self.step()
            if (now := len(self.rows) + len(self.scores) + len(self.failures)) != answered:
                answered, since = now, time.monotonic()

    def score(
        self, prompts: Sequence[Sequence[int]], starts: Sequence[int], adapter: str = "", *, logits: bool = False
    ) -> list[Row]:
        """Run prompts together; returns the scores (or logits) of each prompt's tokens from its start position on."""
        queries = [PositionsQuery.scores_from(start, logits=logits) for start in starts]
        pairs = zip(prompts, queries, strict=True)
        jobs = [self.job(ids, adapter)._replace(positions=query) for ids, query in pairs]
        self.backend.submit(jobs)
        self._step_until(lambda: bool(self.failures) or all(job.digest in self.scores for job in jobs))
        assert not self.failures, self.failures
        return [self.scores[job.digest] for job in jobs]

    def expect(self, prompts: Sequence[Sequence[int]], query: PositionsQuery, adapter: str = "") -> list[Row]:
        """Run a positions query for all prompts together; returns one array (n, width) per prompt."""
        jobs = [self.job(ids, adapter)._replace(positions=query) for ids in prompts]
        self.backend.submit(jobs)
        self._step_until(lambda: bool(self.failures) or all(job.digest in self.scores for job in jobs))
        assert not self.failures, self.failures
        return [self.scores[job.digest].reshape(len(job.span), -1) for job in jobs]

    def head(self) -> Head:
        """The model's head, assembled from its parts as a client does."""
        backend, info = self.backend, self.backend.info
        assert isinstance(backend, TellsHead)
        scale, soft_cap, has_bias = backend.head(HeadQuery("facts"), "")[:FACTS].tolist()
        bias = backend.head(HeadQuery("bias"), "") if has_bias else None
        half = info.vocab_size // 2
        parts = [
            unpack_numbers(backend.head(HeadQuery("weights", first, count), ""), count, info.hidden, info.dtype)
            for first, count in ((0, half), (half, info.vocab_size - half))
        ]
        return Head(np.concatenate(parts), bias, scale, soft_cap or None, info.dtype)

    def check_scores(self, ids: Sequence[int], start: int, scores: Row, adapter: str = "") -> None:
        """Check that each token's score is its entry in the reference row of the tokens before it."""
        rows = self.references([ids[:at] for at in range(start, len(ids))], adapter)
        expected = np.array([row[token] for row, token in zip(rows, ids[start:], strict=True)])
        assert scores.shape == expected.shape
        assert scores.dtype == np.float32
        assert float(np.abs(scores - expected).max()) <= self.subject.tolerance

    def references(self, prompts: Sequence[Sequence[int]], adapter: str = "") -> list[Row]:
        """The reference rows of prompts, which the subject may compute together."""
        if self.subject.reference is reference_row:
            return reference_rows(prompts, adapter, self.version)
        return [self.subject.reference(ids, adapter, self.version) for ids in prompts]

    def ask(self, prompts: Iterable[Sequence[int]], adapter: str = "") -> list[Row]:
        """Run prompts together, and return their rows."""
        return self.finish(self.submit(prompts, adapter))

    def check(self, prompts: Sequence[Sequence[int]], rows: Sequence[Row], adapter: str = "") -> None:
        """Check that each row equals the reference row of its prompt."""
        assert len(rows) == len(prompts)
        for ids, row, expected in zip(prompts, rows, self.references(prompts, adapter), strict=True):
            assert row.shape == expected.shape
            error = float(np.abs(row - expected).max())
            assert error <= self.subject.tolerance, f"off by {error:.2g} for {len(ids)} tokens"
