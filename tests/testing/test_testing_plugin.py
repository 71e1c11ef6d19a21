"""lmpool's pytest fixtures work in a user's test suite, and the examples of docs/testing.md run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"```python (test|run)\n(.*?)```", (ROOT / "docs/testing.md").read_text("utf-8"), re.DOTALL)
SUITE = """
import os
import threading

import pytest
from lmpool.errors import UnknownModel
from lmpool.producer import Producer, SyncProducer
from lmpool.testing import MemoryPool, SyntheticModel

def request_row():
    with SyncProducer() as producer:
        return producer.logprobs([1, 2])

def test_a_row(lmpool_pool):
    assert isinstance(lmpool_pool, MemoryPool)
    with SyncProducer("synthetic", redis=lmpool_pool.redis) as producer:
        assert (producer.logprobs([7]) == lmpool_pool.model.row([7])).all()

def test_the_environment(lmpool_environment, lmpool_pool):
    assert lmpool_environment is lmpool_pool
    assert (request_row() == lmpool_pool.model.row([1, 2])).all()

def test_the_environment_is_as_before():
    assert "LMPOOL_REDIS_URL" not in os.environ
    assert [thread.name for thread in threading.enumerate() if "lmpool" in thread.name] == []

def test_async(lmpool_pool):
    import asyncio
    async def main():
        async with Producer(redis=lmpool_pool.url) as producer:
            return await producer.logprobs([3])
    assert (asyncio.run(main()) == lmpool_pool.model.row([3])).all()

class TestOthers:
    @pytest.fixture
    def lmpool_models(self):
        return [SyntheticModel("a", vocab_size=3), SyntheticModel("b", vocab_size=4)]

    def test_models_of_one_s_own(self, lmpool_pool):
        for name, size in (("a", 3), ("b", 4)):
            with SyncProducer(name, redis=lmpool_pool.url) as producer:
                assert producer.logprobs([0]).shape == (size,)

    @pytest.mark.parametrize("turn", range(10))
    def test_each_test_has_a_pool_of_its_own(self, lmpool_pool, turn):
        assert not lmpool_pool.redis.exists("seen")
        lmpool_pool.redis.set("seen", 1)
"""


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python like a user who has neither a server nor the settings of this test suite."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LMPOOL", "PYTEST"))}
    environment["LMPOOL_RUNTIME_DIR"] = str(folder / "none")
    environment["PATH"] = str(folder)
    # Load no other pytest plugins: they would warn about settings that a user's folder does not have.
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def run_tests(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["-m", "pytest", "-q", "-W", "error", "-p", "lmpool.pytest_plugin", "-p", "no:cacheprovider"]
    return run([*command, *options], folder)


def test_a_user_s_suite_passes_without_a_server_and_without_warnings(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(SUITE)
    done = run_tests(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "15 passed" in done.stdout
    assert "warning" not in done.stdout + done.stderr


def test_a_failing_test_does_not_affect_the_next_test(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "def test_bad(lmpool_pool):\n    lmpool_pool.worker.stall()\n    raise KeyError('mine')\n\n"
        "def test_good(lmpool_pool):\n    assert lmpool_pool.worker.is_running\n"
    )
    done = run_tests(tmp_path)
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert "KeyError: 'mine'" in done.stdout


@pytest.mark.parametrize("way", ["conftest", "option", "both"])
def test_the_plugin_can_be_named_again(tmp_path: Path, way: str) -> None:
    (tmp_path / "test_mine.py").write_text("def test_it(lmpool_pool): pass\n")
    if way != "option":
        (tmp_path / "conftest.py").write_text('pytest_plugins = ["lmpool.pytest_plugin"]\n')
    done = run_tests(tmp_path, *(["-p", "lmpool.pytest_plugin"] if way != "conftest" else []))
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_the_fixtures_are_listed_with_descriptions(tmp_path: Path) -> None:
    done = run_tests(tmp_path, "--fixtures")
    for name in ("lmpool_pool", "lmpool_models", "lmpool_environment"):
        assert re.search(rf"^{name} .*\n    \S", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.parametrize(("kind", "code"), BLOCKS, ids=[f"{i}-{kind}" for i, (kind, _) in enumerate(BLOCKS)])
def test_the_examples_of_the_documentation_run(kind: str, code: str, tmp_path: Path) -> None:
    path = tmp_path / "test_example.py"
    path.write_text(code)
    done = run_tests(tmp_path) if kind == "test" else run(["-W", "error", str(path)], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_example_of_the_documentation_is_tested() -> None:
    text = (ROOT / "docs/testing.md").read_text("utf-8")
    assert len(BLOCKS) == text.count("```python") >= 6
