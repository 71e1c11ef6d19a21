"""Background tasks end for certain, and before what they use is closed."""

from __future__ import annotations

import asyncio

import pytest

from lmpool import aio
from lmpool.aio import end_tasks, finish


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
    assert "still waits for what was cancelled to end: <Task " in caplog.text
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
