"""Threads as greenlets: the code of a thread runs in the event loop's thread until it waits, in virtual time.

A thread of the package waits only in the functions below. So it is switched only there, and a run can be repeated.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import greenlet  # type: ignore[import-untyped]

from tests.simulation.loop import PROCESS, SimulatedLoop, escape

_identities = itertools.count(1)


def _loop() -> SimulatedLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulatedLoop)
    return loop


def _switch(waiting: greenlet.greenlet) -> None:
    waiting.switch()


def wait(seconds: float | None, until: Callable[[Callable[[], None]], None] | None = None) -> None:
    """Let the current thread wait for `seconds` (None: no limit), or until the function given to `until` is called.

    Raises:
        Escaped: the event loop itself would wait (`escape`).
    """
    loop, current = _loop(), greenlet.getcurrent()
    if current.parent is None:
        raise escape(loop, "the event loop would block")
    is_over = False

    def wake() -> None:
        nonlocal is_over
        if not is_over:
            is_over = True
            loop.call_soon(_switch, current)

    if seconds is not None:
        loop.call_later(seconds, wake)
    if until is not None:
        until(wake)
    current.parent.switch()


def sleep(seconds: float) -> None:
    """In place of `time.sleep`."""
    wait(seconds)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """In place of `asyncio.run`, which cannot be called while a loop runs."""
    task = _loop().create_task(work)
    wait(None, lambda wake: task.add_done_callback(lambda _: wake()))
    return task.result()


class Thread:
    """In place of `threading.Thread`."""

    def __init__(
        self, group: None = None, target: Any = None, name: str = "", args: Any = (), kwargs: Any = None, **_: Any
    ) -> None:
        self.name, self.ident, self._is_over = name, next(_identities), False
        self._run: Callable[[], object] = lambda: target(*args, **(kwargs or {}))
        self._joining: list[Callable[[], None]] = []

    def start(self) -> None:
        """Start the thread in the next callback of the event loop."""
        loop = _loop()
        thread = greenlet.greenlet(self._main)
        thread.gr_context = loop.context_of(PROCESS.get())
        loop.call_soon(_switch, thread)

    def _main(self) -> None:
        try:
            self._run()
        finally:
            self._is_over = True
            for wake in self._joining:
                wake()

    def is_alive(self) -> bool:
        """See `threading.Thread`."""
        return not self._is_over

    def join(self, timeout: float | None = None) -> None:
        """See `threading.Thread`."""
        if not self._is_over:
            wait(timeout, self._joining.append)


class SimpleQueue:
    """In place of `queue.SimpleQueue`, for one reader."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._wake: Callable[[], None] = lambda: None

    def put(self, item: Any) -> None:
        """Append an item."""
        self._items.append(item)
        self._wake()

    def empty(self) -> bool:
        """Whether `get` would wait."""
        return not self._items

    def get(self) -> Any:
        """Remove and return the first item; wait for one."""
        while not self._items:
            wait(None, self._set_wake)
        return self._items.popleft()

    def _set_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake


class Event:
    """In place of `threading.Event`."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[Callable[[], None]] = []

    def is_set(self) -> bool:
        """See `threading.Event`."""
        return self._is_set

    def set(self) -> None:
        """See `threading.Event`."""
        self._is_set = True
        for wake in self._waiting:
            wake()
        self._waiting.clear()

    def clear(self) -> None:
        """See `threading.Event`."""
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """See `threading.Event`."""
        if not self._is_set:
            wait(timeout, self._waiting.append)
        return self._is_set
