"""Several workers on one machine: a process for each device, whose logs are one, and which end together."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from lmpool.cli import LAUNCH
from lmpool.embedded import ending
from lmpool.errors import SettingsError, printable
from lmpool.settings import count_cores, count_threads, shown
from lmpool.workers.cli.detached import READY_VARIABLE, tell_ready

_log = logging.getLogger("lmpool.worker")

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_PATIENCE_S = 10.0
# One that has lived for so long starts with a short pause again, should it end.
_LONG_LIFE_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_MOST_QUICK_DEATHS = 5
_REFUSED, _GAVE_UP, _STOPPED_NOW = 2, 1, 130
_MOST_LINE = 1 << 16


def plan_workers(wanted: str, backend: str, device: str | None) -> list[dict[str, str]]:
    """The environment of each worker, beside that of this process: its device, or its share of the threads.

    Args:
        wanted: a number, or "all" for one on each GPU, which is one where there is none.
        backend: what computes the rows.
        device: what `--device` says.

    Raises:
        SettingsError: that is no number of workers that fit this machine.
    """
    gpus = [] if backend == "synthetic" or device == "cpu" else visible_gpus()
    if wanted == "all":
        count = max(1, len(gpus))
    else:
        if not wanted.isdecimal() or not (count := int(wanted)) >= 1:
            raise SettingsError(f"workers: {shown(wanted)} is neither a number of at least 1 nor `all`")
        most, what = (len(gpus), "GPUs, each of which takes one worker") if gpus else (count_cores(), "cores")
        if count > most:
            raise SettingsError(f"workers: {count} are more than the {most} {what} here: at most {most}, or `all`")
    if count == 1:
        return [{}]
    if gpus:
        if device not in (None, "auto"):
            raise SettingsError(f"device: {device!r} is one device, and each of {count} workers has one of its own")
        return [{_VISIBLE: gpu} for gpu in gpus[:count]]
    return [{"OMP_NUM_THREADS": str(max(1, count_threads() // count))}] * count


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES may be for each GPU that this process may use."""
    if (visible := os.environ.get(_VISIBLE)) is not None:
        return [gpu.strip() for gpu in visible.split(",") if gpu.strip() not in ("", "-1")]
    try:
        listed = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        told = subprocess.run(listed, capture_output=True, text=True, timeout=_PATIENCE_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in told.splitlines() if line.strip().isdecimal()]


def as_arguments(options: Mapping[str, Any]) -> list[str]:
    """Options as a command line has them."""
    arguments: list[str] = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        values = value if isinstance(value, list) else [value]
        arguments += [option if one is True else f"{option}={one}" for one in values]
    return arguments


class WorkerProcesses:
    """Runs a worker process in each of some environments until they are told to stop, or give up.

    A worker that dies is started again, after a pause that doubles; one that dies quickly again and again is given up,
    and the others go on.

    Args:
        arguments: of `lmpool`, for the worker of a number.
        environments: of the workers; see `plan_workers`.
        is_text: put the worker's number before each line of its log; lines of JSON name their worker themselves.
    """

    def __init__(
        self, arguments: Callable[[int], list[str]], environments: list[dict[str, str]], *, is_text: bool
    ) -> None:
        self._arguments = arguments
        self._environments = environments
        self._is_text = is_text
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._served: set[int] = set()
        self._given_up = 0
        self._never_served = 0
        self._stopping = asyncio.Event()
        self._code = 0

    async def run(self) -> int:
        """Returns the exit code: 0 after a drain, 1 when all were given up, 2 when one was refused, 130 at once."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal)
        await asyncio.gather(*(self._keep(at) for at in range(len(self._environments))))
        if self._given_up == len(self._environments):
            self._code = self._code or _GAVE_UP
        return self._code

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            _log.info("stopped at once")
            self._code = _STOPPED_NOW
            for process in self._running.values():
                _kill(process)
            return
        _log.info("stopping %d workers; once more ends them at once", len(self._running))
        self._stop()

    def _stop(self) -> None:
        self._stopping.set()
        for process in self._running.values():
            with suppress(ProcessLookupError):
                process.terminate()

    async def _keep(self, at: int) -> None:
        """Run one worker, again where it dies."""
        pause, deaths = _FIRST_PAUSE_S, 0
        while not self._stopping.is_set():
            began = time.monotonic()
            code = await self._run_once(at)
            lived = time.monotonic() - began
            if self._stopping.is_set() or code == 0:
                return
            how = f"worker {at} {ending(code)} after {lived:.0f} s"
            if code == _REFUSED and at not in self._served:
                # What it was told is wrong, and would be so again, for all of them.
                _log.critical("%s, before it has ever served: ending all workers", how)
                self._code = _REFUSED
                self._stop()
                return
            if lived >= _LONG_LIFE_S:
                pause, deaths = _FIRST_PAUSE_S, 0
            deaths += 1
            if deaths >= _MOST_QUICK_DEATHS:
                self._given_up += 1
                left = len(self._environments) - self._given_up
                _log.critical("%s, and so %d times in a row: it is given up; %d workers go on", how, deaths, left)
                if at not in self._served:
                    self._never_served += 1
                    self._tell_if_ready()
                return
            _log.warning("%s: starting it again in %g s", how, pause)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stopping.wait()
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def _run_once(self, at: int) -> int:
        """Run one worker to its end; returns its exit code."""
        heard, told = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-c", LAUNCH, *self._arguments(at),
                # It ends when this pipe does, however this process ends.
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(told,),
                env={**os.environ, **self._environments[at], READY_VARIABLE: str(told)},
            )  # fmt: skip
        finally:
            os.close(told)
        self._running[at] = process
        loop = asyncio.get_running_loop()
        loop.add_reader(heard, self._on_ready, at, heard)
        try:
            if self._stopping.is_set():  # While it was started.
                process.terminate()
            assert process.stdout is not None
            await self._relay(at, process.stdout)
            return await process.wait()
        finally:
            del self._running[at]
            loop.remove_reader(heard)
            os.close(heard)

    def _on_ready(self, at: int, heard: int) -> None:
        asyncio.get_running_loop().remove_reader(heard)
        if os.read(heard, 1):
            self._served.add(at)
            self._tell_if_ready()

    def _tell_if_ready(self) -> None:
        """Say so when all serve that have not been given up before: nobody is to wait for those."""
        if self._served and len(self._served) + self._never_served == len(self._environments):
            _log.info("all %d workers serve", len(self._served))
            tell_ready()

    async def _relay(self, at: int, output: asyncio.StreamReader) -> None:
        """Pass on what a worker prints, a line at a time."""
        prefix = f"[{at}] " if self._is_text else ""
        rest = b""
        while data := await output.read(_MOST_LINE):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > _MOST_LINE:
                lines, rest = [*lines, rest], b""
            self._print(prefix, lines)
        self._print(prefix, [rest] if rest else [])

    def _print(self, prefix: str, lines: list[bytes]) -> None:
        with suppress(BrokenPipeError):  # Who read the log has gone; the workers go on.
            for line in lines:
                sys.stderr.write(f"{prefix}{printable(line.decode('utf-8', 'replace'))}\n")
            sys.stderr.flush()


def _kill(process: asyncio.subprocess.Process) -> None:
    """End a worker and what it has started, which are a process group."""
    with suppress(ProcessLookupError, PermissionError):
        if os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
