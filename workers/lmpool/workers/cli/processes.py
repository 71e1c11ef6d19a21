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
from contextlib import ExitStack, suppress
from itertools import takewhile
from typing import Any

from lmpool.cli import INTERRUPTED, LAUNCH
from lmpool.embedded import ending
from lmpool.errors import SettingsError, printable
from lmpool.settings import count_cores, count_threads, shown
from lmpool.workers.cli.detached import READY_VARIABLE, Lines, kill, tell_ready

_log = logging.getLogger("lmpool.worker")

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_PATIENCE_S = 10.0
# One that has served for so long starts with a short pause again, should it end.
_LONG_LIFE_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_MAX_QUICK_DEATHS = 5
_REFUSED, _GAVE_UP = 2, 1
_MAX_READ = 1 << 16
# For the rest of what a worker has printed that has ended: what it has started may hold its output open.
_REST_S = 1.0


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
        # Numbers, UUIDs of GPUs, or names of MIG instances; CUDA sees none behind one that is not there.
        return list(takewhile(lambda gpu: gpu not in ("", "-1"), map(str.strip, visible.split(","))))
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


class Restarts:
    """When a worker that has died is started again, and when it is given up.

    Attributes:
        deaths: how many it has died in a row of which none came after it had served for long.
    """

    def __init__(self) -> None:
        self._pause = _FIRST_PAUSE_S
        self.deaths = 0

    def after(self, served_s: float) -> float | None:
        """Seconds until it is started again; None when it is given up.

        Args:
            served_s: for how long it has served; how long it has loaded its model tells nothing.
        """
        if served_s >= _LONG_LIFE_S:
            self._pause, self.deaths = _FIRST_PAUSE_S, 0
        else:
            self.deaths += 1
        if self.deaths >= _MAX_QUICK_DEATHS:
            return None
        pause, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE_S)
        return pause


