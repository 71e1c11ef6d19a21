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
from collections.abc import AsyncIterator, Callable

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

    A call may take `limit_s` seconds. `on_hang` is called once, with the error that names the call.
    """

    async def watch() -> None:
        pause_s = min(MAX_INTERVAL_S, limit_s / MIN_BEATS)
        call: Call | None = None
        spent_s, before = 0.0, time.monotonic()
        while call is None or spent_s < limit_s:
            await asyncio.sleep(pause_s)
            now = time.monotonic()
            last, call = call, engine_thread.call
            # Time in which the process was stopped does not count.
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


class ProcessWatchdog:
    """Ends this process when its event loop does not run for too long, while the context is open.

    It prints the stacks of all threads and exits with `EXIT_CODE`. Use it only in processes that are only workers.

    Args:
        limit_s: max seconds for which the event loop may not run. Time in which the process is stopped does not count.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s

    def __enter__(self) -> None:
        _exit_on(EXIT_CODE)
        self._start()
        self._send_heartbeat()

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()
        self._end()

    def _start(self) -> None:
        file, limit = watchdog_process.__file__, str(self._limit_s)
        command = [sys.executable, "-I", "-S", file, str(os.getpid()), limit, str(EXIT_CODE)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0)
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        os.set_blocking(self._pipe.fileno(), False)

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._pipe.close()

    def _send_heartbeat(self) -> None:
        # Schedule the next heartbeat first, so that heartbeats go on after any error below.
        pause_s = min(MAX_INTERVAL_S, self._limit_s / MIN_BEATS)
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._send_heartbeat)
        if is_first := not self._pipe.closed:
            try:
                self._pipe.write(b"\0")  # Writes nothing while the watchdog process is stopped and the pipe is full.
                return
            except BrokenPipeError:
                _log.warning("the process that watches this worker has ended: starting it again")
                self._end()
        try:
            self._start()
        except OSError as error:
            if is_first:
                _log.warning("the process that watches this worker cannot be started, will try again: %s", error)


def _exit_on(number: int) -> None:
    """Have a signal print the stacks of all threads and end the process, without the interpreter lock.

    The handler is in C. The signal's default action would not end a process that is the first of its container.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        libc.signal(number, ctypes.cast(libc._exit, ctypes.c_void_p))
    faulthandler.register(number, all_threads=True, chain=True)
