"""`lmpool up` and `lmpool down`: one process that runs a server and workers as child processes.

The supervisor starts or joins the server of its user (`lmpool.embedded`), starts the workers, and starts again what
terminates. When a worker crashes, the supervisor requeues its jobs at once, so clients do not wait for its lease to
expire. All children end with the supervisor, even if it is killed.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import IO, Annotated, Any, cast

import typer
from redis.exceptions import RedisError

from lmpool.broker import scripts
from lmpool.broker.server import Server
from lmpool.cli import INTERRUPTED, LAUNCH, READY_VARIABLE, report_ready, say
from lmpool.embedded import LOGS, EmbeddedServer, StateFile, User, ending, explained, runtime_dir, secure
from lmpool.errors import LMPoolError, ServerError, SettingsError, printable
from lmpool.protocol.keys import GROUP, Keys
from lmpool.protocol.model_info import LIMITS
from lmpool.settings import count_cores, count_threads, shown
from lmpool.workers.settings import WorkerSettings

_log = logging.getLogger("lmpool.up")  # Without the filter of repeated warnings.

LOG_VARIABLE = "LMPOOL_DETACHED_LOG"
"""Names the log of an `lmpool up --detach`, for the process in the background."""

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_NVIDIA_SMI_TIMEOUT_S = 10.0  # It takes a second where the driver must be loaded first.
_POLL_S = 0.05  # Interval of the checks of children and signals.
_LONG_LIFE_S = 60.0  # A worker that served for so long is started again after the shortest pause.
_MAX_QUICK_CRASHES = 5  # A worker that crashes so often in a row, each time within `_LONG_LIFE_S`, is given up.
_MIN_SERVER_LIFE_S = 60.0  # A server that ends sooner after a restart would end again and again.
_REFUSED = 2  # Exit code of a worker whose options are wrong.
_GAVE_UP = 1  # Exit code of the supervisor when the server or a worker was given up.
_MAX_LINE = 1 << 16  # Characters; a longer line of a worker's log is printed as several.
_REST_S = 1.0  # How long to wait for the last lines of a worker; a process that it started may keep the pipe open.
_SECOND_SIGNAL_S = 0.25  # Between the two SIGTERM of `lmpool down --now`; the kernel merges signals that are pending.
_KILL_S = 5.0  # After which `lmpool down --now` sends SIGKILL.
_MAX_LOGS = 10  # Logs kept of ended `lmpool up --detach`.
_IDLE_MS = int(
    LIMITS["lease_s"][1] * 1000
)  # The longest lease: every worker may claim a job that was idle for so long.
_REASONS_TTL_MS = 3_600_000  # An hour, as for the reasons that workers write.
_MAX_REASONS = 1000  # As for the reasons that workers write.
_MAX_SWEPT = 200  # Workers that one call removes, as in a worker.
_MEMBERS_TTL_MS = 2 * 3_600_000  # Lifetime of the set of workers: longer than any lease, as in a worker.


def plan_workers(wanted: str, backend: str, device: str | None) -> list[dict[str, str]]:
    """Environment variables for each worker: its device, or its share of the threads.

    Args:
        wanted: a number, or "all": one worker per GPU, or one on a machine without a GPU.
        backend: the name of the backend.
        device: the value of `--device`.

    Raises:
        SettingsError: this machine cannot run the number of workers.
    """
    gpus = [] if backend == "synthetic" or device == "cpu" else visible_gpus()
    if wanted == "all":
        count = max(1, len(gpus))
    else:
        if not wanted.isdecimal() or not (count := int(wanted)) >= 1:
            raise SettingsError(f"workers: {shown(wanted)} is neither a number of at least 1 nor `all`")
        limit, unit = (len(gpus), "GPUs, each of which takes one worker") if gpus else (count_cores(), "cores")
        if count > limit:
            raise SettingsError(f"workers: {count} are more than the {limit} {unit} here: at most {limit}, or `all`")
    if count == 1:
        return [{}]
    if gpus:
        if device not in (None, "auto"):
            raise SettingsError(f"device: {device!r} is one device, and each of {count} workers has one of its own")
        return [{_VISIBLE: gpu} for gpu in gpus[:count]]
    return [{"OMP_NUM_THREADS": str(max(1, count_threads() // count))}] * count


def visible_gpus() -> list[str]:
    """The value of CUDA_VISIBLE_DEVICES for each GPU that this process may use."""
    if (visible := os.environ.get(_VISIBLE)) is not None:
        # Numbers, UUIDs of GPUs, or names of MIG instances. CUDA ignores all names behind an invalid one.
        return list(takewhile(lambda gpu: gpu not in ("", "-1"), map(str.strip, visible.split(","))))
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in listed.stdout.splitlines() if line.strip().isdecimal()]


def as_arguments(options: Mapping[str, Any]) -> list[str]:
    """Options as the words of a command line."""
    arguments: list[str] = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        values = value if isinstance(value, list) else [value]
        arguments += [option if one is True else f"{option}={one}" for one in values]
    return arguments


@dataclass(slots=True)
class SupervisedWorker:
    """One of the workers: a process at a time.

    Attributes:
        number: from 0; at the beginning of each line of its log, if there are several workers.
        arguments: of `lmpool`.
        environment: what the worker's environment has more than this process's.
        has_label: whether lines of its log begin with its number.
        process: the running process; None before the start and between two.
        worker_id: the worker's name in Redis; "" until it serves.
        start_at: monotonic time of the start of its process, or of the next one.
        is_gone: no further process is started.
    """

    number: int
    arguments: list[str]
    environment: dict[str, str]
    has_label: bool = False
    process: subprocess.Popen[bytes] | None = None
    worker_id: str = ""
    start_at: float = 0.0
    is_gone: bool = False
    has_served: bool = False
    quick_crashes: int = 0
    _serves_since: float = 0.0
    _ready: int = -1
    _relay: threading.Thread | None = None

    def start(self) -> None:
        """Start a process."""
        self._ready, ready = os.pipe()
        os.set_blocking(self._ready, False)
        self.worker_id, self.start_at = "", time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", LAUNCH, *self.arguments],
            stdin=subprocess.PIPE,  # The worker ends when this pipe is closed, however this process ends.
            stdout=subprocess.PIPE if self.has_label else None,
            stderr=subprocess.STDOUT if self.has_label else None,
            pass_fds=(ready,),
            start_new_session=True,  # A Ctrl-C in the terminal reaches this process alone, which signals the workers.
            env={**os.environ, **self.environment, READY_VARIABLE: str(ready)},
        )
        os.close(ready)
        if self.process.stdout is not None:
            arguments = (f"[{self.number}] ", self.process.stdout)
            self._relay = threading.Thread(target=_print_lines, args=arguments, daemon=True)
            self._relay.start()

    def becomes_ready(self) -> bool:
        """Whether the worker has reported since the last call that it serves."""
        with suppress(BlockingIOError):
            self.worker_id = self.worker_id or os.read(self._ready, 1024).decode()
            if self.worker_id and not self._serves_since:
                self._serves_since, self.has_served = time.monotonic(), True
                return True
        return False

    def on_end(self) -> None:
        """Count a crash, and close what belongs to the process that has ended."""
        assert self.process is not None
        assert self.process.stdin is not None
        served_s = time.monotonic() - self._serves_since if self._serves_since else 0.0
        self.quick_crashes = 0 if served_s >= _LONG_LIFE_S else self.quick_crashes + 1
        if self._relay is not None:
            self._relay.join(_REST_S)
        os.close(self._ready)
        self.process.stdin.close()
        self.process, self._serves_since = None, 0.0

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; SIGKILL also to the processes that the worker has started."""
        if self.process is not None and self.process.poll() is None:
            if number == signal.SIGKILL:
                os.killpg(self.process.pid, number)
            else:
                self.process.send_signal(number)


