"""Helpers of asyncio: pauses between tries, limits of silence, tasks that end for certain, results of several."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

_log = logging.getLogger("lmpool")

_FIRST_S = 0.05
_LONGEST_S = 2.0
_AGAIN_S = 0.1
_MAX_AGAIN_S = 1.0
_WARN_EVERY_S = 10.0
# Parts of a limit of silence: a pause of the event loop counts as one of them, so 20 pauses can use a limit up.
_PARTS = 20

MAX_LATENESS_S = 0.25
"""Seconds by which a timer may be late on a busy machine; where it is later, the event loop was blocked."""


def delays(longest_s: float = _LONGEST_S) -> Iterator[float]:
    """Seconds before each further try: doubling up to `longest_s`, and jittered so that clients do not come at once."""
    ceiling = _FIRST_S
    while True:
        yield random.uniform(ceiling / 2, ceiling)
        ceiling = min(longest_s, ceiling * 2)


@asynccontextmanager
async def silence_limit(seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
    """Limit how long the other side may be silent; as `asyncio.timeout`, but a blocked event loop hardly counts.

    A program that computes in its event loop receives nothing, although the other side may have answered. So a
    pause of the event loop counts as a small part of the limit, however long the pause is.

    Args:
        seconds: the limit; None for none.

    Raises:
        TimeoutError: the limit has passed.
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
    """Cancel tasks and wait until all have ended; what they raise is dropped.

    A cancellation is repeated until it takes: `asyncio.wait_for` of Python 3.11, which what they await may use, loses
    one that comes together with the result. The caller may be cancelled too, even more than once: that is raised
    when all have ended, for they use what the caller is about to close. Tasks that take long are named in the log.

    Raises:
        CancelledError: the caller was cancelled.
    """
    tasks = list(tasks)
    pending = {task for task in tasks if not task.done()}
    interrupted: asyncio.CancelledError | None = None
    pause, loop = _AGAIN_S, asyncio.get_running_loop()
    warn_at = loop.time() + _WARN_EVERY_S
    while pending:
        for task in pending:
            task.cancel()
        try:
            await asyncio.wait(pending, timeout=pause)
        except asyncio.CancelledError as error:
            interrupted = error
        pending = {task for task in pending if not task.done()}
        pause = min(2 * pause, _MAX_AGAIN_S)
        if pending and loop.time() >= warn_at:
            _log.warning("still waits for what was cancelled to end: %s", ", ".join(map(repr, pending)))
            warn_at += _WARN_EVERY_S
    for task in tasks:
        _retrieve(task)
    if interrupted is not None:
        raise interrupted


async def finish(work: Coroutine[Any, Any, None]) -> None:
    """Await something to its end, also when this is cancelled meanwhile, however often: what closes must close.

    Raises:
        CancelledError: this was cancelled; a failure of the work is its cause.
    """
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
    """Await all; the first failure ends the others and is raised.

    Args:
        work: what is awaited.
        explain: called with that failure, and the index in `work` of what has raised it.
    """
    requests = list(work)
    if len(requests) < 2:  # The usual case of a batch of one needs no task.
        return [await request for request in requests]
    tasks = list(map(asyncio.ensure_future, requests))
    failures = _failures(tasks)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if failures:
            error = failures.pop(0)
            ended = (task.done() and not task.cancelled() and task.exception() is error for task in tasks)
            explain(error, list(ended).index(True))
            raise error
    finally:
        await end_tasks(tasks)
    return [task.result() for task in tasks]


async def await_beside(work: Coroutine[Any, Any, T], others: Iterable[Coroutine[Any, Any, None]]) -> T:
    """Await something while others go on beside it, which end with it; the first failure of any ends all and is raised.

    Not by `asyncio.TaskGroup`: before Python 3.13 it forgets that its caller was cancelled while it ends tasks after a
    failure, or leaves a cancellation counted that there was not (https://github.com/python/cpython/issues/116720).
    """
    main = asyncio.ensure_future(work)
    pending = {main, *map(asyncio.ensure_future, others)}
    tasks, failures = list(pending), _failures(pending)
    try:
        while not main.done():
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if failures:
                raise failures.pop(0)
    finally:
        await end_tasks(tasks)
    return main.result()


def _failures(tasks: Iterable[asyncio.Task[Any]]) -> list[BaseException]:
    """What some tasks have raised when it is looked at, the first one first."""
    failures = list[BaseException]()

    def note(task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            failures.append(error)

    for task in tasks:
        task.add_done_callback(note)
    return failures


async def join_task(task: asyncio.Task[T]) -> T:
    """Await a task that others await too: a caller that gives up leaves it to them, and each has its own failure."""
    await ended(task)
    return outcome(task)


async def ended(task: asyncio.Task[Any]) -> None:
    """Wait until a task that others await too has ended, however it does."""
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.add_done_callback(_retrieve)
        raise


def outcome(task: asyncio.Task[T]) -> T:
    """The result of a task that has ended; an exception is one of the caller's own."""
    if not task.cancelled() and (error := task.exception()) is not None:
        raise copy_error(error)
    return task.result()


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Retrieve a failure that perhaps nobody waits for any more, so that it is not reported as never retrieved."""
    if not task.cancelled():
        task.exception()


def copy_error(error: E) -> E:
    """Another exception that says the same, for one of several callers: notes and tracebacks are added to it."""
    kind = type(error)
    # Not by its constructor, which may take something else than `args`. The `args` of an OSError lack its file.
    arguments: tuple[Any, ...] = error.__reduce__()[1]  # type: ignore[assignment]
    other = kind.__new__(kind, *arguments)
    other.args = error.args
    other.__dict__.update(error.__dict__)
    if notes := getattr(error, "__notes__", None):
        other.__notes__ = list(notes)
    # Some are raised from themselves; a copy that names the first as its cause would be told twice.
    other.__cause__ = None if error.__cause__ is error else error.__cause__
    other.__context__ = error.__context__
    other.__suppress_context__ = error.__suppress_context__
    return other.with_traceback(error.__traceback__)
