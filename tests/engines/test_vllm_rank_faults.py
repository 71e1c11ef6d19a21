"""Workers whose model vLLM spreads over two processes end as a whole. `make test-ranks` runs these slow tests."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import signal
from pathlib import Path

from tests.contract.driver import prompt
from tests.contract.vllm_subject import TENSOR_PARALLEL
from tests.engines.spread import NAME, start
from tests.engines.vllm_small import refused
from tests.support.pool import Pool, is_running, ranks_below, until

STEP_S = 5


async def test_a_frozen_rank_ends_the_worker_within_the_step_timeout(model_folder: Path, pool: Pool) -> None:
    draw = random.Random(4)
    worker = start(pool, TENSOR_PARALLEL, model_folder, "--step-timeout-s", STEP_S)
    await asyncio.to_thread(worker.until_says, "serving ")
    ranks = ranks_below(worker.process.pid)
    os.kill(ranks[1], signal.SIGSTOP)  # `rank_kills --freeze` also stops the output rank.
    async with pool.producer(NAME) as producer:
        requested = asyncio.ensure_future(producer.logprobs(prompt(draw, 100)))
        assert await asyncio.to_thread(worker.wait)
        requested.cancel()
    assert f"it has been in one step for {STEP_S} s" in worker.text
    assert "released 1 prompts for other workers" in worker.text
    until(lambda: not any(map(is_running, ranks)), "no rank remains")


def test_a_rank_that_cannot_load_its_part_fails_the_start_in_one_line(model_folder: Path) -> None:
    assert "memory" in refused(model_folder, tensor_parallel_size=2, kv_cache_bytes=1 << 50)
    until(lambda: not multiprocessing.active_children(), "no rank remains in a process that goes on")


def test_a_killed_worker_leaves_no_rank(model_folder: Path, pool: Pool) -> None:
    worker = start(pool, TENSOR_PARALLEL, model_folder)
    until(lambda: len(ranks_below(worker.process.pid)) == 2, "the ranks start")
    ranks = ranks_below(worker.process.pid)
    os.kill(worker.process.pid, signal.SIGKILL)  # While the ranks load.
    until(lambda: not any(map(is_running, ranks)), "no rank remains")
