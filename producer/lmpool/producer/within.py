"""A deadline that several steps of a request share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from lmpool.errors import DeadlineExceeded
from lmpool.producer.checks import ENDLESS_S, check_timeout

ALONE_S = 60.0
"""For how long what has no deadline bears that nobody could answer it: no worker, or no server."""


def begin(timeout: float | Within | None, default: float) -> Within:
    """The deadline of a call that begins now.

    Args:
        timeout: seconds; None for the default. The deadline of a call that this one is part of stays what it is, so
            that errors name the seconds that its caller gave.
        default: seconds.

    Raises:
        SettingsError: `timeout` is not a number above 0.
    """
    if isinstance(timeout, Within):
        return timeout
    return Within(default if timeout is None else check_timeout(timeout))


class Within:
    """A deadline.

    Args:
        seconds: from now on.

    Attributes:
        seconds: as above.
        end: the event loop's time when they have passed.
        loop: the running event loop; asking for it costs a system call before Python 3.12.
    """

    __slots__ = ("end", "loop", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.loop = asyncio.get_running_loop()
        self.end = self.loop.time() + seconds

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

    def bounded(self) -> Within:
        """This deadline; where there is none, that of something which no worker has to compute."""
        return Within(ALONE_S) if self.seconds == ENDLESS_S else self

    def _late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"no answer within {self.seconds:g} s: allow more time (timeout=)")

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """End what is awaited inside when the deadline passes.

        Raises:
            DeadlineExceeded: it has passed already.
            TimeoutError: it passed inside.
        """
        if self.loop.time() >= self.end:
            raise self._late()
        timer = asyncio.timeout_at(self.end)
        try:
            async with timer:
                yield
        except TimeoutError as error:
            if not timer.expired():
                raise  # A connection that timed out by itself.
            raise TimeoutError(f"no answer within {self.seconds:g} s") from error