class WorkerProcesses:
    """Runs a worker process in each of some environments until they are told to stop, or give up.

    A worker that dies is started again, after a pause that doubles; one that dies quickly again and again is given up,
    and the others go on. One that ends with code 0 has been told to, and stays away.

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
        # Since when this life of a worker serves.
        self._serves_since: dict[int, float] = {}
        # Those that are not started again.
        self._gone: set[int] = set()
        self._has_given_up = False
        self._stopping = asyncio.Event()
        self._code = 0

    async def run(self) -> int:
        """Run them to their end.

        Returns:
            the exit code: 0 after a drain, 1 when some were given up and none is left, 2 when one was refused, 130 at
            once.
        """
        loop = asyncio.get_running_loop()
        signals = {signal.SIGINT: self._on_signal, signal.SIGTERM: self._on_signal, signal.SIGHUP: self._on_hangup}
        for number, on_signal in signals.items():
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, on_signal)
        await asyncio.gather(*(self._keep(at) for at in range(len(self._environments))))
        if self._has_given_up and not self._stopping.is_set():
            return _GAVE_UP
        return self._code

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            _log.info("stopped at once")
            self._code = INTERRUPTED
            for process in self._running.values():
                kill(process.pid)
            return
        _log.info("stopping %d workers; once more ends them at once", len(self._running))
        self._stop()

    def _on_hangup(self) -> None:
        # The shell and the kernel each send one when a terminal closes.
        if not self._stopping.is_set():
            self._on_signal()

    def _stop(self) -> None:
        self._stopping.set()
        for process in self._running.values():
            with suppress(ProcessLookupError):
                process.terminate()

    async def _keep(self, at: int) -> None:
        """Run one worker, again where it dies."""
        restarts = Restarts()
        while not self._stopping.is_set():
            began = time.monotonic()
            code = await self._run_once(at)
            ended = time.monotonic()
            served_s = ended - self._serves_since.pop(at, ended)
            if self._stopping.is_set():
                return
            how = f"worker {at} {ending(code)} after {ended - began:.0f} s"
            if code == 0:
                _log.warning("%s: it is not started again; %d workers go on", how, self._others)
                self._let_go(at)
                return
            if code == _REFUSED and at not in self._served:
                # What it was told is wrong, and would be so again, for all of them.
                _log.critical("%s, before it has ever served: ending all workers", how)
                self._code = _REFUSED
                self._stop()
                return
            pause = restarts.after(served_s)
            if pause is None:
                times = f"{restarts.deaths} times in a row"
                _log.critical("%s, and so %s: it is given up; %d workers go on", how, times, self._others)
                self._has_given_up = True
                self._let_go(at)
                return
            _log.warning("%s: starting it again in %g s", how, pause)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stopping.wait()

    async def _run_once(self, at: int) -> int:
        """Run one worker to its end; returns its exit code."""
        with ExitStack() as ours, ExitStack() as theirs:
            # Pipes of our own: asyncio would wait for the end of its, and what a worker has started may hold them open.
            heard, told = _pipe(ours, theirs)
            os.set_blocking(heard, False)
            output, printed = _pipe(ours, theirs)
            life, _ = _pipe(theirs, ours)
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-c", LAUNCH, *self._arguments(at),
                # It ends when this pipe does, however this process ends.
                stdin=life,
                stdout=printed,
                stderr=subprocess.STDOUT,
                pass_fds=(told,),
                # A Ctrl-C in a terminal is for this process, which tells the workers.
                start_new_session=True,
                env={**os.environ, **self._environments[at], READY_VARIABLE: str(told)},
            )  # fmt: skip
            theirs.close()
            self._running[at] = process
            loop = asyncio.get_running_loop()
            loop.add_reader(heard, self._on_ready, at, heard)
            relaying = loop.create_task(self._relay(at, output))
            try:
                if self._stopping.is_set():  # While it was started.
                    process.terminate()
                code = await process.wait()
                # From here on its number may be another's.
                del self._running[at]
                await asyncio.wait([relaying], timeout=_REST_S)
                self._on_ready(at, heard)  # Unless it has been seen: it may have ended at once.
                return code
            finally:
                self._running.pop(at, None)
                loop.remove_reader(heard)
                relaying.cancel()
                await asyncio.wait([relaying])

    def _on_ready(self, at: int, heard: int) -> None:
        asyncio.get_running_loop().remove_reader(heard)
        with suppress(BlockingIOError):
            if os.read(heard, 1):
                self._served.add(at)
                self._serves_since[at] = time.monotonic()
                self._tell_if_ready()

    @property
    def _others(self) -> int:
        """How many go on when one more does not."""
        return len(self._environments) - len(self._gone) - 1

    def _let_go(self, at: int) -> None:
        """Start a worker no more."""
        self._gone.add(at)
        self._tell_if_ready()

    def _tell_if_ready(self) -> None:
        """Say so when all serve that nobody has let go of, if there are any."""
        going = set(range(len(self._environments))) - self._gone
        if going and going <= self._served:
            how_many = "all" if not self._gone else f"{len(going)} of"
            _log.info("%s %d workers serve", how_many, len(self._environments))
            tell_ready()

    async def _relay(self, at: int, output: int) -> None:
        """Pass on what a worker prints, a line at a time, until nobody can print there any more."""
        prefix, lines = f"[{at}] " if self._is_text else "", Lines()
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(output, "rb", buffering=0, closefd=False)
        )
        try:
            while printed := await reader.read(_MAX_READ):
                self._print(prefix, lines.add(printed))
        finally:
            transport.close()
            self._print(prefix, lines.add(b"", is_last=True))

    def _print(self, prefix: str, lines: list[str]) -> None:
        with suppress(OSError):  # Who read the log has gone, or its disk is full; the workers go on.
            for line in lines:
                sys.stderr.write(f"{prefix}{printable(line)}\n")
            sys.stderr.flush()


def _pipe(readers: ExitStack, writers: ExitStack) -> tuple[int, int]:
    """A pipe whose ends are closed with these."""
    reader, writer = os.pipe()
    readers.callback(os.close, reader)
    writers.callback(os.close, writer)
    return reader, writer
