"""A backend that holds Python's interpreter lock (GIL) forever: no thread of the worker runs, and it still ends."""

from __future__ import annotations

import asyncio
import errno
import faulthandler
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from lmpool.synthetic import synthetic_row
from lmpool.workers.backends.synthetic import SyntheticBackend, SyntheticSettings
from lmpool.workers.execution import watchdogs
from lmpool.workers.execution.watchdogs import EXIT_CODE, watching_process
from tests.shared.broker.adapters.test_adapters import serving
from tests.support.pool import Pool, V, until, until_async

LIMIT_S = 4.0

# A backend with a regular expression that runs for years and never releases the interpreter lock.
FREEZING = """
import re, sys
from lmpool.broker.server import Server
from lmpool.workers.backends.synthetic import SyntheticBackend, SyntheticSettings
from lmpool.workers.cli.serve import serve
from lmpool.workers.settings import WorkerSettings

class Engine(SyntheticBackend):
    def submit(self, jobs):
        self.poisoned = any(99 in job.ids for job in jobs)
        super().submit(jobs)

    def step(self):
        if self.poisoned:
            print("frozen", flush=True)
            re.match(r"((\\w|\\w|\\.)+)*!", "model.layers.0.self_attn.q_proj.and.so.on")
        return super().step()

class Settings(SyntheticSettings):
    def open(self):
        return Engine(self)

url, prefix, limit_s = sys.argv[1:]
settings = WorkerSettings(prefix, step_timeout_s=float(limit_s), lease_s=10)
serve(Server(url), Settings(name="syn", vocab_size=512), settings)
"""


@pytest.mark.parametrize("meanwhile", ["nothing else", "it is told to stop", "what watches it was killed"])
async def test_a_worker_whose_backend_holds_the_interpreter_lock_ends(pool: Pool, meanwhile: str) -> None:
    frozen = pool._launch([sys.executable, "-c", FREEZING, pool.url, pool.prefix, str(LIMIT_S)], None, wait=True)
    if meanwhile == "what watches it was killed":
        pid = frozen.process.pid
        (watching,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(watching), signal.SIGKILL)
        await asyncio.to_thread(frozen.until_says, "starting it again")
    async with pool.producer("syn") as producer:
        assert np.array_equal(await producer.logprobs([1]), synthetic_row([1], vocab_size=V)), "it serves"
        asked = asyncio.create_task(producer.logprobs([99]))
        await asyncio.to_thread(frozen.until_says, "frozen")
        if meanwhile == "it is told to stop":
            frozen.signal(signal.SIGTERM)
        await asyncio.to_thread(pool.start, "--lease-s", 1)
        assert np.array_equal(await asked, synthetic_row([99], vocab_size=V)), "another worker takes its prompts over"
        assert await asyncio.to_thread(frozen.wait) == EXIT_CODE
    assert f"the worker hangs: its event loop has not run for {LIMIT_S:g} s" in frozen.text
    assert "in step\n" in frozen.text, "it says where its threads are"


async def test_a_worker_that_was_stopped_for_longer_than_the_step_timeout_continues(pool: Pool) -> None:
    worker = pool.start("--step-timeout-s", 4, "--lease-s", 12)
    async with pool.producer("syn") as producer:
        worker.signal(signal.SIGSTOP)
        # The heartbeat expires after a lease, which is three times the step timeout.
        await asyncio.to_thread(until, lambda: not pool.names("worker:*"), "its heartbeat expires")
        worker.signal(signal.SIGCONT)
        assert np.array_equal(await producer.logprobs([1]), synthetic_row([1], vocab_size=V))
    worker.signal(signal.SIGTERM)
    assert await asyncio.to_thread(worker.wait) == 0


async def test_the_watchdog_process_is_restarted_as_soon_as_possible(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watchdogs, "_exit_on", lambda _: None)
    monkeypatch.setattr(watchdogs, "MAX_INTERVAL_S", 0.02)
    refused = 0

    def children() -> list[str]:
        return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()

    def refuse(*_: Any, **__: Any) -> None:
        nonlocal refused
        refused += 1
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    async def is_refused_thrice() -> bool:
        return refused >= 3

    async def is_started() -> bool:
        return bool({*children()} - {*others})

    others = children()
    with watching_process(60.0):
        (killed,) = {*children()} - {*others}
        with monkeypatch.context() as full:
            full.setattr(subprocess, "Popen", refuse)
            os.kill(int(killed), signal.SIGKILL)
            await until_async(is_refused_thrice, "the worker tries again")
        others.append(killed)
        await until_async(is_started, "the worker starts another process")
    assert {record.getMessage() for record in caplog.records} == {
        "the process that watches this worker has ended: starting it again"
    }


async def test_a_worker_inside_another_program_cannot_end_it(pool: Pool) -> None:
    async with serving(pool, SyntheticBackend(SyntheticSettings(name="syn", vocab_size=V))):
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        assert not [pid for pid in children if b"watchdog_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert not cast(Any, faulthandler).unregister(EXIT_CODE), "no handler was there"
