"""`lmpool up` and `down`: starts, watches and restarts a server and workers, and requeues jobs of crashed workers.

The supervisor starts or joins the server of its user (`lmpool.embedded`), starts the workers, and restarts child
processes that terminate. When a worker crashes, the supervisor requeues its jobs at once, so clients do not wait for
its lease to expire. All children end with the supervisor, even if the supervisor is killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from typing import Annotated, Any, cast

import typer
from redis.asyncio import Redis
from redis.exceptions import RedisError

from lmpool.broker import scripts
from lmpool.broker.server import Server
from lmpool.cli import INTERRUPTED, LAUNCH, READY_VARIABLE, report_ready, say
from lmpool.embedded import LOGS, EmbeddedServer, StateFile, User, ending, explained, runtime_dir, secure
from lmpool.errors import LMPoolError, ServerError, SettingsError
from lmpool.protocol.keys import GROUP, Keys, ModelKeys
from lmpool.protocol.model_info import partitions_in
from lmpool.settings import count_cores, count_threads, shown
from lmpool.workers.settings import WorkerSettings

_log = logging.getLogger("lmpool.up")  # This logger does not suppress repeated warnings.

# Environment variable with the path of the log of `lmpool up --detach`, for the process in the background.
LOG_VARIABLE = "LMPOOL_DETACHED_LOG"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_NVIDIA_SMI_TIMEOUT_S = 10.0  # Max seconds that nvidia-smi may run; it takes a second if it must load the driver.
_POLL_S = 0.05  # Seconds between two checks of child processes and signals.
_MIN_LIFE_S = 60.0  # Seconds; a process that ended sooner after its start would probably end soon again.
_MAX_QUICK_CRASHES = 5  # Number of crashes in a row, each within `_MIN_LIFE_S`, after which a worker is given up.
_REFUSED = 2  # Exit code of a worker after an error: if no worker has served, its options are probably wrong.
_GAVE_UP = 1  # Exit code of the supervisor when the server or a worker was given up.
_SECOND_SIGNAL_S = 0.25  # Seconds between the two SIGTERM of `lmpool down --now`: the kernel would merge two at once.
_KILL_S = 5.0  # Seconds after which `lmpool down --now` sends SIGKILL.
_MAX_LOGS = 10  # Max log files that are kept of `lmpool up --detach` processes that have ended.
_MAX_SWEPT = 200  # Max ended workers that one call of the server removes, as in `heartbeat.py`.
_MEMBERS_TTL_MS = 2 * 3_600_000  # Lifetime in ms of the set of workers, longer than any lease, as in `heartbeat.py`.


def plan_workers(wanted: str, backend: str, device: str | None, ranks: int = 1) -> list[dict[str, str]]:
    """Environment variables for each worker: its devices, or its share of the threads.

    `wanted` is the number of workers, or "all": as many workers as the GPUs suffice for, or one worker on a machine
    without a GPU. `ranks` is the number of processes of one worker, each of which takes a GPU.
    """
    if wanted != "all" and not (wanted.isdecimal() and int(wanted)):
        raise SettingsError(f"workers: {shown(wanted)} is neither a number of at least 1 nor `all`")
    gpus = _visible_gpus() if backend != "synthetic" and device != "cpu" else []
    # Cores do not limit a single worker: processes can share cores, but not GPUs.
    has, unit, limit = len(gpus), "GPUs", len(gpus) // ranks
    if not gpus:
        has, unit, limit = count_cores(), "cores", max(1, count_cores() // ranks)
    count = (max(1, limit) if gpus else 1) if wanted == "all" else int(wanted)
    if count > limit:
        advice = (
            f"at most {limit}, or `all`" if limit else "take smaller parallel sizes, or a worker on several machines"
        )
        raise SettingsError(f"workers: {count} would take {count * ranks} {unit}, and this machine has {has}: {advice}")
    if wanted == "all" and gpus and (idle := has % ranks):
        advice = f"start --workers {limit} if they may be idle, or take other parallel sizes"
        waste = f"all, with {ranks} GPUs each, would leave {idle} of {has} GPUs without work"
        raise SettingsError(f"workers: {waste}: {advice}")
    if not gpus:
        threads = {"OMP_NUM_THREADS": str(max(1, count_threads() // (count * ranks)))}
        return [threads if count * ranks > 1 else {}] * count
    if count == 1:
        return [{}]
    if device not in (None, "auto"):
        raise SettingsError(f"device: {device!r} is one device, and each of {count} workers has its own")
    return [{_VISIBLE: ",".join(gpus[at * ranks : (at + 1) * ranks])} for at in range(count)]


def _visible_gpus() -> list[str]:
    """A value of CUDA_VISIBLE_DEVICES for each GPU that this process may use."""
    if (named := named_gpus()) is None:
        return [index for (index,) in query_gpus("index") if index.isdecimal()]
    return named


def named_gpus() -> list[str] | None:
    """The GPUs in CUDA_VISIBLE_DEVICES: their numbers, UUIDs or MIG instances; None if the variable is not set."""
    if (visible := os.environ.get(_VISIBLE)) is None:
        return None
    # CUDA ignores the names after an invalid name.
    return list(takewhile(lambda gpu: gpu not in ("", "-1"), map(str.strip, visible.split(","))))


def query_gpus(*fields: str) -> list[list[str]]:
    """Fields of each GPU of this machine, from nvidia-smi; [] if nvidia-smi does not run."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.rsplit(",", len(fields) - 1) for line in listed.stdout.splitlines() if line.strip()]
    return [[value.strip() for value in row] for row in rows]


