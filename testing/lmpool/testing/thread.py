"""An event loop in a thread of its own, which serves while a context is open."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs an asynchronous context manager in a thread, and coroutines beside it.

    Args:
        context: entered by `start` and left by `stop`, in the thread.
        name: the thread's name.
    """

    def __init__(self, context: AbstractAsyncContextManager[object], name: str) -> None:
        self._context = context
        self._begun = threading.Event()
        self._error: BaseException | None = None
        # A daemon: a notebook that is closed in the middle must not wait for it.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Enter the context; raises what that raises."""
        self._thread.start()
        self._begun.wait()
        if self._error is not None:
            self.stop()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread; returns what it returns."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def stop(self) -> None:
        """Leave the context and end the thread; raises what leaving raises."""
        if self._error is None:
            self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        # Whatever fails, the thread that started this one waits for it and must hear of it.
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001
            self._error = error
        finally:
            self._begun.set()

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        async with self._context:
            self._begun.set()
            await self._over.wait()
