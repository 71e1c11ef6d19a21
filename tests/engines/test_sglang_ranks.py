"""A model that SGLang spreads over two processes: an idle one keeps serving, and it ends as a whole."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from lmpool.errors import WorkerError
from lmpool.workers.backends.checkpoint import checkpoint_revision
from tests.contract.driver import prompt
from tests.contract.sglang_subject import TENSOR_PARALLEL, settings_of
from tests.engines.test_sglang import opened, scheduler_of
from tests.support.pool import Pool, children_of, is_running, until, until_async

ROOT = Path(__file__).resolve().parents[2]
KILLED = r"^rank 1 of the model has failed: its process was ended by signal 9 \(SIGKILL\)$"


def follower_of(backend: Any) -> int:
    """Process id of the backend's only follower."""
    (process,) = backend._engine._followers._processes
    pid: int = process.pid
    return pid


def follower_below(pid: int) -> int:
    """Process id of a worker's only follower."""
    (follower,) = (child for child, command in children_of(pid).items() if b"follower" in command)
    return follower


def test_two_idle_processes_exchange_messages_and_report_the_end_of_one(model_folder: Path) -> None:
    draw, errors = random.Random(1), SimpleQueue[BaseException]()
    with opened(model_folder, tensor_parallel_size=2) as driver:
        backend: Any = driver.backend
        assert backend.devices == [backend.device, backend.device]
        assert backend.info.revision == checkpoint_revision(model_folder), "the fingerprint does not depend on the size"
        receiver, passes = scheduler_of(backend).request_receiver, SimpleQueue[None]()
        receive = receiver.recv_requests

        def count_and_receive(**named: Any) -> Any:
            passes.put(None)
            return receive(**named)

        receiver.recv_requests = count_and_receive
        until(lambda: passes.qsize() > 2, "rank 0 sends messages, without which a collective of torch would time out")
        prompts = [prompt(draw, 20) for _ in range(3)]
        driver.check(prompts, driver.ask(prompts))
        backend.when_broken(errors.put)
        os.kill(follower_of(backend), signal.SIGKILL)
        with pytest.raises(WorkerError, match=KILLED):
            raise errors.get(timeout=60)
        backend.when_broken(errors.put)
        assert not errors.empty(), "an end before the call is reported too"
        driver.submit(prompts)
        with pytest.raises(WorkerError, match=KILLED):
            driver.step()


def test_a_process_that_is_killed_during_forwards_ends_the_engine(model_folder: Path) -> None:
    draw = random.Random(2)
    with opened(model_folder, tensor_parallel_size=2) as driver:
        digests = driver.submit([prompt(draw, 200) for _ in range(200)])
        driver.step()
        os.kill(follower_of(driver.backend), signal.SIGKILL)
        with pytest.raises(WorkerError, match=KILLED):
            driver.finish(digests)
        errors: SimpleQueue[BaseException] = SimpleQueue()
        backend: Any = driver.backend
        backend.when_broken(errors.put)
        with pytest.raises(WorkerError, match=KILLED):  # An end before this call is reported too.
            raise errors.get(timeout=60)


async def test_ctrl_c_lets_all_processes_finish_their_prompts(model_folder: Path, pool: Pool) -> None:
    draw = random.Random(3)
    worker = pool.start(
        "--backend", "sglang", "--name", "two", *TENSOR_PARALLEL.options(model_folder, {}), model=str(model_folder),
        wait=False, command=TENSOR_PARALLEL.command, installed=True,
    )  # fmt: skip
    await asyncio.to_thread(worker.until_says, "serving ")
    pid = worker.process.pid
    follower = follower_below(pid)
    async with pool.producer("two") as producer:
        prompts = [prompt(draw, 100) for _ in range(8)]
        requested = asyncio.ensure_future(producer.batch_logprobs(prompts))

        async def is_taken() -> bool:
            return pool.held("two") > 0 or requested.done()

        await until_async(is_taken, "the worker has taken the prompts")
        for number in (pid, follower):  # A terminal sends the signal to all processes.
            os.kill(number, signal.SIGINT)
        rows = await requested
    expected = np.stack([TENSOR_PARALLEL.reference(ids, "") for ids in prompts])
    assert np.abs(rows - expected).max() <= TENSOR_PARALLEL.tolerance
    assert await asyncio.to_thread(worker.wait) == 0
    assert "Traceback" not in worker.text
    until(lambda: not is_running(follower), "no follower remains")


_PROGRAM = """
import json, sys
from tests.engines.newest import accept
from tests.engines.sglang_cpu.shim import install
install()
accept()
from lmpool.errors import SettingsError
from lmpool.workers.backends.settings import SglangSettings
from lmpool.workers.backends.sglang import backend
lost = "from lmpool.workers.execution.ranks import following\\nwith following(): raise RuntimeError('no device 1')"
backend.FOLLOWER = [sys.executable, "-c", lost]
try:
    SglangSettings(**json.loads(sys.argv[1])).open()
except SettingsError as error:
    print(error)
"""


def test_a_process_that_cannot_load_its_part_fails_the_start_in_one_line(model_folder: Path) -> None:
    settings = json.dumps(settings_of(model_folder, "float32", {}, ranks=2))
    done = subprocess.run([sys.executable, "-c", _PROGRAM, settings], capture_output=True, text=True, cwd=ROOT)
    reason = "rank 1 of the model has failed: no device 1"
    assert done.stdout.rstrip().endswith(f"cannot serve {model_folder}: {reason}"), done.stderr
    assert len(done.stdout.splitlines()) == 1
