"""Kills or freezes processes of a model that is spread over two processes, while a client checks every row.

    LMPOOL_CONTRACT=vllm-tensor python -m tests.faults.rank_kills --faults 20

`lmpool up` serves the model of the contract tests; LMPOOL_CONTRACT names the backend. The faults hit the processes of
the worker in turn: each rank, and the worker itself. The program waits after each fault until all processes of this
worker have ended, and until the next worker has computed all prompts that were in flight. At the end it prints the
times, and lists requests that were lost or wrong, and processes, files and names of shared memory that are left.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lmpool import embedded
from lmpool.errors import LMPoolError
from lmpool.producer import Producer
from tests.contract.driver import prompt
from tests.contract.model import write_model, write_reference
from tests.contract.subjects import Subject, chosen
from tests.support.pool import (
    DEADLINE_S,
    WorkerProcess,
    children_of,
    is_running,
    ranks_below,
    shared_by,
    until,
    until_async,
)

ROOT = Path(__file__).resolve().parents[2]
_PR_SET_CHILD_SUBREAPER = 36  # Option of prctl, from <sys/prctl.h>.
_MAX_TOKENS = 200  # Tokens of a prompt; all engines accept this many.
_TASKS = 16  # Requests in flight.
_MIN_ROWS = 50  # Rows between two faults.
_GRACE_S = 5.0  # Seconds after the step timeout: a step may begin after the fault, and the machine may be busy.

_UP = """
import sys
from lmpool.cli import main
from lmpool.workers.cli import supervisor
supervisor._MIN_LIFE_S = 0.0  # Start the worker again after any number of faults.
if "sglang" in sys.argv:
    supervisor.LAUNCH = "from tests.engines.sglang_cpu.shim import install; install(); " + supervisor.LAUNCH
