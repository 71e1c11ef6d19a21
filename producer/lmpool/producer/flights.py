"""Requests under way: one flight per prompt, any number of waiters on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from lmpool.prompts import Prompt
from lmpool.rowcache import Row

Answer = Row | Exception
Waiter = Callable[[Answer], None]
"""Called once, with the row or with the exception; never after it was taken off its flight."""


class Stage(Enum):
    """How far a flight has come."""

    UNSENT = auto()
    REFUSED = auto()
    WAITING = auto()


class Flight:
    """One prompt that this process waits for.

    Attributes:
        prompt: ids and digest.
        waiters: who waits for it here.
        stage: whether the server knows that we wait.
        since: loop time of the last sign from the server about this prompt.
        damaged: the cache held something else than a row; ask for it to be overwritten.
        origin: counter of `ProducerStats` that the first waiter's request adds to.
    """

    __slots__ = ("damaged", "origin", "prompt", "since", "stage", "waiters")

    def __init__(self, prompt: Prompt, now: float) -> None:
        self.prompt = prompt
        self.waiters: list[Waiter] = []
        self.stage = Stage.UNSENT
        self.since = now
        self.damaged = 0
        self.origin = "cache_hits"


class SingleWaiter:
    """Waits for one row with a future."""

    __slots__ = ("future",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.future: asyncio.Future[Row] = loop.create_future()

    def __call__(self, answer: Answer) -> None:
        if not self.future.done():
            if isinstance(answer, Exception):
                self.future.set_exception(answer)
            else:
                self.future.set_result(answer)


class BatchWaiter:
    """Collects the rows of a batch in one array, so that no row is kept twice.

    Attributes:
        rows: float32 of shape (n, V); complete when `future` is done.
    """

    __slots__ = ("future", "left", "rows")

    def __init__(self, loop: asyncio.AbstractEventLoop, count: int, vocab_size: int) -> None:
        self.future: asyncio.Future[None] = loop.create_future()
        self.rows: NDArray[np.float32] = np.empty((count, vocab_size), np.float32)
        self.left = count
        if count == 0:
            self.future.set_result(None)

    def at(self, index: int) -> Waiter:
        """The waiter for one row of the batch."""

        def deliver(answer: Answer) -> None:
            if self.future.done():
                return
            if isinstance(answer, Exception):
                self.future.set_exception(answer)
                return
            self.rows[index] = answer
            self.left -= 1
            if self.left == 0:
                self.future.set_result(None)

        return deliver


@dataclass(slots=True)
class ProducerStats:
    """What became of a producer's requests.

    Attributes:
        requests: rows that were asked for.
        local_hits: answered from the producer's own memory.
        cache_hits: answered from the cache in Redis.
        joined: joined a request for the same prompt that was under way here or in another process.
        computed: queued for a worker.
        failed: ended with an exception, or cancelled.
    """

    requests: int = 0
    local_hits: int = 0
    cache_hits: int = 0
    joined: int = 0
    computed: int = 0
    failed: int = 0

    def add(self, name: str, count: int = 1) -> None:
        """Count."""
        setattr(self, name, getattr(self, name) + count)

    def copy(self) -> ProducerStats:
        """A snapshot."""
        return ProducerStats(*(getattr(self, f.name) for f in fields(self)))
