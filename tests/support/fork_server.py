"""Starts the `lmpool` command quickly: forks it from a process that has already imported its modules.

A test run starts the command hundreds of times, and imports take most of a second of CPU in a new interpreter. Tests of
the steps before `lmpool.cli.main`, or of the end of the process, start the installed command instead.
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

# Prefixes of environment variables that Python or the loader reads before a program runs.
_READ_AT_START = ("PYTHON", "LD_", "DYLD_", "MALLOC_", "GLIBC_")


def _at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_READ_AT_START)}


_OURS = _at_start(os.environ)


def can_fork(environment: Mapping[str, str]) -> bool:
    """Whether a forked process with this environment behaves like a new interpreter with this environment."""
    is_supported = "forkserver" in multiprocessing.get_all_start_methods()
    return is_supported and _at_start(environment) == _OURS


class ForkedCommand:
    """A process that runs the `lmpool` command, with the methods of `subprocess.Popen`.

    Args:
        command: the command line; its first word becomes `sys.argv[0]`, and no such program is run.
        environment: all environment variables of the process.
        out: file for the standard output of the process.
        err: file for the standard error of the process, or None for the file `out`.
    """

    def __init__(self, command: list[str], environment: Mapping[str, str], out: Path, err: Path | None = None) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.support.preloaded"])
        # multiprocessing ends a daemon process when this process ends.
        self._process = context.Process(
            target=_run, args=(command, dict(environment), str(out), str(err or "")), daemon=True
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal that ended the process, or None while the process runs."""
        return self.poll()

    def poll(self) -> int | None:
        """The exit code, or None while the process runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process; return its exit code."""
        self._process.join(timeout)
        if (code := self.poll()) is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, if the process still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _run(command: list[str], environment: dict[str, str], out: str, err: str) -> None:
    """Turn this forked process into the process that `command` would have started."""
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
