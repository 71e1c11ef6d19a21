"""`lmpool up --workers` and `--detach`, and `lmpool down`: real processes, real signals."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from lmpool.workers.cli.options import parse_size
from lmpool.workers.cli.processes import Restarts, as_arguments, plan_workers

from lmpool.errors import SettingsError
from lmpool.producer import SyncProducer
from lmpool.synthetic import synthetic_row
from tests.support.pool import DEADLINE_S, V, WorkerProcess, lmpool_command, run_lmpool, until

Up = Callable[..., WorkerProcess]
SYNTHETIC = ("--backend", "synthetic", "--vocab-size", str(V))


@pytest.fixture(autouse=True)
def folder(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder of the test's own, and a machine without GPUs; what is detached there ends with the test."""
    folder = short_dir / "run"
    monkeypatch.setenv("LMPOOL_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    yield folder
    if (folder / "detached").exists():
        assert run_lmpool("down", "--now", LMPOOL_RUNTIME_DIR=str(folder)).returncode == 0


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    """Starts `lmpool up`; kills what is left."""
    started: list[WorkerProcess] = []

    def start(*options: str, says: str = "all 2 workers serve") -> WorkerProcess:
        command = [*lmpool_command(), "up", "syn", *SYNTHETIC, *options]
        started.append(WorkerProcess(command, tmp_path / f"{len(started)}.log", installed=True))
        started[-1].until_says(says)
        return started[-1]

    yield start
    for process in started:
        process.end()


def serving(process: WorkerProcess) -> dict[str, list[int]]:
    """Number of a worker -> the process ids that it has had, as its log tells them."""
    pids: dict[str, list[int]] = {}
    for number, pid in re.findall(r"^\[(\d)\] .*serving 'syn'.* as worker \S+-(\d+)-[0-9a-f]{16}$", process.text, re.M):
        pids.setdefault(number, []).append(int(pid))
    return pids


def runs(pid: int) -> bool:
    """Whether a process has not ended."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def until_no_worker_of(process: WorkerProcess) -> None:
    pids = list(chain.from_iterable(serving(process).values()))
    assert pids
    until(lambda: not any(map(runs, pids)), "no worker is left")


def test_workers_have_one_log_one_is_replaced_when_it_dies_and_one_signal_drains_all(up: Up, folder: Path) -> None:
    process = up("--workers", "2")
    first = serving(process)
    assert sorted(first) == ["0", "1"]
    os.kill(first["1"][0], signal.SIGKILL)
    process.until_says("worker 1 was ended by signal 9 (SIGKILL)")
    until(lambda: len(serving(process)["1"]) == 2, "worker 1 serves again")
    with SyncProducer("syn", timeout=DEADLINE_S) as producer:
        assert np.array_equal(producer.logprobs([1]), synthetic_row([1], vocab_size=V))
    process.signal(signal.SIGINT)
    assert process.wait() == 0
    for number in "01":
        assert re.search(rf"^\[{number}\] .*stopped; nothing was left unfinished$", process.text, re.M)
    until_no_worker_of(process)
    until(lambda: not [path for path in folder.iterdir() if path.is_file()], "the server has ended too")


def test_a_second_signal_ends_all_at_once(up: Up) -> None:
    # A step that takes for ever: a drain would wait for it.
    process = up("--workers", "2", "--step-ms", "600000", "--step-timeout-s", "3600")
    with SyncProducer("syn", timeout=0.5) as producer, pytest.raises(TimeoutError):
        producer.logprobs([1])
    process.signal(signal.SIGINT)
    process.until_says("once more ends them at once")
    process.signal(signal.SIGINT)
    assert process.wait() == 130
    until_no_worker_of(process)


def test_workers_end_with_the_process_that_has_started_them(up: Up) -> None:
    process = up("--workers", "2")
    process.signal(signal.SIGKILL)
    process.wait()
    until_no_worker_of(process)


def test_what_no_worker_can_do_is_not_tried_again(up: Up) -> None:
    process = up("--workers", "2", "--metrics-port", "65535", says="before it has ever served: ending all workers")
    assert process.wait() == 2
    assert "metrics_port" in process.text or "--metrics-port" in process.text


# What a stand-in for a worker does is its argument: serve, leave a process behind, wait, and end with a code.
STAND_INS = """
import asyncio, logging, os, signal, sys
from lmpool.workers.cli import processes
from lmpool.workers.cli.detached import READY_VARIABLE
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
processes.LAUNCH = '''
import os, subprocess, sys
how = sys.argv[1]
print("hello", flush=True)
if "serves" in how:
    os.write(int(os.environ["LMPOOL_READY_DESCRIPTOR"]), b"1")
if "leaves" in how:
    # It has the worker's output, and its input until nobody writes there.
    left = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"])
if "waits" in how:
    sys.stdin.read()
sys.exit(int(how.rpartition("-")[2]))
'''
processes._FIRST_PAUSE_S = processes._LONGEST_PAUSE_S = 0.01
processes._REST_S = 0.1
heard, told = os.pipe()
os.set_blocking(heard, False)
os.environ[READY_VARIABLE] = str(told)
hows = sys.argv[1:]

def on_ready():
    asyncio.get_running_loop().remove_reader(heard)
    print("told that they serve", flush=True)
    for number in os.environ["STOP"].split():
        os.kill(os.getpid(), int(number))

async def run():
    asyncio.get_running_loop().add_reader(heard, on_ready)
    return await processes.WorkerProcesses(lambda at: [hows[at]], [{}] * len(hows), is_text=True).run()

sys.exit(asyncio.run(run()))
"""


def run_stand_ins(tmp_path: Path, *hows: str, stop: Sequence[signal.Signals] = (signal.SIGTERM,)) -> tuple[int, str]:
    """Exit code and log of stand-ins for workers; they are stopped by signals when it is told that they serve."""
    environment = {"STOP": " ".join(str(int(number)) for number in stop)}
    process = WorkerProcess([sys.executable, "-c", STAND_INS, *hows], tmp_path / "log", environment)
    try:
        return process.wait(), process.text
    finally:
        process.end()


def test_one_that_dies_again_and_again_is_given_up(tmp_path: Path) -> None:
    """Each life of these ends at once; the pauses between them are cut short."""
    code, text = run_stand_ins(tmp_path, "dies-7", "dies-7")
    assert code == 1
    for number in range(2):
        assert text.count(f"[{number}] hello\n") == 5
        given_up = rf"worker {number} ended with code 7 after \d+ s, and so 5 times in a row: it is given up"
        assert re.search(given_up, text)
    assert "0 workers go on" in text
    assert "told" not in text


@pytest.mark.parametrize("other", ["dies-7", "ends-0"])
def test_who_waits_for_workers_to_serve_waits_for_none_that_is_not_started_again(tmp_path: Path, other: str) -> None:
    code, text = run_stand_ins(tmp_path, other, "serves-and-waits-0")
    assert code == 0
    assert ("worker 0 ended with code 0" if other == "ends-0" else "it is given up; 1 workers go on") in text
    assert text.index("1 workers go on") < text.index("1 of 2 workers serve") < text.index("told that they serve")


@pytest.mark.parametrize(("others", "expected"), [(["ends-0", "ends-0"], 0), (["ends-0", "dies-7"], 1)])
def test_when_none_is_left_they_have_ended(tmp_path: Path, others: list[str], expected: int) -> None:
    code, text = run_stand_ins(tmp_path, *others)
    assert code == expected
    assert "0 workers go on" in text
    assert "told" not in text


def test_one_that_is_refused_after_it_has_served_is_started_again(tmp_path: Path) -> None:
    # The other may be given up first: then all that go on serve, which is told and is to stop nothing here.
    code, text = run_stand_ins(tmp_path, "serves-2", "dies-7", stop=())
    assert code == 1
    assert text.count("[0] hello\n") == 5
    assert re.search(r"worker 0 ended with code 2 after \d+ s: starting it again in 0\.01 s", text)
    assert "ending all workers" not in text


def test_the_death_of_a_worker_is_seen_although_what_it_has_started_holds_its_output(tmp_path: Path) -> None:
    code, text = run_stand_ins(tmp_path, "leaves-one-and-dies-7")
    assert code == 1
    assert text.count("[0] hello\n") == 5


def test_a_worker_that_has_served_for_long_is_not_given_up_for_what_was_before() -> None:
    restarts = Restarts()
    assert [restarts.after(served_s) for served_s in (0, 59, 0, 0)] == [1, 2, 4, 8]
    # Neither does this one count.
    assert restarts.after(60) == 1
    assert [restarts.after(0) for _ in range(5)] == [2, 4, 8, 16, None]
    assert [Restarts().after(3600) for _ in range(9)] == [1] * 9


def test_a_terminal_that_closes_drains_the_workers_although_it_says_so_twice(tmp_path: Path) -> None:
    for number, expected in ((signal.SIGHUP, 0), (signal.SIGTERM, 130)):
        code, text = run_stand_ins(tmp_path, "serves-and-waits-0", "serves-and-waits-0", stop=[number, number])
        assert (code, "stopped at once" in text) == (expected, expected == 130)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_of_the_terminal_while_workers_start_prints_no_traceback(
    tmp_path: Path, number: signal.Signals
) -> None:
    """It comes to all processes of its group."""
    log = tmp_path / "log"
    command = [*lmpool_command(), "up", "syn", *SYNTHETIC, "--workers", "2"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    until(lambda: "your server runs" in log.read_text(), "workers are about to start")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    until(lambda: len(children.read_text().split()) >= 3, "a supervisor and two workers are there")
    os.killpg(process.pid, number)
    assert process.wait(DEADLINE_S) == 0
    assert "Traceback" not in log.read_text()


def test_detached_workers_serve_until_they_are_told_to_stop(folder: Path) -> None:
    started = run_lmpool("up", "syn", *SYNTHETIC, "--detach")
    assert started.returncode == 0, started.stderr
    assert "serving 'syn'" in started.stderr
    pid, log = re.search(r"served by process (\d+); its log: (\S+)", started.stderr).groups()  # type: ignore[union-attr]
    assert "end it with: lmpool down" in started.stderr
    assert Path(log).parent == folder / "detached"
    assert stat.S_IMODE((folder / "detached").stat().st_mode) == 0o700
    (worker,) = re.findall(r"serving 'syn'.* as worker \S+-(\d+)-[0-9a-f]{16}$", started.stderr, re.M)
    os.kill(int(worker), signal.SIGKILL)
    until(lambda: Path(log).read_text().count("serving 'syn'") == 2, "a worker serves in place of the killed one")
    with SyncProducer("syn", timeout=DEADLINE_S) as producer:
        assert np.array_equal(producer.logprobs([1]), synthetic_row([1], vocab_size=V))
    refused = run_lmpool("down", "other")
    assert refused.returncode == 2
    assert "model: no `lmpool up --detach` here serves 'other'; running: 'syn'" in refused.stderr
    ended = run_lmpool("down", "syn")
    assert (ended.returncode, ended.stdout) == (0, f"ending syn, process {pid}\nended\n")
    assert not runs(int(pid))
    assert "stopped; nothing was left unfinished" in Path(log).read_text()
    assert run_lmpool("down").stdout == "nothing runs here that `lmpool up --detach` has started\n"


def test_several_detached_workers_are_ended_at_once() -> None:
    assert run_lmpool("up", "syn", *SYNTHETIC, "--workers=2", "--detach").returncode == 0
    with SyncProducer("syn", timeout=DEADLINE_S) as producer:
        assert np.array_equal(producer.logprobs([1]), synthetic_row([1], vocab_size=V))
    assert run_lmpool("down", "--now").stdout.startswith("ending syn, process ")
    until(lambda: run_lmpool("down").stdout.startswith("nothing runs"), "nothing is left")


def test_a_detached_start_that_fails_says_why(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        failed = run_lmpool("up", "syn", *SYNTHETIC, "--metrics-port", port, "--detach")
    assert failed.returncode == 2
    assert f"port {port}" in failed.stderr
    assert "it ended with code 2 before it served" in failed.stderr
    assert not list((folder / "detached").glob("*.json"))


@pytest.mark.parametrize("text", ['{"pid": %d}', "", "[]", "{", '{"pid": "x"}'])
def test_a_stale_file_ends_no_process(folder: Path, text: str) -> None:
    """The number in it is that of another by now."""
    (folder / "detached").mkdir(mode=0o700, parents=True)
    folder.chmod(0o700)
    record = folder / "detached" / "0.json"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as another:
        record.write_text(text.replace("%d", str(another.pid)))
        ended = run_lmpool("down")
        another.communicate(b"\n")
    assert another.returncode == 0
    assert (ended.returncode, ended.stdout) == (0, "nothing runs here that `lmpool up --detach` has started\n")
    assert not record.exists()


def test_a_file_that_is_held_and_names_no_process_is_an_error(folder: Path) -> None:
    (folder / "detached").mkdir(mode=0o700, parents=True)
    folder.chmod(0o700)
    record = folder / "detached" / "0.json"
    with record.open("w") as held:
        fcntl.lockf(held, fcntl.LOCK_EX)
        held.write(json.dumps({"pid": 1}))
        held.flush()
        ended = run_lmpool("down")
    record.unlink()
    assert ended.returncode == 2
    assert f"{record} does not say which process holds it" in ended.stderr


# How many


@pytest.mark.parametrize("wanted", ["0", "-1", "two", "", "1.5", "99", "ALL"])
def test_a_number_of_workers_that_this_machine_has_no_room_for_is_refused(
    monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    for visible in ("", "0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(SettingsError, match="^workers: "):
            plan_workers(wanted, "hf", None)


def test_the_command_says_so_in_one_line() -> None:
    for wanted, reason in (("0", "'0' is neither a number of at least 1 nor `all`"), ("99", "99 are more than the ")):
        ended = run_lmpool("up", "syn", *SYNTHETIC, "--workers", wanted)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert ended.stderr.startswith(f"lmpool: --workers: {reason}")
        assert ended.stderr.count("\n") == 1


def test_each_gpu_has_one_worker_and_cores_are_divided(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert plan_workers("all", "hf", None) == plan_workers("1", "hf", None) == [{}]
    monkeypatch.setattr("lmpool.workers.cli.processes.count_cores", lambda: 8)
    monkeypatch.setattr("lmpool.workers.cli.processes.count_threads", lambda: 8)
    assert plan_workers("3", "hf", None) == [{"OMP_NUM_THREADS": "2"}] * 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-aa, 7")
    assert plan_workers("all", "vllm", None) == [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in ("4", "GPU-aa", "7")]
    assert len(plan_workers("2", "hf", "auto")) == 2
    uuids = ["GPU-5ebe2bbf-9f1d-4a6c-8b1c-0b6d8f9e7a11", "MIG-GPU-5ebe2bbf-9f1d-4a6c/7/0", "MIG-41b8ea11-d2b8"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(uuids))
    assert plan_workers("all", "hf", None) == [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in uuids]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0,-1,2")
    assert plan_workers("all", "hf", None) == [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in "10"]
    assert plan_workers("all", "hf", "cpu") == plan_workers("all", "synthetic", None) == [{}]
    with pytest.raises(SettingsError, match="^device: 'cuda:1' is one device"):
        plan_workers("all", "hf", "cuda:1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nprintf '0\\n1\\n'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert plan_workers("all", "hf", None) == [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in "01"]


# How options are written


def test_sizes_are_written_as_people_write_them() -> None:
    sizes = {"4096": 4096, "128k": 128_000, "8g": 8 * 10**9, "8G": 2**33, "8GiB": 2**33, "8GB": 8 * 10**9,
             "1.5k": 1500, " 2 Ki": 2048, "0": 0, "-1": -1}  # fmt: skip
    assert {text: parse_size(text) for text in sizes} == sizes
    for text in ("", "k", "1.5", "8x", "1e3", "0x10", "8 g b"):
        with pytest.raises(Exception, match="is no size|is no whole number"):
            parse_size(text)


def test_options_survive_the_way_to_a_worker() -> None:
    options = {"backend": "hf", "with_trie": True, "adapters": ["a=b", "c=d"], "seed": -1}
    assert as_arguments(options) == ["--backend=hf", "--with-trie", "--adapters=a=b", "--adapters=c=d", "--seed=-1"]


def test_the_names_of_vllm_are_aliases_and_errors_name_what_was_given(tmp_path: Path) -> None:
    model = str(tmp_path / "nowhere")
    for option, value in (("--served-model-name", "a{b"), ("--max-num-seqs", "0"), ("--max-model-len", "0")):
        ended = run_lmpool("worker", model, option, value)
        assert ended.returncode == 2
        assert ended.stderr.startswith(f"lmpool: {option}: "), ended.stderr
    ended = run_lmpool("worker", "syn", "--backend", "synthetic", "--max-model-len", "many")
    assert "'many' is no size: write 4096, 128k" in ended.stderr


def test_the_help_is_short_and_there_is_all_of_it() -> None:
    short, whole = (run_lmpool("up", option, COLUMNS="200").stdout for option in ("--help", "--help-all"))
    options = [set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) for text in (short, whole)]
    assert {"--workers", "--detach", "--dtype", "--max-model-len", "--kv-cache-bytes", "--help-all"} <= options[0]
    assert len([line for line in short.splitlines() if re.match(r"│ --", line)]) <= 14
    assert {"--lease-s", "--memory-mb", "--vocab-size"} <= options[1] - options[0]
