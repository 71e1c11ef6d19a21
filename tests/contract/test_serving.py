"""Every backend in a real worker process: start, requests through Redis, malformed jobs, and drain."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmpool import errors
from lmpool.producer import Producer
from lmpool.protocol.job import Failure, Job, digest_of, unpack_failure
from lmpool.protocol.keys import JOB_FIELD
from tests.contract.driver import prompt
from tests.contract.model import V
from tests.contract.subjects import Subject
from tests.support.pool import Pool, WorkerProcess, run_lmpool, until, until_async
from tests.support.scrape import free_port, scrape

NAME = "contract"


class Served:
    """A pool with one worker of the subject."""

    def __init__(self, pool: Pool, worker: WorkerProcess, subject: Subject, metrics_port: int) -> None:
        self.pool = pool
        self.worker = worker
        self.subject = subject
        self.metrics_port = metrics_port

    def show(self, *command: str) -> str:
        """The output of an `lmpool` command on the pool."""
        return run_lmpool(*command, "--redis", self.pool.url, "--prefix", self.pool.prefix).stdout

    def workers(self) -> list[dict[str, Any]]:
        """The workers in the output of `lmpool status`."""
        return [worker for model in json.loads(self.show("status", "--json")) for worker in model["workers"]]

    def states(self) -> list[str]:
        """The states of the workers in the output of `lmpool status`."""
        return [worker["state"] for worker in self.workers()]

    def counted(self) -> tuple[float, float]:
        """Number of tokens of requests, and number of reused tokens, from the worker's metrics."""
        metrics = scrape(self.metrics_port)
        names = ("lmpool_worker_tokens_total", "lmpool_worker_reused_tokens_total")
        tokens, reused = (metrics.value(name, model=NAME) for name in names)
        return tokens, reused

    def failure_of(self, ids: bytes, adapter: str = "") -> Failure:
        """The worker's failure of a job that no producer would send."""
        redis, keys = self.pool.redis, self.pool.keys.model(NAME)
        reply = keys.reply("test")
        with asyncio.Runner() as runner:
            info = runner.run(self._info())
        # Register the reply stream before the job, because the worker may fail the job at once.
        redis.hset(keys.waiting + digest_of(ids, adapter), mapping={b"job": "0-1", reply: ""})
        redis.xadd(keys.jobs, {JOB_FIELD: Job(ids, adapter, info.fingerprint, False).pack()})
        replies: Any = until(lambda: redis.xrange(reply), "the worker answers")
        redis.delete(reply)
        return unpack_failure(replies[0][1][b"e"])

    async def _info(self) -> Any:
        async with self.pool.producer(NAME) as producer:
            return producer.model


