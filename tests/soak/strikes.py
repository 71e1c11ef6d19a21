"""The processes of a soak run, and the faults that hit them: those of chaos runs, more rarely, and six more."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import redis

from lmpool.protocol.keys import Keys
from tests.faults.chaos.fleet import Fleet, Process
from tests.faults.chaos.plan import Kind, Strike, draw_plan
from tests.faults.chaos.settings import MODEL
from tests.faults.chaos.striker import Striker

MEMORY_BYTES = 1 << 28
"""Memory limit of the server."""
KEPT = 0
"""Number of the worker and of the client that no fault kills or freezes, so that their leaks become visible."""

_RARER = 4.0  # Factor by which the faults of a chaos run are rarer here.
_PAUSE_S = (15.0, 45.0)  # Min and max seconds between two of the six faults of this file.
_FREEZE_S = (0.5, 6.0)  # Min and max seconds for which a client is frozen.
_SHORT_S = 2.0  # Seconds for which the server is short of memory.
_SHORT = 0.8  # Share of the used memory that the server may then use.
_FIRST_S, _QUIET_S = 5.0, 20.0  # Seconds without faults of this file at the beginning and at the end.
_BATCH = 1000  # Keys that are listed or removed at once.


class ClientKind(Enum):
    """The kinds of faults of clients and data, which chaos runs do not have, with the texts that describe them."""

    KILL_CLIENT = "kill a client"
    FREEZE_CLIENT = "freeze a client"
    DROP_ROWS = "remove all rows"
    SHORT_OF_MEMORY = "a server that is short of memory"
    FLUSH = "FLUSHALL"
    RESTART_EMPTY = "restart the server without its data"


class Window(NamedTuple):
    """One fault: its kind, its start and end in seconds of the monotonic clock, and the process that it hit, if one."""

    kind: Kind | ClientKind
    hit: float
    over: float
    process: str = ""


class SoakFleet(Fleet):
    """The processes of a soak run.

    Attributes:
        names: name of each process so far -> its process, such as "worker 0" and "client 1.3".
        reports: the file with the report of each client so far, by the client's name.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._clients_started = 0
        self.names: dict[str, Process] = {}
        self.reports: dict[str, Path] = {}

    def _start_worker(self, number: int) -> Process:
        settings = self._settings
        options = {
            "backend": "synthetic", "encoding": "bf16", "vocab-size": settings.vocab_size, "lease-s": settings.lease_s,
            "max-batch": settings.max_batch, "row-ttl-s": settings.row_ttl_s, "shm-bytes": settings.shm_bytes,
            "partitions": settings.partitions, "redis": self._url(number), "prefix": self._prefix,
            # A cache that is full after minutes, so that later growth is a leak.
            "trie-values-mb": 1,
        }  # fmt: skip
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "tests.soak.worker", "worker", MODEL, "--with-trie", *words]
        self._started += 1
        log = self._folder / f"worker-{self._started}.log"
        return self._named(
            f"worker {number}.{self._started}", Process(number, command, log, self._folder, self._hosts[0])
        )

    def _start_client(self, place: int) -> Process:
        name, self._clients_started = f"client {place}.{self._clients_started}", self._clients_started + 1
        report = self._folder / f"{name}.report"
        given = [json.dumps(asdict(self._settings)), name.partition(".")[2], self._url(place), self._prefix]
        command = [sys.executable, "-m", "tests.soak.client", *given, str(self._folder / "adapters"), str(report)]
        self.reports[name] = report
        # The last client has another folder of shared memory, as on another host.
        host = self._hosts[place == self._settings.clients - 1]
        return self._named(name, Process(place, command, self._folder / f"{name}.log", self._folder, host))

    def _named(self, name: str, process: Process) -> Process:
        self.names[name] = process
        return process

    def mend(self) -> None:
        """Start a replacement for every worker and client that has ended."""
        super().mend()
        for place, client in enumerate(self.clients):
            if client.code is not None:
                # A client that finds no server at its start may end, as a worker may.
                if not client.is_struck and client.says("asking"):
                    self.failed.append(f"client {client.number} ended with {client.code}: {client.last_words}")
                self.clients[place] = self._start_client(place)