def _print_lines(label: str, output: IO[bytes]) -> None:
    with io.TextIOWrapper(output, "utf-8", "replace") as lines:
        while line := lines.readline(_MAX_LINE):
            with suppress(OSError):  # The terminal or the disk of the log is gone; the workers go on.
                sys.stderr.write(f"{label}{printable(line.removesuffix(chr(10)))}\n")
                sys.stderr.flush()


class Supervisor:
    """Runs workers and their server until a signal arrives, or until no worker is left.

    Args:
        server: the embedded server, which runs.
        user: the record of this process in the server's state file.
        workers: the workers.
        max_deliveries: of their settings.
    """

    def __init__(
        self, server: EmbeddedServer, user: User, workers: list[SupervisedWorker], max_deliveries: int
    ) -> None:
        self._server = server
        self._user = user
        self._workers = workers
        self._max_deliveries = max_deliveries
        self._signals: list[int] = []
        self._is_stopping = False
        self._code = 0
        self._has_server = True
        self._server_started_at = -_MIN_SERVER_LIFE_S

    def run(self) -> int:
        """Run the workers.

        Returns:
            the exit code: 0 after a drain, 1 if the server or a worker was given up, 2 if the options of a worker are
            wrong, 130 after a second signal.
        """
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: self._signals.append(number))
        while not all(worker.is_gone for worker in self._workers):
            while self._signals:
                self._on_signal(self._signals.pop(0))
            if self._has_server and not self._server.running:
                self._has_server = self._restart_server()
            for worker in self._workers:
                self._check(worker)
            time.sleep(_POLL_S)
        return self._code

    def _on_signal(self, number: int) -> None:
        if not self._is_stopping:
            _log.info("stopping: workers finish the prompts that they hold; a second signal ends them at once")
            self._stop(0)
        elif number != signal.SIGHUP:  # The shell and the kernel each send one when a terminal closes.
            _log.info("stopped at once")
            self._stop(INTERRUPTED, signal.SIGKILL)

    def _stop(self, code: int, number: signal.Signals = signal.SIGTERM) -> None:
        self._is_stopping, self._code = True, code
        for worker in self._workers:
            worker.signal(number)

    def _restart_server(self) -> bool:
        """Start the server again; stop at once and return False if that is of no use."""
        reason = " | ".join(f"your server {self._server.why_ended}".splitlines())
        try:
            if time.monotonic() - self._server_started_at < _MIN_SERVER_LIFE_S:
                raise ServerError(f"{reason}; it was started less than {_MIN_SERVER_LIFE_S:g} s ago: giving up")
            _log.warning("%s; starting it again: cached rows are lost", reason)
            self._server.join(self._user)
        except LMPoolError as error:
            _log.critical("%s", error)
            self._stop(_GAVE_UP, signal.SIGKILL)
            return False
        self._server_started_at = time.monotonic()
        _log.info("your server runs again at %s", self._server.url)
        return True

    def _check(self, worker: SupervisedWorker) -> None:
        """Start a worker, note that it serves, or handle its end."""
        if worker.process is None:
            if self._is_stopping:
                worker.is_gone = True
            elif not worker.is_gone and time.monotonic() >= worker.start_at:
                worker.start()
            return
        if worker.becomes_ready():
            self._report_if_ready()
        if (code := worker.process.poll()) is not None:
            worker.becomes_ready()
            self._on_end(worker, code)

    def _on_end(self, worker: SupervisedWorker, code: int) -> None:
        how = f"worker {worker.number} {ending(code)} after {time.monotonic() - worker.start_at:.0f} s"
        if worker.worker_id and code != 0 and not self._is_stopping:
            self._requeue(worker, f"it {ending(code)}")
        worker.on_end()
        if self._is_stopping:
            worker.is_gone = True
            return
        others = sum(not other.is_gone for other in self._workers) - 1
        if code == _REFUSED and not worker.has_served:
            if len(self._workers) > 1:  # A single worker has printed the reason in its last line.
                _log.critical("%s, before it served: stopping all workers", how)
            self._stop(_REFUSED)
        elif code == 0:
            _log.warning("%s: it is not started again; %d workers go on", how, others)
        elif worker.quick_crashes >= _MAX_QUICK_CRASHES:
            _log.critical(
                "%s, the %d. time in a row: it is given up; %d workers go on", how, worker.quick_crashes, others
            )
            self._code = _GAVE_UP
        else:
            pause = 2 ** max(0, worker.quick_crashes - 1)
            _log.warning("%s: starting it again in %d s", how, pause)
            worker.start_at = time.monotonic() + pause
            return
        worker.is_gone = True
        self._report_if_ready()

    def _report_if_ready(self) -> None:
        """Report that the workers serve, once all serve that were not given up."""
        left = [worker for worker in self._workers if not worker.is_gone]
        if left and all(worker.has_served for worker in left):
            if len(self._workers) > 1:
                of = "all" if len(left) == len(self._workers) else f"{len(left)} of"
                _log.info("%s %d workers serve", of, len(self._workers))
            report_ready()

    def _requeue(self, worker: SupervisedWorker, reason: str) -> None:
        try:
            count = asyncio.run(_requeue(self._server.url, self._user, worker.worker_id, self._max_deliveries, reason))
        except (RedisError, OSError, LMPoolError) as error:
            _log.warning("cannot requeue the prompts of worker %d, they wait for its lease: %s", worker.number, error)
            return
        if count:
            _log.info("requeued %d prompts of worker %d", count, worker.number)
        for other in self._workers:
            if other.worker_id:
                other.signal(signal.SIGUSR1)  # It claims them now instead of within a third of a lease.


