"""Background tasks end for certain, and before what they use is closed."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from lmpool import aio
from lmpool.aio import await_beside, end_tasks, finish, gather


class Deaf:
    """Waits; the first cancellations are lost on it, and it says when it has ended."""

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
    """Have a task end that a test has not ended, or nothing would end the test's event loop."""
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)


@pytest.mark.parametrize("lost", [0, 1, 3])
async def test_a_task_ends_even_if_cancellations_are_lost(lost: int) -> None:
    deaf = Deaf(lost)
    async with asyncio.timeout(10):
        await end_tasks([await begun(deaf)])
    assert deaf.has_ended


async def test_who_is_cancelled_while_it_ends_tasks_goes_on_only_when_they_have_ended() -> None:
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
            # Cancelled, and again while it ends the other.
            await end_tasks([owner])
    finally:
        await insist(task)
    assert (seen, owner.cancelled()) == ([True], True)


async def test_tasks_that_take_long_to_end_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(aio, "_WARN_EVERY_S", 0.05)
    await end_tasks([await begun(Deaf(3))])
    assert "still waiting for cancelled tasks to end: <Task " in caplog.text
    assert "Deaf.run" in caplog.text


async def test_what_a_task_raises_at_its_end_is_dropped() -> None:
    async def fail() -> None:
        raise KeyError("mine")

    task = asyncio.create_task(fail())
    await end_tasks([task])
    await end_tasks([])
    assert task.done()


async def test_what_closes_is_finished_although_its_caller_is_cancelled_again_and_again() -> None:
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


async def test_what_fails_to_close_says_so() -> None:
    async def close() -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        await finish(close())


async def test_who_is_cancelled_while_something_fails_to_close_is_heard() -> None:
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
async def test_the_first_failure_ends_what_goes_on_together_and_is_raised(together: Any) -> None:
    others = [Deaf(2) for _ in range(3)]
    with pytest.raises(OSError, match="gone"):
        await together([other.run() for other in others])
    assert all(other.has_ended for other in others)
    caller = asyncio.current_task()
    assert caller is not None
    assert caller.cancelling() == 0, "else no timeout around it would be told from a cancellation any more"


@pytest.mark.parametrize("together", TOGETHER)
async def test_of_many_failures_at_once_the_first_is_raised_and_none_is_reported(together: Any) -> None:
    reported, failures = list[Any](), [fail(f"number {number}") for number in range(20)]
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    with pytest.raises(OSError, match="number 0|gone"):
        await together(failures)
    gc.collect()
    assert reported == []


@pytest.mark.parametrize("together", TOGETHER)
async def test_who_is_cancelled_while_others_end_after_a_failure_is_heard(together: Any) -> None:
    """`asyncio.TaskGroup` before Python 3.13 raises the failure instead."""
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


async def test_what_goes_on_together_gives_its_results() -> None:
    assert await gather([wait(3), wait(0), wait(1)]) == [3, 0, 1]
    assert await gather([wait(2)]) == [2]
    assert await gather(list[Any]()) == []
    other = Deaf(1)
    assert await await_beside(wait(3), [other.run(), note(wait(1))]) == 3
    assert other.has_ended


async def note(work: Any) -> None:
    await work
