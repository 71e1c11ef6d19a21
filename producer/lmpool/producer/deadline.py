"""Deadlines: what callers give as `timeout`, and the moment that all steps of a request share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

from lmpool.aio import silence_limit
from lmpool.errors import DeadlineExceeded, SettingsError, argument
from lmpool.settings import shown

ENDLESS_S = 9e8
"""Stands for no deadline at all: a request ends in its row, or when nobody could have answered it for long.

With infinity, deadlines could not be computed with.
"""

ALONE_S = 60.0
"""For how long a request without a deadline waits while nobody could answer it: no worker, or no server."""


def check_timeout(timeout: float) -> float:
    """Seconds that a request may take.

    Raises:
        SettingsError: not a number above 0.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < 1e9:
        raise SettingsError(f"timeout: {shown(timeout)} must be a number of seconds above 0")
    return float(timeout)


class Deadline:
    """The moment at which a request ends, whichever of its steps is under way.

    Args:
        seconds: from now on.

    Attributes:
        seconds: as above.
        end: the event loop's time when they have passed.
        loop: the running event loop; asking for it costs a system call before Python 3.12.
        is_of_caller: whether a caller has set it. If not, each step of the request may take `seconds`, in which a
            blocked event loop hardly counts.
    """

    __slots__ = ("end", "is_of_caller", "loop", "seconds")

    def __init__(self, seconds: float, *, is_of_caller: bool = True) -> None:
        self.seconds = seconds
        self.is_of_caller = is_of_caller
        self.loop = asyncio.get_running_loop()
        self.end = self.loop.time() + seconds

    @classmethod
    def of(cls, timeout: float | None, default: float) -> Self:
        """The deadline of a call that begins now.

        Args:
            timeout: seconds; None for the default.
            default: seconds.

        Raises:
            SettingsError: `timeout` is not a number above 0.
        """
        return cls(default if timeout is None else check_timeout(timeout))

    @property
    def left(self) -> float:
        """Seconds until the deadline.

        Raises:
            DeadlineExceeded: it has passed.
        """
        left = self.end - self.loop.time()
        if left <= 0:
            raise self._late()
        return left

    def bounded(self) -> Deadline:
        """This deadline; where it is endless, one of `ALONE_S`, for what no worker has to compute."""
        return Deadline(ALONE_S, is_of_caller=False) if self.seconds == ENDLESS_S else self

    def _late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"no answer within {self.seconds:g} s: allow more time ({argument('timeout')})")

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """End what is awaited inside when the deadline passes.

        Raises:
            DeadlineExceeded: it has passed already.
            TimeoutError: it passed inside.
        """
        if self.is_of_caller and self.loop.time() >= self.end:
            raise self._late()
        try:
            async with asyncio.timeout_at(self.end) if self.is_of_caller else silence_limit(self.seconds) as timer:
                yield
        except TimeoutError as error:
            if not timer.expired():
                raise  # A connection that timed out by itself.
            raise TimeoutError(f"no answer within {self.seconds:g} s") from error
