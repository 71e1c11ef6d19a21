"""Drives a backend in a test as the worker's thread does."""

from __future__ import annotations

import itertools
import mmap
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
from lmpool.protocol.query import PositionsQuery
from lmpool.protocol.row import Encoding, Row, RowBlock, decode_row
from lmpool.workers.execution.contract import Backend, BackendJob
from tests.contract.model import V
from tests.contract.subjects import Subject

DEADLINE_S = 120.0
"""Between one answer and the next. How long all of them take is a matter of how many there are, and of the machine."""
_numbers = itertools.count()


def prompt(draw: random.Random, length: int) -> list[int]:
    """A random prompt."""
    return [draw.randrange(V) for _ in range(length)]


class Slots:
    """Memory of rows with gaps between them, as in shared memory.

    Attributes:
        given: the requested blocks.
    """

    _BYTES = 16 * 2**20
    # A GPU may still write to registered memory.
    _all: ClassVar[list[memoryview]] = []

    def __init__(self) -> None:
        self.given: list[NDArray[Any]] = []
        self._left = memoryview(mmap.mmap(-1, self._BYTES))
        self._all.append(self._left)

    def __call__(self, count: int, vocab_size: int, encoding: Encoding) -> NDArray[Any]:
        """See `NewRows`."""
        stride = (vocab_size + 5) * encoding.dtype.itemsize
        memory = np.frombuffer(self._left[: count * stride], np.uint8)
        self._left = self._left[count * stride :]
        memory[:] = 7
        self.given.append(memory.view(encoding.dtype).reshape(count, vocab_size + 5)[:, :vocab_size])
        return self.given[-1]

    def have(self, block: RowBlock) -> bool:
        """Whether the rows of a block are in this memory."""
        return any(np.shares_memory(block.numbers, memory) for memory in self.given)


class Opened:
    """A subject's backend, made when the context is entered.

    Attributes:
        subject: describes the backend.
        rows: digest -> row, of all results.
        failures: digest -> message.
        scores: digest -> scores.
        blocks: of the last step with results.
    """

    def __init__(self, subject: Subject, model: Path, dtype: str, adapters: dict[str, Path]) -> None:
        self.subject = subject
        self.rows: dict[bytes, Row] = {}
        self.failures: dict[bytes, str] = {}
        self.scores: dict[bytes, Row] = {}
        self.blocks: Sequence[RowBlock] = ()
        self._make: Callable[[], Backend] = lambda: subject.make(model, dtype, adapters if subject.has_adapters else {})

    def __enter__(self) -> Self:
        self.backend = self._make()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.backend.close()

    def job(self, ids: Sequence[int], adapter: str = "") -> BackendJob:
        """A job with a digest of its own, so that the backend cannot have its row already.

        Args:
            ids: the prompt.
            adapter: name of an adapter, or "".
        """
        info = self.backend.info
        data = encode_prompt(list(ids), vocab_size=info.vocab_size, max_tokens=info.max_prompt_tokens).ids
        return BackendJob(digest_of(data, f"{next(_numbers)}"), data, self.qualified(adapter))

    def qualified(self, adapter: str) -> str:
        """The qualified name of an adapter; "" for none."""
        return (
            next(full_name for full_name in self.backend.adapters if name_of(full_name) == adapter) if adapter else ""
        )

    def submit(self, prompts: Iterable[Sequence[int]], adapter: str = "") -> list[bytes]:
        """Submit prompts; return their digests."""
        jobs = [self.job(ids, adapter) for ids in prompts]
        self.backend.submit(jobs)
        return [job.digest for job in jobs]

    def step(self) -> None:
        """Run one step, and keep its results."""
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
        """Step until all of these have results; return their rows."""
        self._step_until(lambda: all(digest in self.rows or digest in self.failures for digest in digests))
        failed = [self.failures[digest] for digest in digests if digest in self.failures]
        assert not failed, failed
        return [self.rows[digest] for digest in digests]

    def _step_until(self, is_done: Callable[[], bool]) -> None:
        """Step until a condition holds; fail when no more results arrive."""
        answered, since = 0, time.monotonic()
        while not is_done():
            assert time.monotonic() < since + DEADLINE_S, f"no answer within {DEADLINE_S} s"
            self.step()
            if (now := len(self.rows) + len(self.scores) + len(self.failures)) != answered:
                answered, since = now, time.monotonic()

    def score(
        self, prompts: Sequence[Sequence[int]], starts: Sequence[int], adapter: str = "", *, logits: bool = False
    ) -> list[Row]:
        """The scores, or their logits, of prompts that run together, from the given positions on."""
        queries = [PositionsQuery.scores_from(start, logits=logits) for start in starts]
        pairs = zip(prompts, queries, strict=True)
        jobs = [self.job(ids, adapter)._replace(positions=query) for ids, query in pairs]
        self.backend.submit(jobs)
        self._step_until(lambda: bool(self.failures) or all(job.digest in self.scores for job in jobs))
        assert not self.failures, self.failures
        return [self.scores[job.digest] for job in jobs]

    def expect(self, prompts: Sequence[Sequence[int]], query: PositionsQuery, adapter: str = "") -> list[Row]:
        """The results of a positions query for prompts that run together, each (n, width)."""
        jobs = [self.job(ids, adapter)._replace(positions=query) for ids in prompts]
        self.backend.submit(jobs)
        self._step_until(lambda: bool(self.failures) or all(job.digest in self.scores for job in jobs))
        assert not self.failures, self.failures
        return [self.scores[job.digest].reshape(len(job.span), -1) for job in jobs]

    def check_scores(self, ids: Sequence[int], start: int, scores: Row, adapter: str = "") -> None:
        """Each score must be the reference row's entry."""
        rows = [self.subject.reference(ids[:at], adapter) for at in range(start, len(ids))]
        expected = np.array([row[token] for row, token in zip(rows, ids[start:], strict=True)])
        assert scores.shape == expected.shape
        assert scores.dtype == np.float32
        assert float(np.abs(scores - expected).max()) <= self.subject.tolerance

    def ask(self, prompts: Iterable[Sequence[int]], adapter: str = "") -> list[Row]:
        """The rows of prompts that run together."""
        return self.finish(self.submit(prompts, adapter))

    def check(self, prompts: Sequence[Sequence[int]], rows: Sequence[Row], adapter: str = "") -> None:
        """Each row must be the reference's."""
        assert len(rows) == len(prompts)
        for ids, row in zip(prompts, rows, strict=True):
            expected = self.subject.reference(ids, adapter)
            assert row.shape == expected.shape
            error = float(np.abs(row - expected).max())
            assert error <= self.subject.tolerance, f"off by {error:.2g} for {len(ids)} tokens"
