"""Processes of a chaos run: clients, and workers that are replaced when they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path

from lmpool.rows.shared_memory import FOLDER_VARIABLE, NAME
from tests.faults.chaos.settings import MODEL, ChaosSettings
from tests.faults.chaos.worker import TRACE_VARIABLE

_END_S = 60.0
START_S = 120.0
SERVING = f"serving {MODEL!r}"
"""Text that a worker prints when it begins to take jobs."""
ASKING = "asking"
"""Text that a client prints when it begins to send requests."""
_TRACEBACK_S = 0.5
_ROOT = Path(__file__).parents[3]
PARTS = ("shared", "producer", "workers", "testing")
"""The folders of a checkout that contain the package."""


def environment_of(root: Path) -> dict[str, str]:
    """The environment of a process that uses the package in a checkout."""
    paths = os.pathsep.join(str(root / part) for part in PARTS)
    return {**os.environ, **({} if root == _ROOT else {"PYTHONPATH": paths})}


class Process:
    """One client or worker process with its log.

    Attributes:
        number: number of the client or worker; a replacement takes the number of its predecessor.
        is_struck: whether the run killed the process on purpose.
        is_frozen: whether the run stopped the process with SIGSTOP.
        is_draining: whether the run sent SIGTERM to the process.
    """

    def __init__(
        self, number: int, command: Sequence[str], log: Path, trace: Path, host: Path, root: Path = _ROOT
    ) -> None:
        self.number = number
        self.is_struck = self.is_frozen = self.is_draining = False
        self._log = log
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=_ROOT,  # The modules of the tests are always those of this checkout.
                env={
                    **environment_of(root),
                    "OMP_WAIT_POLICY": "PASSIVE",
                    "OMP_NUM_THREADS": "1",
                    "LMPOOL_TRACEBACK": "1",
                    TRACE_VARIABLE: str(trace),
                    FOLDER_VARIABLE: str(host),
                },
            )

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code, or None while the process runs."""
        return self._process.poll()

    @property
    def last_words(self) -> str:
        """The last 1,000 characters of the process's output."""
        return self._log.read_text("utf-8", "replace")[-1000:].strip()

    def says(self, text: str) -> bool:
        """Whether the process's output contains a text."""
        return text in self._log.read_text("utf-8", "replace")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it still runs."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def ends_within(self, seconds: float) -> bool:
        """Wait until the process ends; after `seconds`, log the stacks of its threads, kill it, and return False."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(_TRACEBACK_S)
            self._process.kill()
            self._process.wait()
            return False
        return True


class Fleet:
    """Starts, replaces and ends the processes of a run.

    Args:
        settings: settings of the chaos run.
        folder: folder for logs and traces.
        hosts: a folder in shared memory for each of two hosts; the last worker and the last client are on the second.
        url: returns the URL of the server or of the proxy for the number of a worker or client.
        prefix: prefix of all keys.

    Attributes:
        workers: one process for each worker, the latest replacement.
        clients: all clients.
        failed: processes that exited unexpectedly or with an error: number, exit code and last output.
        leaked: processes that did not end after SIGTERM: number and last output.
    """

    def __init__(
        self, settings: ChaosSettings, folder: Path, hosts: tuple[Path, Path], url: Callable[[int], str], prefix: str
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._hosts = hosts
        self._url = url
        self._prefix = prefix
        self._started = 0
        self._numbers = count()
        self.workers: list[Process] = []
        self.clients: list[Process] = []
        self.failed: list[str] = []
        self.leaked: list[str] = []

    @property
    def traces(self) -> list[Path]:
        """The trace files of all workers, which list the prompts that they computed."""
        return sorted(self._folder.glob("*.trace"))

    @property
    def segments(self) -> list[Path]:
        """The sockets of the workers' shared memory segments."""
        return sorted(path for host in self._hosts for path in host.glob(f"{NAME}*/{NAME}*"))

    @property
    def logs(self) -> list[Path]:
        """The request logs of all clients, in the order of their numbers."""
        logs = self._folder.glob("client-*.requests")
        return sorted(logs, key=lambda path: int(path.stem.partition("-")[2]))

    def root(self, role: str) -> Path:
        """The checkout that the next process of a role, "worker" or "client", uses."""
        return _ROOT

    def start(self) -> None:
        """Start the workers, then the clients; wait until the clients send requests.

        Raises:
            RuntimeError: a process ended, or took too long to start.
        """
        self.workers = [self._start_worker(number) for number in range(self._settings.workers)]
        self._await(self.workers, SERVING)
        self.clients = [self._start_client(place) for place in range(self._settings.clients)]
        self._await(self.clients, ASKING)

    def _await(self, processes: Sequence[Process], text: str) -> None:
        end = time.monotonic() + START_S
        for process in processes:
            while not process.says(text):
                if process.code is not None or time.monotonic() > end:
                    raise RuntimeError(f"a process has not printed {text!r}: {process.last_words}")
                time.sleep(0.02)

    def _start_worker(self, number: int) -> Process:
        settings = self._settings
        options = {
            "backend": "synthetic", "encoding": "bf16", "vocab-size": settings.vocab_size, "lease-s": settings.lease_s,
            "step-ms": settings.step_ms if number else settings.slow_ms, "token-ms": settings.token_ms,
            "max-batch": settings.max_batch, "row-ttl-s": settings.row_ttl_s,
            "shm-bytes": settings.shm_bytes, "partitions": settings.partitions,
            "redis": self._url(number), "prefix": self._prefix,
        }  # fmt: skip
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "tests.faults.chaos.worker", "worker", MODEL, "--with-trie", *words]
        self._started += 1
        host = self._hosts[number == settings.workers - 1]
        log = self._folder / f"worker-{self._started}.log"
        return Process(number, command, log, self._folder, host, self.root("worker"))

    def _start_client(self, place: int) -> Process:
        number = next(self._numbers)
        given = [json.dumps(asdict(self._settings)), str(number), self._url(number), self._prefix]
        given += [str(self._folder / "adapters"), str(self._folder / f"client-{number}.requests")]
        command = [sys.executable, "-m", "tests.faults.chaos.client", *given]
        host = self._hosts[place == self._settings.clients - 1]
        log = self._folder / f"client-{number}.log"
        return Process(number, command, log, self._folder, host, self.root("client"))

    @property
    def is_whole(self) -> bool:
        """Whether all workers run and take jobs. A worker that drains must be replaced when it has ended."""
        return all(worker.code is None and not worker.is_draining and worker.says(SERVING) for worker in self.workers)

    def mend(self) -> None:
        """Start a replacement for every worker that has ended."""
        for place, worker in enumerate(self.workers):
            if worker.code is None:
                continue
            # A worker that finds no server at its start may end, so only the end of a serving worker is a failure.
            is_expected = worker.is_struck or (worker.is_draining and worker.code == 0)
            if not is_expected and worker.says(SERVING):
                self.failed.append(f"worker {worker.number} ended with {worker.code}: {worker.last_words}")
            self.workers[place] = self._start_worker(worker.number)

    def thaw(self) -> None:
        """Continue all frozen workers."""
        for worker in self.workers:
            if worker.is_frozen:
                worker.signal(signal.SIGCONT)
                worker.is_frozen = False

    def stop_clients(self) -> None:
        """Send SIGTERM to the clients, so that they send no more requests."""
        for client in self.clients:
            if not client.is_draining:  # A second signal would kill a client that has ended its event loop.
                client.signal(signal.SIGTERM)

    def end_clients(self) -> None:
        """After `stop_clients`, wait until all requests of the clients have ended and the clients exit."""
        self._end("client", self.clients, self._settings.timeout_s + _END_S)

    def end_workers(self) -> None:
        """Send SIGTERM to the workers, and wait until they have finished their jobs and exit."""
        for worker in self.workers:
            worker.signal(signal.SIGTERM)
        self._end("worker", self.workers, self._settings.lease_s * 2 + _END_S)

    def _end(self, role: str, processes: Sequence[Process], seconds: float) -> None:
        end = time.monotonic() + seconds
        for process in processes:
            if not process.ends_within(max(0.1, end - time.monotonic())):
                self.leaked.append(f"{role} {process.number}: {process.last_words}")
            elif process.code:
                self.failed.append(f"{role} {process.number} ended with {process.code}: {process.last_words}")

    def kill(self) -> None:
        """Kill the processes that still run."""
        for process in [*self.workers, *self.clients]:
            process.signal(signal.SIGKILL)
            process.ends_within(_END_S)
