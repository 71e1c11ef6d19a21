"""A program that ends a worker whose event loop does not run.

A call that holds the interpreter lock stops all threads and signal handlers of a worker, so only another process can
detect the call. `watching_process` starts this file as `python -I -S FILE PID LIMIT_S SIGNAL`. Its standard input is a
pipe: the worker writes to the pipe while its event loop runs, and the system closes the pipe when the worker ends.

A timer in the worker (`faulthandler.dump_traceback_later`) is no substitute: the timer runs on while a signal stops the
worker (SIGSTOP), and would end a worker that continues before the worker can report that its event loop runs.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

MAX_INTERVAL_S = 1.0
"""Max seconds between two heartbeats of the worker."""

MIN_BEATS = 8
"""Min heartbeats that a running worker sends within the time limit."""

_PIPE = 0  # File descriptor of the pipe to which the worker writes: standard input.
_GRACE_S = 5.0  # Seconds from the signal to SIGKILL, in which the worker prints its stacks.


def main(pid: int, limit_s: float, number: int) -> None:
    """Watch the parent process until it ends; send it the signal `number` if heartbeats stop for `limit_s` seconds."""
    # Ignore these signals: the worker handles them and may need time to end, and this process must run until then.
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    if not _is_silent_for(pid, limit_s):
        return
    sys.stderr.write(
        f"lmpool: the worker hangs: its event loop has not run for {limit_s:g} s, so a call holds the interpreter lock "
        "(step_timeout_s; give the worker a larger --step-timeout-s if its steps may take so long). It ends now, and "
        "other workers take over its prompts after a lease. Its stacks:\n"
    )
    sys.stderr.flush()
    os.kill(pid, number)
    end = time.monotonic() + _GRACE_S
    while (left := end - time.monotonic()) > 0:
        if select.select([_PIPE], [], [], left)[0] and not os.read(_PIPE, 65536):
            return
    os.kill(pid, signal.SIGKILL)


def _is_silent_for(pid: int, limit_s: float) -> bool:
    """Wait until the parent has been silent for `limit_s` while it was not stopped; False when the parent has ended."""
    pause_s = min(MAX_INTERVAL_S, limit_s / MIN_BEATS)
    spent_s, before = 0.0, time.monotonic()
    while spent_s < limit_s:
        has_written = bool(select.select([_PIPE], [], [], pause_s)[0])
        # Check the parent process too: children of the worker may keep the pipe open after the worker has ended.
        if (has_written and not os.read(_PIPE, 65536)) or os.getppid() != pid:
            return False
        state, now = b"", time.monotonic()
        with suppress(OSError):  # Some systems have no /proc.
            # In `stat`, the process state follows the program's name, which may contain any characters.
            state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1]
        is_stopped = state in (b"T", b"t")  # A signal or a debugger stopped the worker.
        # Count at most two pauses per check, because time in which this process itself was stopped must not count.
        spent_s = 0.0 if has_written or is_stopped else spent_s + min(now - before, 2 * pause_s)
        before = now
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