supervisor.LAUNCH = "from tests.engines.newest import accept; accept(); " + supervisor.LAUNCH
main()
"""


class Load:
    """Requests rows of random prompts, always `_TASKS` at once, and compares the rows with the reference.

    Attributes:
        rows: number of right rows.
        open: numbers of the requests in flight.
        faults: description of each lost request and of each wrong row.
    """

    def __init__(self, producer: Producer, subject: Subject) -> None:
        self._producer = producer
        self._subject = subject
        self._draw = random.Random(0)
        self._requests = self.rows = 0
        self.open: set[int] = set()
        self.faults: list[str] = []
        self.is_stopping = False

    async def run(self) -> None:
        """Send one request after the other, until `is_stopping`."""
        while not self.is_stopping:
            await self.request()

    async def request(self) -> None:
        """Request one row."""
        ids = prompt(self._draw, self._draw.randrange(1, _MAX_TOKENS))
        number, self._requests = self._requests, self._requests + 1
        self.open.add(number)
        try:
            row = await self._producer.logprobs(ids)
        except LMPoolError as error:
            self.faults.append(f"lost: {error}")
        else:
            off = float(np.abs(row - self._subject.reference(ids, "")).max())
            if off <= self._subject.tolerance:
                self.rows += 1
            else:
                self.faults.append(f"wrong: off by {off:.2g} for {len(ids)} tokens")
        self.open.remove(number)


class Struck(NamedTuple):
    """What a fault has caused."""

    ended_s: float  # Seconds until all processes of the worker had ended.
    answered_s: float  # Seconds until the next worker had computed a row.
    names: set[Path]  # The names of shared memory that the processes had at the time of the fault.


async def strike(load: Load, up: WorkerProcess, turn: int, number: signal.Signals, limit_s: float) -> Struck:
    """Send a signal to the next process in turn, and wait until the next worker has computed the prompts in flight."""
    rows = load.rows

    async def is_loaded() -> bool:
        return load.rows >= rows + _MIN_ROWS or not up.is_running

    await until_async(is_loaded, f"rows before the next fault; it printed:\n{up.text}")
    (worker,) = (pid for pid, command in children_of(up.process.pid).items() if b"worker" in command.split(b"\0"))
    ranks = ranks_below(worker)
    assert len(ranks) in (1, 2), f"these are no ranks: {children_of(worker)}"
    # The watchdog process ends a worker whose interpreter is frozen, but not a stopped worker.
    turns = ranks if number == signal.SIGSTOP else [*ranks, worker]
    names = {name for pid in (worker, *ranks) for name in shared_by(pid)}
    in_flight = set(load.open)
    struck = time.monotonic()
    os.kill(turns[turn % len(turns)], number)

    async def has_ended() -> bool:
        return not any(map(is_running, (worker, *ranks)))

    await until_async(has_ended, f"the worker and its ranks have ended; it printed:\n{up.text}", limit_s)
    ended = time.monotonic() - struck
    await load.request()
    answered = time.monotonic() - struck

    async def is_answered() -> bool:
        return not in_flight & load.open

    await until_async(is_answered, "the prompts in flight have rows")
    return Struck(ended, answered, names)


async def run(subject: Subject, folder: Path, faults: int, number: signal.Signals, step_timeout_s: float) -> list[str]:
    """Run the faults, print the times, and return what went wrong."""
    model = write_model(folder / "model")
    write_reference(model, {"": None})
    places = {"LMPOOL_RUNTIME_DIR": "run", "LMPOOL_SHM_DIR": "shm", "TMPDIR": "tmp"}
    for variable, name in places.items():
        (folder / name).mkdir(mode=0o700)
        os.environ[variable] = str(folder / name)
    os.environ |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    options = ["--backend", subject.name, "--name", "two", "--step-timeout-s", str(step_timeout_s)]
    command = [sys.executable, "-c", _UP, "up", str(model), *options, *subject.options(model, {})]
    up = WorkerProcess(command, folder / "log", installed=True)
    struck: list[Struck] = []
    try:
        await asyncio.to_thread(up.until_says, "serving ")
        async with Producer("two", redis=embedded.find(), timeout=DEADLINE_S) as producer, asyncio.TaskGroup() as group:
            load = Load(producer, subject)
            for _ in range(_TASKS):
                group.create_task(load.run())
            for turn in range(faults):
                struck.append(await strike(load, up, turn, number, step_timeout_s + _GRACE_S))
                ended, answered, _ = struck[-1]
                print(
                    f"{turn + 1}. {number.name}: ended after {ended:.1f} s, answered after {answered:.1f} s", flush=True
                )
            load.is_stopping = True
        up.signal(signal.SIGTERM)
        code = await asyncio.to_thread(up.wait)
    finally:
        up.end()
    seconds_of = {"ended": [each.ended_s for each in struck], "answered": [each.answered_s for each in struck]}
    for name, seconds in seconds_of.items():
        print(f"{name} after: median {statistics.median(seconds):.1f} s, worst {max(seconds):.1f} s")
    print(f"{load.rows} right rows, {len(load.faults)} lost or wrong")
    found = [*load.faults, *([f"`lmpool up` exited with {code}: {up.text[-1000:]}"] if code else [])]
    with suppress(AssertionError):
        until(lambda: not any(map(is_running, children_of(os.getpid()))), "all processes have ended", _GRACE_S)
    left = children_of(os.getpid())
    found += [f"left: process {pid}: {command!r}" for pid, command in left.items() if is_running(pid)]
    paths = {path for name in ("shm", "tmp") for path in (folder / name).rglob("*") if not path.is_dir()}
    paths = {path for path in paths if "torchinductor" not in str(path)}  # torch keeps its cache for later processes.
    paths |= {path for each in struck for path in each.names if path.exists()}
    return found + [f"left: {path}" for path in sorted(paths)]


def main() -> int:
    """Run the faults that the command line describes; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.rank_kills", description=__doc__)
    parser.add_argument("--faults", type=int, default=20, help="number of faults (default: %(default)s)")
    parser.add_argument("--freeze", action="store_true", help="SIGSTOP instead of SIGKILL, to ranks only")
    parser.add_argument("--step-timeout-s", type=float, default=10.0, help="(default: %(default)s)")
    given = parser.parse_args()
    # Orphans become children of this process.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))
    number = signal.SIGSTOP if given.freeze else signal.SIGKILL
    (subject,) = chosen().values()
    with tempfile.TemporaryDirectory(prefix="lmp") as folder:
        found = asyncio.run(run(subject, Path(folder), given.faults, number, given.step_timeout_s))
    print("\n".join(found) if found else "nothing lost, wrong or left")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
