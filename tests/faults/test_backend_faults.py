"""Backends that raise or hang: other workers take over at once, and a prompt that breaks backends is given up."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from lmpool.embedded import EmbeddedServer
from lmpool.errors import LMPoolError, WorkerError
from lmpool.producer import Producer, SyncProducer
from lmpool.synthetic import synthetic_row
from tests.support.gate import Gate
from tests.support.pool import (
    DEADLINE_S,
    Pool,
    V,
    WorkerProcess,
    is_held,
    lmpool_command,
    pending,
    until,
    until_async,
    until_done,
)

POISON = 99
LONG_LEASE_S = 600
LIMIT_S = 4.0
FAULTS = {
    "raise": "MemoryError: the prompt contains the token 99, for which there is no memory",
    "hang": f"the backend hangs: it has been in one step for {LIMIT_S:g} s (step_timeout_s",
}


def told_to(fault: str) -> tuple[str | int | float, ...]:
    """Options of a worker whose backend fails on the token `POISON`."""
    limit = ("--step-timeout-s", LIMIT_S) if fault == "hang" else ()
    return (f"--{fault}-token", POISON, *limit)


async def ask_all(producer: Producer, prompts: list[list[int]]) -> None:
    """Request many prompts concurrently and check every value."""
    rows = await asyncio.gather(*map(producer.logprobs, prompts))
    for prompt, got in zip(prompts, rows, strict=True):
        assert np.array_equal(got, synthetic_row(prompt, vocab_size=V))


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_worker_whose_backend_fails_releases_its_jobs_at_once_and_ends(pool: Pool, fault: str) -> None:
    # If the worker did not release its jobs, other workers could not claim them for ten minutes.
    worker = pool.start(*told_to(fault), "--lease-s", LONG_LEASE_S, "--max-batch", 8)
    async with pool.producer() as producer:
        asked = asyncio.create_task(ask_all(producer, [[POISON, 1], *([i] for i in range(40))]))
        assert await asyncio.to_thread(worker.wait) == 2
        (line,) = (line for line in worker.text.splitlines() if line.startswith("lmpool: "))
        assert FAULTS[fault] in line
        assert "in _injected_failures" in worker.text, "it says where the thread is"
        held = pending(pool)
        assert held
        assert all(job["time_since_delivered"] > LONG_LEASE_S * 1000 for job in held)
        assert {job["times_delivered"] for job in held} == {1}
        assert not pool.names("worker:*")
        assert pool.redis.hexists(pool.keys.models(), "syn"), "who waits still finds the model"
        await asyncio.to_thread(pool.start, "--lease-s", 1)
        await asyncio.wait_for(asked, DEADLINE_S)
    await until_done(pool)


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_prompt_that_crashes_workers_is_given_up_with_the_reason_and_its_batch_is_served(
    pool: Pool, fault: str
) -> None:
    for _ in range(4):
        pool.start(*told_to(fault), "--lease-s", 6, "--max-batch", 64, wait=False)
    for worker in pool.workers:
        await asyncio.to_thread(worker.until_says, "serving ")
    async with pool.producer() as producer:
        # Send the poison first, so that other prompts are in its batch.
        poison = asyncio.create_task(producer.logprobs([POISON, 1]))
        good = asyncio.create_task(ask_all(producer, [[i] for i in range(40)]))
        with pytest.raises(WorkerError) as caught:
            await asyncio.wait_for(poison, DEADLINE_S)
        assert f"given up after 3 deliveries: the last worker that held it ended: {FAULTS[fault]}" in str(caught.value)
        await asyncio.wait_for(good, DEADLINE_S)
    until(lambda: sum(worker.is_running for worker in pool.workers) == 1, "three workers have ended")
    assert sorted(worker.process.poll() or 0 for worker in pool.workers) == [0, 2, 2, 2]
    assert pool.redis.xlen(pool.keys.model("syn").dead) == 1
    await until_done(pool)
    assert 0 < pool.redis.pttl(pool.keys.model("syn").reasons) <= 3_600_000


async def test_a_hanging_worker_ends_while_its_server_does_not_reply(
    own_server: EmbeddedServer, tmp_path: Path
) -> None:
    pool = Pool(own_server.url, "frozen", tmp_path)
    pid = pool.redis.info("server")["process_id"]
    try:
        # The step timeout is long enough to stop the server before the worker gives up.
        worker = pool.start("--hang-token", POISON, "--step-timeout-s", 10, "--lease-s", 1)
        async with pool.producer() as producer:
            asked = asyncio.create_task(producer.logprobs([POISON]))
            await until_async(lambda: is_held(pool), "the worker holds the prompt")
            os.kill(pid, signal.SIGSTOP)
            assert await asyncio.to_thread(worker.wait) == 2
            assert "cannot deregister" in worker.text
            os.kill(pid, signal.SIGCONT)
            asked.cancel()
    finally:
        os.kill(pid, signal.SIGCONT)
        pool.end()


WITH_THREADS = """
import sys, threading
from lmpool.broker.server import Server
from lmpool.workers.backends.synthetic import SyntheticSettings
from lmpool.workers.cli.serve import serve
from lmpool.workers.settings import WorkerSettings

class Engine(SyntheticSettings):
    def open(self):
        threading.Thread(target=threading.Event().wait).start()
        return super().open()

