"""Adapters: refused by name where there is none, told apart wherever rows are named, and never mixed on the way."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import Any

import msgpack
import numpy as np
import pytest
from numpy.typing import NDArray

from lmpool.card import MAX_ADAPTERS, ModelCard
from lmpool.errors import ModelMismatch, ProtocolError, UnknownAdapter
from lmpool.messages import Failure, Job, unpack_failure
from lmpool.producer import Producer, SyncProducer
from lmpool.prompts import digest_of, encode_prompt
from lmpool.rows import RowBlock
from lmpool.server import Server
from lmpool.synthetic import synthetic_row
from lmpool.workers import worker as worker_module
from lmpool.workers.backend import Backend, BackendJob, Finished
from lmpool.workers.backends.synthetic import SyntheticBackend, SyntheticSettings
from lmpool.workers.settings import WorkerSettings
from lmpool.workers.worker import Worker
from tests.pool import Pool, Prepared, until

V = 64
SHIFTS = {"": 0, "one": 1, "other": 2}
ADAPTERS = {"one": "0f", "other": "1e"}

Row = NDArray[np.float32]


class Adapted(SyntheticBackend):
    """Serves two adapters: their rows are those of the base, shifted."""

    def __init__(self, adapters: dict[str, str] = ADAPTERS) -> None:
        super().__init__(SyntheticSettings(name="syn", vocab_size=V, max_batch=8))
        self._adapters = adapters
        self._adapter_of: dict[bytes, str] = {}

    @property
    def card(self) -> ModelCard:
        return replace(super().card, adapters=self._adapters)

    def submit(self, jobs: Iterable[BackendJob]) -> None:
        jobs = list(jobs)
        self._adapter_of |= {job.digest: job.adapter for job in jobs}
        super().submit(jobs)

    def step(self) -> Finished:
        finished = super().step()
        return finished._replace(blocks=[self._shifted(block) for block in finished.blocks])

    def _shifted(self, block: RowBlock) -> RowBlock:
        shifts = [SHIFTS[self._adapter_of.pop(digest)] for digest in block.digests]
        rows = [np.roll(row, shift) for row, shift in zip(block.numbers, shifts, strict=True)]
        return replace(block, numbers=np.stack(rows))


@pytest.fixture(autouse=True)
def _short_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that waits for prompts hears of its end only between two reads."""
    monkeypatch.setattr(worker_module, "_BLOCK_MS", 20)


def expected(ids: list[int], adapter: str) -> Row:
    return np.roll(synthetic_row(ids, vocab_size=V), SHIFTS[adapter])


@asynccontextmanager
async def serving(pool: Pool, backend: Backend) -> AsyncIterator[Worker]:
    """A worker in this process."""
    worker = Worker(Server(pool.url), Prepared(backend), WorkerSettings(pool.prefix))
    ready = asyncio.Event()
    running = asyncio.create_task(worker.run(lambda _: ready.set()))
    await asyncio.wait_for(ready.wait(), 10)
    yield worker
    worker.stop()
    await asyncio.wait_for(running, 10)


# Rows


async def test_rows_of_adapters_are_never_mixed(pool: Pool) -> None:
    asked = [(ids, adapter) for ids in ([1], [2], [1, 2], [2, 1]) for adapter in SHIFTS] * 2
    backend = Adapted()
    async with serving(pool, backend):
        for cache_bytes in (2**20, 0):
            async with pool.producer("syn", cache_bytes=cache_bytes) as producer:
                assert producer.model.adapters == ADAPTERS
                for _ in range(2):
                    rows = await asyncio.gather(*(producer.logprobs(ids, adapter=adapter) for ids, adapter in asked))
                    for (ids, adapter), row in zip(asked, rows, strict=True):
                        assert np.array_equal(row, expected(ids, adapter)), (ids, adapter)
        assert backend.stats().rows == len(asked) // 2, "each was computed once, for both producers"


async def test_a_batch_is_of_one_adapter(pool: Pool) -> None:
    prompts = [[1], [2, 3], [1]]
    async with serving(pool, Adapted()), pool.producer() as producer:
        for adapter in ("other", "", "one"):
            rows = await producer.batch_logprobs(prompts, adapter=adapter)
            assert np.array_equal(rows, [expected(ids, adapter) for ids in prompts])


