"""Helpers for asyncio: delays between retries, silence limits, tasks that end reliably, results of several tasks."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

_log = logging.getLogger("lmpool")

_FIRST_DELAY_S = 0.05  # Seconds before the first retry: a restarted server accepts connections after about this time.
_MAX_DELAY_S = 2.0  # Max seconds between retries: a server that returns is used within two seconds.
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.005, 1.0  # Min and max seconds between two polls.
_PAUSE_SHARE = 1 / 20  # Seconds between two polls, as a part of the time since the first poll.
_CANCEL_S = 0.1  # Seconds until a cancellation is repeated for the first time; the pause doubles each time.
_MAX_CANCEL_S = 1.0  # Max seconds between repeated cancellations of a task that ignores its cancellation.
_WARN_EVERY_S = 10.0  # Seconds between log lines about tasks that do not end.
_PARTS = 20  # Parts of a silence limit: each time the event loop blocks, it uses up at most one part of the limit.

# Seconds by which a timer may be late on a busy machine. If a timer is later, the event loop was blocked.
MAX_LATENESS_S = 0.25


def delays(max_s: float = _MAX_DELAY_S) -> Iterator[float]:
    """Yield the seconds before each retry: doubling up to `max_s`, with jitter so that clients do not retry in step."""
    ceiling = _FIRST_DELAY_S
    while True:
        yield random.uniform(ceiling / 2, ceiling)
        ceiling = min(max_s, ceiling * 2)


def pauses() -> Iterator[float]:
    """Yield the seconds before each poll for the end of another process's work: a twentieth of the time so far.

    The caller notices the end of short work soon, and polls long work about once a second.
    """
    began = time.monotonic()
    while True:
        yield min(_MAX_PAUSE_S, max(_MIN_PAUSE_S, _PAUSE_SHARE * (time.monotonic() - began)))


@asynccontextmanager
async def silence_limit(seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
    """Limit how long the other side may be silent, like `asyncio.timeout`, but count little of a blocked event loop.

    A program that computes in its event loop receives nothing, although the other side may have answered. So each block
    of the event loop uses up only one of `_PARTS` parts of the limit, however long it takes. None means no limit.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(seconds) as timer:
        if seconds is None:
            yield timer
            return
        part = seconds / _PARTS
        ticking: asyncio.TimerHandle

        def tick(left: int) -> None:
            nonlocal ticking
            timer.reschedule(loop.time() + left * part)
            if left > 1:
                ticking = loop.call_later(part, tick, left - 1)

        ticking = loop.call_later(part, tick, _PARTS - 1)
        try:
            yield timer
        finally:
            ticking.cancel()


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until all have ended; discard their exceptions.

    Cancellations are repeated, because `asyncio.wait_for` of Python 3.11 loses a cancellation that arrives together
    with the result. If the caller is cancelled, `CancelledError` is raised when all tasks have ended, because the tasks
    use objects that the caller is about to close. The log names tasks that take long to end.
    """
    tasks = list(tasks)
    pending = {task for task in tasks if not task.done()}
    interrupted: asyncio.CancelledError | None = None
    pause, loop = _CANCEL_S, asyncio.get_running_loop()
    warn_at = loop.time() + _WARN_EVERY_S
    while pending:
        for task in pending:
            task.cancel()
        try:
            await asyncio.wait(pending, timeout=pause)
        except asyncio.CancelledError as error:
            interrupted = error
        pending = {task for task in pending if not task.done()}
        pause = min(2 * pause, _MAX_CANCEL_S)
        if pending and loop.time() >= warn_at:
            _log.warning("still waiting for cancelled tasks to end: %s", ", ".join(map(repr, pending)))
            warn_at += _WARN_EVERY_S
    for task in tasks:
        _retrieve(task)
    if interrupted is not None:
        raise interrupted


async def finish(work: Coroutine[Any, Any, None]) -> None:
    """Await a coroutine to its end, even if the caller is cancelled: for closing, which must be completed."""
    task = asyncio.ensure_future(work)
    interrupted: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            interrupted = error
    if interrupted is not None:
        raise interrupted from task.exception()
    task.result()


async def gather(
    work: Iterable[Coroutine[Any, Any, T]], explain: Callable[[BaseException, int], object] = lambda error, index: None
) -> list[T]:
    """Await all coroutines; the first exception cancels the other coroutines and is raised.

    `explain` is called with the first exception, and with the index in `work` of the coroutine that raised it.
    """
    requests = list(work)
    if len(requests) < 2:  # Usually there is one coroutine, which needs no task.
        return [await request for request in requests]
    tasks = list(map(asyncio.ensure_future, requests))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for index, task in enumerate(tasks):
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                explain(error, index)
                raise error
    finally:
        await end_tasks(tasks)
    return [task.result() for task in tasks]


async def await_beside(work: Coroutine[Any, Any, T], others: Iterable[Coroutine[Any, Any, None]]) -> T:
    """Await `work` while `others` run as tasks; cancel these when `work` ends. The first exception ends all.

    `asyncio.TaskGroup` is no alternative before Python 3.13: it can lose or invent a cancellation of its caller
    (https://github.com/python/cpython/issues/116720).
    """
    main = asyncio.ensure_future(work)
    tasks: list[asyncio.Task[Any]] = [main, *map(asyncio.ensure_future, others)]
    pending = set(tasks)
    try:
        while not main.done():
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task in done and not task.cancelled():
                    task.result()
    finally:
        await end_tasks(tasks)
    return main.result()


async def join_task(task: asyncio.Task[T]) -> T:
    """Await a task that other callers await too: a cancelled caller does not cancel the task; exceptions are copied."""
    await ended(task)
    return outcome(task)


async def ended(task: asyncio.Task[Any]) -> None:
    """Wait until a task that other callers await too has ended, with a result or an exception."""
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.add_done_callback(_retrieve)
        raise


def outcome(task: asyncio.Task[T]) -> T:
    """Return the result of an ended task, or raise a copy of its exception."""
    if not task.cancelled() and (error := task.exception()) is not None:
        raise copy_error(error)
    return task.result()


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Retrieve the exception of a task, so that asyncio does not log it as never retrieved."""
    if not task.cancelled():
        task.exception()


def copy_error(error: E) -> E:
    """Copy an exception for one of several callers, because each caller adds notes and tracebacks."""
    kind = type(error)
    # Create the copy without `__init__`, whose parameters may differ from `args`. An OSError's `args` lack its file.
    arguments: tuple[Any, ...] = error.__reduce__()[1]  # type: ignore[assignment]
    other = kind.__new__(kind, *arguments)
    other.args = error.args
    other.__dict__.update(error.__dict__)
    if notes := getattr(error, "__notes__", None):
        other.__notes__ = list(notes)
    # A traceback would print the error twice if the original were the cause of the copy.
    other.__cause__ = None if error.__cause__ is error else error.__cause__
    other.__context__ = error.__context__
    other.__suppress_context__ = error.__suppress_context__
    return other.with_traceback(error.__traceback__)
