"""The `lmpool` commands that tests fork behave like the installed `lmpool` command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fork_server import ForkedCommand
from tests.support.pool import DEADLINE_S, Pool, WorkerProcess, lmpool_command, run_lmpool

TWO_COMMANDS = """
import os
from tests.support.pool import run_lmpool
print(run_lmpool("status").stderr, end="")
del os.environ["LMPOOL_REDIS_URL"]
print(run_lmpool("status").stderr, end="")
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("--version",),
        ("status", "--json"),
        ("flush",),
        ("worker", "m", "--x"),
        ("dead", "list"),
        ("queue", "show", "syn"),
        ("adapters", "list", "--no-wait"),
        ("logprobs", "1", "--ids", "--no-wait"),
        ("bench", "--no-wait"),
        ("trie", "show", "1", "--no-wait"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_it_prints_and_exits_as_the_installed_command_does(pool: Pool, arguments: tuple[str, ...]) -> None:
    where = () if arguments[0] == "--version" else ("--redis", pool.url, "--prefix", pool.prefix)
    command = [*lmpool_command(), *arguments, *where]
    real = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    forked = run_lmpool(*arguments, *where)
    assert (forked.returncode, forked.stdout, forked.stderr) == (real.returncode, real.stdout, real.stderr)
    assert real.stdout or real.stderr or arguments[0] == "dead"


@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGKILL, -9)])
def test_its_exit_code_tells_what_ended_it(pool: Pool, number: signal.Signals, code: int, installed: bool) -> None:
    worker = pool.start(installed=installed)
    assert isinstance(worker.process, ForkedCommand) is not installed
    assert Path(f"/proc/{worker.process.pid}").exists()
    assert worker.is_running
    with pytest.raises(subprocess.TimeoutExpired):
        worker.wait(0.01)
    worker.signal(number)
    assert worker.wait() == code
    assert worker.process.returncode == code
    assert not Path(f"/proc/{worker.process.pid}").exists(), "nobody is left to be waited for"
    worker.signal(signal.SIGKILL)
    assert ("nothing was left unfinished" in worker.text) is (code == 0)


def test_it_has_the_environment_that_it_is_given_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: Pool
) -> None:
    pool.start()
    monkeypatch.setenv("LMPOOL_REDIS_URL", pool.url)
    assert '"syn"' in run_lmpool("status", "--json", "--prefix", pool.prefix).stdout
    command = [*lmpool_command(), "status"]
    fresh = WorkerProcess(command, tmp_path / "log", {"PYTHONDONTWRITEBYTECODE": "x"})
    assert isinstance(fresh.process, subprocess.Popen), "the interpreter reads this as it starts"
    assert fresh.wait() == 0
    # Start a fork server whose environment has LMPOOL_REDIS_URL; the second command must not inherit this variable.
    given = {**os.environ, "LMPOOL_REDIS_URL": "http://x", "LMPOOL_RUNTIME_DIR": str(tmp_path)}
    script = [sys.executable, "-c", TWO_COMMANDS]
    told = subprocess.run(script, capture_output=True, text=True, timeout=DEADLINE_S, check=True, env=given)
    first, second = told.stdout.splitlines()
    assert "'http://x' is not a Redis URL" in first
    assert "or set --redis or LMPOOL_REDIS_URL" in second


def test_it_has_imported_no_torch(tmp_path: Path) -> None:
    process = ForkedCommand(["lmpool", "status", "--redis", "redis://127.0.0.1:1"], {}, tmp_path / "log")
    try:
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
    finally:
        process.kill()