async def test_prompts_without_an_adapter_are_those_of_the_base(pool: Pool) -> None:
    async with serving(pool, Adapted()), pool.producer() as producer:
        await producer.logprobs([1], adapter="one")
        assert np.array_equal(await producer.logprobs([1]), expected([1], ""))
        assert np.array_equal((await producer.batch_logprobs([[1]]))[0], expected([1], ""))
        assert producer.stats().local_hits == 1


async def test_adapters_without_asyncio(pool: Pool) -> None:
    def ask() -> dict[str, tuple[Row, Row]]:
        with SyncProducer("syn", redis=pool.url, prefix=pool.prefix) as producer:
            return {
                adapter: (
                    producer.logprobs([1, 2], adapter=adapter),
                    producer.batch_logprobs([[1, 2], [3]], adapter=adapter),
                )
                for adapter in SHIFTS
            }

    async with serving(pool, Adapted()):
        for adapter, (row, rows) in (await asyncio.to_thread(ask)).items():
            assert np.array_equal(row, expected([1, 2], adapter))
            assert np.array_equal(rows, [expected([1, 2], adapter), expected([3], adapter)])


# Refusals

Ask = Callable[[Producer, str], Any]

WAYS: dict[str, Ask] = {
    "logprobs": lambda producer, adapter: producer.logprobs([1], adapter=adapter),
    "batch_logprobs": lambda producer, adapter: producer.batch_logprobs([[1], [2]], adapter=adapter),
}


@pytest.mark.parametrize("ask", WAYS.values(), ids=WAYS)
async def test_a_producer_refuses_an_adapter_that_there_is_not(pool: Pool, ask: Ask) -> None:
    async with serving(pool, Adapted()), pool.producer() as producer:
        adapters: list[Any] = ["two", "One", "one ", "on", "x" * 1000, "\ud800", None, 0, 5, [], ["one"], b"one"]
        for adapter in adapters:
            with pytest.raises(UnknownAdapter) as caught:
                await ask(producer, adapter)
            text = str(caught.value)
            assert text.startswith("the model 'syn' has no adapter ")
            assert text.endswith("; it has: one, other")
            assert len(text) < 400
        assert producer.stats().requests == 0
    assert pool.jobs() == 0


@pytest.mark.parametrize("ask", WAYS.values(), ids=WAYS)
async def test_a_model_without_adapters_says_so(pool: Pool, ask: Ask) -> None:
    async with serving(pool, Adapted({})), pool.producer() as producer:
        with pytest.raises(UnknownAdapter) as caught:
            await ask(producer, "one")
    assert str(caught.value) == "the model 'syn' has no adapter 'one'; it has: none"


def test_an_unknown_adapter_is_refused_without_asyncio(pool: Pool) -> None:
    pool.start()
    with SyncProducer(redis=pool.url, prefix=pool.prefix) as producer:
        with pytest.raises(UnknownAdapter, match="no adapter 'one'; it has: none"):
            producer.logprobs([1], adapter="one")
        with pytest.raises(UnknownAdapter, match="no adapter 'one'; it has: none"):
            producer.batch_logprobs([[1]], adapter="one")


def reply_to(pool: Pool, ids: bytes, adapter: str) -> dict[bytes, bytes]:
    """Have a job computed as a client would that checks nothing; returns what that client is told."""
    model = pool.keys.model("syn")
    card = ModelCard.unpack(pool.redis.hget(pool.keys.models(), "syn"))  # type: ignore[arg-type]
    digest, reply = digest_of(ids, adapter), model.reply("raw")
    pool.redis.hset(model.waiting + digest, reply, b"")
    pool.redis.xadd(model.jobs, {"m": Job(ids, adapter, card.fingerprint).pack()})
    (told,) = until(lambda: pool.redis.xrange(reply), "the client is told")
    fields: dict[bytes, bytes] = told[1]
    assert fields[b"d"] == digest
    return fields


def test_a_worker_refuses_a_job_that_names_an_unknown_adapter(pool: Pool) -> None:
    pool.start("--vocab-size", V)
    ids = encode_prompt([1], vocab_size=V, max_tokens=1).ids
    told = reply_to(pool, ids, "one")
    assert unpack_failure(told[b"e"]) == Failure(
        UnknownAdapter.__name__, "the model 'syn' has no adapter 'one'; it has: none"
    )
    until(lambda: pool.jobs() == 0, "the job has ended")
    assert not pool.redis.exists(pool.keys.model("syn").dead), "the job decodes, so it is no dead letter"
    with SyncProducer(redis=pool.url, prefix=pool.prefix) as producer:
        assert np.array_equal(producer.logprobs([1]), synthetic_row([1], vocab_size=V)), "it serves on"


