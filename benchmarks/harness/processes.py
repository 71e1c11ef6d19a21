"""Child processes of the benchmark, which end when the benchmark ends, even if SIGKILL ends the benchmark."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

REPOSITORY = Path(__file__).resolve().parents[2]

_FINISH_S = 2.0  # Max seconds until a child ends after its standard input has ended.
_STOP_S = 10.0  # Seconds from SIGTERM to SIGKILL: a worker drains in this time.
_START_S = 180.0  # Max seconds until a started child is ready: some children load models.
_LOG_LINES = 15  # Number of lines that an error message quotes from the end of the log.


class BenchmarkError(Exception):
    """A measure failed; the message says why."""


class Skipped(Exception):
    """A measure does not apply on this machine, for example because it needs a GPU; the message says why."""


def run(*command: str) -> str:
    """Run a program without PYTHONPATH, because it may belong to another environment, and return its output.

    Raises:
        BenchmarkError: the program cannot start, or its exit code is not 0.
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
    """Processor time of a process and all its threads so far; NaN on systems other than Linux."""
    # Compute the id of the process's clock like clock_getcpuclockid(3), which Python does not wrap.
    return time.clock_gettime(~pid << 3 | 2) if sys.platform == "linux" else math.nan


class Process:
    """A child process that runs from construction to `stop`, or for the length of a `with` block.

    Args:
        command: path of the program, and arguments.
        log: file for its output.
        environment: variables in addition to the environment of this process.
    """

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name = log.stem
        self._is_terminated = False
        self._log = log
        tied = [sys.executable, "-I", "-S", str(Path(__file__).with_name("end_with_parent.py")), str(os.getpid())]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*tied, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if self._answers else output,
                stderr=output,
                cwd=REPOSITORY,
                env={**os.environ, **environment},
                # Hide Ctrl-C from the child: the benchmark itself ends its children, in order.
                start_new_session=True,
            )

    _answers = False

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def check(self) -> None:
        """Raise BenchmarkError if the process has ended."""
        if (code := self._process.poll()) is not None:
            raise self._failure(f"ended with exit code {code}")

    def terminate(self) -> None:
        """Send SIGTERM but do not wait, so that several processes end concurrently. The caller then calls `stop`."""
        if not self._is_terminated:
            self._is_terminated = True
            self._process.terminate()

    def stop(self) -> None:
        """Close the process's standard input, which ends a `Child`; then send SIGTERM, and after 10 s SIGKILL."""
        process = self._process
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                # Ignore data that a failed child did not read.
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        if self._answers and self._ends_within(_FINISH_S):
            return
        # Send only one SIGTERM: on a second SIGTERM, a worker exits without releasing its jobs.
        self.terminate()
        if not self._ends_within(_STOP_S):
            # Also end the processes that it has started, such as the engine of vLLM's server: they would keep memory.
            os.killpg(process.pid, signal.SIGKILL)
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
        return BenchmarkError("\n  ".join([f"process {self.name} {reason}; last lines of its log:", *lines]))


class Child(Process):
    """A process that responds to requests with the protocol of `line_protocol.py`; must be ready in 3 minutes."""

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
        """Send a request; `receive` returns its response."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("has ended") from None

    def receive(self, seconds: float) -> Any:
        """Return the response to the oldest pending request.

        Raises:
            BenchmarkError: the process ended, or did not respond within `seconds`.
        """
        assert self._process.stdout is not None
        output = self._process.stdout.fileno()
        deadline = time.monotonic() + seconds
        while b"\n" not in self._received:
            if not select.select([output], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise self._failure(f"did not respond within {seconds:g} s")
            part = os.read(output, 1 << 16)
            if not part:
                raise self._failure("ended")
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def request(self, do: str, *, within: float = 300.0, **arguments: Any) -> Any:
        """Send a request and wait for its response."""
        self.send(do, **arguments)
        return self.receive(within)


def free_port() -> int:
    """A free TCP port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])