async def _requeue(url: str, user: User, worker_id: str, max_deliveries: int, reason: str) -> int:
    """Requeue the jobs of a worker that has crashed, and deregister it; returns how many jobs it held.

    The jobs keep their delivery counts, so a prompt that kills workers is still given up.
    """
    everything = Keys(user.prefix)
    keys, redis, count = everything.model(user.model), Server(url).client(), 0
    try:
        # It may hold jobs of its own lane, of the shared stream, and of other lanes, from which it claimed them.
        members = cast(list[bytes], await redis.zrange(keys.lanes, 0, -1))
        for lane in {b"", worker_id.encode(), *members}:
            stream = keys.lane(lane) if lane else keys.jobs
            suffix, begin = b" " + lane if lane else b"", b"-"
            while begin:
                limits = [_IDLE_MS, scripts.MAX_AT_ONCE, begin, max_deliveries, reason, _REASONS_TTL_MS, _MAX_REASONS]
                args = [GROUP, worker_id, *limits, suffix]
                released, begin = await scripts.RELEASE(redis, [stream, keys.reasons], args)
                count += released
        await redis.delete(everything.worker(worker_id))
        moved = 1
        while moved:
            swept = [keys.jobs, keys.workers, keys.capacity, keys.virtual_time]
            _, _, moved = await scripts.REMOVE_GONE(redis, swept, [GROUP, _MAX_SWEPT, _MEMBERS_TTL_MS, 0, worker_id])
        return count
    finally:
        await redis.aclose()


