"""Runs pools of real worker processes and producers for tests, and waits for conditions instead of fixed times."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import redis
from redis.asyncio import Redis
from redis.cluster import RedisCluster

from lmpool.admin.heartbeats import read_heartbeats
from lmpool.broker.scripts import read_alive
from lmpool.broker.server import Server
from lmpool.producer import Producer
from lmpool.protocol.adapter import MAX_LOADED
from lmpool.protocol.keys import GROUP, WAKE_FIELD, Keys
from lmpool.workers.execution.contract import Backend
from tests.support.fork_server import ForkedCommand, can_fork

DEADLINE_S = 240.0
"""Max seconds that tests wait for a condition; importing transformers alone may take two minutes."""
PATIENCE: dict[str, Any] = {"socket_timeout": DEADLINE_S, "socket_connect_timeout": DEADLINE_S}
"""Options of a redis-py client: its own limits of 5 s are too short on a busy machine."""
V = 512

PROTOCOL_VARIABLE = "LMPOOL_TEST_PROTOCOL"
"""Environment variable with the RESP version (2 or 3) of a test run; `embedded.BINARY_VARIABLE` names the server."""


def lmpool_command() -> list[str]:
    """The `lmpool` command of the environment that runs the tests."""
    return [str(Path(sys.executable).with_name("lmpool"))]


def run_lmpool(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run an `lmpool` command to its end, in a forked process if the environment allows a fork."""
    command, whole = [*lmpool_command(), *arguments], {**os.environ, **environment}
    if not can_fork(whole):
        return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, env=whole)
    with TemporaryDirectory(prefix="lmp") as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = ForkedCommand(command, whole, out, err)
        try:
            code = process.wait(DEADLINE_S)
        finally:
            process.kill()
        return subprocess.CompletedProcess(command, code, out.read_text("utf-8"), err.read_text("utf-8"))


def server_pid(folder: Path) -> int:
    """Process id of a folder's embedded server, from the first record of its state file; 0 without a state file."""
    try:
        return int(json.loads((folder / "state").read_bytes()[:4096]).get("pid", 0))
    except (FileNotFoundError, ValueError):
        return 0


def is_running(pid: int) -> bool:
    """Whether a process still runs."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def children_of(pid: int) -> dict[int, bytes]:
    """The child processes of a process, and the command line of each; its words end with zero bytes."""
    children = {}
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # The thread has just ended.
            for child in path.read_text().split():
                with contextlib.suppress(OSError):
                    children[int(child)] = Path(f"/proc/{child}/cmdline").read_bytes()
    return children


def ranks_below(pid: int) -> list[int]:
    """Process ids of the ranks that a worker has started for a model in several processes, in their order."""
    words = (b"VLLM", b"spawn_main", b"follower")
    return sorted(child for child, command in children_of(pid).items() if any(word in command for word in words))


def shared_by(pid: int) -> set[Path]:
    """Paths of the shared memory and of the semaphores that a process has mapped, if they still have a name."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {Path(line.split()[5]) for line in lines if "/dev/shm/" in line and not line.endswith("(deleted)")}


def spoken(url: str) -> str:
    """A server's URL, with the RESP version of this test run."""
    version = os.environ.get(PROTOCOL_VARIABLE)
    if not version:
        return url
    return f"{url}{'&' if '?' in url else '?'}protocol={version}"


def until(condition: Callable[[], Any], description: str, deadline_s: float = DEADLINE_S) -> Any:
    """Wait until `condition()` is true, and return its value."""
    end = time.monotonic() + deadline_s
    while not (result := condition()):
        assert time.monotonic() < end, f"not within {deadline_s} s: {description}"
        time.sleep(0.01)
    return result


async def until_async(condition: Callable[[], Awaitable[Any]], description: str, deadline_s: float = DEADLINE_S) -> Any:
    """Wait until `await condition()` is true, and return its value."""
    end = time.monotonic() + deadline_s
    while not (result := await condition()):
        assert time.monotonic() < end, f"not within {deadline_s} s: {description}"
        await asyncio.sleep(0.01)
    return result


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock can be advanced."""

    skipped_s = 0.0

    def time(self) -> float:
        """Clock of the event loop in seconds, which includes skipped time."""
        return super().time() + self.skipped_s


def run_skipping(work: Callable[[SkippingLoop], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine in an event loop with a clock that can be advanced."""
    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, SkippingLoop)
        runner.run(work(loop))


def deadline_ms(seconds: float = 60.0) -> int:
    """A worker's deadline `seconds` from now, in ms, as the sorted set of workers stores it."""
    return int((time.time() + seconds) * 1000)


