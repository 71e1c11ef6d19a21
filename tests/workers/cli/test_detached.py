"""How `lmpool down` ends what `lmpool up --detach` has started, with stand-ins for it: real processes, real signals."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
from lmpool.workers.cli.detached import Lines

from lmpool.embedded import EmbeddedServer
from lmpool.workers.cli import detached
from tests.support.pool import DEADLINE_S, V, WorkerProcess, lmpool_command, run_lmpool, until

Start = Callable[..., "subprocess.Popen[bytes]"]
# Notes each SIGTERM in the file that it is given, and ends when all the others are there.
PATIENT = """
import os, signal, sys, time
told, *needed = sys.argv[1:]
def note(*_):
    with open(told, "a") as file:
        file.write("x")
signal.signal(signal.SIGTERM, note)
print("ready", flush=True)
while not all(map(os.path.exists, needed)):
    time.sleep(0.01)
"""
HOLDS = """
import fcntl, sys
with open(sys.argv[1], "r+b") as record:
    fcntl.lockf(record, int(sys.argv[2]), 1, 0)
    print("ready", flush=True)
    sys.stdin.read()
"""
ENDS_WITH_ITS_INPUT = "import sys; print('ready', flush=True); sys.stdin.read()"


@pytest.fixture
def folder(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where records are, in a runtime folder of the test's own; what is detached there ends with the test."""
    monkeypatch.setenv("LMPOOL_RUNTIME_DIR", str(short_dir / "run"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (short_dir / "run").mkdir(mode=0o700)
    (short_dir / "run" / "detached").mkdir(mode=0o700)
    yield short_dir / "run" / "detached"
    run_lmpool("down", "--now", LMPOOL_RUNTIME_DIR=str(short_dir / "run"))


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Starts a program of Python as `up --detach` starts lmpool; kills what is left."""
    started = []

    def start(name: str, program: str, *arguments: str, **what: Any) -> subprocess.Popen[bytes]:
        record = folder / f"{name}.json"
        command = detached.launch(record.with_suffix(".new"), record, {"model": name, **what})
        process = subprocess.Popen(
            [*command, "-c", program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@contextmanager
def holding(record: Path, how: int) -> Iterator[None]:
    """Have another process hold the lock that says whether one runs."""
    command = [sys.executable, "-c", HOLDS, str(record), str(how)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        yield
        holder.communicate()


def runs(pid: int) -> bool:
    """Whether a process has not ended."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_all_are_told_before_any_is_waited_for(start: Start, tmp_path: Path) -> None:
    """Each of these ends when both have been told."""
    told = [str(tmp_path / name) for name in "ab"]
    both = [start(Path(mine).name, PATIENT, mine, *told) for mine in told]
    ended = run_lmpool("down")
    assert ended.returncode == 0, ended.stderr
    ending = "".join(f"ending {name}, process {of.pid}\n" for name, of in zip("ab", both, strict=True))
    assert ended.stdout == f"{ending}ended\n"
    assert [process.wait() for process in both] == [0, 0]


def test_one_model_is_ended_by_its_name_and_the_others_go_on(start: Start, tmp_path: Path) -> None:
    ended, goes_on = (start(name, PATIENT, str(tmp_path / name), str(tmp_path / name)) for name in ("one", "two"))
    done = run_lmpool("down", "one")
    assert (done.returncode, done.stdout) == (0, f"ending one, process {ended.pid}\nended\n")
    assert ended.wait() == 0
    assert runs(goes_on.pid)
    assert run_lmpool("down").stdout == f"ending two, process {goes_on.pid}\nended\n"


def test_who_stops_waiting_is_told_what_still_runs_and_waiting_again_tells_it_nothing(
    start: Start, tmp_path: Path
) -> None:
    """A second signal would have it drop what it computes."""
    told, end = tmp_path / "told", tmp_path / "end"
    process = start("syn", PATIENT, str(told), str(end))
    first, second, third = (
        WorkerProcess([*lmpool_command(), "down"], tmp_path / f"{number}.log", installed=True) for number in range(3)
    )
    for waiting in (first, second, third):
        waiting.until_says(f"ending syn, process {process.pid}")
    first.signal(signal.SIGINT)
    assert first.wait() == 130
    assert f"syn, process {process.pid}, still runs" in first.text
    assert "lmpool down --now" in first.text
    assert sum("told so before" in waiting.text for waiting in (first, second, third)) == 2
    end.touch()
    assert (second.wait(), third.wait(), process.wait()) == (0, 0, 0)
    assert told.read_text() == "x"
    assert run_lmpool("down").stdout.startswith("nothing runs")


def test_the_lock_alone_says_whether_it_runs(start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that the record names has ended, and nothing of it is left in any list of processes."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as named:
        holder = start("syn", ENDS_WITH_ITS_INPUT, pid=named.pid)
        looks = []

        def look(_: float) -> None:
            looks.append(named.wait())
            if len(looks) == 3:
                holder.communicate()

        monkeypatch.setattr(time, "sleep", look)
        detached.down()
    assert looks == [-signal.SIGTERM] * 3
    assert not list(folder.glob("*.json"))


def test_now_ends_also_what_it_has_started(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It hears no SIGTERM, and neither does its child."""
    program = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import sys; print('ready', flush=True); sys.stdin.read()"])
child.wait()
"""
    monkeypatch.setattr(detached, "_PATIENCE_S", 0.5)
    process = start("syn", program)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    (child,) = map(int, children.read_text().split())
    detached.down(now=True)
    assert process.wait(DEADLINE_S) == -signal.SIGKILL
    until(lambda: not runs(child), "its child has ended")
    assert capsys.readouterr().out == f"ending syn, process {process.pid}\nended\n"


def test_now_ends_workers_that_do_not_answer(folder: Path) -> None:
    options = ("--backend", "synthetic", "--vocab-size", str(V), "--workers=2", "--detach")
    started = run_lmpool("up", "syn", *options)
    assert started.returncode == 0, started.stderr
    workers = [int(pid) for pid in re.findall(r"as worker \S+-(\d+)-[0-9a-f]{16}$", started.stderr, re.M)]
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGSTOP)
    assert run_lmpool("down", "--now").returncode == 0
    until(lambda: not any(map(runs, workers)), "no worker is left")


def test_a_record_that_names_no_process_keeps_no_other_from_ending(start: Start, folder: Path) -> None:
    process = start("syn", "print('ready', flush=True); input()")
    with (folder / "0.json").open("w") as broken, (folder / "x.json").open("w") as other:
        for held in (broken, other):
            fcntl.lockf(held, fcntl.LOCK_EX)
        broken.write('{"pid": ')
        broken.flush()
        ended = run_lmpool("down")
    assert process.wait(DEADLINE_S) == -signal.SIGTERM
    assert (ended.returncode, ended.stdout) == (2, f"ending syn, process {process.pid}\nended\n")
    assert f"{folder}/0.json, {folder}/x.json does not say which process" in ended.stderr


def test_whoever_has_an_up_in_another_terminal_is_told_how_that_is_ended(folder: Path) -> None:
    with EmbeddedServer(2**24, folder.parent) as server:
        # A server that is busy, and says nothing meanwhile, runs as well.
        os.kill(server.pid, signal.SIGSTOP)
        told = run_lmpool("down").stdout
        os.kill(server.pid, signal.SIGCONT)
    assert told.startswith("nothing runs here that `lmpool up --detach` has started; ")
    assert told.endswith("an `lmpool up` of another terminal is ended there, by Ctrl-C\n")
    assert run_lmpool("down").stdout == "nothing runs here that `lmpool up --detach` has started\n"


# Records


def test_a_record_is_whole_and_held_as_soon_as_it_has_its_name(folder: Path) -> None:
    for number in range(20):
        record = folder / f"{number}.json"
        command = detached.launch(record.with_suffix(".new"), record, {"model": "syn"})
        with subprocess.Popen([*command, "-c", "input()"], stdin=subprocess.PIPE) as process:
            while not record.exists():
                assert process.poll() is None
            lock = os.open(record, os.O_RDWR)
            assert detached._is_held(lock)
            assert json.loads(record.read_bytes()) == {"pid": process.pid, "model": "syn"}
            process.communicate(b"\n")
            assert not detached._is_held(lock)
            os.close(lock)
    assert not list(folder.glob("*.new"))


def test_two_that_look_at_a_stale_record_do_not_take_each_other_for_its_process(folder: Path) -> None:
    record = folder / "0.json"
    record.write_text("{}")
    lock = os.open(record, os.O_RDWR)
    with holding(record, fcntl.LOCK_SH):
        assert not detached._is_held(lock)
    with holding(record, fcntl.LOCK_EX):
        assert detached._is_held(lock)
    os.close(lock)


def test_what_is_left_of_a_start_is_removed_once_it_is_old_and_nobody_holds_it(folder: Path) -> None:
    for name in ("young", "old", "held"):
        (folder / f"{name}.new").touch()
    for name in ("old", "held"):
        os.utime(folder / f"{name}.new", (1, 1))
    with holding(folder / "held.new", fcntl.LOCK_EX):
        detached._prune(folder)
    assert sorted(path.stem for path in folder.iterdir()) == ["held", "young"]


# What is passed on


def test_what_has_ended_is_not_waited_for_although_others_hold_its_pipe(tmp_path: Path) -> None:
    program = "import subprocess, sys; subprocess.Popen(['cat'], pass_fds=[int(sys.argv[1])]); sys.exit(3)"
    heard, told = os.pipe()
    log = tmp_path / "log"
    log.write_text("it says this")
    command = [sys.executable, "-c", program, str(told)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[told]) as process, log.open("rb") as said:
        # Its byte ends the wait, but not as it should.
        late = Timer(DEADLINE_S, os.write, (told, b"1"))
        late.start()
        assert detached._await_serving(process, heard, said) == 3
        late.cancel()
    os.close(heard)
    os.close(told)


def test_lines_are_printed_when_they_are_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, lines = tmp_path / "log", Lines()
    with log.open("wb", buffering=0) as output, log.open("rb") as said:
        for written, printed in ((b"hel", ""), (b"lo\nw\xc3", "hello\n"), (b"\xb6rld\n", "w\u00f6rld\n")):
            output.write(written)
            detached._pass_on(said, lines)
            assert capsys.readouterr().err == printed


def test_lines_have_a_longest_length_and_end_like_those_of_any_system() -> None:
    lines = Lines()
    assert lines.add(b"a\r") == []
    assert lines.add(b"\nb\rc\n\n\xff") == ["a", "b", "c", ""]
    assert lines.add(b"", is_last=True) == ["\ufffd"]
    text = "\u00e9" * 200_000
    parts = [line for at in range(0, 400_000, 30_001) for line in lines.add(text.encode()[at : at + 30_001])]
    assert sum(map(len, parts)) > 100_000
    parts += lines.add(b"end\n")
    assert "".join(parts) == f"{text}end"
    assert max(map(len, parts)) <= 65_536
    assert [len(line) for line in Lines().add(b"x" * 65_537 + b"\n")] == [65_536, 1]
