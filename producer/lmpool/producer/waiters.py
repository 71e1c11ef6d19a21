"""Those who wait for rows: one for a single row, one for a batch."""

from __future__ import annotations

import asyncio

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import ModelMismatch
from lmpool.producer.flights import Answer, Waiter
from lmpool.rowcache import Row


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
            if answer.shape != self.rows.shape[1:]:
                v = self.rows.shape[1]
                self.future.set_exception(ModelMismatch(f"the model's V was {v} and is {answer.size} now: ask again"))
                return
            self.rows[index] = answer
            self.left -= 1
            if self.left == 0:
                self.future.set_result(None)

        return deliver
