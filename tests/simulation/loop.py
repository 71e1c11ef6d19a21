"""An event loop with virtual time that runs the callbacks of several simulated processes in a drawn order.

A process is a context variable: each callback belongs to the process whose context it has. Callbacks of one process
run in the order of `call_soon`, as asyncio promises; callbacks of different processes run in any order.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from random import Random
from typing import Any

EPOCH = 1_800_000_000.0
"""The wall clock's time when a simulation begins, in seconds since 1970."""

MAX_S = 3000.0
"""Virtual seconds after which a simulation counts as endless."""

_CALLBACK_S = 1e-5  # Virtual seconds that each callback takes, so that no work is free.
_MAX_EXECUTOR_S = 0.003  # Max virtual seconds until a function of an executor runs.


@dataclass(eq=False, slots=True)
class Process:
    """A simulated process.

    Attributes:
        name: shown in the log.
        is_alive: False once the process was killed or has ended; then none of its callbacks runs any more.
        resume_at: time until which the process is stopped, as by SIGSTOP.
        clock_s: seconds by which its wall clock differs from the loop's.
        ready: callbacks that may run now.
        on_kill: called when the process ends, to close its connections.
    """

    name: str
    is_alive: bool = True
    resume_at: float = 0.0
    clock_s: float = 0.0
    ready: deque[asyncio.Handle] = field(default_factory=deque)
    on_kill: list[Callable[[], None]] = field(default_factory=list)


WORLD = Process("world")
"""The process of the simulation itself, which is never stopped."""

PROCESS: ContextVar[Process] = ContextVar("process", default=WORLD)


class Escaped(BaseException):
    """The code under test used something that the simulation does not control, such as a socket or a thread."""


def escape(loop: asyncio.AbstractEventLoop, text: str) -> Escaped:
    """Report that code under test escapes, and return the error to raise: a task may keep an error that it raises."""
    error = Escaped(text)
    loop.call_exception_handler({"message": "the code under test has escaped", "exception": error})
    return error


class Stuck(Exception):
    """Nothing can ever happen again, although the simulation has not ended."""


class SimulatedTask(asyncio.Task[Any]):
    """A task whose hash is a serial number: sets of tasks then have the same order in each run of a seed."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._number = next(_numbers)
        super().__init__(*args, **options)

    def __hash__(self) -> int:
        return self._number


class SimulatedFuture(asyncio.Future[Any]):
    """A future whose hash is a serial number."""

    def __init__(self, **options: Any) -> None:
        self._number = next(_numbers)
        super().__init__(**options)

    def __hash__(self) -> int:
        return self._number


_numbers = itertools.count()


class SimulatedLoop(asyncio.BaseEventLoop):
    """See the module's docstring.

    Args:
        random: draws the order of callbacks, and delays.

    Attributes:
        network: opens connections; set by `Network`.
    """

    network: Any

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.random = random
        self._now = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._serial = itertools.count()
        self._active: list[Process] = []  # Processes with callbacks that may run now.
        self.set_task_factory(lambda loop, work, **options: SimulatedTask(work, loop=loop, **options))

    def time(self) -> float:
        return self._now

    def create_future(self) -> asyncio.Future[Any]:
        return SimulatedFuture(loop=self)

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._add(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._serial), timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """A cancelled timer stays in the heap until its time."""

    def _add(self, handle: asyncio.Handle) -> None:
        process = handle._context.get(PROCESS, WORLD)  # type: ignore[attr-defined]
        if not process.is_alive:
            return
        if not process.ready and process.resume_at <= self._now:
            self._active.append(process)
        process.ready.append(handle)

    def pause(self, process: Process, seconds: float) -> None:
        """Stop a process for `seconds`, as SIGSTOP does; its timers are late, and data waits in its connections."""
        if process.is_alive:
            process.resume_at = max(process.resume_at, self._now + seconds)
            if process in self._active:
                self._active.remove(process)
            self.call_at(process.resume_at, self._resume, process, context=Context())

    def _resume(self, process: Process) -> None:
        if process.is_alive and process.ready and process.resume_at <= self._now and process not in self._active:
            self._active.append(process)

    def kill(self, process: Process) -> None:
        """End a process, as SIGKILL does: nothing of it runs any more, and its connections close."""
        if process.is_alive:
            process.is_alive = False
            process.ready.clear()
            if process in self._active:
                self._active.remove(process)
            for close in process.on_kill:
                close()

    def _run_once(self) -> None:
        timers = self._timers
        if self._now > MAX_S:
            raise Stuck(f"the simulation has not ended after {MAX_S:g} s")
        while timers and timers[0][0] <= self._now:
            timer = heapq.heappop(timers)[2]
            if not timer.cancelled():
                self._add(timer)
        if not self._active:
            while timers and timers[0][2].cancelled():
                heapq.heappop(timers)
            if not timers:
                raise Stuck("all processes wait, and no timer is set")
            self._now = max(self._now, timers[0][0])
            return
        process = self._active[0] if len(self._active) == 1 else self.random.choice(self._active)
        handle = process.ready.popleft()
        if not process.ready:
            self._active.remove(process)
        if not handle.cancelled():
            self._now += _CALLBACK_S
            handle._run()

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Run the function in a callback after a drawn delay: it may use no time and must not block."""
        future = self.create_future()

        def work() -> None:
            if not future.cancelled():
                try:
                    future.set_result(func(*args))
                except Exception as error:  # noqa: BLE001  the caller receives it
                    future.set_exception(error)

        self.call_later(self.random.random() * _MAX_EXECUTOR_S, work)
        return future

    async def create_unix_connection(self, factory: Any, path: Any = None, **options: Any) -> Any:  # type: ignore[override]
        return await self.network.connect(factory, str(path))

    async def create_connection(self, factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:  # type: ignore[override]
        return await self.network.connect(factory, f"{host}:{port}")

    async def create_unix_server(self, factory: Any, path: Any = None, **options: Any) -> Any:  # type: ignore[override]
        return self.network.listen(factory, str(path))

    async def create_server(self, factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:  # type: ignore[override]
        return self.network.listen(factory, f"{host}:{port}")

    def context_of(self, process: Process) -> Context:
        """A new context in which callbacks belong to `process`."""
        context = copy_context()
        context.run(PROCESS.set, process)
        return context
