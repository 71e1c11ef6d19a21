"""Background tasks always end, and they end before the objects that they use are closed."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from lmpool import aio
from lmpool.aio import await_beside, end_tasks, finish, gather


class Deaf:
    """A coroutine that waits, ignores the first `lost` cancellations, and records its end."""

    def __init__(self, lost: int) -> None:
        self.heard = 0
        self.has_ended = False
        self._lost = lost

    async def run(self) -> None:
        try:
            while True:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    self.heard += 1
                    if self.heard > self._lost:
                        raise
        finally:
            self.has_ended = True


async def begun(deaf: Deaf) -> asyncio.Task[None]:
    task = asyncio.create_task(deaf.run())
    await asyncio.sleep(0)
    return task


async def insist(task: asyncio.Task[None]) -> None:
    """Cancel a task until it ends, because otherwise the test's event loop would not end."""
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)


@pytest.mark.parametrize("lost", [0, 1, 3])
async def test_a_task_ends_even_if_cancellations_are_lost(lost: int) -> None:
    deaf = Deaf(lost)
    async with asyncio.timeout(10):
        await end_tasks([await begun(deaf)])
    assert deaf.has_ended


async def test_a_cancelled_end_tasks_returns_only_after_the_tasks_have_ended() -> None:
    deaf = Deaf(2)
    task = await begun(deaf)
    seen = []

    async def own() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            try:
                await end_tasks([task])
            finally:
                seen.append(deaf.has_ended)

    owner = asyncio.create_task(own())
    await asyncio.sleep(0)
    try:
        async with asyncio.timeout(10):
            # `end_tasks` cancels the owner again while the owner waits for the end of its own task.
            await end_tasks([owner])
    finally:
        await insist(task)
    assert (seen, owner.cancelled()) == ([True], True)


async def test_tasks_that_take_long_to_end_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(aio, "_WARN_EVERY_S", 0.05)
    await end_tasks([await begun(Deaf(3))])
    assert "still waiting for cancelled tasks to end: <Task " in caplog.text
    assert "Deaf.run" in caplog.text


async def test_the_exception_of_an_ended_task_is_discarded() -> None:
    async def fail() -> None:
        raise KeyError("mine")

    task = asyncio.create_task(fail())
    await end_tasks([task])
    await end_tasks([])
    assert task.done()


async def test_finish_completes_although_its_caller_is_cancelled_repeatedly() -> None:
    may_end, ends = asyncio.Event(), []

    async def close() -> None:
        await may_end.wait()
        ends.append("closed")

    closing = asyncio.create_task(finish(close()))
    for _ in range(3):
        await asyncio.sleep(0)
        closing.cancel()
    await asyncio.sleep(0)
    assert not closing.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert ends == ["closed"]


async def test_finish_raises_the_error_of_its_coroutine() -> None:
    async def close() -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        await finish(close())


async def test_a_cancelled_finish_raises_cancellederror_caused_by_the_error() -> None:
    may_fail = asyncio.Event()

    async def close() -> None:
        await may_fail.wait()
        raise OSError("gone")

    closing = asyncio.create_task(finish(close()))
    await asyncio.sleep(0)
    closing.cancel()
    may_fail.set()
    with pytest.raises(asyncio.CancelledError) as raised:
        await closing
    assert isinstance(raised.value.__cause__, OSError)


async def fail(why: str = "gone") -> None:
    raise OSError(why)


async def wait(number: int) -> int:
    for _ in range(number):
        await asyncio.sleep(0)
    return number


TOGETHER = [
    pytest.param(lambda others: gather([*others, fail()]), id="gather"),
    pytest.param(lambda others: await_beside(fail(), others), id="work fails"),
    pytest.param(lambda others: await_beside(asyncio.Event().wait(), [*others, fail()]), id="another fails"),
]


@pytest.mark.parametrize("together", TOGETHER)
async def test_the_first_failure_cancels_the_other_tasks_and_is_raised(together: Any) -> None:
    others = [Deaf(2) for _ in range(3)]
    with pytest.raises(OSError, match="gone"):
        await together([other.run() for other in others])
    assert all(other.has_ended for other in others)
    caller = asyncio.current_task()
    assert caller is not None
    assert caller.cancelling() == 0, "otherwise a timeout around the call would look like a cancellation"


@pytest.mark.parametrize("together", TOGETHER)
async def test_the_first_of_many_simultaneous_failures_is_raised_and_none_is_reported(together: Any) -> None:
    reported, failures = list[Any](), [fail(f"number {number}") for number in range(20)]
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    with pytest.raises(OSError, match="number 0|gone"):
        await together(failures)
    gc.collect()
    assert reported == []


@pytest.mark.parametrize("together", TOGETHER)
async def test_a_cancellation_during_the_cleanup_after_a_failure_is_raised(together: Any) -> None:
    """lmpool raises the cancellation, although `asyncio.TaskGroup` before Python 3.13 raises the failure."""
    is_ending, may_end = asyncio.Event(), asyncio.Event()

    async def end_slowly() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            is_ending.set()
            await finish(note(may_end.wait()))

    caller = asyncio.create_task(together([end_slowly()]))
    await is_ending.wait()
    caller.cancel()
    await asyncio.sleep(0)
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await caller


async def test_gather_and_await_beside_return_the_results() -> None:
    assert await gather([wait(3), wait(0), wait(1)]) == [3, 0, 1]
    assert await gather([wait(2)]) == [2]
    assert await gather(list[Any]()) == []
    other = Deaf(1)
    assert await await_beside(wait(3), [other.run(), note(wait(1))]) == 3
    assert other.has_ended


async def note(work: Any) -> None:
    await work
