"""Helpers for tests of workers whose model is spread over several processes (ranks)."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import numpy as np

from tests.contract.driver import prompt
from tests.contract.subjects import Subject
from tests.support.pool import Pool, WorkerProcess, is_running, ranks_below, until, until_async

NAME = "two"
"""Name of the model of `start`."""


def start(pool: Pool, subject: Subject, folder: Path, *options: str | int) -> WorkerProcess:
    """Start a worker of a subject, without adapters, and without waiting until it serves."""
    return pool.start(
        "--backend", subject.name, "--name", NAME, *subject.options(folder, {}), *options, model=str(folder),
        wait=False, command=subject.command, installed=True,
    )  # fmt: skip


async def check_ctrl_c(pool: Pool, subject: Subject, *workers: WorkerProcess) -> None:
    """Check that a worker finishes its prompts after Ctrl-C, and that all its processes then end.

    Args:
        pool: the pool of the worker.
        subject: the subject of the worker.
        workers: the worker, and the processes that run its ranks on other machines.
    """
    draw = random.Random(3)
    await asyncio.to_thread(workers[0].until_says, "serving ")
    ranks = [rank for worker in workers for rank in ranks_below(worker.process.pid)]
    assert len(ranks) >= subject.processes - 1
    async with pool.producer(NAME) as producer:
        prompts = [prompt(draw, 100) for _ in range(8)]
        requested = asyncio.ensure_future(producer.batch_logprobs(prompts))

        async def is_taken() -> bool:
            return pool.held(NAME) > 0 or requested.done()

        await until_async(is_taken, "the worker has taken the prompts")
        # A terminal sends the signal to all processes. The worker gets it last.
        for pid in (*ranks, *(worker.process.pid for worker in reversed(workers))):
            os.kill(pid, signal.SIGINT)
        rows = await requested
    expected = np.stack([subject.reference(ids, "") for ids in prompts])
    assert np.abs(rows - expected).max() <= subject.tolerance
    assert [await asyncio.to_thread(worker.wait) for worker in workers] == [0] * len(workers)
    assert not [worker.text for worker in workers if "Traceback" in worker.text]
    until(lambda: not any(map(is_running, ranks)), "no rank remains")
