"""The testbed of the measures: a Redis server for both sides, a folder of logs, and the processes of both sides."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import cast

import redis

from benchmarks.harness.processes import BenchmarkError, Child, Process
from lmpool.embedded import EmbeddedServer
from lmpool.protocol.keys import Keys
from lmpool.protocol.model_info import TRIE_SERVICE

# The server's memory limit, enough for the rows of several seconds. With less memory, the server would evict unread
# rows, because its LRU clock ticks only once a second.
MEMORY_BYTES = 4 * 2**30
_FILLER_BYTES = 196_608  # Bytes of a filler value, the size of a float32 row of 49,152 entries.
_FILLER_TTL_S = 3600  # Lifetime of filler values in seconds: longer than a measure takes.
_WORKERS_READY_S = 180.0  # Max seconds until started workers are ready: some workers load models.
_LOOPBACK = "127.0.0.1"
_POLL_S = 0.05  # Seconds between two checks of a condition.
_WAVE = 8  # Max processes that start concurrently: if dozens start at once, each start takes a minute.
_HEARTBEATS_S = 60.0  # Max seconds to wait for a heartbeat of every worker.
_IDLE_S = 180.0  # Max seconds until workers are idle: a worker drops cancelled prompts only at its next check.
_SCANNED = 10_000  # COUNT of the SCAN command: large, so that a scan of a full server takes few round trips.

# Let OpenMP threads sleep while they wait: spinning threads would take cores from other processes.
_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}


@dataclass(slots=True)
class Testbed:
    """The Redis server of a measure, and methods that start the processes of both sides.

    Attributes:
        url: address of the server that both sides use.
        folder: folder for logs, deleted after the run.
        repeats: number of samples of each side.
        quick: whether samples are smaller, for a short run that checks the measures.
        server: process id of the server.
        memory_bytes: the server's memory limit.
    """

    url: str
    folder: Path
    repeats: int
    quick: bool
    server: int
    memory_bytes: int
    _numbers: Iterator[int] = field(default_factory=count)

    def scaled(self, full: int, quick: int) -> int:
        """The size of a sample: `full`, or `quick` in a quick run."""
        return quick if self.quick else full

    def over_tcp(self) -> Testbed:
        """The same testbed, whose processes reach the server over TCP, as processes on other hosts do."""
        with socket.create_server((_LOOPBACK, 0)) as probe:
            port = probe.getsockname()[1]
        with redis.Redis.from_url(self.url) as server:
            server.config_set("port", port)
        return replace(self, url=f"redis://{_LOOPBACK}:{port}")

    def child(self, module: str, *arguments: str, python: str = sys.executable, **environment: str) -> Child:
        """Start a module of this package as a process that responds to requests."""
        command = [python, "-m", f"benchmarks.{module}", *arguments]
        return Child(command, self._log(module), {**_ENVIRONMENT, **environment})

    def process(self, name: str, *command: str, **environment: str) -> Process:
        """Start a program that is not a module of this package."""
        return Process(command, self._log(name), {**_ENVIRONMENT, **environment})

    def producer(self, model: str, *options: str, **environment: str) -> Child:
        """Start a process with a producer for a served model."""
        return self.child("clients.producer", "--redis", self.url, "--model", model, *options, **environment)

    def wait_for_shared_memory(self, name: str) -> None:
        """Wait up to a minute until the workers that serve `name` have shared memory, which they create after start."""

        def have_segments() -> bool:
            return all("shared" in fields for fields, _ in _heartbeats(server, name).values())

        with redis.Redis.from_url(self.url, decode_responses=True) as server:
            wait_until(have_segments, _HEARTBEATS_S, f"shared memory of the workers that serve {name!r}")

    def wait_until_idle(self, name: str) -> None:
        """Wait up to three minutes until the workers that serve `name` hold no prompts, not even cancelled prompts."""

        def are_idle() -> bool:
            return all(fields.get("in_flight") == "0" for fields, _ in _heartbeats(server, name).values())

        with redis.Redis.from_url(self.url, decode_responses=True) as server:
            wait_until(are_idle, _IDLE_S, f"the end of all prompts of the workers that serve {name!r}")

    def refill(self) -> None:
        """Empty the server, then store filler values until it evicts keys, so that all measures begin in one state.

        A full cache that evicts is the steady state of a cache.
        """
        value = os.urandom(_FILLER_BYTES)
        with redis.Redis.from_url(self.url) as server:
            server.flushall()
            server.config_resetstat()
            for start in range(0, 2 * self.memory_bytes // _FILLER_BYTES + 32, 32):
                pipe = server.pipeline(transaction=False)
                for index in range(start, start + 32):
                    pipe.set(f"filler:{index}", value, ex=_FILLER_TTL_S)
                pipe.execute()
                if cast("dict[str, int]", server.info("stats"))["evicted_keys"]:
                    return
        raise BenchmarkError(f"the server evicted nothing after {2 * self.memory_bytes:,} bytes of filler values")

    @contextmanager
    def workers(
        self,
        name: str,
        model: str,
        *options: str,
        number: int = 1,
        command: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Iterator[None]:
        """Start `number` more workers that serve a model as `name`; they are ready when the block begins.

        Args:
            options: options of `lmpool worker`.
            command: the `lmpool` command to run; default: the command of this environment.

        Raises:
            BenchmarkError: a worker ended, or the workers are not ready within 3 minutes.
        """
        lmpool = command or [own_command()]
        command = [*lmpool, "worker", model, "--name", name, "--redis", self.url, *options]
        with self._serving(name, command, number, environment or {}):
            yield

    @contextmanager
    def trie_worker(self, *options: str) -> Iterator[None]:
        """Start one trie worker; the trie worker is ready when the `with` block begins."""
        with self._serving(TRIE_SERVICE, [own_command(), "trie-worker", "--redis", self.url, *options], 1, {}):
            yield

    def heartbeats(self, model: str) -> dict[str, dict[str, str]]:
        """The counters of a model's workers: worker id -> fields of a heartbeat that was sent after this call."""
        found: dict[str, dict[str, str]] = {}
        began = time.monotonic()

        def are_new() -> bool:
            found.clear()
            silences = []
            for name, (fields, left_s) in _heartbeats(server, model).items():
                found[name] = fields
                silences.append(float(fields["lease_s"]) - left_s)
            return bool(silences) and max(silences) < time.monotonic() - began

        with redis.Redis.from_url(self.url, decode_responses=True) as server:
            wait_until(are_new, _HEARTBEATS_S, f"heartbeats of the workers that serve {model!r}")
        return found

    @contextmanager
    def _serving(
        self, name: str, command: Sequence[str], number: int, environment: Mapping[str, str]
    ) -> Iterator[None]:
        started: list[Process] = []
        with ExitStack() as stack, redis.Redis.from_url(self.url, decode_responses=True) as server:
            number_before = len(_heartbeats(server, name))

            def are_ready() -> bool:
                for process in started:
                    process.check()
                return len(_heartbeats(server, name)) >= number_before + len(started)

            while len(started) < number:
                wave = min(_WAVE, number - len(started))
                processes = (self.process(f"worker-{name}", *command, **environment) for _ in range(wave))
                started.extend(map(stack.enter_context, processes))
                wait_until(are_ready, _WORKERS_READY_S, f"{len(started)} workers that serve {name!r}")
            try:
                yield
            finally:
                for process in started:
                    process.terminate()

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}-{next(self._numbers)}.log"


