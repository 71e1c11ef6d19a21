"""Processes of the benchmark: started, asked, ended. Each ends with the benchmark, however that ends."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

REPOSITORY = Path(__file__).resolve().parents[2]

_FINISH_S = 2.0
_STOP_S = 10.0
_START_S = 180.0
_LOG_LINES = 15


class BenchmarkError(Exception):
    """A measure could not be taken; the message says why."""


class LeftOut(Exception):
    """A measure does not apply here, such as one of a device that this machine has not; the message says why."""


def run(*command: str) -> str:
    """What a program prints that ends by itself; one of any environment, so PYTHONPATH is kept from it.

    Raises:
        BenchmarkError: it cannot be started, or its exit code is not 0.
    """
    try:
        environment = {**os.environ, "PYTHONPATH": ""}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    except OSError as error:
        raise BenchmarkError(f"{command[0]} cannot be run: {error}") from None
    if done.returncode:
        raise BenchmarkError(f"{' '.join(command)} failed:\n{done.stderr[-2000:].strip()}")
    return done.stdout


def processor_seconds(pid: int) -> float:
    """Processor time of a process and all its threads so far; not a number where the system has no such clock."""
    # The clock that clock_getcpuclockid(3) names, which Python lacks.
    return time.clock_gettime(~pid << 3 | 2) if sys.platform == "linux" else math.nan


class Process:
    """One process, from construction to `stop`, or for the length of a `with` block.

    Args:
        command: program and arguments; the program as a path.
        log: file for what it prints.
        environment: added to this process's own.
    """

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name = log.stem
        self._is_told = False
        self._log = log
        tied = [sys.executable, "-I", "-S", str(Path(__file__).with_name("tied.py")), str(os.getpid())]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*tied, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if self._answers else output,
                stderr=output,
                cwd=REPOSITORY,
                env={**os.environ, **environment},
                # Ctrl-C is for the benchmark alone: it ends its processes in order.
                start_new_session=True,
            )

    _answers = False

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def check(self) -> None:
        """See that it still runs.

        Raises:
            BenchmarkError: it has ended.
        """
        if (code := self._process.poll()) is not None:
            raise self._failure(f"ended with exit code {code}")

    def terminate(self) -> None:
        """Ask it to end, without waiting for that: several end at the same time. `stop` must follow."""
        if not self._is_told:
            self._is_told = True
            self._process.terminate()

    def stop(self) -> None:
        """End it: end of input, which a `Child` obeys, then SIGTERM, and SIGKILL when that does not help."""
        process = self._process
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                # What a failed child left unread in the pipe is of no use any more.
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        if self._answers and self._ends_within(_FINISH_S):
            return
        # Once only: on a second signal a worker would leave at once, without a word to the others.
        self.terminate()
        if not self._ends_within(_STOP_S):
            process.kill()
            process.wait()

    def _ends_within(self, seconds: float) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _failure(self, reason: str) -> BenchmarkError:
        lines = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return BenchmarkError("\n  ".join([f"the process {self.name} {reason}; its log ends with", *lines]))


class Child(Process):
    """A process that answers requests by the protocol of `lines.py`.

    Args:
        As `Process`.

    Raises:
        BenchmarkError: it is not ready within 3 minutes.
    """

    _answers = True

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        super().__init__(command, log, environment)
        self._received = b""
        try:
            self.receive(_START_S)
        except BaseException:
            self.stop()
            raise

    def send(self, do: str, **arguments: Any) -> None:
        """Send a request whose answer `receive` returns."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("has ended") from None

    def receive(self, seconds: float) -> Any:
        """The answer to the oldest request that has none.

        Raises:
            BenchmarkError: the process ended, or it did not answer within `seconds`.
        """
        assert self._process.stdout is not None
        output = self._process.stdout.fileno()
        deadline = time.monotonic() + seconds
        while b"\n" not in self._received:
            if not select.select([output], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise self._failure(f"did not answer within {seconds:g} s")
            part = os.read(output, 1 << 16)
            if not part:
                raise self._failure("ended")
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def ask(self, do: str, *, within: float = 300.0, **arguments: Any) -> Any:
        """Send a request and wait for its answer.

        Raises:
            BenchmarkError: see `receive`.
        """
        self.send(do, **arguments)
        return self.receive(within)


def free_port() -> int:
    """A port of this machine at which nothing listens now."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])
