"""`lmpool up` and `lmpool down`, with real processes and real signals."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest
import redis

from lmpool import embedded
from lmpool.embedded import EmbeddedServer, StateFile
from lmpool.errors import LMPoolError, WorkerError
from lmpool.producer import SyncProducer
from lmpool.synthetic import synthetic_row
from tests.support.pool import (
    DEADLINE_S,
    PATIENCE,
    V,
    WorkerProcess,
    is_running,
    lmpool_command,
    run_lmpool,
    server_pid,
    until,
)

Up = Callable[..., WorkerProcess]
SYNTHETIC = ("--backend", "synthetic", "--vocab-size", str(V))
POISON = 99


@pytest.fixture(autouse=True)
def folder(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder of the test, and a machine without GPUs; the fixture stops detached workers at the end."""
    folder = short_dir / "run"
    monkeypatch.setenv("LMPOOL_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    yield folder
    assert run_lmpool("down", "--now", LMPOOL_RUNTIME_DIR=str(folder)).returncode == 0


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    """Starts `lmpool up` and waits for a line of its log; ends the processes after the test."""
    started: list[WorkerProcess] = []

    def start(*options: str, model: str = "syn", says: str = "serving ") -> WorkerProcess:
        command = [*lmpool_command(), "up", model, *SYNTHETIC, *options]
        started.append(WorkerProcess(command, tmp_path / f"{len(started)}.log", installed=True))
        started[-1].until_says(says)
        return started[-1]

    yield start
    for process in started:
        process.end()


def two_workers(up: Up, *options: str) -> WorkerProcess:
    return up("--workers", "2", *options, says="all 2 workers serve")


def serving(process: WorkerProcess) -> dict[str, list[int]]:
    """Number of each worker ("" for a single worker) -> its process ids so far, as read from the log."""
    pids: dict[str, list[int]] = {}
    pattern = r"^(?:\[(\d)\] )?\d.*serving 'syn'.* as worker \S+-(\d+)-[0-9a-f]{16}$"
    for number, pid in re.findall(pattern, process.text, re.M):
        pids.setdefault(number, []).append(int(pid))
    return pids


def until_no_worker_of(process: WorkerProcess) -> None:
    pids = [pid for pids in serving(process).values() for pid in pids]
    assert pids
    until(lambda: not any(map(is_running, pids)), "no worker is left")


def holders() -> set[bytes]:
    """The workers that hold prompts."""
    names: set[bytes] = set()
    with redis.Redis.from_url(str(embedded.find()), **PATIENCE) as client:
        for stream in client.scan_iter("lmpool:{syn}:*", _type="stream"):
            with suppress(redis.ResponseError):  # The stream was removed after the listing.
                for group in client.xinfo_groups(stream):
                    consumers = client.xpending(stream, group["name"])["consumers"]
                    names |= {consumer["name"] for consumer in consumers}
    return names


def is_right(producer: SyncProducer, token: int) -> bool:
    return np.array_equal(producer.logprobs([token]), synthetic_row([token], vocab_size=V))


def is_stopped(folder: Path) -> bool:
    """Whether the server has ended, and only its state file and logs are left."""
    return {path.name for path in folder.iterdir()} <= {"state", "logs"}


# The server


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_the_server_stays_until_the_last_up_has_ended(up: Up, folder: Path, number: signal.Signals) -> None:
    first, second = up(), up(model="other")
    assert "your server runs at unix://" in first.text
    assert "your server runs already at unix://" in second.text
    pid = server_pid(folder)
    first.signal(number)
    assert first.wait() == (0 if number == signal.SIGINT else -number)
    assert ("your server goes on for the other `lmpool up`" in first.text) == (number == signal.SIGINT)
    with SyncProducer("other", timeout=60) as producer:
        assert is_right(producer, 1)
    assert server_pid(folder) == pid
    second.signal(number)
    second.wait()
    assert "goes on" not in second.text
    until(lambda: not is_running(pid), "the server ends with the last")
    until(lambda: is_stopped(folder), "its files were removed")


def test_a_second_up_of_the_same_name_is_refused(up: Up) -> None:
    process = up()
    for options in ((), ("--workers", "2"), ("--detach",)):
        refused = run_lmpool("up", "syn", *SYNTHETIC, *options)
        assert refused.returncode == 2
        assert f"`lmpool up` already serves 'syn', as process {process.process.pid}" in refused.stderr
        assert "with --workers N" in refused.stderr
        assert "give another --name" in refused.stderr
    assert process.is_running
    # A second `lmpool up` with another prefix serves a separate pool on the same server.
    other = up("--prefix", "other")
    other.signal(signal.SIGINT)
    assert other.wait() == 0


def test_a_killed_server_is_started_again_for_all_that_use_it(up: Up, folder: Path) -> None:
    both = [up("--memory-mb", "64"), up("--memory-mb", "32", model="other")]
    assert "--memory-mb has no effect" in both[1].text
    pid = server_pid(folder)
    with SyncProducer("syn", timeout=60) as syn, SyncProducer("other", timeout=60) as other:
        assert all(is_right(producer, 1) for producer in (syn, other))
        os.kill(pid, signal.SIGKILL)
        until(lambda: server_pid(folder) not in (0, pid), "the server runs again")
        assert all(is_right(producer, 2) for producer in (syn, other))
        with redis.Redis(unix_socket_path=str(folder / "redis.sock"), **PATIENCE) as client:
            assert client.config_get("maxmemory") == {"maxmemory": str(64 * 2**20)}

    def texts() -> str:
        return "".join(process.text for process in both)

    assert "your server was ended by signal 9 (SIGKILL); the end of" in texts()
    # The server runs before `lmpool up` says so.
    until(lambda: "your server runs again at unix://" in texts(), "one of them says that the server runs again")


def test_a_server_that_ends_twice_within_a_minute_is_given_up(up: Up, folder: Path) -> None:
    process = up()
    os.kill(server_pid(folder), signal.SIGKILL)
    process.until_says("your server runs again")
    os.kill(server_pid(folder), signal.SIGKILL)
    assert process.wait(60) == 1
    line = process.text.splitlines()[-1]
    assert "your server was ended by signal 9 (SIGKILL); the end of" in line
    assert "it was started less than 60 s ago: giving up" in line
    until_no_worker_of(process)


def test_a_killed_keeper_is_replaced(up: Up, folder: Path) -> None:
    process = up()
    keeper = int(re.search(r"PPid:\t(\d+)", Path(f"/proc/{server_pid(folder)}/status").read_text())[1])  # type: ignore[index]
    with SyncProducer("syn", timeout=60) as producer:
        assert is_right(producer, 1)
        os.kill(keeper, signal.SIGKILL)
        process.until_says("your server was ended together with its keeper process; starting it again")
        process.until_says("your server runs again")
        assert is_right(producer, 2)
    process.signal(signal.SIGINT)
    assert process.wait() == 0
    until(lambda: is_stopped(folder), "the server has ended")


JOINS_AND_STOPS = """
import os
from lmpool.embedded import EmbeddedServer, User, ping
for _ in range(5):
    server = EmbeddedServer(2**24)
    server.join(User(os.getpid()))
    assert ping(server._socket) == b"+PONG\\r\\n"
    server.stop()
"""


def test_many_short_processes_always_have_a_server_and_leave_none(folder: Path) -> None:
    command = [sys.executable, "-c", JOINS_AND_STOPS]
    crowd = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for _ in range(3)]
    assert [process.communicate()[1] for process in crowd] == [b""] * 3
    until(lambda: is_stopped(folder), "nothing is left")


