"""The `lmpool` command without its start: forked from a process that has imported it already.

A fresh interpreter spends most of a second of CPU on imports, hundreds of times in a test run. The steps before
`lmpool.cli.main`, and the end of the process, are left out here; tests of either start the installed command.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from lmpool import cli

# Variables that the interpreter and the loader read before any program runs.
_READ_AT_START = ("PYTHON", "LD_", "DYLD_", "MALLOC_", "GLIBC_")


def _at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_READ_AT_START)}


_OURS = _at_start(os.environ)


def can_fork(environment: Mapping[str, str]) -> bool:
    """Whether a forked process behaves like a fresh one with this environment."""
    is_supported = "forkserver" in multiprocessing.get_all_start_methods()
    return is_supported and _at_start(environment) == _OURS


class ForkedCommand:
    """A process that runs the `lmpool` command, with the methods of `subprocess.Popen`.

    Args:
        command: the command line; its first word is only the name that the process sees.
        environment: its whole environment.
        out: a file for its output.
        err: a file for its errors; None for the same file.
    """

    def __init__(self, command: list[str], environment: Mapping[str, str], out: Path, err: Path | None = None) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.support.preloaded"])
        # A daemon is ended with this process.
        self._process = context.Process(
            target=_run, args=(command, dict(environment), str(out), str(err or "")), daemon=True
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The last known exit code: minus the number of the signal that ended it."""
        return self.poll()

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit code."""
        self._process.join(timeout)
        if (code := self.poll()) is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)


def _run(command: list[str], environment: dict[str, str], out: str, err: str) -> None:
    """Become the process that `command` would have started."""
    with Path(out).open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if err:
        with Path(err).open("wb") as file:
            os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = command
    cli.main()
