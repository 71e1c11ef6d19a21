"""A model that vLLM spreads over two processes (ranks): the engine ends as a whole, and nothing remains of it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
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
from tests.support.pool import Pool, until, until_async

ENDED = "^a process of the model has ended$"


@contextmanager
def opened(folder: Path, subject: Subject = TENSOR_PARALLEL) -> Iterator[Opened]:
    """The subject's backend, without adapters."""
    with Opened(subject, folder, "float32", {}) as driver:
        yield driver


def ranks_of(backend: Any) -> list[int]:
    """Process ids of the backend's ranks."""
    return [rank.proc.pid for rank in backend._core.engine_core.model_executor.workers]


def children_of(pid: int) -> set[int]:
    """Process ids of the children of a worker that run a part of the model."""
    children = {
        int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()
    }
    commands = {child: Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
    return {child for child, command in commands.items() if b"VLLM" in command or b"spawn_main" in command}


def mapped_by(pid: int) -> set[str]:
    """Paths of the shared memory that a process has mapped, and that has a name."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[5] for line in lines if "/dev/shm/psm_" in line and not line.endswith("(deleted)")}


def test_an_idle_engine_reports_the_end_of_a_rank(model_folder: Path) -> None:
    draw, errors = random.Random(1), SimpleQueue[BaseException]()
    with opened(model_folder) as driver:
        backend: Any = driver.backend
        assert backend.devices == ["cpu", "cpu"]
        assert backend.info.revision == checkpoint_revision(model_folder), "the fingerprint does not depend on the size"
        ranks = ranks_of(backend)
        assert [mapped_by(pid) for pid in (os.getpid(), *ranks)] == [set()] * 3, (
            "killed processes would leave the names"
        )
        prompts = [prompt(draw, 20) for _ in range(3)]
        driver.check(prompts, driver.ask(prompts))
        backend.when_broken(errors.put)
        os.kill(ranks[1], signal.SIGKILL)
        with pytest.raises(WorkerError, match=ENDED):
            raise errors.get(timeout=60)
        until(lambda: not Path(f"/proc/{ranks[0]}").exists(), "the other rank ends")


def test_a_rank_that_is_killed_during_forwards_ends_the_engine(model_folder: Path) -> None:
    draw = random.Random(2)
    with opened(model_folder) as driver:
        digests = driver.submit([prompt(draw, 200) for _ in range(200)])
        driver.step()
        os.kill(ranks_of(driver.backend)[0], signal.SIGKILL)
        with pytest.raises(Exception, match="cancelled|Executor failed|died"):
            driver.finish(digests)


async def test_ctrl_c_lets_all_ranks_finish_their_prompts(model_folder: Path, pool: Pool) -> None:
    draw = random.Random(3)
    worker = pool.start(
        "--backend", "vllm", "--name", "two", *TENSOR_PARALLEL.options(model_folder, {}), model=str(model_folder),
        wait=False, command=TENSOR_PARALLEL.command, installed=True,
    )  # fmt: skip
    await asyncio.to_thread(worker.until_says, "serving ")
    pid = worker.process.pid
    ranks = children_of(pid)
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
    until(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks), "no rank remains")


def test_a_rank_that_cannot_load_its_part_fails_the_start_in_one_line(model_folder: Path) -> None:
    assert "must be divisible by tensor parallel size (3)" in refused(model_folder, tensor_parallel_size=3)
    message = refused(model_folder, tensor_parallel_size=2, kv_cache_bytes=1 << 50)
    assert "memory" in message


def test_a_killed_worker_leaves_no_rank(model_folder: Path, pool: Pool) -> None:
    worker = pool.start(
        "--backend", "vllm", "--name", "two", *TENSOR_PARALLEL.options(model_folder, {}), model=str(model_folder),
        wait=False, command=TENSOR_PARALLEL.command, installed=True,
    )  # fmt: skip
    until(lambda: len(children_of(worker.process.pid)) == 2, "the ranks start")
    ranks = children_of(worker.process.pid)
    os.kill(worker.process.pid, signal.SIGKILL)  # While the ranks load.
    until(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks), "no rank remains")
