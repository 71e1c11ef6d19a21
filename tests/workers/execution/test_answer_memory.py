"""Unpublished results take a bounded amount of a worker's memory, for any number of requests."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from lmpool.protocol.job import digest_of
from lmpool.protocol.query import GenerateQuery, HeadQuery, PositionsQuery
from lmpool.synthetic import synthetic_row
from lmpool.workers.backends.synthetic import SyntheticBackend, SyntheticSettings
from lmpool.workers.execution import yielding
from lmpool.workers.execution.contract import BackendJob
from lmpool.workers.execution.in_flight import InFlightPrompt
from lmpool.workers.execution.yielding import AnswerMemory
from tests.support.gate import GatedBackend, OneByOne, gated_worker
from tests.support.pool import Pool, V
from tests.workers.execution.test_engine_thread import stepping

LENGTH = 40
ALL = PositionsQuery(0)
SIZE = 4 * LENGTH * V
INFO = replace(SyntheticBackend(SyntheticSettings("syn", vocab_size=V)).info, hidden=64)


@pytest.fixture(autouse=True)
def _room_for_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yielding, "MAX_ANSWER_BYTES", 3 * SIZE)


def job(
    number: int, wanted: PositionsQuery | GenerateQuery | HeadQuery | None = ALL, *, bulk: bool = False
) -> InFlightPrompt:
    ids = np.array([number] * LENGTH, "<u4").tobytes()
    prompt = InFlightPrompt(digest_of(ids, repr(wanted)), ids, bulk=bulk, status="pending")
    match wanted:
        case PositionsQuery():
            prompt.positions = wanted
        case GenerateQuery():
            prompt.generate = wanted
        case HeadQuery():
            prompt.head = wanted
    return prompt


def first_tokens(jobs: Iterable[InFlightPrompt]) -> list[int]:
    return [job.ids[0] for job in jobs]


def memory() -> AnswerMemory:
    return AnswerMemory(INFO)


def test_large_answers_wait_until_others_are_published() -> None:
    held, jobs = memory(), [job(number) for number in range(8)]
    assert first_tokens(held.admit(jobs[:5])) == [0, 1, 2]
    assert first_tokens(held.admit(jobs[5:])) == []
    # Drop a waiting prompt and publish a result: the result's memory admits the next waiting prompt.
    assert first_tokens([*held.drop([jobs[4]]), *held.free([jobs[1]])]) == [3]
    assert first_tokens(held.free([jobs[0], jobs[2]])) == [5, 6]
    assert first_tokens(held.free([jobs[at] for at in (3, 5, 6)])) == [7]
    assert held.free([jobs[7]]) == []
    assert first_tokens(held.admit(jobs[:1])) == [0]


@pytest.mark.parametrize(
    "wanted",
    [HeadQuery("weights", 0, 5 * V), GenerateQuery(LENGTH * V, 1.0, 1.0, 0), PositionsQuery(0, V // 2)],
    ids=["head", "continuation", "top"],
)
def test_the_limit_counts_bytes_of_every_kind_of_answer(wanted: PositionsQuery | GenerateQuery | HeadQuery) -> None:
    held = memory()
    count = len(held.admit([job(number, wanted) for number in range(20)]))
    assert 1 <= count < 10
    assert len(held.admit([job(number, wanted) for number in range(20, 40)])) == 0


def test_rows_and_small_answers_never_wait() -> None:
    held = memory()
    held.admit([job(number) for number in range(9)])
    small = [None, PositionsQuery(0, 5), GenerateQuery(9, 1.0, 1.0, 0), HeadQuery("facts")]
    jobs = [job(20, wanted) for wanted in small]
    assert list(held.admit([*jobs, job(24)])) == jobs


def test_an_answer_larger_than_the_limit_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yielding, "MAX_ANSWER_BYTES", SIZE - 1)
    held, jobs = memory(), [job(0), job(1)]
    assert first_tokens(held.admit(jobs)) == [0]
    assert first_tokens(held.free([jobs[0]])) == [1]


def test_large_answers_of_bulk_clients_wait_behind_the_others() -> None:
    held = memory()
    bulk = [job(number, bulk=True) for number in range(6)]
    assert first_tokens(held.admit(bulk)) == [0, 1, 2]
    assert first_tokens(held.admit([job(9)])) == []
    bulk[5].bulk = False
    held.promote([bulk[5], job(30)])
    admitted = held.free(bulk[:3])
    assert first_tokens(admitted) == [9, 5, 3], "one that yields no more waits behind those that never did"
    assert [job.bulk for job in admitted] == [False, False, True]


def test_a_prompt_that_is_submitted_again_during_publication_waits_and_counts_again() -> None:
    held, jobs = memory(), [job(number) for number in range(5)]
    assert first_tokens(held.admit(jobs[:4])) == [0, 1, 2]
    # Publish a result: it frees memory for one more prompt, and its prompt may be submitted again.
    assert first_tokens(held.free(jobs[:1])) == [3]
    assert first_tokens(held.admit(jobs[:1])) == [], "there is no room for its second answer yet"
    assert first_tokens(held.free(jobs[1:2])) == [0]
    assert first_tokens(held.admit(jobs[4:])) == []
    assert first_tokens(held.drop(jobs[:1])) == [4]


def test_the_cost_of_a_call_depends_on_the_admitted_prompts_only() -> None:
    def calls_of_next(waiting: int) -> int:
        held, calls = memory(), 0
        first, *others = [job(number) for number in range(4)]
        held.admit([first, *others, *(job(number, bulk=number % 2 == 0) for number in range(4, 4 + waiting))])

        def count(*_: object) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(count)
        try:
            admitted = held.free([first])
        finally:
            sys.setprofile(None)
        assert admitted == [others[-1]]
        return calls

    assert calls_of_next(1000) == calls_of_next(10)


async def test_the_backend_gets_only_prompts_whose_answers_fit_into_memory() -> None:
    class Noting(GatedBackend):
        given = 0

        def submit(self, jobs: Iterable[BackendJob]) -> None:
            jobs = list(jobs)
            self.given += sum(job.positions is not None for job in jobs)
            super().submit(jobs)

    backend, jobs = Noting(OneByOne(), batch=20), [job(number) for number in range(8)]
    backend.gate.open()
    async with stepping(backend) as (engine_thread, outcome):
        engine_thread.submit(jobs)
        assert engine_thread.owed == len(jobs)

        async def after(count: int) -> None:
            """Wait until `count` results are computed, then request a row, and wait until it is computed too."""
            await outcome.until(lambda: engine_thread.owed == 8 - count, "those are answered")
            engine_thread.submit([job(50 + count, None)])
            await outcome.until(lambda: engine_thread.owed == 8 - count, "and a row")

        await after(3)
        assert backend.given == 3, "none of these is published yet"
        engine_thread.abort([jobs[7]])
        assert jobs[7].status == "ended"
        engine_thread.published(jobs[:3])
        await outcome.until(lambda: engine_thread.owed == 1, "the next three are answered")
        engine_thread.published([jobs[4]])
        await outcome.until(lambda: not engine_thread.owed, "the last is")
        assert backend.given == 7
    assert not outcome.broken


async def test_many_large_answers_are_computed_one_after_the_other(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yielding, "MAX_ANSWER_BYTES", SIZE)
    backend = GatedBackend(OneByOne(), batch=4)
    backend.gate.open()
    async with gated_worker(pool, backend), pool.producer() as producer, pool.producer(priority="bulk") as bulk:
        texts = [[number, *range(LENGTH - 1)] for number in range(30)]
        asked = [producer.batch_positions(texts[:20], full=True), bulk.batch_positions(texts[10:], full=True)]
        for part, answers in zip((texts[:20], texts[10:]), await asyncio.gather(*asked), strict=True):
            for text, answer in zip(part, answers, strict=True):
                assert np.array_equal(np.asarray(answer.full)[-1], synthetic_row(text, vocab_size=V))