class SoakStriker(Striker):
    """Applies both kinds of faults, prints each, and never kills or freezes the worker and the client `KEPT`.

    Attributes:
        windows: the faults so far.
    """

    _fleet: SoakFleet

    def __init__(self, folder: Path, prefix: str, *args: Any) -> None:
        super().__init__(*args)
        self._folder = folder
        self._keys = Keys(prefix)
        self._began = time.monotonic()
        self.windows: list[Window] = []

    async def run(self, plan: Sequence[Strike], seconds: float) -> None:
        """Apply the faults of the plan, and faults of clients and of the server's data, for some seconds."""
        self._began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            group.create_task(super().run(plan, seconds))
            if plan:
                group.create_task(self._strike_data(self._began + seconds - _QUIET_S))

    def _ready(self) -> list[Process]:
        return [worker for worker in super()._ready() if worker.number != KEPT]

    async def _strike(self, strike: Strike) -> None:
        await super()._strike(strike)
        hit, _ = self.troubles[-1]
        self._note(Window(strike.kind, hit, time.monotonic()))

    async def _strike_data(self, end: float) -> None:
        kinds: list[ClientKind] = []
        await asyncio.sleep(_FIRST_S)
        while time.monotonic() < end:
            if not kinds:
                kinds = list(ClientKind)
                self._draw.shuffle(kinds)
            kind, hit = kinds.pop(), time.monotonic()
            process = await self._strike_one(kind)
            self._note(Window(kind, hit, time.monotonic(), process))
            await asyncio.sleep(self._draw.uniform(*_PAUSE_S))

    async def _strike_one(self, kind: ClientKind) -> str:
        """Apply a fault; return the name of the process that it hits, or ""."""
        if kind is ClientKind.RESTART_EMPTY:
            async with self._restarting:
                await asyncio.to_thread(self._server.stop)
                shutil.rmtree(self._folder / "appendonlydir")
                await asyncio.to_thread(self._server.start)
        elif kind in (ClientKind.KILL_CLIENT, ClientKind.FREEZE_CLIENT):
            return await self._strike_client(kind)
        else:
            data: dict[ClientKind, Callable[[redis.Redis], object]] = {
                ClientKind.DROP_ROWS: self._drop_rows,
                ClientKind.SHORT_OF_MEMORY: _be_short,
                ClientKind.FLUSH: redis.Redis.flushall,
            }
            async with self._restarting:
                await asyncio.to_thread(self._with_server, data[kind])
        return ""

    async def _strike_client(self, kind: ClientKind) -> str:
        ready = [client for client in self._fleet.clients if client.number != KEPT and client.says("asking")]
        if not ready:
            return ""
        client = self._draw.choice(ready)
        if kind is ClientKind.KILL_CLIENT:
            client.is_struck = True
            client.signal(signal.SIGKILL)
        else:
            client.signal(signal.SIGSTOP)
            await asyncio.sleep(self._draw.uniform(*_FREEZE_S))
            client.signal(signal.SIGCONT)
        return next(name for name, process in self._fleet.names.items() if process is client)

    def _with_server(self, work: Callable[[redis.Redis], object]) -> None:
        # Connect without the proxy, whose connections other faults cut.
        with redis.Redis.from_url(self._server.url) as client:
            work(client)

    def _drop_rows(self, client: redis.Redis) -> None:
        names: list[bytes] = []
        for key in client.scan_iter(self._keys.rows() + b"*", _BATCH):
            names.append(key)
            if len(names) == _BATCH:
                client.unlink(*names)
                names.clear()

    def _note(self, window: Window) -> None:
        self.windows.append(window)
        at, lasted = window.hit - self._began, window.over - window.hit
        print(f"{at:8.1f} s  {window.kind.value} {window.process} ({lasted:.1f} s)", flush=True)


def draw_faults(seed: int, seconds: float) -> list[Strike]:
    """Draw the faults of chaos runs for a soak run."""
    return [replace(strike, at=strike.at * _RARER) for strike in draw_plan(seed, seconds / _RARER)]


def _be_short(client: redis.Redis) -> None:
    """Limit the server's memory to less than it uses, so that it evicts keys with a lifetime."""
    used: Any = client.info("memory")
    client.config_set("maxmemory", int(used["used_memory"] * _SHORT))
    time.sleep(_SHORT_S)
    client.config_set("maxmemory", MEMORY_BYTES)
