"""Those who wait for rows: one for a single row, one for a batch; and the deadlines of the former."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import ModelMismatch
from lmpool.producer.client.requests import Answer, Flight, Waiter
from lmpool.rows.cache import Row

_SLOTS_PER_S = 100


class SingleWaiter:
    """Waits for one row with a future.

    Args:
        loop: the running event loop.
        seconds: how long it waits, for who is told that they have passed.

    Attributes:
        future: has the row.
        flight: what it waits for.
        seconds: as above.
        slot: which of the `Deadlines` it is in.
    """

    __slots__ = ("flight", "future", "seconds", "slot")

    flight: Flight

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self.future: asyncio.Future[Row] = loop.create_future()
        self.seconds = seconds
        self.slot = 0

    def __call__(self, answer: Answer) -> None:
        if not self.future.done():
            if isinstance(answer, Exception):
                self.future.set_exception(answer)
            else:
                self.future.set_result(answer)


class Deadlines:
    """Ends waits whose time has passed, at most 10 ms later.

    A timer for each would cost more than anything else of a request that is answered in time; one for all those
    that end within the same hundredth of a second costs next to nothing.

    Args:
        loop: the running event loop.
        expire: called with each waiter whose time has passed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, expire: Callable[[SingleWaiter], None]) -> None:
        self._loop = loop
        self._expire = expire
        self._slots: dict[int, tuple[set[SingleWaiter], asyncio.TimerHandle]] = {}

    def add(self, waiter: SingleWaiter, until: float) -> None:
        """End a wait at the loop time `until`, unless it is removed before."""
        number = waiter.slot = int(until * _SLOTS_PER_S) + 1
        slot = self._slots.get(number)
        if slot is None:
            slot = self._slots[number] = set(), self._loop.call_at(number / _SLOTS_PER_S, self._end, number)
        slot[0].add(waiter)

    def remove(self, waiter: SingleWaiter) -> None:
        """Forget a wait that has ended, in whichever way."""
        slot = self._slots.get(waiter.slot)
        if slot is not None:
            waiters, timer = slot
            waiters.discard(waiter)
            if not waiters:
                timer.cancel()
                del self._slots[waiter.slot]

    def _end(self, number: int) -> None:
        waiters, _ = self._slots.pop(number)
        for waiter in waiters:
            self._expire(waiter)


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
