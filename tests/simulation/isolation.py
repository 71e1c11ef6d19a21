"""Replaces clocks, random numbers and threads while a simulation runs; sockets, processes and blocking waits raise.

Import this module before the package: some modules of the package copy functions of `time` when they are imported.
"""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import queue
import random
import secrets
import socket
import subprocess
import threading
import time
from random import Random
from typing import Any, NoReturn

from tests.simulation import threads
from tests.simulation.loop import EPOCH, PROCESS, Process, SimulatedLoop, escape

_real_monotonic, _real_time = time.monotonic, time.time
_loop: SimulatedLoop | None = None


def monotonic() -> float:
    """The loop's time; before a simulation the real time."""
    return _real_monotonic() if _loop is None else _loop.time()


def wall_clock() -> float:
    """The wall clock of the current process; before a simulation the real time."""
    return _real_time() if _loop is None else EPOCH + _loop.time() + PROCESS.get().clock_s


def _refuse(name: str) -> Any:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        assert _loop is not None
        raise escape(_loop, f"{name} was used in a simulation")

    return refuse


time.monotonic, time.time, time.perf_counter = monotonic, wall_clock, monotonic
time.time_ns = lambda: int(wall_clock() * 1e9)
time.monotonic_ns = time.perf_counter_ns = lambda: int(monotonic() * 1e9)


def begin(loop: SimulatedLoop, draws: Random) -> None:
    """Isolate this process for the simulation in `loop`, until the process ends: `draws` gives all random numbers."""
    global _loop
    from lmpool.rows import datagram
    from lmpool.workers.cli import supervisor
    from lmpool.workers.execution import engine_thread
    from tests.simulation.supervision import System

    _loop = loop
    random.seed(draws.getrandbits(64))
    secrets.token_bytes = lambda count=16: draws.randbytes(count or 16)  # type: ignore[assignment]
    secrets.token_hex = lambda count=16: draws.randbytes(count or 16).hex()  # type: ignore[assignment]
    secrets.randbits = draws.getrandbits  # type: ignore[assignment]
    os.urandom = draws.randbytes
    os.getpid = lambda: 1
    socket.gethostname = lambda: "host"
    time.sleep = threads.sleep  # type: ignore[assignment]
    threading.Thread, threading.Event = threads.Thread, threads.Event  # type: ignore[misc,assignment]
    queue.SimpleQueue = engine_thread.SimpleQueue = threads.SimpleQueue  # type: ignore
    subprocess.Popen = _refuse("subprocess.Popen")  # type: ignore[misc]
    socket.socket.connect = socket.socket.bind = _refuse("a socket")  # type: ignore[method-assign]
    # Datagrams are an optimisation, which the server's messages replace.
    datagram.DatagramReceiver.open = lambda self, on_message: None  # type: ignore[method-assign]
    fcntl.flock = _flock
    vars(supervisor)["os"] = System()
    asyncio.run = threads.run  # type: ignore[assignment]
    asyncio.set_event_loop(loop)
    gc.collect()
    gc.disable()  # Collections at other times would end abandoned generators in another order.


def _flock(file: Any, how: int) -> None:
    """In place of `fcntl.flock`: a process that was killed still has its descriptors, but holds no locks."""
    number = file if isinstance(file, int) else file.fileno()
    inode, me = os.fstat(number).st_ino, PROCESS.get()
    held = [lock for lock in _locks.get(inode, []) if lock[1].is_alive and lock[0] != number and _is_of(lock[0], inode)]
    if any(how & fcntl.LOCK_EX or other & fcntl.LOCK_EX for _, _, other in held):
        raise BlockingIOError
    _locks[inode] = held if how & fcntl.LOCK_UN else [*held, (number, me, how)]


def _is_of(number: int, inode: int) -> bool:
    """Whether an open descriptor still names a file."""
    try:
        return os.fstat(number).st_ino == inode
    except OSError:
        return False


_locks: dict[int, list[tuple[int, Process, int]]] = {}
