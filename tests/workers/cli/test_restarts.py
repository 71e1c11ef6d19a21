"""Which workers `lmpool up` starts again, with scripts that stand in for workers."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from lmpool.embedded import EmbeddedServer, User
from lmpool.workers.cli import supervisor
from lmpool.workers.cli.supervisor import SupervisedWorker
from tests.support.pool import DEADLINE_S, WorkerProcess

# A script that stands in for a worker. Its argument lists the actions: follow another worker that serves, serve, wait,
# end with an exit code.
STAND_INS = """
import logging, os, signal, sys, time, types
from lmpool.workers.cli import supervisor
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
supervisor.LAUNCH = '''
import os, sys, time
how = sys.argv[1]
os.write(1, f"[{os.environ['NUMBER']}] hello\\\\n".encode())  # In one piece: `print` of two processes may interleave.
while "follows" in how and not os.path.exists(os.environ["SERVES"]):
    time.sleep(0.01)
if "serves" in how:
    os.write(int(os.environ["LMPOOL_READY_DESCRIPTOR"]), b"id")
if "waits" in how:
    sys.stdin.read()
sys.exit(int(how.rpartition("-")[2]))
'''
async def requeue_nothing(*_):
    pass

supervisor.Supervisor._requeue = requeue_nothing
supervisor.time = types.SimpleNamespace(monotonic=lambda: 10 * time.monotonic(), sleep=time.sleep)

def report_ready():
    print("reported that they serve", flush=True)
    for number in os.environ["STOP"].split():
        os.kill(os.getpid(), int(number))

supervisor.report_ready = report_ready
report_if_ready = supervisor.Supervisor._report_if_ready

def note_and_report(self):
    open(os.environ["SERVES"], "w").close()
    report_if_ready(self)