async def test_a_worker_with_adapters_names_them_in_its_refusal(pool: Pool) -> None:
    ids = encode_prompt([1], vocab_size=V, max_tokens=1).ids
    async with serving(pool, Adapted()):
        told = await asyncio.to_thread(reply_to, pool, ids, "two")
    assert unpack_failure(told[b"e"]).text == "the model 'syn' has no adapter 'two'; it has: one, other"


async def test_a_worker_whose_adapter_has_other_weights_may_not_join(pool: Pool) -> None:
    other = Worker(Server(pool.url), Prepared(Adapted(ADAPTERS | {"one": "ff"})), WorkerSettings(pool.prefix))
    async with serving(pool, Adapted()):
        with pytest.raises(ModelMismatch, match=r"adapter: 'one@ff, other@1e', not 'one@0f, other@1e'"):
            await asyncio.wait_for(other.run(), 10)


# Names


def test_the_digest_of_a_prompt_is_another_one_for_each_adapter() -> None:
    names = ["", "one", "One", "one ", "other", "x" * 64, "x" * 65, "x" * 200]
    prompts = [encode_prompt([1, 2], vocab_size=V, max_tokens=9, adapter=name) for name in names]
    assert len({prompt.digest for prompt in prompts}) == len(names)
    assert {prompt.ids for prompt in prompts} == {prompts[0].ids}
    assert [prompt.adapter for prompt in prompts] == names
    assert [digest_of(prompt.ids, prompt.adapter) for prompt in prompts] == [prompt.digest for prompt in prompts]


CARD = Adapted().card


@pytest.mark.parametrize(
    "adapters",
    [
        {},
        ADAPTERS,
        {"ü ☃": "0f", "x" * 200: "y" * 200},
        {f"adapter-{number}": "0f" for number in range(MAX_ADAPTERS)},
    ],
    ids=lambda adapters: f"{len(adapters)}",
)
def test_the_card_carries_adapters_over_the_wire(adapters: dict[str, str]) -> None:
    card = replace(CARD, adapters=adapters)
    read = ModelCard.unpack(card.pack())
    assert read == card
    assert list(read.adapters) == list(adapters)
    assert read.fingerprint == card.fingerprint


MALFORMED: list[Any] = [
    None, "one", ["one"], [["one", "0f"]], 1, True, b"one",
    {b"one": "0f"}, {"one": b"0f"}, {"one": 1}, {"one": None}, {1: "0f"}, {"one": {"two": "0f"}}, {"one": ["0f"]},
    {"one": "0f", "other": 1}, {"": "0f"},
    {f"adapter-{number}": "0f" for number in range(MAX_ADAPTERS + 1)},
]  # fmt: skip


@pytest.mark.parametrize("adapters", MALFORMED, ids=lambda value: re.sub(r"\W+", " ", repr(value))[:30])
def test_a_card_with_malformed_adapters_is_refused(adapters: object) -> None:
    with pytest.raises(ProtocolError, match="a model card (has adapters = |does not decode: )"):
        ModelCard.unpack(msgpack.packb({**asdict(CARD), "adapters": adapters}))


def fingerprints(cards: Collection[dict[str, str]]) -> set[str]:
    return {replace(CARD, adapters=adapters).fingerprint for adapters in cards}


def test_the_fingerprint_changes_with_an_adapters_weights_and_name() -> None:
    different: list[dict[str, str]] = [
        {}, {"one": "0f"}, {"one": "ff"}, {"two": "0f"}, ADAPTERS, ADAPTERS | {"one": "ff"},
        {"one": "1e", "other": "0f"}, ADAPTERS | {"third": "0f"},
    ]  # fmt: skip
    assert len(fingerprints(different)) == len(different)


def test_the_fingerprint_does_not_depend_on_the_order_of_adapters() -> None:
    assert len(fingerprints([ADAPTERS, dict(reversed(ADAPTERS.items()))])) == 1