def supervise(
    arguments: list[str],
    environments: list[dict[str, str]],
    settings: WorkerSettings,
    model: str,
    memory_mb: int | None,
) -> int:
    """Run `lmpool up`; returns the exit code.

    Args:
        arguments: of `lmpool`, for each worker; the server's URL and the metrics port are added.
        environments: one for each worker; see `plan_workers`.
        settings: the settings of the workers.
        model: the name under which they serve.
        memory_mb: the value of `--memory-mb`.

    Raises:
        SettingsError: another `lmpool up` serves a model of this name.
        ServerError: the server cannot be started.
    """
    from lmpool.workers.cli.serve import start_log  # Imports all of the worker: other commands need none of it.

    start_log(settings.log_format, model)
    server = EmbeddedServer(None if memory_mb is None else memory_mb * 2**20)
    user = User(os.getpid(), model, settings.prefix, os.environ.pop(LOG_VARIABLE, ""))
    is_started = server.join(user)
    code = None
    try:
        if settings.log_format == "text":  # JSON logs have the address too, and must not contain other lines.
            say(f"your server runs {'' if is_started else 'already '}at {server.url}", err=True)
            if memory_mb is not None and not is_started:
                say("--memory-mb has no effect on a server that runs already", err=True)
        workers = []
        for number, environment in enumerate(environments):
            port = {"metrics_port": settings.metrics_port + number} if settings.metrics_port else {}
            words = [*arguments, *as_arguments({"redis": server.url, **port})]
            workers.append(SupervisedWorker(number, words, environment, has_label=len(environments) > 1))
        code = Supervisor(server, user, workers, settings.max_deliveries).run()
    finally:
        if server.stop() and code == 0:
            _log.info("your server goes on for the other `lmpool up` that use it")
    return code


