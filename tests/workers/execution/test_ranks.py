"""Processes of a model that is spread over several processes: they end with the worker, and it ends with each."""

from __future__ import annotations

import io
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from lmpool.errors import WorkerError
from lmpool.workers.execution.ranks import Followers, _SendingHandler
from tests.support.pool import until

FOLLOWER = """
import logging, os, signal
from lmpool.workers.execution.ranks import following
with following() as setup:
    print("this line does not disturb the log")
    logging.getLogger("engine").warning("pid %d", os.getpid())
    if setup["fails"]:
        raise MemoryError("no memory for the weights\\nand more lines")
    signal.pause()
"""
COMMAND = [sys.executable, "-c", FOLLOWER]
KILLED_WHILE_IT_WRITES = """
import logging, os, signal
os.write(1, b"a library's \\xff\\n")
from lmpool.workers.execution.ranks import following
with following():
    pipe = logging.getLogger().handlers[-1]._pipe
    pipe.write('["engine", 30, "half a li')
    pipe.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""
RUNS = {"fails": False}


@contextmanager
def followers(
    *setups: dict[str, bool], command: list[str] = COMMAND
) -> Iterator[tuple[Followers, SimpleQueue[WorkerError]]]:
    """Follower processes, and the errors that they report."""
    errors: SimpleQueue[WorkerError] = SimpleQueue()
    started = Followers(command, setups, errors.put)
    try:
        yield started, errors
    finally:
        started.close(0)


def pids(caplog: pytest.LogCaptureFixture, count: int) -> list[int]:
    """The process ids that `count` followers have logged, in the order of their ranks."""
    until(lambda: len(caplog.messages) >= count, "all followers run")
    return [int(text.rpartition(" ")[2]) for text in sorted(caplog.messages)]


def is_running(pid: int) -> bool:
    """Whether a process has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1] != b"Z"
    except FileNotFoundError:
        return False


def signals_ignored_by(pid: int) -> int:
    """A number in which the bit `number - 1` is set for each signal that a process ignores."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("SigIgn:")).split()[1], 16)


def test_log_entries_carry_the_rank(caplog: pytest.LogCaptureFixture) -> None:
    with followers(RUNS, RUNS):
        first, second = pids(caplog, 2)
    assert sorted(caplog.messages) == [f"(rank 1) pid {first}", f"(rank 2) pid {second}"]
    assert {(record.name, record.levelno) for record in caplog.records} == {("engine", logging.WARNING)}


def test_a_killed_follower_is_reported_and_the_others_end(caplog: pytest.LogCaptureFixture) -> None:
    with followers(RUNS, RUNS, RUNS) as (started, errors):
        all_pids = pids(caplog, 3)
        # A process that does not run on cannot notice the end of another process.
        os.kill(all_pids[0], signal.SIGSTOP)
        os.kill(all_pids[1], signal.SIGKILL)
        error = errors.get(timeout=60)
        assert str(error) == "rank 2 of the model has failed: its process was ended by signal 9 (SIGKILL)"
        assert started.cause_of(OSError("connection reset")) is error
        until(lambda: not any(map(is_running, all_pids)), "all followers have ended")
    assert errors.empty(), "only the first end is reported"


def test_the_error_of_a_follower_is_reported_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with followers(RUNS, {"fails": True}) as (_, errors):
        assert str(errors.get(timeout=60)) == "rank 2 of the model has failed: no memory for the weights"


def test_output_that_is_no_log_entry_is_logged_and_the_end_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with followers(RUNS, command=[sys.executable, "-c", KILLED_WHILE_IT_WRITES]) as (_, errors):
        error = errors.get(timeout=60)
    assert str(error) == "rank 1 of the model has failed: its process was ended by signal 9 (SIGKILL)"
    assert caplog.messages == ["(rank 1) a library's \ufffd", '(rank 1) ["engine", 30, "half a li']


def test_two_threads_do_not_mix_their_lines() -> None:
    class Pipe(io.StringIO):
        def write(self, text: str) -> int:
            lock: Any = handler.lock
            assert lock._is_owned()
            return super().write(text)

    pipe = Pipe()
    handler = _SendingHandler(pipe)
    handler.send("", None, "the reason of the end")
    handler.handle(logging.makeLogRecord({"msg": "an entry"}))
    assert pipe.getvalue().count("\n") == 2


STARTS_A_RANK = """
import atexit, signal, sys, traceback
from lmpool.workers.execution.ranks import RankProcess

class Slow:
    def __reduce__(self):
        return signal.pause, ()

def work(*given):
    atexit.register(print, "Python has ended slowly", flush=True)
    print(*given)
    1 / given[0]

if __name__ == "__main__":
    rank = RankProcess(target=work, args=({argument},))
    rank.start()
    print(rank.pid, flush=True)
    rank.join()
    print(rank.exitcode)
"""


@pytest.fixture
def starts_a_rank(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts a process that starts a rank with an argument; the argument is an expression."""
    started = []

    def start(argument: str) -> subprocess.Popen[str]:
        program = tmp_path / "worker.py"
        program.write_text(STARTS_A_RANK.replace("{argument}", argument))
        pipe = subprocess.PIPE
        started.append(subprocess.Popen([sys.executable, str(program)], stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_rank_that_still_imports_its_engine_ends_with_its_worker(starts_a_rank: Any) -> None:
    worker = starts_a_rank("Slow()")
    rank = int(worker.stdout.readline())
    ignored = 1 << signal.SIGTERM - 1
    until(lambda: signals_ignored_by(rank) & ignored, "the rank has begun")
    worker.kill()
    until(lambda: not is_running(rank), "the rank ends")


def test_a_rank_that_has_finished_ends_at_once_and_an_error_is_printed(starts_a_rank: Any) -> None:
    out, error = starts_a_rank("5").communicate()
    assert out.splitlines()[1:] == ["5", "0"], error
    out, error = starts_a_rank("0").communicate()
    assert out.splitlines()[-1] == "1"
    assert "ZeroDivisionError" in error


def test_closing_reports_no_end(caplog: pytest.LogCaptureFixture) -> None:
    with followers(RUNS) as (started, errors):
        pids(caplog, 1)
        started.close(0)
        assert started._processes[0].returncode == -signal.SIGKILL
    assert errors.empty()


def test_followers_ignore_signals_that_stop_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    with followers(RUNS):
        (pid,) = pids(caplog, 1)
        ignored = signals_ignored_by(pid)
        assert all(ignored >> (number - 1) & 1 for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))


def test_a_follower_ends_with_its_worker_even_if_it_is_stopped() -> None:
    worker = f"""
import logging, signal, sys
from lmpool.workers.execution.ranks import Followers
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
followers = Followers({COMMAND!r}, [{RUNS!r}], print)
signal.pause()
"""
    process = subprocess.Popen([sys.executable, "-uc", worker], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    follower = int(process.stdout.readline().rpartition(" ")[2])
    os.kill(follower, signal.SIGSTOP)
    process.kill()
    process.wait()
    until(lambda: not is_running(follower), "the follower ends")
    process.stdout.close()
