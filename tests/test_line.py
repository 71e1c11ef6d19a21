"""Lines: who waits for a connection uses it in the order of coming."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from lmpool.line import Line
from lmpool.server import Server


async def test_nobody_overtakes_those_who_wait_for_a_connection() -> None:
    # What was stored first must not be removed first.
    connected = asyncio.Event()

    async def connect() -> Any:
        await connected.wait()
        return SimpleNamespace(closed=False)

    line: Line[Any] = Line(Server("redis://localhost:1"), connect)
    order: list[int] = []
    tasks: list[asyncio.Task[None]] = []

    async def use(number: int) -> None:
        await line.open()
        order.append(number)
        if len(tasks) < 12:
            tasks.append(asyncio.create_task(use(len(tasks))))

    tasks += [asyncio.create_task(use(number)) for number in range(6)]
    await asyncio.sleep(0)
    connected.set()
    while not all(task.done() for task in tasks):
        await asyncio.gather(*tasks)
    assert order == list(range(12))
