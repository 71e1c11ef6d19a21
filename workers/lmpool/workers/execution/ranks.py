"""Followers, the ranks (processes of a model) outside the worker's process: their start, their logs and their end.

A follower is a child process of the worker. It ends when the worker ends, and the worker ends when a follower ends.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import util
from multiprocessing.context import SpawnProcess
from typing import IO, Any

from lmpool.embedded import ending
from lmpool.errors import WorkerError, first_line

_PR_SET_PDEATHSIG = 1  # Option of prctl, from <sys/prctl.h>.
_END_S = 5.0  # Max seconds to wait for a follower to end before SIGKILL.
_LAST = -1000  # Priority of the function that `multiprocessing` calls last in a process.
_REPORT_S = 1.0  # Max seconds from an error of rank 0 to the report of the follower that caused the error.


def stay_with(parent: int) -> None:
    """Make this process end when its parent process ends, and not before.

    The process ignores signals that reach all processes of a terminal or a container, because the worker needs all
    ranks until it has finished its prompts.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


class RankProcess(SpawnProcess):
    """A rank that `multiprocessing` starts: it ends with the worker from the beginning, and without delay."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The new process calls `_begin` before it loads the other values, whose classes import an engine for seconds.
        return _begin, (os.getpid(),), vars(self)

    def run(self) -> None:
        """Run the rank."""
        super().run()
        # Exit at once: Python would free all modules of the engine first, which takes 2 s. The priority is lower than
        # that of the functions which remove temporary files.
        util.Finalize(None, os._exit, args=(0,), exitpriority=_LAST)


def _begin(worker: int) -> RankProcess:
    stay_with(worker)
    gc.disable()  # See `importing`; the rank enables it when it has imported its engine.
    return RankProcess.__new__(RankProcess)


class Followers:
    """The follower processes of a worker.

    Args:
        command: command of a follower, which calls `following`.
        setups: the setup of each follower, from rank 1 on, as JSON values.
        on_end: called in another thread with the error if a follower ends before `close`. All other followers are
            killed before this call, because a rank can wait forever for a rank that has ended.

    Attributes:
        error: the error, if a follower has ended before `close`.
    """

    def __init__(
        self, command: Sequence[str], setups: Sequence[Mapping[str, Any]], on_end: Callable[[WorkerError], None]
    ) -> None:
        self.error: WorkerError | None = None
        self._on_end = on_end
        self._has_failed = threading.Event()
        self._lock = threading.Lock()
        self._is_closed = False
        self._processes: list[subprocess.Popen[str]] = []
        self._threads: list[threading.Thread] = []
        for rank, setup in enumerate(setups, 1):
            pipe = subprocess.PIPE
            # The end of the thread that starts a follower ends the follower too: see PR_SET_PDEATHSIG.
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, encoding="utf-8", errors="replace")
            self._processes.append(process)
            assert process.stdin is not None
            json.dump({**setup, "parent": os.getpid()}, process.stdin)
            process.stdin.close()
            watch = threading.Thread(target=self._watch, args=(rank, process), name=f"lmpool-rank-{rank}", daemon=True)
            watch.start()
            self._threads.append(watch)

    def _watch(self, rank: int, process: subprocess.Popen[str]) -> None:
        """Log what a follower logs, until the follower ends."""
        reason = ""
        assert process.stdout is not None
        for line in process.stdout:
            try:
                name, level, text = json.loads(line)
            except (ValueError, TypeError):  # Other code wrote to the pipe, or the process was killed while it wrote.
                name, level, text = __name__, logging.WARNING, line.rstrip()
            if level is None:
                reason = text
            else:
                logging.getLogger(name).log(level, "(rank %d) %s", rank, text)
        process.stdout.close()
        end = ending(process.wait())
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
        if is_first:
            self._kill()
            self.error = WorkerError(f"rank {rank} of the model has failed: {reason or f'its process {end}'}")
            self._has_failed.set()
            self._on_end(self.error)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def cause_of(self, error: BaseException) -> BaseException:
        """The error of a follower whose end may have caused an error of this process; `error` itself if all run."""
        self._has_failed.wait(_REPORT_S)
        return self.error or error

    def expect_end(self) -> None:
        """Report no ends of followers from now on."""
        with self._lock:
            self._is_closed = True

    def close(self, timeout_s: float = _END_S) -> None:
        """Wait until the followers have ended; kill followers that take too long."""
        self.expect_end()
        timer = threading.Timer(timeout_s, self._kill)
        timer.start()
        for thread in self._threads:
            thread.join()
        timer.cancel()


@contextmanager
def following() -> Iterator[dict[str, Any]]:
    """Run a follower: provide its setup, send its logs to the worker, and end the process with the context.

    An exception in the context is reported to the worker.
    """
    setup: dict[str, Any] = json.load(sys.stdin)
    stay_with(setup["parent"])
    # Keep the pipe to the worker for log entries: other output to standard output goes to standard error.
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    handler = _SendingHandler(pipe)
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.INFO)
    code = 1
    try:
        yield setup
        code = 0
    except BaseException as error:  # noqa: BLE001  # The worker raises the error.
        handler.send("", None, first_line(error))
    finally:
        sys.stdout.flush()
        # Exit at once: libraries would print warnings about resources that the system frees.
        os._exit(code)


class _SendingHandler(logging.Handler):
    """Sends log entries to the worker, which logs them as its own."""

    def __init__(self, pipe: IO[str]) -> None:
        super().__init__()
        self._pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        """Send one entry; its traceback is a part of its text."""
        self.send(record.name, record.levelno, self.format(record))

    def send(self, name: str, level: int | None, text: str) -> None:
        """Send a text; a text without a level is the reason why this process ends."""
        self.acquire()  # `emit` holds the lock already, and the reason of an end is sent without `emit`.
        try:
            self._pipe.write(json.dumps([name, level, text]) + "\n")
            self._pipe.flush()
        finally:
            self.release()
