"""Change the weights many times, and SIGKILL one process at a random moment of each change.

The killed process is a worker, the publisher or the server. After each kill the pool must converge: all versions are
decided, all workers serve the newest served version, and all clients get rows of this version.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from lmpool.broker.scripts import read_alive
from lmpool.broker.server import Server
from lmpool.embedded import EmbeddedServer
from lmpool.protocol.version import REFUSED, SERVED, name_of_version
from tests.support.fork_server import ForkedCommand
from tests.support.pool import Pool, WorkerProcess, lmpool_command, until, until_async
from tests.versions.traffic import Rows, Traffic

_LEASE_S = 1.0  # Lease of the workers: short, so that the pool soon removes a killed worker.
WORKER_OPTIONS = ("--lease-s", _LEASE_S, "--step-ms", 50)
"""Options of the workers. Their steps are slow, so that many kills meet a worker that checks new weights."""
VICTIMS = ("worker", "publisher", "server", "memory")
"""Processes that are killed; "memory" is the server, which also loses its data."""
_CALM_CHANGES = 5  # Changes without a kill, which measure how long a usual change takes.
_CONVERGENCE_S = 60.0  # Max seconds from a kill to convergence: much longer than leases and a server's restart take.
_LOST_S = 10.0  # Timeout of a publisher whose version the server may lose.
_PROMPTS = tuple([first, second] for first in range(100) for second in range(100))  # Too many for clients to cache all.
_PAUSE_S = 0.005  # Pause of a client after each row: it leaves CPU time for the workers.


@dataclass
class Kills:
    """Changes with kills.

    Attributes:
        pool: the pool.
        server: the pool's server, which has an append-only file.
        workers: the workers that have not been killed.
        start_worker: starts a worker, and does not wait until it serves.
        versions: the oracle.
        draw: source of the moments and of the killed processes.
        usual_s: median seconds of a change without a kill.
        killed: number of kills of each kind.
        unserved: versions whose publisher, or whose server's memory, was lost before a worker served them.
    """

    pool: Pool
    server: EmbeddedServer
    workers: list[WorkerProcess]
    start_worker: Callable[[], WorkerProcess]
    versions: Rows
    draw: random.Random
    usual_s: float = 0.0
    killed: Counter[str] = field(default_factory=Counter)
    unserved: list[int] = field(default_factory=list)

    async def run(self, changes: int, clients: int) -> Traffic:
        """Make the changes while clients request rows; returns what the clients got."""
        traffic = Traffic(self.versions, prompts=_PROMPTS, pause_s=_PAUSE_S)
        async with traffic.running(self.pool, clients):
            calm = [await self._change(version + 1, "", 0.0, traffic) for version in range(_CALM_CHANGES)]
            self.usual_s = statistics.median(calm)
            print(f"a usual change takes {self.usual_s:.2f} s", flush=True)
            for version in range(_CALM_CHANGES + 1, _CALM_CHANGES + changes + 1):
                victim, moment_s = self.draw.choice(VICTIMS), self.draw.uniform(0, 1.5 * self.usual_s)
                seconds = await self._change(version, victim, moment_s, traffic)
                print(f"{version}: {victim} killed at {moment_s:.3f} s, converged at {seconds:.2f} s", flush=True)
        return traffic

    async def _change(self, version: int, victim: str, moment_s: float, traffic: Traffic) -> float:
        """Publish a version, kill the victim at a moment, and return the seconds until the pool has converged."""
        began = time.monotonic()
        publisher = self._publish(version, _LOST_S if victim == "memory" else _CONVERGENCE_S)
        if victim:
            await asyncio.sleep(moment_s)
            self.killed[victim] += 1
            await self._kill(victim, publisher)
        code = await asyncio.to_thread(publisher.wait, _CONVERGENCE_S)
        assert code == 0 or victim in ("publisher", "memory"), f"the publisher ended with {code}: {self._log(version)}"
        newest = await self._converge(traffic)
        assert newest == version or code != 0, f"version {version} was served, and now {newest} is"
        self.unserved += [version] if newest < version else []
        return time.monotonic() - began

    def _log(self, version: int) -> str:
        return (self.pool.folder / f"publisher-{version}.log").read_text("utf-8", "replace")

    def _publish(self, version: int, timeout_s: float) -> ForkedCommand:
        """Start a process that publishes a full or sparse version, as a file for the workers or through the pool."""
        file, weights = self.pool.folder / f"weights-{version}.safetensors", self.versions.weights(version)
        sparse = {"seed.indices": np.array([0]), "seed.values": weights["seed"].reshape(1)}
        save_file(self.draw.choice((weights, sparse)), file)
        place = ["--redis", self.pool.url, "--prefix", self.pool.prefix, "--model", "syn"]
        options = ["--version", str(version), "--timeout", str(timeout_s), *self.draw.choice(([], ["--stored"]))]
        command = [*lmpool_command(), "weights", "publish", str(file), *place, *options]
        return ForkedCommand(command, dict(os.environ), self.pool.folder / f"publisher-{version}.log")

    async def _kill(self, victim: str, publisher: ForkedCommand) -> None:
        """Kill a process, and start another one in its place unless it is the publisher."""
        if victim == "publisher":
            publisher.kill()
        elif victim == "worker":
            killed = self.draw.choice(self.workers)
            killed.end()
            self.workers[self.workers.index(killed)] = self.start_worker()
        else:
            os.kill(self.server.pid, signal.SIGKILL)
            # Some of the leases expire while no server runs.
            await asyncio.sleep(self.draw.uniform(0, 2 * _LEASE_S))
            await asyncio.to_thread(until, lambda: not self.server.running, "the server has ended")
            if victim == "memory":
                shutil.rmtree(Path(self.server.log_path).with_name("appendonlydir"))
            await asyncio.to_thread(self.server.start)

    async def _converge(self, traffic: Traffic) -> int:
        """Wait until the pool has converged; returns the version that it serves."""
        state: tuple[dict[int, str], set[int], dict[int, int]] = {}, set(), {}
        newest = 0

        async def has_converged() -> bool:
            nonlocal state, newest
            assert all(worker.is_running for worker in self.workers), "a worker has ended"
            waiting = self.pool.producer("syn", when_absent="wait")
            async with waiting as producer, Server(self.pool.url).connected() as client:
                states = await producer.versions()
                newest = max((number for number, text in states.items() if text == SERVED), default=0)
                keys = self.pool.keys.model(name_of_version("syn", newest))
                names = (await read_alive(client, keys, names=True)).names
                state = states, {int(name.split("-")[-2]) for name in names}, dict(traffic.seen)
                assert not any(text.startswith(REFUSED) for text in states.values()), states
                is_decided = set(states.values()) <= {SERVED}
                # A killed worker counts as alive until its lease expires, so compare the processes, not their number.
                is_served = is_decided and state[1] == {worker.process.pid for worker in self.workers}
                is_served &= {*traffic.seen.values()} == {newest}
                # A client that connects now gets the same version.
                return is_served and (await producer.versioned(producer.logprobs, [0, 0]))[1] == newest

        try:
            async with asyncio.timeout(_CONVERGENCE_S):
                await until_async(has_converged, "the pool converges", _CONVERGENCE_S)
        except (TimeoutError, AssertionError) as error:
            logs = "\n".join(f"{worker.log}:\n{worker.text[-3000:]}" for worker in self.workers)
            text = f"no convergence: states, processes that serve the newest version, clients' versions: {state}"
            raise AssertionError(f"{text}\n{logs}") from error
        return newest