supervisor.Supervisor._report_if_ready = note_and_report
server = types.SimpleNamespace(running=True)
hows = enumerate(sys.argv[1:])
workers = [supervisor.SupervisedWorker(number, [how], {"NUMBER": str(number)}) for number, how in hows]
sys.exit(supervisor.Supervisor(server, None, workers, 3).run())
"""


def run_stand_ins(tmp_path: Path, *hows: str, stop: Sequence[signal.Signals] = (signal.SIGTERM,)) -> tuple[int, str]:
    """Run stand-ins for workers, and stop them by signals once they serve; returns the exit code and the log."""
    environment = {"STOP": " ".join(str(int(number)) for number in stop), "SERVES": str(tmp_path / "serves")}
    process = WorkerProcess([sys.executable, "-c", STAND_INS, *hows], tmp_path / "log", environment)
    try:
        return process.wait(), process.text
    finally:
        process.end()


def test_a_worker_that_ends_five_times_in_a_row_is_given_up(tmp_path: Path) -> None:
    code, text = run_stand_ins(tmp_path, "fails-7", "fails-7")
    assert code == 1
    for number in range(2):
        assert text.count(f"[{number}] hello\n") == 5
        assert re.search(rf"worker {number} ended with code 7 after \d+ s, the 5\. time in a row: it is given up", text)
        assert re.findall(rf"worker {number} .* starting it again in (\d+) s", text) == ["1", "2", "4", "8"]
    assert "0 workers go on" in text
    assert "reported" not in text


@pytest.mark.parametrize("other", ["fails-7", "ends-0"])
def test_a_start_does_not_wait_for_a_worker_that_is_not_started_again(tmp_path: Path, other: str) -> None:
    code, text = run_stand_ins(tmp_path, other, "serves-and-waits-0")
    assert code == 0
    assert ("worker 0 ended with code 0" if other == "ends-0" else "it is given up; 1 workers go on") in text
    assert text.index("1 workers go on") < text.index("1 of 2 workers serve") < text.index("reported that they serve")


@pytest.mark.parametrize(("others", "expected"), [(["ends-0", "ends-0"], 0), (["ends-0", "fails-7"], 1)])
def test_the_supervisor_ends_when_no_worker_is_left(tmp_path: Path, others: list[str], expected: int) -> None:
    code, text = run_stand_ins(tmp_path, *others)
    assert code == expected
    assert "0 workers go on" in text
    assert "reported" not in text


def test_a_worker_that_is_refused_after_it_served_is_started_again(tmp_path: Path) -> None:
    code, text = run_stand_ins(tmp_path, "serves-2", "fails-7", stop=())
    assert code == 1
    assert text.count("[0] hello\n") == 5
    assert re.search(r"worker 0 ended with code 2 after \d+ s: starting it again in 1 s", text)
    assert "stopping all workers" not in text


def test_workers_that_are_refused_before_any_worker_served_are_not_started_again(tmp_path: Path) -> None:
    code, text = run_stand_ins(tmp_path, "fails-2", "waits-0")
    assert code == 2
    assert re.search(r"worker 0 ended with code 2 after \d+ s, before any worker served: stopping all workers", text)
    assert text.count("[0] hello\n") == 1
    assert "reported" not in text


def test_a_worker_that_is_refused_while_another_serves_is_started_again(tmp_path: Path) -> None:
    """Exit code 2 can have a passing reason, such as a GPU that is busy."""
    code, text = run_stand_ins(tmp_path, "serves-and-waits-0", "follows-and-fails-2")
    assert code == 0
    assert text.count("[1] hello\n") == 5
    assert text.index("it is given up; 1 workers go on") < text.index("reported that they serve")
    assert "stopping all workers" not in text


@pytest.mark.parametrize("is_stopping", [False, True])
def test_a_worker_that_serves_after_the_stop_is_not_reported(
    monkeypatch: pytest.MonkeyPatch, is_stopping: bool
) -> None:
    reports: list[str] = []
    monkeypatch.setattr(supervisor, "report_ready", lambda: reports.append("ready"))
    process: Any = SimpleNamespace(poll=lambda: None)
    reader, writer = os.pipe()
    os.write(writer, b"id")
    worker = SupervisedWorker(0, [], {}, process, ready=reader)
    up = supervisor.Supervisor(EmbeddedServer(), User(os.getpid()), [worker], 3, is_stopping=is_stopping)
    up._check(worker)
    os.close(reader)
    os.close(writer)
    assert worker.has_served
    assert reports == ([] if is_stopping else ["ready"])


def test_a_worker_whose_process_cannot_be_started_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    ends: list[int] = []

    def pipe() -> tuple[int, int]:
        ends.extend(made := os_pipe())
        return made

    worker, os_pipe = SupervisedWorker(0, [], {}), os.pipe
    up = supervisor.Supervisor(EmbeddedServer(), User(os.getpid()), [worker], 3)
    began = time.monotonic()
    with monkeypatch.context() as without_processes:
        without_processes.setattr(subprocess, "Popen", refuse)
        without_processes.setattr(os, "pipe", pipe)
        up._check(worker)
    for end in ends:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(end)
    assert len(ends) == 2
    reason = rf"worker 0 cannot be started: \[Errno {errno.EAGAIN}\] .*: starting it again in 1 s"
    assert re.search(reason, caplog.text)
    assert worker.start_at >= began + 1
    worker.start_at = 0.0
    monkeypatch.setattr(supervisor, "LAUNCH", "pass")
    up._check(worker)
    assert worker.process is not None
    assert worker.process.wait(DEADLINE_S) == 0
    worker.on_end()


def test_a_terminal_that_closes_drains_the_workers_although_it_sends_two_signals(tmp_path: Path) -> None:
    for number, expected in ((signal.SIGHUP, 0), (signal.SIGTERM, 130)):
        code, text = run_stand_ins(tmp_path, "serves-and-waits-0", "serves-and-waits-0", stop=[number, number])
        assert (code, "stopped at once" in text) == (expected, expected == 130)


def test_a_crash_after_a_minute_of_service_resets_the_count() -> None:
    worker = SupervisedWorker(0, [], {})

    def crash(served_s: float) -> int:
        worker.process = subprocess.Popen(["true"], stdin=subprocess.PIPE)
        worker.process.wait()
        worker.ready, writer = os.pipe()
        os.close(writer)
        worker.serves_since = time.monotonic() - served_s if served_s else 0.0
        worker.on_end()
        return worker.quick_crashes

    assert [crash(served_s) for served_s in (0, 59, 0, 0)] == [1, 2, 3, 4]
    assert crash(60) == 0
    assert crash(0) == 1