@contextmanager
def open_testbed(repeats: int, quick: bool, memory_bytes: int = MEMORY_BYTES) -> Iterator[Testbed]:
    """Start a Redis server in a temporary folder, and stop it at the end of the `with` block."""
    with tempfile.TemporaryDirectory(prefix="lmpool-bench-") as name:
        folder = Path(name)
        os.environ["LMPOOL_RUNTIME_DIR"] = str(folder / "server")
        with EmbeddedServer(memory_bytes) as server:
            yield Testbed(server.url, folder, repeats, quick, server.pid, memory_bytes)


def wait_until(condition: Callable[[], bool], seconds: float, description: str) -> None:
    """Poll until the condition holds; raise BenchmarkError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise BenchmarkError(f"timed out after {seconds:g} s waiting for {description}")
        time.sleep(_POLL_S)


def own_command() -> str:
    """The `lmpool` command of the environment that runs the benchmark."""
    return str(Path(sys.executable).with_name("lmpool"))


def _heartbeats(server: redis.Redis, model: str) -> dict[str, tuple[dict[str, str], float]]:
    """Worker id -> fields of the heartbeat, and its remaining lifetime in seconds, for the workers of a model."""
    found = {}
    beginning = Keys().worker("").decode()
    for key in server.scan_iter(f"{beginning}*", count=_SCANNED):
        fields = cast("dict[str, str]", server.hgetall(key))
        if fields.get("model") == model and fields.get("state") != "loading":
            found[key.removeprefix(beginning)] = fields, server.pttl(key) / 1000
    return found
