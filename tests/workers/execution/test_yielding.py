"""Bulk prompts in a worker: interactive prompts are computed first, and no bulk prompt waits for ever."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from lmpool.protocol.job import decode_ids
from lmpool.protocol.query import HeadQuery
from lmpool.workers.execution.engine_thread import EngineThread
from lmpool.workers.execution.in_flight import DrawnTokens, InFlightPrompt
from lmpool.workers.execution.yielding import PATIENCE_STEPS, YieldingPrompts
from tests.support.gate import GatedBackend, OneByOne
from tests.workers.execution.test_engine_thread import Outcome, continuing, jobs, stepping

BATCH = 2


def bulk(*tokens: int) -> list[InFlightPrompt]:
    return jobs(*tokens, bulk=True)


class Steps:
    """An engine thread whose backend runs one step each time the test allows it.

    Attributes:
        engine_thread: the engine thread.
        outcome: record of the engine thread's callbacks.
        backend: backend of the engine thread.
    """

    def __init__(self, backend: GatedBackend, engine_thread: EngineThread, outcome: Outcome) -> None:
        self.backend = backend
        self.engine_thread = engine_thread
        self.outcome = outcome

    @property
    def computed(self) -> list[int]:
        """First token of each computed prompt, in the order of computation."""
        return [int(decode_ids(ids)[0]) for ids in self.backend.computed]

    async def let(self, steps: int) -> None:
        """Allow this many steps; after each, wait until the next step begins or no prompt is left."""
        for _ in range(steps):
            self.backend.is_stepping.clear()
            told = len(self.outcome.finished)
            self.backend.gate.let(1)
            await self.outcome.until(lambda told=told: len(self.outcome.finished) > told, "a step has passed")  # type: ignore[misc]
            idle = not self.engine_thread.owed
            await self.outcome.until(lambda idle=idle: idle or self.backend.is_stepping.is_set(), "the next has come")  # type: ignore[misc]

    async def begin(self, asked: list[InFlightPrompt]) -> None:
        """Submit the first prompts, and wait until their step has begun."""
        self.engine_thread.submit(asked)
        await self.outcome.until(self.backend.is_stepping.is_set, "a step has come to the gate")


@pytest.fixture
async def steps() -> AsyncIterator[Steps]:
    backend = GatedBackend(OneByOne(), BATCH)
    async with stepping(backend) as (engine_thread, outcome):
        yield Steps(backend, engine_thread, outcome)
        backend.gate.open()


async def test_interactive_prompts_go_before_bulk_prompts(steps: Steps) -> None:
    await steps.begin([*bulk(1, 2, 3, 4, 5), *jobs(10)])
    steps.engine_thread.submit(jobs(11, 12, 13))
    await steps.let(4)
    assert steps.computed == [10, 1, 11, 12, 13, 2, 3, 4]


async def test_bulk_prompts_run_in_turn_while_others_keep_submitting(steps: Steps) -> None:
    await steps.begin([*bulk(1, 2), *jobs(10, 11)])
    for step in range(PATIENCE_STEPS + BATCH):
        steps.engine_thread.submit(jobs(*(100 + BATCH * step + number for number in range(BATCH))))
        await steps.let(1)
    assert [steps.computed.index(number) // BATCH for number in (1, 2)] == [PATIENCE_STEPS, PATIENCE_STEPS + 1]


async def test_bulk_clients_alone_have_whole_steps(steps: Steps) -> None:
    await steps.begin(bulk(*range(1, 8)))
    await steps.let(4)
    assert steps.computed == list(range(1, 8))
    assert steps.backend.stats().steps == 4


async def test_without_interactive_clients_the_backend_gets_as_many_bulk_prompts_as_it_accepts(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    await steps.begin([*bulk(*range(1, 60)), *jobs(99)])
    await steps.let(PATIENCE_STEPS - 1)
    assert steps.backend.capacity() == BATCH, "what the step computes"
    monkeypatch.setattr("lmpool.workers.execution.yielding.QUIET_S", -1.0)
    await steps.let(2)
    assert steps.backend.capacity() == 0, "and what comes next"


async def test_a_yielding_bulk_prompt_becomes_interactive_when_another_client_joins(steps: Steps) -> None:
    prompts = [*bulk(1, 2, 3, 4, 5), *jobs(10)]
    await steps.begin(prompts)
    steps.engine_thread.promote([prompts[3], prompts[5], *jobs(77)])
    await steps.let(3)
    assert steps.computed == [10, 1, 4, 2, 3, 5]


async def test_a_yielding_prompt_without_a_client_is_dropped(steps: Steps) -> None:
    prompts = bulk(1, 2, 3, 4)
    await steps.begin([*prompts, *jobs(10)])
    steps.engine_thread.abort(prompts[1:3])
    await steps.let(2)
    assert steps.computed == [10, 1, 4]
    assert not steps.engine_thread.owed


async def test_a_yielding_prompt_whose_adapter_was_dropped_is_reported_as_stale(steps: Steps) -> None:
    (stale,) = bulk(2)
    stale.adapter = "a@1"
    await steps.begin([*bulk(1), stale, *jobs(10)])
    await steps.let(1)
    await steps.outcome.until(lambda: any(part.stale for part in steps.outcome.finished), "it is told")
    assert [part.stale for part in steps.outcome.finished if part.stale] == [[stale]]
    assert steps.computed == [10, 1]


@pytest.mark.parametrize("kind", ["bulk", "continuation"])
async def test_yielding_prompts_take_no_capacity_of_rows(steps: Steps, kind: str) -> None:
    engine_thread, count = steps.engine_thread, 3 * BATCH
    yielding = bulk(*range(1, count + 1)) if kind == "bulk" else [continuing(n) for n in range(1, count + 1)]
    assert engine_thread.capacity == 2 * BATCH
    await steps.begin(yielding)
    assert engine_thread.yielding == count
    assert engine_thread.capacity == BATCH, "what is left until it holds four batches that yield"
    engine_thread.abort(yielding[BATCH:])
    assert engine_thread.capacity == 2 * BATCH
    engine_thread.submit(jobs(10))
    assert engine_thread.capacity == 2 * BATCH - 1
    steps.backend.gate.open()
    await steps.outcome.until(lambda: not engine_thread.owed, "all are answered")
    assert engine_thread.capacity == 2 * BATCH
    assert engine_thread.yielding == 0


async def test_a_worker_that_holds_many_bulk_prompts_still_takes_the_next_job(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whose jobs are all bulk prompts must still read on: the next entry may be an interactive prompt."""
    engine_thread, seconds = steps.engine_thread, "lmpool.workers.execution.engine_thread._BEYOND_LIMIT_S"
    monkeypatch.setattr(seconds, 1e9)
    await steps.begin(bulk(*range(1, 4 * BATCH + 1)))
    assert engine_thread.capacity == 0, "it has taken one just now, and bulk clients are alone"
    monkeypatch.setattr(seconds, -1.0)
    assert engine_thread.capacity == 1
    monkeypatch.setattr(seconds, 1e9)
    engine_thread.submit(jobs(100))
    assert engine_thread.capacity == 1, "interactive clients ask"
    engine_thread.submit(bulk(*range(4 * BATCH + 1, 8 * BATCH + 1)))
    assert engine_thread.capacity == 0