def entry_ids(reply: Any) -> list[bytes]:
    """The entry ids in redis-py's reply to a read of one stream, with RESP 2 or RESP 3."""
    if isinstance(reply, dict):
        (parts,) = reply.values()
        return [entry for part in parts for entry, _ in part]
    return [entry for entry, _ in reply[0][1]] if reply else []


def open_sockets() -> int:
    """The number of open sockets of this process."""
    return sum(is_socket(descriptor) for descriptor in Path("/dev/fd").iterdir())


def is_socket(descriptor: Path) -> bool:
    """Whether a descriptor of this process is a socket, or False for a descriptor that has been closed."""
    with contextlib.suppress(OSError):
        return stat.S_ISSOCK(os.fstat(int(descriptor.name)).st_mode)
    return False


class Prepared:
    """Settings that open an existing backend."""

    def __init__(self, backend: Backend, max_adapters: int = MAX_LOADED) -> None:
        self._backend = backend
        self.served_as = backend.info.name
        self.max_adapters = max_adapters

    def open(self) -> Backend:
        """Return the existing backend."""
        return self._backend


class WorkerProcess:
    """One `lmpool worker` process with its log.

    Args:
        command: the command line; a command that begins with `lmpool_command()` runs in a forked process.
        log: file for the output of the process.
        environment: variables that are added to the environment of this process.
        installed: always start the installed command and never fork, to test how the command starts or ends.
    """

    def __init__(
        self, command: list[str], log: Path, environment: Mapping[str, str] | None = None, *, installed: bool = False
    ) -> None:
        self.log = log
        log.write_bytes(b"")
        whole = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", **(environment or {})}
        self.process: subprocess.Popen[bytes] | ForkedCommand
        if not installed and command[:1] == lmpool_command() and can_fork(whole):
            self.process = ForkedCommand(command, whole, log)
        else:
            with log.open("wb") as out:
                self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=whole)

    @property
    def text(self) -> str:
        """The worker's output."""
        return self.log.read_text("utf-8", "replace")

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self.process.poll() is None

    def until_says(self, text: str) -> None:
        """Wait until the worker has printed a text."""

        def said() -> bool:
            if self.process.poll() is not None and text not in self.text:
                raise AssertionError(f"the worker ended with {self.process.returncode}:\n{self.text}")
            return text in self.text

        until(said, f"the worker prints {text!r}; it printed:\n{self.text}")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """Wait for the end of the process; return its exit code."""
        return self.process.wait(deadline_s)

    def end(self) -> None:
        """Kill the process if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Pool:
    """Worker processes and producers of one test, with their own key prefix on a shared server."""

    def __init__(self, url: str, prefix: str, folder: Path) -> None:
        self.url = spoken(url)
        self.prefix = prefix
        self.folder = folder
        self.keys = Keys(prefix)
        self.workers: list[WorkerProcess] = []
        self.redis = _client(self.url)

    def start(
        self,
        *options: str | int | float,
        model: str = "syn",
        wait: bool = True,
        command: Callable[[], list[str]] = lmpool_command,
        environment: Mapping[str, str] | None = None,
        installed: bool = False,
    ) -> WorkerProcess:
        """Start a worker process, by default with the synthetic backend. `command` replaces `lmpool`."""
        chosen = [str(option) for option in options]
        if "--backend" not in chosen:
            chosen += ["--backend", "synthetic"]
            if "--vocab-size" not in chosen:
                chosen += ["--vocab-size", str(V)]
        arguments = ["worker", model, "--redis", self.url, "--prefix", self.prefix, *chosen]
        return self._launch([*command(), *arguments], environment, wait=wait, installed=installed)

    def start_trie_worker(
        self,
        *options: str | int | float,
        wait: bool = True,
        environment: Mapping[str, str] | None = None,
        installed: bool = False,
    ) -> WorkerProcess:
        """Start a trie worker process."""
        arguments = ["trie-worker", "--redis", self.url, "--prefix", self.prefix, *map(str, options)]
        return self._launch([*lmpool_command(), *arguments], environment, wait=wait, installed=installed)

    def _launch(
        self, command: list[str], environment: Mapping[str, str] | None, *, wait: bool, installed: bool = False
    ) -> WorkerProcess:
        log = self.folder / f"worker-{len(self.workers)}.log"
        worker = WorkerProcess(command, log, environment, installed=installed)
        self.workers.append(worker)
        if wait:
            worker.until_says("serving ")
        return worker

    def producer(self, model: str | None = None, **settings: Any) -> Producer:
        """A producer of this pool, with generous timeouts unless the settings say otherwise."""
        return Producer(model, redis=self.url, prefix=self.prefix, **{"timeout": DEADLINE_S, **settings})

    def jobs(self, model: str = "syn") -> int:
        """Number of prompts in a model's queue: in the shared stream, in the workers' lanes, and in the backlog."""
        jobs, *lanes = self.streams(model)
        queued = [int(self.redis.xlen(jobs))]
        for lane in lanes:  # A worker that was killed may have left an entry that only wakes it.
            entries: Any = self.redis.xrange(lane)
            queued.append(sum(WAKE_FIELD not in fields for _, fields in entries))
        return sum(queued) + int(self.redis.zcard(self.keys.model(model).backlog))

    def streams(self, model: str = "syn") -> list[bytes]:
        """The keys of the streams of a model's queue: the shared stream, and one stream (lane) per worker."""
        keys = self.keys.model(model)
        lanes = self.redis.scan_iter(match=f"{keys.lane('*').decode()}", count=1000)
        return [keys.jobs, *sorted(lanes)]

    def held(self, model: str = "syn") -> int:
        """Number of entries that workers hold; 0 while the model has no queue."""
        held = 0
        for stream in self.streams(model):
            try:
                groups: Any = self.redis.xinfo_groups(stream)
            except redis.ResponseError as error:
                # Skip a missing stream: the queue does not exist yet, or a lane was removed after the listing.
                if "no such key" not in str(error):
                    raise
                continue
            held += sum(int(group["pending"]) for group in groups[:1])
        return held

    def names(self, pattern: str) -> list[str]:
        """The keys of this pool that match a pattern, without the marks of finished jobs, which expire on a cluster."""
        keys = self.redis.scan_iter(match=f"{self.prefix}:{pattern}", count=1000)
        return sorted(key.decode("utf-8", "replace") for key in keys if not self._is_mark(key))

    def _is_mark(self, key: bytes) -> bool:
        if b":waiting:" not in key or self.redis.type(key) not in (b"hash", b"none"):
            return False
        # A key without a field `job` has just expired, so it was a mark: keys of waiting clients live much longer.
        return self.redis.hget(key, "job") in (b"done", None) and "+cluster" in self.url

    def clients(self) -> list[dict[str, str]]:
        """The connected clients of the server, or of all masters of the cluster."""
        redis: Any = self.redis
        if "+cluster" in self.url:
            masters = [redis.get_redis_connection(node) for node in redis.get_primaries()]
            return [client for master in masters for client in master.client_list()]
        return list(redis.client_list())

    async def rows_computed(self, model: str = "syn") -> int:
        """Number of rows that the live workers have computed, from their last heartbeats."""
        client: Redis = Server(self.url).client()
        try:
            names = (await read_alive(client, self.keys.model(model), names=True)).names
            return sum(int(worker.fields["rows"]) for worker in await read_heartbeats(client, self.keys, names))
        finally:
            await client.aclose()

    def end(self) -> None:
        """End all workers and close the connection."""
        for worker in self.workers:
            worker.end()
        self.redis.close()


