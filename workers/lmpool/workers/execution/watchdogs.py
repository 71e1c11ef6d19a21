"""Watchdogs of a worker: for calls of the backend that do not return, and for an event loop that does not run."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import IO

from lmpool.aio import end_tasks
from lmpool.errors import WorkerError
from lmpool.workers.execution import watchdog_process
from lmpool.workers.execution.engine_thread import Call, EngineThread
from lmpool.workers.execution.watchdog_process import MAX_INTERVAL_S, MIN_BEATS

EXIT_CODE = int(signal.SIGALRM)
"""Exit code of a worker whose event loop does not run: the number of the signal that ends it."""

_log = logging.getLogger("lmpool.worker")


@contextlib.asynccontextmanager
async def watching_calls(
    engine_thread: EngineThread, limit_s: float, on_hang: Callable[[WorkerError], None]
) -> AsyncIterator[None]:
    """Watch every call of the backend while the context is open, except loading the model, which may take long.

    A call may take `limit_s` seconds. `on_hang` is called once, with an error that names the call.
    """

    async def watch() -> None:
        pause_s = min(MAX_INTERVAL_S, limit_s / MIN_BEATS)
        call: Call | None = None
        spent_s, before = 0.0, time.monotonic()
        while call is None or spent_s < limit_s:
            await asyncio.sleep(pause_s)
            now = time.monotonic()
            last, call = call, engine_thread.call
            # Count at most two pauses per check, because time in which the process was stopped must not count.
            spent_s = spent_s + min(now - before, 2 * pause_s) if call is last else 0.0
            before = now
        text = f"the backend hangs: it has been in one {call.description} for {limit_s:g} s "
        advice = "(step_timeout_s; give the worker a larger --step-timeout-s if its steps may take so long)"
        on_hang(WorkerError(text + advice))

    task = asyncio.create_task(watch(), name="watchdog")
    try:
        yield
    finally:
        await end_tasks([task])


@contextlib.contextmanager
def watching_process(limit_s: float) -> Iterator[None]:
    """End this process when its event loop has not run for `limit_s` seconds, while the context is open.

    The process prints the stacks of all threads and exits with `EXIT_CODE`. Time in which the process is stopped does
    not count. Use this function only in processes that do nothing but run a worker.
    """
    _exit_on(EXIT_CODE)
    arguments = [watchdog_process.__file__, str(os.getpid()), str(limit_s), str(EXIT_CODE)]
    command, loop = [sys.executable, "-I", "-S", *arguments], asyncio.get_running_loop()

    def start() -> tuple[subprocess.Popen[bytes], IO[bytes]]:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0)
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        return process, process.stdin

    process, pipe = start()
    timer: asyncio.Handle

    def send_heartbeat() -> None:
        nonlocal process, pipe, timer
        # Schedule the next heartbeat first, so that heartbeats go on after any error below.
        timer = loop.call_later(min(MAX_INTERVAL_S, limit_s / MIN_BEATS), send_heartbeat)
        try:
            pipe.write(b"\0")  # If the watchdog process is stopped and the pipe is full, this writes nothing.
        except (BrokenPipeError, ValueError):  # ValueError: the last start failed, so the pipe is closed.
            _log.warning("the process that watches this worker has ended: starting it again")
            end()
            with contextlib.suppress(OSError):
                process, pipe = start()

    def end() -> None:
        process.kill()
        process.wait()
        pipe.close()

    timer = loop.call_soon(send_heartbeat)
    try:
        yield
    finally:
        timer.cancel()
        end()


def _exit_on(number: int) -> None:
    """Have a signal print the stacks of all threads and end the process, without the interpreter lock.

    The signal handler is C code. The default action of the signal would not end the first process of a container.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        libc.signal(number, ctypes.cast(libc._exit, ctypes.c_void_p))
    faulthandler.register(number, all_threads=True, chain=True)
