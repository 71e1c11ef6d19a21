"""The program of a process that ends a worker whose event loop does not run any more.

A call that holds the interpreter lock stops every thread of a worker and its signal handlers too, so only another
process can notice. `ProcessWatchdog` starts it as `python -I -S FILE PID LIMIT_S SIGNAL`. Its standard input is a pipe
in which the worker writes whenever its event loop runs, and which is closed however the worker ends.

A timer inside the worker (such as `faulthandler.dump_traceback_later`) would do but for one thing: time in which a
worker is stopped counts for it, and it strikes before a worker that wakes up can say that it lives.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from pathlib import Path

MAX_INTERVAL_S = 1.0
"""Seconds between two heartbeats of the worker, at most."""

MIN_BEATS = 8
"""Heartbeats, at least, within the time that is allowed."""

_PIPE = 0
_GRACE_S = 5.0


def main(pid: int, limit_s: float, number: int) -> None:
    """Watch the parent until it has ended; end it by a signal when it has not written for too long."""
    # These signals are for the worker, which may take its time to end.
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    if not _is_silent_for(pid, limit_s):
        return
    sys.stderr.write(
        f"lmpool: the worker hangs: its event loop has not run for {limit_s:g} s, so a call holds the interpreter lock "
        "(step_timeout_s; give the worker a larger --step-timeout-s if its steps may take so long). It ends now, and "
        "other workers take its prompts over after a lease; where it hangs:\n"
    )
    sys.stderr.flush()
    os.kill(pid, number)
    end = time.monotonic() + _GRACE_S
    while (left := end - time.monotonic()) > 0:
        if select.select([_PIPE], [], [], left)[0] and not os.read(_PIPE, 65536):
            return
    os.kill(pid, signal.SIGKILL)


def _is_silent_for(pid: int, limit_s: float) -> bool:
    """Wait until the parent has been silent for so long while it could run; False when it has ended."""
    pause = min(MAX_INTERVAL_S, limit_s / MIN_BEATS)
    spent, before = 0.0, time.monotonic()
    while spent < limit_s:
        has_written = bool(select.select([_PIPE], [], [], pause)[0])
        # Children of the worker may hold the pipe open.
        if (has_written and not os.read(_PIPE, 65536)) or os.getppid() != pid:
            return False
        now = time.monotonic()
        # Both may have been stopped together: then this process was not there to count.
        spent = 0.0 if has_written or _is_stopped(pid) else spent + min(now - before, 2 * pause)
        before = now
    return True


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by a signal or a debugger; False where the system does not tell."""
    try:
        # The state follows the program's name, which may have any characters in it.
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1]
    except OSError:
        return False
    return state in (b"T", b"t")


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