@pytest.fixture(scope="module")
def served(
    subject: Subject, server_url: str, model_folder: Path, adapter_folders: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:  # fmt: skip
    """A ready worker. The fixture also checks that `lmpool status` shows the worker while it loads."""
    pool = Pool(server_url, f"contract-{subject.name}", tmp_path_factory.mktemp("pool"))
    adapters = adapter_folders if subject.has_adapters else {}
    port = free_port()
    worker = pool.start(
        "--backend", subject.name, "--name", NAME, *subject.options(model_folder, adapters), "--lease-s", 5,
        "--metrics-port", port,
        model=str(model_folder), wait=False, command=subject.command, environment=subject.environment, installed=True,
    )  # fmt: skip
    served = Served(pool, worker, subject, port)
    if subject.has_model:
        until(lambda: served.states() == ["loading"] or not worker.is_running, "the worker is seen to load")
        assert worker.is_running, worker.text
    worker.until_says("serving ")
    yield served
    pool.end()


async def test_clients_get_the_references_rows(served: Served) -> None:
    draw = random.Random(100)
    until(lambda: served.states() == ["ready"], "the worker serves")  # On a busy machine its heartbeat may be late.
    async with served.pool.producer(NAME) as first, served.pool.producer(NAME) as other:
        most = first.model.max_prompt_tokens
        prompts = [prompt(draw, length) for length in (1, 7, 33, 100, most)]
        await _check(served, first, prompts)
        contexts = [prompt(draw, 10 + i) for i in range(10)]
        for _ in range(5):
            await asyncio.gather(_check(served, first, contexts), _check(served, other, contexts[::2]))
            contexts = [[*ids, draw.randrange(V)] for ids in contexts]
        for adapter in await first.adapters():
            await _check(served, first, prompts, adapter)


async def test_reuse_is_reported_in_heartbeats_commands_and_metrics(served: Served) -> None:
    draw = random.Random(102)
    tokens_before, reused_before = await asyncio.to_thread(served.counted)
    contexts, tokens, reusable = [prompt(draw, 40) for _ in range(3)], 0, 0
    async with served.pool.producer(NAME) as producer:
        for at, new in enumerate((1, 1, 3, 2, 1)):
            longer = [[*ids, *prompt(draw, new)] for ids in contexts]
            await _check(served, producer, longer)
            tokens += sum(map(len, longer))
            # From the third request on, a backend detects that each prompt extends an earlier prompt.
            reusable += sum(map(len, contexts)) if at > 1 else 0
            contexts = longer
    counted = await asyncio.to_thread(served.counted)
    assert counted[0] - tokens_before == tokens
    reused = counted[1] - reused_before
    assert (reused >= reusable) if served.subject.has_model else (reused == 0)

    def is_told() -> bool:
        (worker,) = served.workers()
        return (worker["tokens"], worker["reused"]) == counted

    until(is_told, "a heartbeat tells the same")
    share = f"{counted[1] / counted[0]:.0%}"
    assert share in served.show("status")
    assert share in served.show("top", "--once")


async def _check(served: Served, producer: Producer, prompts: list[list[int]], adapter: str = "") -> None:
    rows = await producer.batch_logprobs(prompts, adapter=adapter)
    expected = np.stack([served.subject.reference(ids, adapter) for ids in prompts])
    assert np.abs(rows - expected).max() <= served.subject.tolerance


@pytest.mark.parametrize(
    ("ids", "kind"),
    [
        ([5] * 5000, "PromptTooLong"),
        ([1, V], "TokenOutOfRange"),
        ([2**32 - 1], "TokenOutOfRange"),
        ([], "EmptyPrompt"),
    ],
    ids=["too long", "beyond V", "far beyond V", "empty"],
)
def test_a_prompt_that_the_model_cannot_take_never_reaches_the_engine(
    served: Served, ids: list[int], kind: str
) -> None:
    assert served.failure_of(np.asarray(ids, "<u4").tobytes()).kind == kind
    until(lambda: served.states() == ["ready"], "the worker serves")


def test_malformed_ids_and_unknown_adapters_are_refused(served: Served) -> None:
    assert served.failure_of(b"abcde").kind == errors.NotTokenIds.__name__
    failure = served.failure_of(b"\x01\0\0\0", "nobody's")
    assert failure.kind == errors.UnknownAdapter.__name__
    assert "nobody's" in failure.text
    until(lambda: served.states() == ["ready"], "the worker serves")


async def test_a_stopping_worker_finishes_its_prompts_in_flight(served: Served) -> None:
    draw = random.Random(101)
    async with served.pool.producer(NAME) as producer:
        prompts = [prompt(draw, 100) for _ in range(8)]
        asked = asyncio.ensure_future(producer.batch_logprobs(prompts))

        async def is_taken() -> bool:
            return served.pool.held(NAME) > 0 or asked.done()

        await until_async(is_taken, "the worker has taken the prompts")
        served.worker.signal(signal.SIGTERM)
        rows = await asked
    expected = np.stack([served.subject.reference(ids, "") for ids in prompts])
    assert np.abs(rows - expected).max() <= served.subject.tolerance
    assert await asyncio.to_thread(served.worker.wait) == 0
    assert "Traceback" not in served.worker.text
    assert served.states() == []
