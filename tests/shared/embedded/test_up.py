"""The server that several `lmpool up` share: real processes, real signals."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from lmpool.workers.cli.shared_server import SharedServer

from lmpool import embedded
from lmpool.producer import SyncProducer
from lmpool.synthetic import synthetic_row
from tests.support.pool import V, WorkerProcess, lmpool_command, until

Up = Callable[..., WorkerProcess]

# Acts as a supervisor that ends: holds the users' lock alone, and removes the file when it is told to.
ENDING = """
import fcntl, os, sys
path = sys.argv[1]
lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
fcntl.lockf(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
os.unlink(path)
"""

# Stops where it has seen that it is not the last one, until its standard input ends; then tells what it has seen.
LEAVES_SLOWLY = """
import sys
from lmpool.workers.cli import shared_server
try_alone = shared_server._locks_alone
def look(users):
    found = try_alone(users)
    print("leaving", flush=True)
    sys.stdin.read()
    return found
shared_server._locks_alone = look
server = shared_server.SharedServer()
server.join()
print(server.leave())
"""

# Joins, looks and leaves, again and again.
COMES_AND_GOES = """
from lmpool.embedded import ping
from lmpool.workers.cli.shared_server import SharedServer
for _ in range(5):
    server = SharedServer(2**24)
    server.join()
    server.watch(print)
    assert ping(server._socket) == b"+PONG\\r\\n"
    print(server.leave())
"""

FORKS = """
import os, sys
from lmpool.workers.cli.shared_server import SharedServer
SharedServer(2**24).join()
print("joined", flush=True)
os.fork()
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime folder of the test's own."""
    monkeypatch.setenv("LMPOOL_RUNTIME_DIR", str(short_dir / "run"))
    return short_dir / "run"


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    """Starts `lmpool up` and waits until it serves; ends all of them."""
    started: list[WorkerProcess] = []

    def start(model: str, *options: str, within: tuple[str, ...] = ()) -> WorkerProcess:
        command = [*within, *lmpool_command(), "up", model, "--backend", "synthetic", "--vocab-size", str(V), *options]
        started.append(WorkerProcess(command, tmp_path / f"{model}.log"))
        started[-1].until_says("serving ")
        return started[-1]

    yield start
    for process in started:
        process.end()


def is_right(producer: SyncProducer, token: int) -> bool:
    """Whether the row of a prompt of one token comes."""
    return np.array_equal(producer.logprobs([token]), synthetic_row([token], vocab_size=V))


def server_pid(folder: Path) -> int:
    """Process id of the server; 0 while there is none."""
    try:
        return int((folder / "server.pid").read_text() or "0")
    except FileNotFoundError:
        return 0


def runs(pid: int) -> bool:
    """Whether a process has not ended."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_the_server_stays_until_the_last_up_has_ended(up: Up, folder: Path, number: signal.Signals) -> None:
    first, second = up("syn"), up("other")
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
    until(lambda: not runs(pid), "the server ends with the last")
    until(lambda: not list(folder.iterdir()), "its files are gone")


def test_of_two_that_leave_together_the_second_ends_the_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really_lock = fcntl.lockf
    server = SharedServer(2**24)
    assert server.join()
    server.watch(print)
    command = [sys.executable, "-c", LEAVES_SLOWLY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == "leaving\n"

        def lock(descriptor: int, how: int, *where: int) -> None:
            if not how & fcntl.LOCK_NB:  # It is about to wait for the other.
                other.stdin.close()  # type: ignore[union-attr]
            really_lock(descriptor, how, *where)

        monkeypatch.setattr(fcntl, "lockf", lock)
        assert not server.leave(), "nobody is left"
        assert other.stdout.readline() == "True\n"
    until(lambda: not list(folder.iterdir()), "the folder is empty")


def test_a_server_that_is_killed_is_started_again_and_not_for_ever(up: Up, folder: Path) -> None:
    both = [up("syn", "--memory-mb", "64"), up("other", "--memory-mb", "32")]
    assert "--memory-mb has no effect" in both[1].text
    pid = server_pid(folder)
    with SyncProducer("syn", timeout=60) as syn, SyncProducer("other", timeout=60) as other:
        assert all(is_right(producer, 1) for producer in (syn, other))
        os.kill(pid, signal.SIGKILL)
        for process in both:
            process.until_says("your server was ended by signal 9 (SIGKILL); the end of")
            process.until_says("your server runs again at unix://")
        assert all(is_right(producer, 2) for producer in (syn, other))
    assert server_pid(folder) not in (0, pid)
    assert embedded.memory_limit(folder / "redis.sock") == 64 * 2**20
    os.kill(server_pid(folder), signal.SIGKILL)
    for process in both:
        assert process.wait() == 1
        last = process.text.splitlines()[-1]
        assert "your server was ended by signal 9 (SIGKILL); the end of" in last
        assert "it had been started again less than 60 s before" in last


def test_a_supervisor_that_is_killed_is_replaced(up: Up, folder: Path) -> None:
    process = up("syn")
    with SyncProducer("syn", timeout=60) as producer:
        assert is_right(producer, 1)
        os.kill(int((folder / "owner.lock").read_text()), signal.SIGKILL)
        process.until_says("your server's supervisor has ended; starting it again")
        process.until_says("your server runs again")
        assert is_right(producer, 2)
    process.signal(signal.SIGINT)
    assert process.wait() == 0
    until(lambda: not list(folder.iterdir()), "the folder is empty")


@pytest.mark.parametrize("is_late", [False, True], ids=["the lock is held", "the lock's file has gone"])
def test_who_joins_while_the_last_one_leaves_gets_a_new_server(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    folder.mkdir(mode=0o700)
    really_lock = fcntl.lockf
    command = [sys.executable, "-c", ENDING, str(folder / "users.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as ending:

        def lock(*arguments: int) -> None:
            monkeypatch.setattr(fcntl, "lockf", really_lock)
            if is_late:
                ending.communicate()
                really_lock(*arguments)
                return
            with pytest.raises(OSError, match="temporarily unavailable"):
                really_lock(*arguments)
            assert not (folder / "owner.lock").exists(), "it must not join what ends"
            ending.communicate()
            raise BlockingIOError

        assert ending.stdout is not None
        assert ending.stdout.readline() == "held\n"
        monkeypatch.setattr(fcntl, "lockf", lock)
        server = SharedServer(2**24)
        assert server.join()
        server.watch(print)
        visitor = subprocess.run([sys.executable, "-c", COMES_AND_GOES], stdout=subprocess.PIPE, text=True, check=True)
        assert visitor.stdout == 5 * "True\n", "it sees that this process holds the lock"
        assert embedded.find() == server.url
        assert not server.leave()
    until(lambda: not list(folder.iterdir()), "the folder is empty")


def test_many_that_come_and_go_always_have_a_server_and_leave_none(folder: Path) -> None:
    command = [sys.executable, "-c", COMES_AND_GOES]
    crowd = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for _ in range(3)]
    assert [process.communicate()[1] for process in crowd] == [b""] * 3
    until(lambda: not list(folder.iterdir()), "nothing is left")


def test_a_start_that_fails_says_why_and_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMPOOL_SERVER_BINARY", "/bin/false")
    command = [*lmpool_command(), "up", "syn", "--backend", "synthetic"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("lmpool: the embedded server ended at its start: ")


def test_what_goes_wrong_is_the_last_word_also_where_the_server_goes_on(up: Up, tmp_path: Path) -> None:
    up("syn")
    # Other weights under that name.
    command = [*lmpool_command(), "up", "syn", "--backend", "synthetic", "--vocab-size", str(V + 1)]
    other = WorkerProcess(command, tmp_path / "wrong.log")
    assert other.wait() == 2
    assert other.text.splitlines()[-1].startswith("lmpool: ")
    assert "goes on" not in other.text


def test_the_fork_of_a_process_that_was_killed_does_not_keep_the_server(folder: Path) -> None:
    command = [sys.executable, "-c", FORKS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "joined\n"
        assert SharedServer().url == embedded.find()
        process.kill()
        # The fork lives on, until its standard input ends.
        until(lambda: not list(folder.iterdir()), "the server ends with the program")