async def test_a_row_waits_for_one_step_of_continuations(steps: Steps) -> None:
    await steps.begin([continuing(number, most=100) for number in range(1, 2 * BATCH + 1)])
    steps.engine_thread.submit(jobs(10))
    await steps.let(2)
    assert steps.computed[:BATCH] == [1, 2], "the step that was at the gate"
    assert steps.computed[BATCH] == 10


async def test_continuations_hold_a_batch_of_the_backend_at_most(steps: Steps) -> None:
    await steps.begin([continuing(number, most=3) for number in range(1, 3 * BATCH + 1)])
    await steps.let(3 * 3)
    assert steps.computed == [1, 2] * 3 + [3, 4] * 3 + [5, 6] * 3


async def test_continuations_progress_while_others_request_many_rows(steps: Steps) -> None:
    engine_thread, row = steps.engine_thread, 100
    await steps.begin([continuing(1, most=100), continuing(2, most=100), *jobs(10, 11)])
    for _ in range(20):
        count = max(0, engine_thread.capacity)
        engine_thread.submit(jobs(*range(row, row + count)))
        row += count
        await steps.let(1)
    assert sum(number < 10 for number in steps.computed) >= len(steps.computed) // 6


async def test_a_bulk_continuation_that_another_client_joins_goes_before_bulk_prompts(steps: Steps) -> None:
    continued = continuing(9, most=3, bulk=True)
    await steps.begin([*bulk(*range(1, 8)), continued])
    steps.engine_thread.promote([continued])
    await steps.let(4)
    assert steps.computed == [1, 2, 3, 4, 9, 5, 9, 6], "behind the step that the backend had already"


async def test_the_backend_holds_few_tokens_of_bulk_prompts_next_to_interactive_clients() -> None:
    long = [InFlightPrompt(bytes([number]) * 16, bytes(4 * 1500), bulk=True) for number in range(4)]
    yielding = YieldingPrompts(64)
    yielding.keep([*jobs(1), *long])
    assert yielding.next(held=1, continuations=0, bulk_tokens=0, capacity=128) == long[:1]
    assert yielding.next(held=1, continuations=0, bulk_tokens=1500, capacity=128) == []
    assert yielding.next(held=0, continuations=0, bulk_tokens=0, capacity=128) == long[1:2]


async def test_a_started_bulk_continuation_counts_as_one_token_of_that_limit() -> None:
    long = [continuing(number, bulk=True) for number in range(6)]
    yielding = YieldingPrompts(4)
    for prompt in long:
        prompt.ids = bytes(4 * 1500)
        prompt.drawn = DrawnTokens(frozenset(), (), [1], [])
    yielding.keep(jobs(1))
    yielding.keep_longer(long)
    assert yielding.next(held=0, continuations=0, bulk_tokens=0, capacity=8) == long[:4]


async def test_a_started_continuation_waits_for_its_turn_once(steps: Steps) -> None:
    continued = continuing(1, most=8, bulk=True)
    waiting = bulk(*range(2, 2 + 12 * BATCH))
    await steps.begin([continued, *waiting])
    await steps.let(6)
    lengths = [len(ids) // 4 for ids in steps.backend.computed if decode_ids(ids)[0] == 1]
    assert lengths == [1, 2, 3], "before those that came with it, behind the step that the backend has already"


async def test_a_bulk_continuation_ends_while_others_keep_submitting(steps: Steps) -> None:
    continued = continuing(1, most=3, bulk=True)
    await steps.begin([continued, *jobs(10, 11)])
    for step in range(PATIENCE_STEPS + 4 * BATCH):
        steps.engine_thread.submit(jobs(*(100 + BATCH * step + number for number in range(BATCH))))
        await steps.let(1)
    assert continued.digest in steps.outcome.digests()


async def test_a_head_query_of_a_bulk_client_is_no_row(steps: Steps) -> None:
    (of_head,) = bulk(1)
    of_head.head = HeadQuery("facts")
    steps.engine_thread.submit([of_head, *bulk(2)])
    await steps.outcome.until(lambda: of_head.digest in steps.outcome.digests(), "it ends")
    await steps.let(1)
    assert steps.computed == [2], "the backend of this test has no head, so the query fails without a row"