def as_arguments(options: Mapping[str, Any]) -> list[str]:
    """Options as the words of a command line."""
    arguments: list[str] = []
    for name, value in options.items():
        option, values = f"--{name.replace('_', '-')}", value if isinstance(value, list) else [value]
        arguments += [option if one is True else f"{option}={one}" for one in values]
    return arguments


def _spawn(words: list[str], environment: Mapping[str, str], **options: Any) -> tuple[subprocess.Popen[bytes], int]:
    """Start Python with these arguments; returns the process, and a pipe in which it reports that it serves."""
    reader, ready = os.pipe()
    command, variables = [sys.executable, "-P", *words], {**os.environ, **environment, READY_VARIABLE: str(ready)}
    # Start a new session: Ctrl-C in the terminal then reaches only the supervisor, which signals its children.
    try:
        process = subprocess.Popen(command, env=variables, pass_fds=(ready,), start_new_session=True, **options)
    except OSError:
        os.close(reader)
        raise
    finally:
        os.close(ready)
    return process, reader


@dataclass(slots=True)
class SupervisedWorker:
    """A worker of `lmpool up`, which runs as one process at a time. Times are monotonic, in seconds."""

    number: int  # Number of the worker, counted from 0.
    arguments: list[str]  # Arguments of the command `lmpool`.
    environment: dict[str, str]  # Variables in addition to the supervisor's environment.
    process: subprocess.Popen[bytes] | None = None  # None before the first start and between two processes.
    worker_id: str = ""  # The worker's name in Redis; "" until it serves.
    start_at: float = 0.0  # Time when the worker's process was started, or when the next one will be.
    is_gone: bool = False  # Whether no more processes are started for this worker.
    has_served: bool = False  # Whether a process of this worker has served.
    serves_since: float = 0.0  # Time when the worker's present process began to serve; 0 before.
    quick_crashes: int = 0  # Number of crashes in a row, each before or soon after the process served.
    ready: int = -1  # Descriptor of the pipe in which the process reports that it serves.

    def start(self) -> None:
        """Start a process."""
        self.worker_id, self.start_at = "", time.monotonic()
        # Give the worker a pipe as standard input: the pipe closes when the supervisor ends, and then the worker ends.
        self.process, self.ready = _spawn(["-c", LAUNCH, *self.arguments], self.environment, stdin=subprocess.PIPE)
        os.set_blocking(self.ready, False)

    def start_later(self, why: str) -> None:
        """Start the next process after 1, 2, 4 or 8 s, doubled by each crash in a row. Log the reason `why`."""
        pause = 2 ** max(0, self.quick_crashes - 1)
        _log.warning("%s: starting it again in %d s", why, pause)
        self.start_at = time.monotonic() + pause

    def on_end(self) -> None:
        """Count a crash, and close the pipes of the process that has ended."""
        is_quick = not self.serves_since or time.monotonic() - self.serves_since < _MIN_LIFE_S
        self.quick_crashes = self.quick_crashes + 1 if is_quick else 0
        os.close(self.ready)
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
        self.process, self.serves_since = None, 0.0

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; SIGKILL also to the processes that the worker has started."""
        if self.process is not None and self.process.poll() is None:
            send = os.killpg if number == signal.SIGKILL else os.kill
            send(self.process.pid, number)


@dataclass(slots=True)
class Supervisor:
    """Runs workers and their server until a signal arrives, or until no worker is left."""

    server: EmbeddedServer
    user: User  # The record of this process in the server's state file.
    workers: list[SupervisedWorker]
    max_deliveries: int  # Deliveries after which workers give up a job.
    is_stopping: bool = False
    code: int = 0
    has_server: bool = True  # False once the server was given up.
    server_started_at: float = -_MIN_LIFE_S  # Monotonic time of the server's last restart.

    def run(self) -> int:
        """Run the workers; returns the exit code.

        The exit code is 0 after a drain, 1 if the server or a worker was given up, 2 if the options of a worker are
        wrong, and 130 after a second signal.
        """
        signals: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: signals.append(number))
        while not all(worker.is_gone for worker in self.workers):
            while signals:
                received = signals.pop(0)
                if not self.is_stopping:
                    _log.info("stopping: workers finish the prompts that they hold; a second signal ends them at once")
                    self._stop(0)
                elif received != signal.SIGHUP:  # A closed terminal can cause two SIGHUP.
                    _log.info("stopped at once")
                    self._stop(INTERRUPTED, signal.SIGKILL)
            if self.has_server and not self.server.running:
                self._restart_server()
            for worker in self.workers:
                self._check(worker)
            time.sleep(_POLL_S)
        return self.code

    def _stop(self, code: int, number: signal.Signals = signal.SIGTERM) -> None:
        self.is_stopping, self.code = True, code
        for worker in self.workers:
            worker.signal(number)

    def _restart_server(self) -> None:
        """Restart the server; if it cannot start, or ended soon after its last restart, stop all workers at once."""
        reason = " | ".join(f"your server {self.server.why_ended}".splitlines())
        try:
            if time.monotonic() - self.server_started_at < _MIN_LIFE_S:
                raise ServerError(f"{reason}; it was started less than {_MIN_LIFE_S:g} s ago: giving up")
            _log.warning("%s; starting it again: cached rows are lost", reason)
            self.server.join(self.user)
        except LMPoolError as error:
            _log.critical("%s", error)
            self.has_server = False
            self._stop(_GAVE_UP, signal.SIGKILL)
        else:
            self.server_started_at = time.monotonic()
            _log.info("your server runs again at %s", self.server.url)

    def _check(self, worker: SupervisedWorker) -> None:
        """Start a worker's process, record that the worker serves, or handle the end of the process."""
        if worker.process is None:
            if self.is_stopping:
                worker.is_gone = True
            elif not worker.is_gone and time.monotonic() >= worker.start_at:
                try:
                    worker.start()
                except OSError as error:  # For example, this machine has no free memory or no free process id.
                    worker.start_later(f"worker {worker.number} cannot be started: {error}")
            return
        code = worker.process.poll()
        with suppress(BlockingIOError):
            worker.worker_id = worker.worker_id or os.read(worker.ready, 1024).decode()
        if worker.worker_id and not worker.serves_since:
            worker.serves_since, worker.has_served = time.monotonic(), True
            if code is None:
                self._report_if_ready()
        if code is None:
            return
        if worker.worker_id and code != 0 and not self.is_stopping:
            asyncio.run(self._requeue(worker, f"it {ending(code)}"))
        worker.on_end()
        how = f"worker {worker.number} {ending(code)} after {time.monotonic() - worker.start_at:.0f} s"
        others = sum(not other.is_gone for other in self.workers) - 1
        if self.is_stopping:
            worker.is_gone = True
            return
        if code == _REFUSED and not any(other.has_served for other in self.workers):
            if len(self.workers) > 1:  # A single worker itself logs the reason.
                _log.critical("%s, before any worker served: stopping all workers", how)
            self._stop(_REFUSED)
        elif code == 0:
            _log.warning("%s: it is not started again; %d workers go on", how, others)
        elif (crashes := worker.quick_crashes) >= _MAX_QUICK_CRASHES:
            _log.critical("%s, the %d. time in a row: it is given up; %d workers go on", how, crashes, others)
            self.code = _GAVE_UP
        else:
            worker.start_later(how)
            return
        worker.is_gone = True
        self._report_if_ready()

    def _report_if_ready(self) -> None:
        """Report that the workers serve, once every worker that was not given up has served."""
        left = [worker for worker in self.workers if not worker.is_gone]
        if left and not self.is_stopping and all(worker.has_served for worker in left):
            if (count := len(self.workers)) > 1:
                _log.info("%s %d workers serve", "all" if len(left) == count else f"{len(left)} of", count)
            report_ready()

    async def _requeue_in(self, redis: Redis, keys: ModelKeys, worker_id: str, reason: str) -> int:
        """Requeue the jobs of a crashed worker in one partition of the model's queue; return the number of jobs."""
        # The worker may hold jobs of its lane (stream), of the shared stream, and claimed jobs of other lanes.
        lanes = [worker_id.encode(), *cast(list[bytes], await redis.zrange(keys.lanes, 0, -1))]
        count = await scripts.release_jobs(redis, keys, worker_id, lanes, self.max_deliveries, reason)
        swept, moved = [keys.jobs, keys.workers, keys.capacity, keys.virtual_time], 1
        while moved:
            args = [GROUP, _MAX_SWEPT, _MEMBERS_TTL_MS, 0, worker_id]
            _, _, moved = await scripts.REMOVE_GONE(redis, swept, args)
        return count

    async def _requeue(self, worker: SupervisedWorker, reason: str) -> None:
        """Requeue the jobs of a worker that has crashed, and deregister the worker.

        The jobs keep their delivery counts, so a prompt that kills workers is still given up.
        """
        everything = Keys(self.user.prefix)
        model, worker_id, count = self.user.model, worker.worker_id, 0
        try:
            async with Server(self.server.url).client() as redis:
                heartbeat = everything.worker(worker_id)
                # The worker may have served a version of the model's weights, which has a name of its own.
                model = (await scripts.read_texts(redis, heartbeat, ["model"])).get("model", model)
                seen = (await scripts.read_infos(redis, everything, model)).get(model.encode(), b"")
                await redis.delete(heartbeat)
                for number in partitions_in(seen):
                    count += await self._requeue_in(redis, everything.model(model, number), worker_id, reason)
        except (RedisError, OSError, LMPoolError) as error:
            _log.warning("cannot requeue the prompts of worker %d, they wait for its lease: %s", worker.number, error)
            return
        if count:
            _log.info("requeued %d prompts of worker %d", count, worker.number)
        for other in self.workers:
            if other.worker_id:
                other.signal(signal.SIGUSR1)  # The other worker claims the jobs now, not a third of a lease later.


