"""The `lmpool` command without its start: forked from a process that has imported it already.

A fresh interpreter spends most of a second of CPU on imports, hundreds of times in a test run. What it does before
`lmpool.cli.main` is left out here, and so is its end; tests of either start the installed command.
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

# What the interpreter and the loader read before any program does.
_READ_AT_START = ("PYTHON", "LD_", "DYLD_", "MALLOC_", "GLIBC_")


def _at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_READ_AT_START)}


_OURS = _at_start(os.environ)


def can_fork(environment: Mapping[str, str]) -> bool:
    """Whether a forked process is as good as a fresh one that has this environment."""
    is_supported = "forkserver" in multiprocessing.get_all_start_methods()
    return is_supported and _at_start(environment) == _OURS


class ForkedCommand:
    """A process that runs the `lmpool` command, with what `subprocess.Popen` has of it.

    Args:
        command: the command line; its first word is only what the process believes to be called.
        environment: all of its environment.
        out: a file for its output.
        err: a file for its errors; None for the same.
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
        """The exit code as far as it is known: minus the number of the signal that ended it."""
        return self.poll()

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; returns the exit code."""
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
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


def _run(command: list[str], environment: dict[str, str], out: str, err: str) -> None:
    """Become what `command` would have started."""
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