url, prefix = sys.argv[1:]
backend = Engine(name="syn", vocab_size=512, hang_token=99)
serve(Server(url), backend, WorkerSettings(prefix, step_timeout_s=4.0))
"""


async def test_threads_of_a_hanging_engine_do_not_keep_the_process_alive(pool: Pool) -> None:
    worker = pool._launch([sys.executable, "-c", WITH_THREADS, pool.url, pool.prefix], None, wait=True)
    async with pool.producer() as producer:
        asked = asyncio.create_task(producer.logprobs([POISON]))
        assert await asyncio.to_thread(worker.wait) == 2
        asked.cancel()
    assert FAULTS["hang"] in worker.text


def test_up_starts_a_worker_again_whose_backend_hangs(
    short_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMPOOL_RUNTIME_DIR", str(short_dir / "run"))
    up = ["up", "syn", "--backend", "synthetic", "--vocab-size", str(V), *map(str, told_to("hang"))]
    supervisor = WorkerProcess([*lmpool_command(), *up], tmp_path / "up.log")
    try:
        supervisor.until_says("serving ")
        with SyncProducer() as producer:
            with pytest.raises(LMPoolError):
                producer.logprobs([POISON], timeout=10)
            supervisor.until_says(FAULTS["hang"])
            supervisor.until_says("worker 0 ended with code 2")
            supervisor.until_says("starting it again in 1 s")
            assert producer.logprobs([1], timeout=60).shape == (V,)
        supervisor.signal(signal.SIGINT)
        supervisor.signal(signal.SIGINT)
        supervisor.wait()
        assert not (short_dir / "run" / "server.log").exists(), "the server was stopped"
    finally:
        supervisor.end()


async def holds_all(pool: Pool) -> bool:
    """Whether workers hold ten prompts."""
    return pool.held() == 10


async def taken_over(pool: Pool, frozen: WorkerProcess, gate: Gate) -> WorkerProcess:
    """Freeze the worker that holds jobs; start another worker, which claims all jobs, and freeze it too."""
    frozen.signal(signal.SIGSTOP)
    (first,) = {job["consumer"] for job in pending(pool)}
    other = await asyncio.to_thread(lambda: pool.start("--lease-s", 2, "--max-batch", 16, command=gate.command))
    until(lambda: first not in {job["consumer"] for job in pending(pool)}, "the other has taken all")
    other.signal(signal.SIGSTOP)
    return other


async def test_a_frozen_worker_whose_jobs_were_claimed_releases_no_jobs_of_other_workers(
    pool: Pool, tmp_path: Path
) -> None:
    gate = Gate(tmp_path / "gate")
    frozen = pool.start("--hang-token", POISON, "--step-timeout-s", 6, "--lease-s", 2, "--max-batch", 16)
    async with pool.producer(when_absent="wait") as producer:
        asked = asyncio.create_task(ask_all(producer, [[POISON, i] for i in range(10)]))
        await until_async(lambda: holds_all(pool), "the worker holds all prompts")
        other = await taken_over(pool, frozen, gate)
        before = pending(pool)
        frozen.signal(signal.SIGCONT)
        assert await asyncio.to_thread(frozen.wait) == 2
        assert "handed" not in frozen.text
        held = pending(pool)
        assert [(job["consumer"], job["times_delivered"]) for job in held] == [(before[0]["consumer"], 2)] * 10
        assert all(job["time_since_delivered"] < 3_600_000 for job in held), "they look as they did"
        gate.open()
        other.signal(signal.SIGCONT)
        await asyncio.wait_for(asked, DEADLINE_S)
    await until_done(pool)


async def test_a_frozen_worker_whose_jobs_were_claimed_fails_no_jobs_of_other_workers(
    pool: Pool, tmp_path: Path
) -> None:
    frozen_gate, gate = Gate(tmp_path / "own"), Gate(tmp_path / "gate")
    frozen = pool.start("--fail-token", POISON, "--lease-s", 2, "--max-batch", 16, command=frozen_gate.command)
    async with pool.producer(when_absent="wait") as producer:
        asked = asyncio.create_task(ask_all(producer, [[POISON, i] for i in range(10)]))
        await until_async(lambda: holds_all(pool), "the worker holds all prompts")
        other = await taken_over(pool, frozen, gate)
        frozen_gate.open()
        frozen.signal(signal.SIGCONT)
        frozen.signal(signal.SIGTERM)
        assert await asyncio.to_thread(frozen.wait) == 0
        assert len(pending(pool)) == 10, "the other still has them"
        gate.open()
        other.signal(signal.SIGCONT)
        await asyncio.wait_for(asked, DEADLINE_S)
    await until_done(pool)


async def test_workers_that_are_killed_at_random_instants_lose_nothing(pool: Pool) -> None:
    chance = random.Random(6)
    prompts = [[i % V, i // V] for i in range(800)]
    # Allow 100 deliveries: no prompt may be given up, however often its workers are killed.
    options = ("--lease-s", 1, "--max-batch", 16, "--step-ms", 15, "--max-deliveries", 100)
    for _ in range(5):
        pool.start(*options, wait=False)
    for worker in pool.workers:
        await asyncio.to_thread(worker.until_says, "serving ")
    async with pool.producer() as producer:
        tasks = [asyncio.create_task(producer.logprobs(prompt)) for prompt in prompts]
        done = 0
        for victim in chance.sample(pool.workers, 4):
            done += chance.randrange(1, 160)

            async def is_due(least: int = done) -> bool:
                return sum(task.done() for task in tasks) >= least

            await until_async(is_due, f"{done} prompts have been answered")
            victim.end()
        for prompt, row in zip(prompts, await asyncio.wait_for(asyncio.gather(*tasks), DEADLINE_S), strict=True):
            assert np.array_equal(row, synthetic_row(prompt, vocab_size=V))
    await until_done(pool)
    assert not pool.names("*waiting*")