FORKS = """
import os, sys
from lmpool.embedded import EmbeddedServer, User
EmbeddedServer(2**24).join(User(os.getpid()))
print("joined", flush=True)
os.fork()
sys.stdin.read()
"""


def test_the_fork_of_a_killed_process_does_not_keep_the_server(folder: Path) -> None:
    command = [sys.executable, "-c", FORKS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "joined\n"
        assert embedded.find() is not None
        process.kill()
        # Of `lmpool up`, only the forked process is left, which lives until its standard input is closed.
        until(lambda: is_stopped(folder), "the server ends with the program")


def test_the_reason_of_a_failed_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMPOOL_SERVER_BINARY", "/bin/false")
    ended = run_lmpool("up", "syn", "--backend", "synthetic")
    assert ended.returncode == 2
    assert ended.stderr.startswith("lmpool: the embedded server ended at its start: ")


def test_the_reason_of_a_refusal_is_the_last_line_while_the_server_stays(up: Up, tmp_path: Path) -> None:
    up(model="other")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = [*lmpool_command(), "up", "syn", *SYNTHETIC, "--metrics-port", str(taken.getsockname()[1])]
        refused = WorkerProcess(command, tmp_path / "wrong.log")
        assert refused.wait() == 2
    assert refused.text.splitlines()[-1].startswith("lmpool: ")
    assert "goes on" not in refused.text


# Workers


@pytest.mark.parametrize("count", [1, 2])
def test_jobs_of_a_killed_worker_are_taken_up_at_once(up: Up, count: int) -> None:
    """The lease is ten minutes: if the killed worker's jobs waited for its end, their requests would time out."""
    # The workers need seconds for all prompts: a busy machine may pause the test before it kills a worker.
    options = ("--lease-s", "600", "--step-ms", "1000", "--max-batch", "4")
    process = up(*options) if count == 1 else two_workers(up, *options)
    (killed, *_), *_ = serving(process).values()
    with SyncProducer("syn", timeout=DEADLINE_S) as producer:
        prompts = [[token] for token in range(24)]
        rows: list[np.ndarray] = []
        requests = threading.Thread(target=lambda: rows.extend(producer.batch_logprobs(prompts)))
        requests.start()
        until(lambda: len(holders()) == count, "each worker holds prompts")
        os.kill(killed, signal.SIGKILL)
        process.until_says("requeued ")
        if count == 2:
            process.until_says("claimed ")
        requests.join()
    expected = [synthetic_row(prompt, vocab_size=V) for prompt in prompts]
    assert np.array_equal(rows, expected)


@pytest.mark.parametrize("count", ["1", "2"])
def test_a_prompt_that_kills_workers_is_given_up_after_its_deliveries(up: Up, count: str) -> None:
    says = "serving " if count == "1" else "all 2 workers serve"
    process = up("--workers", count, "--crash-token", str(POISON), "--lease-s", "600", says=says)
    with SyncProducer("syn", timeout=DEADLINE_S, when_absent="wait") as producer:
        with pytest.raises(WorkerError, match="given up after 3 deliveries: the last worker that held it ended: it "):
            producer.logprobs([POISON])

        def restarts() -> int:
            return len(re.findall(r"starting it again in", process.text))

        # `lmpool up` requeues the jobs of a worker, and the client gets its error, before `lmpool up` logs the restart.
        until(lambda: restarts() >= 3, "the third restart is logged")
        assert is_right(producer, 1)
        assert restarts() == 3


def test_workers_share_a_log_dead_ones_are_replaced_and_one_signal_drains_all(up: Up, folder: Path) -> None:
    process = two_workers(up)
    first = serving(process)
    assert sorted(first) == ["0", "1"]
    os.kill(first["1"][0], signal.SIGKILL)
    process.until_says("worker 1 was ended by signal 9 (SIGKILL)")
    until(lambda: len(serving(process)["1"]) == 2, "worker 1 serves again")
    with SyncProducer("syn", timeout=DEADLINE_S) as producer:
        assert is_right(producer, 1)
    process.signal(signal.SIGINT)
    assert process.wait() == 0
    for number in "01":
        assert re.search(rf"^\[{number}\] .*stopped; nothing was left unfinished$", process.text, re.M)
    until_no_worker_of(process)
    until(lambda: is_stopped(folder), "the server has ended too")


@pytest.mark.parametrize("count", [1, 2])
def test_a_second_signal_ends_all_at_once(up: Up, count: int) -> None:
    # Let a step take ten minutes: a worker that drains would wait for the end of this step.
    options = ("--step-ms", "600000", "--step-timeout-s", "3600")
    process = up(*options) if count == 1 else two_workers(up, *options)
    with SyncProducer("syn", timeout=DEADLINE_S) as producer:
        request = threading.Thread(target=lambda: _until_closed(producer))
        request.start()
        until(holders, "a worker holds the prompt")
        process.signal(signal.SIGTERM)
        process.until_says("a second signal ends them at once")
        process.signal(signal.SIGTERM)
        assert process.wait() == 130
        until_no_worker_of(process)
    request.join()


def _until_closed(producer: SyncProducer) -> None:
    """Request a row until the producer is closed."""
    with suppress(LMPoolError):
        producer.logprobs([1])


@pytest.mark.parametrize("count", [1, 2])
def test_workers_and_server_end_with_a_killed_supervisor(up: Up, folder: Path, count: int) -> None:
    process = up() if count == 1 else two_workers(up)
    process.signal(signal.SIGKILL)
    process.wait()
    until_no_worker_of(process)
    until(lambda: is_stopped(folder), "the server has ended too")
    assert run_lmpool("down").stdout == "nothing to stop: no `lmpool up --detach` of yours runs here\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_of_the_terminal_while_workers_start_prints_no_traceback(
    tmp_path: Path, number: signal.Signals
) -> None:
    """The terminal sends its signals to all processes of the foreground group."""
    log = tmp_path / "log"
    command = [*lmpool_command(), "up", "syn", *SYNTHETIC, "--workers", "2"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    until(lambda: "your server runs" in log.read_text(), "workers are about to start")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    until(lambda: len(children.read_text().split()) >= 3, "a keeper and two workers were started")
    os.killpg(process.pid, number)
    assert process.wait(DEADLINE_S) == 0
    assert "Traceback" not in log.read_text()


# In the background


def start_detached(*options: str) -> tuple[int, Path, list[int]]:
    """Run `lmpool up --detach`; returns its process id, its log, and the process ids of its workers."""
    started = run_lmpool("up", "syn", *SYNTHETIC, "--detach", *options)
    assert started.returncode == 0, started.stderr
    pid, log = re.search(r"served by process (\d+); its log: (\S+)", started.stderr).groups()  # type: ignore[union-attr]
    assert "stop it with: lmpool down" in started.stderr
    workers = re.findall(r"serving 'syn'.* as worker \S+-(\d+)-[0-9a-f]{16}$", started.stderr, re.M)
    return int(pid), Path(log), [int(worker) for worker in workers]


def test_detached_workers_serve_until_down(folder: Path) -> None:
    pid, log, (worker,) = start_detached()
    assert log.parent == folder / "logs"
    assert stat.S_IMODE((folder / "logs").stat().st_mode) == 0o700
    os.kill(worker, signal.SIGKILL)
    until(lambda: log.read_text().count("serving 'syn'") == 2, "a worker serves in place of the killed one")
    with SyncProducer("syn", timeout=DEADLINE_S) as producer:
        assert is_right(producer, 1)
    refused = run_lmpool("down", "other")
    assert refused.returncode == 2
    assert "model: no `lmpool up --detach` of yours serves 'other'; running: 'syn'" in refused.stderr
    ended = run_lmpool("down", "syn")
    assert (ended.returncode, ended.stdout) == (0, f"stopping syn, process {pid}\nstopped\n")
    until(lambda: not is_running(pid), "the process has ended")
    assert "stopped; nothing was left unfinished" in log.read_text()
    assert run_lmpool("down").stdout == "nothing to stop: no `lmpool up --detach` of yours runs here\n"


def test_down_stops_one_model_by_its_name(folder: Path) -> None:
    first, _, _ = start_detached()
    assert run_lmpool("up", "other", *SYNTHETIC, "--detach").returncode == 0
    assert run_lmpool("down", "other").returncode == 0
    assert is_running(first)
    with SyncProducer("syn", timeout=DEADLINE_S) as producer:
        assert is_right(producer, 1)
    assert run_lmpool("down").stdout == f"stopping syn, process {first}\nstopped\n"


@pytest.mark.parametrize("frozen", ["", "worker", "supervisor"])
def test_now_ends_all_processes_even_frozen_ones(frozen: str) -> None:
    pid, _, workers = start_detached("--workers=2")
    if frozen:
        os.kill(pid if frozen == "supervisor" else workers[0], signal.SIGSTOP)
    ended = run_lmpool("down", "--now")
    assert (ended.returncode, ended.stdout.splitlines()[0]) == (0, f"stopping syn, process {pid}")
    until(lambda: not any(map(is_running, [pid, *workers])), "no process is left")
    assert run_lmpool("down").stdout.startswith("nothing to stop")


def test_an_interrupted_down_reports_what_still_runs_and_the_next_one_waits_for_it(tmp_path: Path) -> None:
    """The next `lmpool down` must not send a second signal: the worker would drop the prompts that it holds."""
    pid, log, (worker,) = start_detached()
    os.kill(worker, signal.SIGSTOP)
    first = WorkerProcess([*lmpool_command(), "down"], tmp_path / "first.log", installed=True)
    first.until_says(f"stopping syn, process {pid}")
    second = WorkerProcess([*lmpool_command(), "down"], tmp_path / "second.log", installed=True)
    second.until_says(f"stopping syn, process {pid}, which `lmpool down` has signalled before")
    first.signal(signal.SIGINT)
    assert first.wait() == 130
    assert f"syn, process {pid}, still runs" in first.text
    assert "lmpool down --now" in first.text
    os.kill(worker, signal.SIGCONT)
    assert second.wait() == 0
    assert "stopped; nothing was left unfinished" in log.read_text()
    assert "stopped at once" not in log.read_text()


def test_the_reason_of_a_failed_detached_start_is_reported(folder: Path) -> None:
    with ExitStack() as taken:
        port = taken.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        with suppress(OSError):  # Another process may have the second worker's port.
            taken.enter_context(socket.create_server(("127.0.0.1", port + 1)))
        failed = run_lmpool("up", "syn", *SYNTHETIC, "--workers", "2", "--metrics-port", str(port), "--detach")
    assert failed.returncode == 2
    assert f"port {port}" in failed.stderr
    assert "it ended with code 2 before it served" in failed.stderr
    assert run_lmpool("down").stdout.startswith("nothing to stop")


@pytest.mark.parametrize("text", ['{"pid": %d, "model": "syn", "log": "x"}', "", "[]", "{", "\0\1"])
def test_a_stale_state_file_ends_no_process(folder: Path, text: str) -> None:
    """The process id in an old state file may belong to another process by now."""
    folder.mkdir(mode=0o700)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as another:
        record = text.replace("%d", str(another.pid)).ljust(4095) + "\n"
        (folder / "state").write_text(record * 3)
        ended = run_lmpool("down")
        another.communicate(b"\n")
    assert another.returncode == 0
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "nothing to stop: no `lmpool up --detach` of yours runs here\n"


def test_down_names_an_up_in_a_terminal(up: Up) -> None:
    process = up()
    advice = f"; syn is served by an `lmpool up` in a terminal, process {process.process.pid}: stop that one there"
    assert run_lmpool("down").stdout.startswith(f"nothing to stop: no `lmpool up --detach` of yours runs here{advice}")
    refused = run_lmpool("down", "syn")
    assert refused.returncode == 2
    assert advice in refused.stderr
    assert process.is_running


def test_ten_logs_of_ended_workers_are_kept(folder: Path) -> None:
    (folder / "logs").mkdir(mode=0o700, parents=True)
    folder.chmod(0o700)
    for number in range(12):
        (folder / "logs" / f"{number:02}.log").write_text("")
        os.utime(folder / "logs" / f"{number:02}.log", (number, number))
    _, log, _ = start_detached()
    assert sorted(path.name for path in log.parent.iterdir() if path != log) == [f"{n:02}.log" for n in range(2, 12)]


def test_a_server_of_another_program_is_not_shown_as_lmpool_up(folder: Path) -> None:
    with EmbeddedServer(2**24, folder):
        assert run_lmpool("down").stdout == "nothing to stop: no `lmpool up --detach` of yours runs here\n"
        state = StateFile(folder)
        assert state.read(0)["memory_bytes"] == 2**24