def supervise(
    arguments: list[str], plan: list[dict[str, str]], settings: WorkerSettings, model: str, memory_mb: int | None
) -> int:
    """Run `lmpool up`; returns the exit code.

    Each worker gets the arguments of `lmpool`, the server's URL and a metrics port. `plan` has the environment of each
    worker (`plan_workers`), and `model` is the name under which the workers serve.
    """
    from lmpool.workers.cli import serve  # Import here, because other commands do not need the worker's code.

    serve.start_log(settings.log_format, model)
    server = EmbeddedServer(None if memory_mb is None else memory_mb * 2**20)
    user = User(os.getpid(), model, settings.prefix, os.environ.pop(LOG_VARIABLE, ""))
    is_started = server.join(user)
    code = None
    try:
        if settings.log_format == "text":  # JSON logs must have only JSON lines.
            say(f"your server runs {'' if is_started else 'already '}at {server.url}", err=True)
            if memory_mb is not None and not is_started:
                say("--memory-mb has no effect on a server that runs already", err=True)
        workers = []
        for number, environment in enumerate(plan):
            port = {"metrics_port": settings.metrics_port + number} if settings.metrics_port else {}
            words = [*arguments, *as_arguments({"redis": server.url, **port})]
            label = {serve.LABEL_VARIABLE: f"[{number}] "} if len(plan) > 1 else {}
            workers.append(SupervisedWorker(number, words, environment | label))
        code = Supervisor(server, user, workers, settings.max_deliveries).run()
    finally:
        if server.stop() and code == 0:
            _log.info("your server goes on for the other `lmpool up` that use it")
    return code


