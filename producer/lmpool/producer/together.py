"""Awaiting together: several requests as one, and one task by several who ask."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)


async def all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all; the first failure ends the others and is raised."""
    requests = list(work)
    if len(requests) == 1:  # The usual case of a batch of one needs no task.
        return [await requests[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(request) for request in requests]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def shared(task: asyncio.Task[T]) -> T:
    """Await a task that others await too: who gives up leaves it to them, and its failure is each one's own."""
    await ended(task)
    return outcome(task)


async def ended(task: asyncio.Task[Any]) -> None:
    """Wait until a task that others await too has ended, however it does."""
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.add_done_callback(_seen)
        raise


def outcome(task: asyncio.Task[T]) -> T:
    """The result of a task that has ended; an exception is one of the caller's own."""
    if not task.cancelled() and (error := task.exception()) is not None:
        raise own(error)
    return task.result()


def _seen(task: asyncio.Task[Any]) -> None:
    """Take note of a failure that perhaps nobody waits for any more, so that it is not reported as never retrieved."""
    if not task.cancelled():
        task.exception()


def own(error: E) -> E:
    """Another exception that says the same, for one of several who are told: notes and tracebacks are added to it."""
    kind = type(error)
    # Not by its constructor, which may take something else than `args`. Those of an OSError lack its file.
    made_of: tuple[Any, ...] = error.__reduce__()[1]  # type: ignore[assignment]
    other = kind.__new__(kind, *made_of)
    other.args = error.args
    other.__dict__.update(error.__dict__)
    if notes := getattr(error, "__notes__", None):
        other.__notes__ = list(notes)
    other.__cause__, other.__context__ = error.__cause__, error.__context__
    other.__suppress_context__ = error.__suppress_context__
    return other.with_traceback(error.__traceback__)