def _client(url: str) -> redis.Redis:
    """A redis-py client of a server or of a cluster; both kinds of client have equal methods."""
    if "+cluster" not in url:
        return redis.Redis.from_url(url, **PATIENCE)  # Some tests send values of 300 MiB.
    return cast(redis.Redis, RedisCluster.from_url(url.replace("+cluster", "")))


def count_waiting(redis: Any, waiting: bytes) -> int:
    """Number of clients in a waiting key: 1 in a string; a hash has a field per client and the field `job`."""
    kind = redis.type(waiting)
    return redis.hlen(waiting) - 1 if kind == b"hash" else int(kind == b"string")


async def is_held(pool: Pool) -> bool:
    """Whether any worker holds prompts."""
    return pool.held() > 0


async def until_done(pool: Pool, model: str = "syn") -> None:
    """Wait until a model has no queued or pending job: a client can get a row shortly before its job has ended."""

    async def is_done() -> bool:
        return not pool.jobs(model) and not pool.held(model)

    await until_async(is_done, f"no job of {model!r} is left")


def pending(pool: Pool, model: str = "syn") -> list[dict[str, Any]]:
    """The pending entries of all streams, as XPENDING returns them: the jobs that workers hold."""
    entries: list[dict[str, Any]] = []
    for stream in pool.streams(model):
        # Ignore errors of a lane (a worker's stream) that has no consumer group yet, or was just removed.
        with contextlib.suppress(redis.ResponseError):
            entries += pool.redis.xpending_range(stream, GROUP, "-", "+", 1000)
    return entries