def start_detached(arguments: list[str], model: str) -> None:
    """Start `lmpool up` with these arguments in the background, print its log, and return when it serves the model.

    Raises:
        Exit: `lmpool up` ended before it served; the exception has its exit code.
    """
    folder = runtime_dir()
    with explained(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        secure(folder)
        (folder / LOGS).mkdir(mode=0o700, exist_ok=True)
        state = StateFile(folder)
        with state.mutex():
            used = {user.log for user in state.users()}
        os.close(state.file)
        logs = [log for log in (folder / LOGS).glob("*.log") if str(log) not in used]
        for log in sorted(logs, key=lambda log: log.stat().st_mtime)[:-_MAX_LOGS]:
            log.unlink(missing_ok=True)
        log = folder / LOGS / f"{secrets.token_hex(4)}.log"
        output = log.open("xb")
    with output:
        files = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        process, reader = _spawn(["-m", "lmpool", *arguments], {LOG_VARIABLE: str(log)}, **files)
    with log.open(encoding="utf-8", errors="replace") as printed, os.fdopen(reader, "rb") as is_ready:

        def print_more() -> None:
            for line in printed:
                say(line.rstrip("\n"), err=True)

        try:
            while not select.select([is_ready], [], [], _POLL_S)[0]:
                print_more()
            code = None if is_ready.read(1) else process.wait()  # The end of the process closes this pipe.
        except KeyboardInterrupt:
            say("stopping it; a second Ctrl-C kills it", err=True)
            try:
                process.terminate()
                process.wait()
            except KeyboardInterrupt:
                process.kill()  # The workers and the server end with this process.
            raise
        finally:
            print_more()
    if code is not None:
        say(f"lmpool: it {ending(code)} before it served; its log: {log}", err=True)
        raise typer.Exit(code if 0 < code < 256 else 1)
    say(f"{model} is served by process {process.pid}; its log: {log}", err=True)
    say("stop it with: lmpool down", err=True)


def down(
    model: Annotated[str | None, typer.Argument(help="Name of the model to stop (default: all of them).")] = None,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for the prompts that are being computed.")] = False,
) -> None:
    """Stop each `lmpool up --detach` on this machine, after it has finished the prompts that it holds."""
    folder = runtime_dir()
    users: list[User] = []
    if (folder / "state").exists():
        with explained(folder):
            secure(folder)
            state = StateFile(folder)
            with state.mutex():
                users = [user for user in state.users() if user.model]
                stopped = [user for user in users if user.log and model in (None, user.model)]
                for user in stopped:
                    # Without --now, signal only once: a second signal makes `lmpool up` drop its prompts.
                    if now or not user.is_stopping:
                        os.kill(user.pid, signal.SIGTERM)
                    state.write(user.number, asdict(replace(user, is_stopping=True)))
        if stopped:
            _wait_until_ended(state, stopped, now=now)
            return
    advice = "".join(
        f"; {user.model} is served by an `lmpool up` in a terminal, process {user.pid}: stop that one there, by Ctrl-C"
        for user in users
        if not user.log and model in (None, user.model)
    )
    if model is not None:
        running = ", ".join(shown(user.model) for user in users if user.log) or "none"
        raise SettingsError(f"model: no `lmpool up --detach` of yours serves {model!r}; running: {running}{advice}")
    say(f"nothing to stop: no `lmpool up --detach` of yours runs here{advice}")


def _wait_until_ended(state: StateFile, users: list[User], *, now: bool) -> None:
    for user in users:
        told = ", which `lmpool down` has signalled before" if user.is_stopping else ""
        say(f"stopping {user.model}, process {user.pid}{told}")
    began, left = time.monotonic(), users
    signals = [(_SECOND_SIGNAL_S, signal.SIGTERM), (_KILL_S, signal.SIGKILL)] if now else []
    try:
        while left := [user for user in left if state.is_held(user.number)]:
            if signals and time.monotonic() - began > signals[0][0]:
                _, number = signals.pop(0)
                for user in left:
                    with suppress(ProcessLookupError):
                        os.kill(user.pid, number)
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        for user in left:
            say(f"{user.model}, process {user.pid}, still runs: it finishes the prompts that it holds", err=True)
        say("to wait for it: lmpool down; to end it at once: lmpool down --now", err=True)
        raise
    say("stopped")
