"""If a query makes a worker's code raise, only this query fails: the worker and its other prompts continue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lmpool.broker.server import Server
from lmpool.errors import WorkerError
from lmpool.producer import Producer
from lmpool.protocol.job import digest_of
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.query import HeadQuery, PositionsQuery, unpack_query
from lmpool.synthetic import synthetic_row
from lmpool.workers.backends.row_encoder import PositionAnswers
from lmpool.workers.backends.synthetic import SyntheticBackend, SyntheticSettings
from lmpool.workers.execution.contract import BackendJob
from lmpool.workers.execution.engine_thread import EngineThread
from lmpool.workers.execution.in_flight import InFlightPrompt
from lmpool.workers.settings import WorkerSettings
from lmpool.workers.worker import Worker
from tests.support.pool import DEADLINE_S, Pool, Prepared, V, until_async

PROMPT = [1, 2, 3]
SYNTHETIC = "lmpool.workers.backends.synthetic.SyntheticBackend"


class WithHead(SyntheticBackend):
    """A backend that announces hidden states and an output head in its info, and raises in `head`."""

    def __init__(self) -> None:
        super().__init__(SyntheticSettings("syn", vocab_size=V))

    @property
    def info(self) -> ModelInfo:
        return replace(super().info, hidden=4)

    def head(self, query: HeadQuery, adapter: str) -> NDArray[np.float32]:
        return raising(query)


def raising(*_: object, **__: object) -> NoReturn:
    raise TypeError("unexpected\nand more")


class Kind(NamedTuple):
    """A kind of query.

    Attributes:
        request: function that sends a query of this kind.
        broken: path of a function that the test replaces by one that raises, or None if the backend always raises.
        can_answer: whether the backend of these tests can answer the query when nothing raises.
    """

    request: Callable[[Producer], Awaitable[Any]]
    broken: str | None = None
    can_answer: bool = True


async def values_of_nodes(producer: Producer) -> Any:
    trie = await producer.trie([bytes([at % 256, at // 256]) for at in range(V)])
    return await trie.weight_sum(prompt=PROMPT)


KINDS = {
    "top": Kind(lambda producer: producer.topk(PROMPT, 3), "lmpool.protocol.picks.top"),
    "top-of-allowed": Kind(lambda producer: producer.topk(PROMPT, 3, allowed=[1, 2, 3]), "lmpool.protocol.picks.top"),
    "sample": Kind(lambda producer: producer.sample(PROMPT, seed=1), "lmpool.protocol.picks.sample"),
    "sample-of-allowed": Kind(
        lambda producer: producer.sample(PROMPT, seed=1, allowed=[1, 2]), "lmpool.protocol.picks.sample"
    ),
    "mass": Kind(lambda producer: producer.mass(PROMPT, [1, 2]), "lmpool.protocol.picks.mass_of"),
    "entries": Kind(lambda producer: producer.logprobs(PROMPT, targets=[1]), "lmpool.protocol.picks.tempered"),
    "generate": Kind(lambda producer: producer.generate(PROMPT, 5), "lmpool.workers.execution.yielding.sample"),
    "scores": Kind(lambda producer: producer.score(PROMPT, [4, 5]), "lmpool.protocol.query.PositionsQuery.of"),
    "score-logits": Kind(
        lambda producer: producer.score(PROMPT, [4], mode="logits"), "lmpool.protocol.query.PositionsQuery.of"
    ),
    "positions-top": Kind(
        lambda producer: producer.positions(PROMPT, top=3), "lmpool.protocol.query.PositionsQuery.of"
    ),
    "positions-targets": Kind(
        lambda producer: producer.positions(PROMPT, targets=[1]), "lmpool.protocol.query.PositionsQuery.of"
    ),
    "positions-rows": Kind(
        lambda producer: producer.positions(PROMPT, full=True), "lmpool.protocol.query.PositionsQuery.of"
    ),
    "positions-of-allowed": Kind(
        lambda producer: producer.topk(PROMPT, 1, allowed=[1, 2], mode="logits"),
        "lmpool.protocol.query.PositionsQuery.among",
    ),
    "logits": Kind(
        lambda producer: producer.logprobs(PROMPT, mode="logits"), "lmpool.protocol.query.PositionsQuery.of"
    ),
    "logz": Kind(lambda producer: producer.logz(PROMPT), "lmpool.protocol.query.PositionsQuery.of"),
    "hidden": Kind(
        lambda producer: producer.hidden(PROMPT), "lmpool.protocol.query.PositionsQuery.of", can_answer=False
    ),
    "head": Kind(lambda producer: producer.head(), can_answer=False),
    "trie": Kind(values_of_nodes, "lmpool.workers.trie._select"),
}


@asynccontextmanager
async def serving(pool: Pool) -> AsyncIterator[asyncio.Task[None]]:
    """The task of a worker that runs in this process."""
    worker = Worker(
        Server(pool.url), Prepared(WithHead()), WorkerSettings(prefix=pool.prefix, shm_bytes=0, with_trie=True)
    )
    ready = asyncio.Event()
    running = asyncio.create_task(worker.run(lambda info: ready.set()))
    await asyncio.wait_for(ready.wait(), DEADLINE_S)
    yield running
    worker.stop()
    await asyncio.wait_for(running, DEADLINE_S)


def test_the_parameters_cover_every_kind_of_query() -> None:
    """`KINDS` has all kinds of queries that `unpack_query` reads, except "fresh", which is computed like any row."""
    tags = {"trie", "top", "sample", "mass", "entries", "positions", "generate", "head", "fresh"}
    names = {name.removesuffix("Query").lower() for name in unpack_query.__globals__ if name.endswith("Query")}
    assert names - {"pick", ""} == tags
    assert all(any(tag in kind for kind in KINDS) for tag in tags - {"fresh"})


@pytest.mark.parametrize("kind", KINDS)
async def test_a_query_that_raises_fails_alone(pool: Pool, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    request, broken, can_answer = KINDS[kind]
    async with serving(pool) as running, pool.producer() as producer:
        if broken is not None:
            monkeypatch.setattr(broken, raising)
        with pytest.raises(WorkerError, match="TypeError: unexpected"):
            await request(producer)
        assert np.array_equal(await producer.logprobs([7, 8]), synthetic_row([7, 8], vocab_size=V))
        assert not running.done()
        monkeypatch.undo()
        if can_answer:
            await request(producer)


async def test_an_exception_of_the_device_ends_the_worker() -> None:
    """After an error of the device (GPU), the worker could not compute any later query."""

    class Broken(WithHead):
        def head(self, query: HeadQuery, adapter: str) -> NDArray[np.float32]:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    broken: list[BaseException] = []
    engine_thread = EngineThread(Broken, lambda finished: None, broken.append)
    await asyncio.wait_for(engine_thread.start(), DEADLINE_S)
    engine_thread.submit([InFlightPrompt(bytes(16), bytes(4), head=HeadQuery("bias"))])

    async def is_broken() -> bool:
        return bool(broken)

    await until_async(is_broken, "the thread has ended")
    assert "illegal memory access" in str(broken[0])
    await asyncio.wait_for(engine_thread.close(), DEADLINE_S)


def test_positions_that_raise_fail_their_prompt_and_not_the_engines_step() -> None:
    ids = np.arange(4, dtype="<u4").tobytes()
    answers = PositionAnswers()
    for name, target in (("good", 1), ("bad", V)):
        targets = np.array([target], "<u4").tobytes()
        answers.open(name, BackendJob(digest_of(ids), ids, positions=PositionsQuery(0, targets=targets)))
    logits = torch.zeros(8, V)
    for name, row in (("good", 0), ("bad", 4)):
        answers.add(answers.wanted(name, range(2), row), row, logits[row : row + 2])
        answers.add(answers.wanted(name, range(2, 4), row + 2), row + 2, logits[row + 2 : row + 4])
    assert np.allclose(answers.take("good"), -np.log(V))
    failure = answers.take("bad")
    assert isinstance(failure, str)
    assert failure.startswith("RuntimeError: index 512 is out of bounds")
