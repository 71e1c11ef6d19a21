"""A model that vLLM spreads over two processes (ranks): the engine ends as a whole, and nothing remains of it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from lmpool.errors import WorkerError
from lmpool.workers.backends.checkpoint import checkpoint_revision
from tests.contract.driver import Opened, prompt
from tests.contract.subjects import Subject
from tests.contract.vllm_subject import TENSOR_PARALLEL
from tests.engines.vllm_small import refused
from tests.support.pool import Pool, children_of, is_running, shared_by, until, until_async

ROOT = Path(__file__).resolve().parents[2]
STEP_S = 5
ENDED = "^a process of the model has ended$"


@contextmanager
def opened(folder: Path, subject: Subject = TENSOR_PARALLEL) -> Iterator[Opened]:
    """The subject's backend, without adapters."""
    with Opened(subject, folder, "float32", {}) as driver:
        yield driver


def ranks_of(backend: Any) -> list[int]:
    """Process ids of the backend's ranks."""
    return [rank.proc.pid for rank in backend._core.engine_core.model_executor.workers]


def ranks_below(pid: int) -> list[int]:
    """Process ids of the ranks of a worker, in their order."""
    return sorted(
        child for child, command in children_of(pid).items() if b"VLLM" in command or b"spawn_main" in command
    )


def test_an_idle_engine_reports_the_end_of_a_rank(model_folder: Path) -> None:
    draw, errors = random.Random(1), SimpleQueue[BaseException]()
    with opened(model_folder) as driver:
        backend: Any = driver.backend
        assert backend.devices == ["cpu", "cpu"]
        assert backend.info.revision == checkpoint_revision(model_folder), "the fingerprint does not depend on the size"
        ranks = ranks_of(backend)
        assert [shared_by(pid) for pid in (os.getpid(), *ranks)] == [set()] * 3, (
            "killed processes would leave the names"
        )
        prompts = [prompt(draw, 20) for _ in range(3)]
        driver.check(prompts, driver.ask(prompts))
        backend.when_broken(errors.put)
        os.kill(ranks[1], signal.SIGKILL)
        with pytest.raises(WorkerError, match=ENDED):
            raise errors.get(timeout=60)
        until(lambda: not Path(f"/proc/{ranks[0]}").exists(), "the other rank ends")


def test_a_worker_that_loses_any_process_under_load_is_replaced_and_leaves_nothing() -> None:
    command, environment = [sys.executable, "-m", "tests.faults.rank_kills", "--faults", "3"], dict(os.environ)
    environment["LMPOOL_CONTRACT"] = "vllm-tensor"
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.stdout.splitlines()[-1:] == ["nothing lost, wrong or left"], done.stdout + done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize("rank", [0, 1], ids=["the output rank", "another rank"])
async def test_a_frozen_rank_ends_the_worker_within_the_step_timeout(model_folder: Path, pool: Pool, rank: int) -> None:
    draw = random.Random(4)
    worker = pool.start(
        "--backend", "vllm", "--name", "two", *TENSOR_PARALLEL.options(model_folder, {}), "--step-timeout-s", STEP_S,
        model=str(model_folder), wait=False, command=TENSOR_PARALLEL.command, installed=True,
    )  # fmt: skip
    await asyncio.to_thread(worker.until_says, "serving ")
    ranks = ranks_below(worker.process.pid)
    os.kill(ranks[rank], signal.SIGSTOP)
    async with pool.producer("two") as producer:
        requested = asyncio.ensure_future(producer.logprobs(prompt(draw, 100)))
        assert await asyncio.to_thread(worker.wait)
        requested.cancel()
    assert f"it has been in one step for {STEP_S} s" in worker.text
    assert "released 1 prompts for other workers" in worker.text
    until(lambda: not any(map(is_running, ranks)), "no rank remains")


async def test_ctrl_c_lets_all_ranks_finish_their_prompts(model_folder: Path, pool: Pool) -> None:
    draw = random.Random(3)
    worker = pool.start(
        "--backend", "vllm", "--name", "two", *TENSOR_PARALLEL.options(model_folder, {}), model=str(model_folder),
        wait=False, command=TENSOR_PARALLEL.command, installed=True,
    )  # fmt: skip
    await asyncio.to_thread(worker.until_says, "serving ")
    pid = worker.process.pid
    ranks = ranks_below(pid)
    assert len(ranks) == 2
    async with pool.producer("two") as producer:
        prompts = [prompt(draw, 100) for _ in range(8)]
        requested = asyncio.ensure_future(producer.batch_logprobs(prompts))

        async def is_taken() -> bool:
            return pool.held("two") > 0 or requested.done()

        await until_async(is_taken, "the worker has taken the prompts")
        for number in (pid, *ranks):  # A terminal sends the signal to all processes.
            os.kill(number, signal.SIGINT)
        rows = await requested
    expected = np.stack([TENSOR_PARALLEL.reference(ids, "") for ids in prompts])
    assert np.abs(rows - expected).max() <= TENSOR_PARALLEL.tolerance
    assert await asyncio.to_thread(worker.wait) == 0
    assert "Traceback" not in worker.text
    until(lambda: not any(map(is_running, ranks)), "no rank remains")


def test_a_rank_that_cannot_load_its_part_fails_the_start_in_one_line(model_folder: Path) -> None:
    assert "must be divisible by tensor parallel size (3)" in refused(model_folder, tensor_parallel_size=3)
    message = refused(model_folder, tensor_parallel_size=2, kv_cache_bytes=1 << 50)
    assert "memory" in message


def test_a_killed_worker_leaves_no_rank(model_folder: Path, pool: Pool) -> None:
    worker = pool.start(
        "--backend", "vllm", "--name", "two", *TENSOR_PARALLEL.options(model_folder, {}), model=str(model_folder),
        wait=False, command=TENSOR_PARALLEL.command, installed=True,
    )  # fmt: skip
    until(lambda: len(ranks_below(worker.process.pid)) == 2, "the ranks start")
    ranks = ranks_below(worker.process.pid)
    os.kill(worker.process.pid, signal.SIGKILL)  # While the ranks load.
    until(lambda: not any(map(is_running, ranks)), "no rank remains")