def start_detached(arguments: list[str], model: str) -> None:
    """Start `lmpool up` in the background, print its log, and return when it serves.

    Args:
        arguments: of `lmpool`.
        model: the name under which it serves.

    Raises:
        Exit: it ended before it served, with its exit code.
        ServerError: the runtime folder cannot be used.
    """
    folder = runtime_dir()
    with explained(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        secure(folder)
        (folder / LOGS).mkdir(mode=0o700, exist_ok=True)
        _remove_old_logs(folder)
        log = folder / LOGS / f"{secrets.token_hex(4)}.log"
        output = log.open("xb")
    reader, ready = os.pipe()
    with output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "lmpool", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(ready,),
            env={**os.environ, READY_VARIABLE: str(ready), LOG_VARIABLE: str(log)},
        )
    os.close(ready)
    with log.open(encoding="utf-8", errors="replace") as printed:
        try:
            while process.poll() is None and not select.select([reader], [], [], _POLL_S)[0]:
                _print_more(printed)
            serves = select.select([reader], [], [], 0)[0] and os.read(reader, 1)
            code = None if serves else process.wait()
        except KeyboardInterrupt:
            say("stopping it; a second Ctrl-C kills it", err=True)
            try:
                process.terminate()
                process.wait()
            except KeyboardInterrupt:
                process.kill()  # Its children end with it.
            raise
        finally:
            _print_more(printed)
            os.close(reader)
    if code is not None:
        say(f"lmpool: it {ending(code)} before it served; its log: {log}", err=True)
        raise typer.Exit(code if 0 < code < 256 else 1)
    say(f"{model} is served by process {process.pid}; its log: {log}", err=True)
    say("stop it with: lmpool down", err=True)


def _print_more(log: IO[str]) -> None:
    for line in log.readlines():
        say(line.rstrip("\n"), err=True)


def _remove_old_logs(folder: Path) -> None:
    state = StateFile(folder)
    with state.mutex():
        used = {user.log for user in state.users()}
    os.close(state.file)
    logs = [log for log in (folder / LOGS).glob("*.log") if str(log) not in used]
    for log in sorted(logs, key=lambda log: log.stat().st_mtime)[:-_MAX_LOGS]:
        log.unlink(missing_ok=True)


def down(
    model: Annotated[str | None, typer.Argument(help="Name of the model to stop (default: all of them).")] = None,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for the prompts that are being computed.")] = False,
) -> None:
    """Stop what `lmpool up --detach` has started on this machine, after it has finished the prompts that it holds."""
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
                    # A second signal would make it drop the prompts that it computes.
                    if now or not user.is_stopping:
                        os.kill(user.pid, signal.SIGTERM)
                    state.write(user.number, asdict(replace(user, is_stopping=True)))
        if stopped:
            _wait_until_ended(state, stopped, now=now)
            return
    in_terminals = [user for user in users if not user.log and model in (None, user.model)]
    advice = "".join(
        f"; {user.model} is served by an `lmpool up` in a terminal, process {user.pid}: stop that one there, by Ctrl-C"
        for user in in_terminals
    )
    if model is None:
        say(f"nothing to stop: no `lmpool up --detach` of yours runs here{advice}")
        return
    running = ", ".join(shown(user.model) for user in users if user.log) or "none"
    raise SettingsError(f"model: no `lmpool up --detach` of yours serves {shown(model)}; running: {running}{advice}")


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
