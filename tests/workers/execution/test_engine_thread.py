"""A worker whose backend returns wrong results ends before it publishes them; other workers take over its jobs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from lmpool.broker.server import Server
from lmpool.errors import SettingsError, WorkerError
from lmpool.protocol.job import digest_of
from lmpool.protocol.query import GenerateQuery
from lmpool.protocol.row import Encoding, Row, RowBlock
from lmpool.synthetic import synthetic_row
from lmpool.workers.backends.synthetic import SyntheticBackend, SyntheticSettings
from lmpool.workers.execution.contract import Backend, Finished
from lmpool.workers.execution.engine_thread import EngineThread, StepResult
from lmpool.workers.execution.in_flight import InFlightPrompt
from lmpool.workers.execution.yielding import YieldingPrompts, advance, begin
from lmpool.workers.settings import WorkerSettings
from lmpool.workers.worker import Worker
from tests.support.gate import GatedBackend, OneByOne
from tests.support.pool import DEADLINE_S, Pool, Prepared, until_async

V = 64
FAIL = 50
STRANGER = bytes(range(16))

Spoil = Callable[[Finished], Finished]


class Faulty(SyntheticBackend):
    """A backend that returns changed results after some correct steps.

    Args:
        spoil: function that changes the result of a step.
        good: number of correct steps at the beginning.
        max_batch: max prompts in a step.
    """

    def __init__(self, spoil: Spoil, good: int = 0, max_batch: int = 32) -> None:
        super().__init__(SyntheticSettings(name="syn", vocab_size=V, fail_token=FAIL, max_batch=max_batch))
        self._spoil = spoil
        self._good = good

    def step(self) -> Finished:
        finished = super().step()
        self._good -= 1
        return finished if self._good >= 0 else self._spoil(finished)


def rows(digests: Iterable[bytes], vocab_size: int = V) -> RowBlock:
    """A valid block of rows for prompts with these digests."""
    digests = list(digests)
    return RowBlock(digests, np.full((len(digests), vocab_size), -np.log(vocab_size), "<f4"), None, Encoding.F32)


def digests_of(finished: Finished) -> list[bytes]:
    return [digest for block in finished.blocks for digest in block.digests]


def with_a_strangers_row(finished: Finished) -> Finished:
    return finished._replace(blocks=[*finished.blocks, rows([STRANGER])])


def with_a_strangers_failure(finished: Finished) -> Finished:
    return finished._replace(failures={STRANGER: "no"})


def with_rows_of_strangers_only(finished: Finished) -> Finished:
    return Finished([rows([STRANGER, bytes(16)])], {})


def with_each_block_twice(finished: Finished) -> Finished:
    return finished._replace(blocks=finished.blocks * 2)


def with_a_row_twice_in_a_block(finished: Finished) -> Finished:
    return Finished([rows([*digests_of(finished), digests_of(finished)[0]])], {})


def with_row_and_failure(finished: Finished) -> Finished:
    return finished._replace(failures={digests_of(finished)[-1]: "out of memory"})


def with_rows_of_another_length(finished: Finished) -> Finished:
    return Finished([rows(digests_of(finished), V + 1)], {})


def with_one_block_of_another_length(finished: Finished) -> Finished:
    first, *others = digests_of(finished)
    return Finished([rows(others), rows([first], V - 1)], {})


def with_logits_for_rows(finished: Finished) -> Finished:
    (block,) = finished.blocks
    return finished._replace(blocks=[RowBlock(block.digests, block.numbers + np.float32(30), None, Encoding.F32)])


def with_narrow_numbers_and_no_log_z(finished: Finished) -> Finished:
    numbers = (finished.blocks[0].numbers + np.float32(30)).astype(np.float16)
    return Finished([RowBlock(digests_of(finished), numbers, np.zeros(len(numbers), np.float32), Encoding.F16)], {})


TWICE = "has returned two results in one step for {} prompts, such as [0-9a-f]{{32}}$"
NOT_SUBMITTED = f"results for {{}} prompts that were not submitted, such as {STRANGER.hex()}$"
FAULTS: dict[str, tuple[Spoil, str]] = {
    "a stranger's row": (with_a_strangers_row, NOT_SUBMITTED.format(1)),
    "a stranger's failure": (
        with_a_strangers_failure,
        NOT_SUBMITTED.format(1),
    ),
    "strangers": (with_rows_of_strangers_only, NOT_SUBMITTED.format(2)),
    "a block twice": (with_each_block_twice, TWICE.format(3)),
    "a row twice in a block": (with_a_row_twice_in_a_block, TWICE.format(1)),
    "row and failure": (with_row_and_failure, TWICE.format(1)),
    "logits": (with_logits_for_rows, "has returned something that is not a row: the largest .* no log-probabilities$"),
    "no logZ": (with_narrow_numbers_and_no_log_z, "has returned something that is not a row: the largest"),
    "V + 1": (with_rows_of_another_length, rf"has returned rows of {V + 1} entries; its info says V = {V}$"),
    "V - 1 in one block": (with_one_block_of_another_length, rf"rows of {V - 1} entries; its info says V = {V}$"),
}


class Outcome:
    """Records the results and errors that an engine thread reports by its callbacks."""

    def __init__(self) -> None:
        self.finished: list[StepResult] = []
        self.broken: list[BaseException] = []

    def digests(self) -> list[bytes]:
        """Digests of the prompts whose rows or failures were reported."""
        return [digest for result in self.finished for digest in result.finished.digests]

    async def until(self, condition: Callable[[], bool], expected: str) -> None:
        """Wait until a condition holds."""

        async def met() -> bool:
            return condition()

        await until_async(met, expected)


@asynccontextmanager
async def stepping(backend: Backend) -> AsyncIterator[tuple[EngineThread, Outcome]]:
    """A started engine thread, and its callbacks."""
    outcome = Outcome()
    engine_thread = EngineThread(lambda: backend, outcome.finished.append, outcome.broken.append)
    await asyncio.wait_for(engine_thread.start(), DEADLINE_S)
    yield engine_thread, outcome
    await asyncio.wait_for(engine_thread.close(), DEADLINE_S)


def jobs(*tokens: int, bulk: bool = False) -> list[InFlightPrompt]:
    ids = [np.array([token], "<u4").tobytes() for token in tokens]
    return [InFlightPrompt(digest_of(data), data, bulk=bulk) for data in ids]


async def test_rows_and_failures_reach_the_event_loop() -> None:
    backend = SyntheticBackend(SyntheticSettings(vocab_size=V, fail_token=FAIL, max_batch=2))
    asked = jobs(1, 2, FAIL, 4, 5)
    async with stepping(backend) as (engine_thread, outcome):
        engine_thread.submit(asked)
        await outcome.until(lambda: len(outcome.digests()) == 5, "all are answered")
        assert not engine_thread.owed
    assert sorted(outcome.digests()) == sorted(job.digest for job in asked)
    assert not outcome.broken


@pytest.mark.parametrize(("spoil", "message"), FAULTS.values(), ids=FAULTS)
async def test_a_result_that_must_not_be_published_breaks_the_backend(spoil: Spoil, message: str) -> None:
    good, bad = jobs(1, 2, 3), jobs(4, 5, 6)
    async with stepping(Faulty(spoil, good=1)) as (engine_thread, outcome):
        engine_thread.submit(good)
        await outcome.until(lambda: len(outcome.digests()) == 3, "the good step is told")
        assert not outcome.broken
        engine_thread.submit(bad)
        await outcome.until(lambda: bool(outcome.broken), "the fault is told")
    (error,) = outcome.broken
    with pytest.raises(WorkerError, match=f"^the backend .*{message}"):
        raise error
    assert sorted(outcome.digests()) == sorted(job.digest for job in good), "nothing of the bad step is handed on"


@pytest.mark.parametrize("token", [1, FAIL], ids=["row", "failure"])
async def test_a_second_result_for_a_prompt_in_a_later_step_breaks_the_backend(token: int) -> None:
    (first,) = jobs(token)

    def again(finished: Finished) -> Finished:
        return finished._replace(blocks=[*finished.blocks, rows([first.digest])])

    async with stepping(Faulty(again, good=1)) as (engine_thread, outcome):
        engine_thread.submit([first])
        await outcome.until(lambda: len(outcome.digests()) == 1, "the first is answered")
        engine_thread.submit(jobs(2))
        await outcome.until(lambda: bool(outcome.broken), "the fault is told")
    assert first.digest.hex() in str(outcome.broken[0])
    assert outcome.digests() == [first.digest]


async def test_a_backend_that_breaks_while_it_is_idle_is_reported() -> None:
    class Idle(SyntheticBackend):
        def when_broken(self, report: Callable[[BaseException], object]) -> None:
            self.report = report

    backend, error = Idle(SyntheticSettings(vocab_size=V)), WorkerError("a process has ended")
    async with stepping(backend) as (_, outcome):
        threading.Thread(target=backend.report, args=(error,)).start()
        await outcome.until(lambda: outcome.broken == [error], "the error is reported")


async def test_results_before_a_step_that_breaks_are_reported() -> None:
    good, bad = jobs(1, 2), jobs(3, 4)
    async with stepping(Faulty(with_a_strangers_row, good=1, max_batch=2)) as (engine_thread, outcome):
        engine_thread.submit([*good, *bad])
        await outcome.until(lambda: bool(outcome.broken), "the fault is told")
        assert sorted(outcome.digests()) == sorted(job.digest for job in good)
        assert [job for job in [*good, *bad] if job.is_owed] == bad
        assert engine_thread.owed == len(bad)


async def test_the_results_of_a_step_do_not_wait_for_the_next_step() -> None:
    goes_on = threading.Event()
    first, second = jobs(1, 2)

    class Waiting(SyntheticBackend):
        def step(self) -> Finished:
            assert self.stats().steps == 0 or goes_on.wait(DEADLINE_S)
            return super().step()

    async with stepping(Waiting(SyntheticSettings(vocab_size=V, max_batch=1))) as (engine_thread, outcome):
        engine_thread.submit([first, second])
        await outcome.until(lambda: outcome.digests() == [first.digest], "the first is told")
        goes_on.set()
        await outcome.until(lambda: outcome.digests() == [first.digest, second.digest], "both are")


async def test_a_busy_event_loop_receives_several_steps_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, all_are_done = jobs(*range(10)), threading.Event()

    class Counted(SyntheticBackend):
        def step(self) -> Finished:
            finished = super().step()
            if self.stats().steps == len(asked):
                all_are_done.set()
            return finished

    async with stepping(Counted(SyntheticSettings(vocab_size=V, max_batch=1))) as (engine_thread, outcome):
        posts: list[object] = []
        loop = asyncio.get_running_loop()
        post = loop.call_soon_threadsafe
        monkeypatch.setattr(engine_thread, "_loop", SimpleNamespace(call_soon_threadsafe=posts.append))
        engine_thread.submit(asked)
        assert all_are_done.wait(DEADLINE_S)
        monkeypatch.undo()
        assert len(posts) == 1
        post(engine_thread._receive)
        await outcome.until(lambda: len(outcome.digests()) == len(asked), "all are told")
        assert not engine_thread.owed


async def test_a_prompt_that_is_submitted_again_may_have_another_result() -> None:
    asked = jobs(1)
    async with stepping(SyntheticBackend(SyntheticSettings(vocab_size=V))) as (engine_thread, outcome):
        engine_thread.submit(asked)
        await outcome.until(lambda: len(outcome.digests()) == 1, "it is answered")
        engine_thread.submit(asked)
        await outcome.until(lambda: len(outcome.digests()) == 2, "it is answered again")
    assert not outcome.broken


# In a pool


async def test_clients_of_a_worker_with_a_broken_backend_are_served_by_another_worker(pool: Pool) -> None:
    spoil, message = FAULTS["a stranger's row"]
    settings = WorkerSettings(pool.prefix, lease_s=0.5)
    worker = Worker(Server(pool.url), Prepared(Faulty(spoil)), settings)
    ready = asyncio.Event()
    first = asyncio.create_task(worker.run(lambda _: ready.set()))
    await asyncio.wait_for(ready.wait(), DEADLINE_S)
    async with pool.producer("syn") as producer:
        asked = [asyncio.create_task(producer.logprobs([token])) for token in range(20)]
        with pytest.raises(WorkerError, match=f"^the backend broke: the backend 'synthetic' .*{message}"):
            await asyncio.wait_for(first, DEADLINE_S)
        assert not pool.names("row:*"), "nothing was published"
        assert not any(request.done() for request in asked)
        healthy = Worker(Server(pool.url), SyntheticSettings(name="syn", vocab_size=V), settings)
        second = asyncio.create_task(healthy.run())
        for token, row in enumerate(await asyncio.wait_for(asyncio.gather(*asked), DEADLINE_S)):
            assert np.array_equal(row, synthetic_row([token], vocab_size=V))
    healthy.stop()
    await asyncio.wait_for(second, DEADLINE_S)
    assert pool.jobs() == 0


# Adapters


class Adapted(SyntheticBackend):
    """A backend that runs a step only when the test allows it, and whose adapters may raise errors."""

    def __init__(self, folder: Path) -> None:
        super().__init__(SyntheticSettings(name="syn", vocab_size=V, adapters=[f"a={folder}"]))
        self.may_step = threading.Event()
        self.is_stepping = threading.Event()
        self.stepped: list[bytes] = []

    def step(self) -> Finished:
        self.is_stepping.set()
        self.may_step.wait()
        finished = super().step()
        self.stepped += finished.digests
        return finished

    def load_adapter(self, name: str, source: str) -> str:
        if name == "broken":
            raise RuntimeError("the device is gone")
        return super().load_adapter(name, source)


def job(number: int, adapter: str = "") -> InFlightPrompt:
    return InFlightPrompt(bytes([number]) * 16, b"\1\0\0\0", adapter)


@asynccontextmanager
async def held_back(backend: Adapted) -> AsyncIterator[tuple[EngineThread, list[StepResult], list[BaseException]]]:
    finished: list[StepResult] = []
    broken: list[BaseException] = []
    engine_thread = EngineThread(lambda: backend, finished.append, broken.append)
    await engine_thread.start()
    try:
        yield engine_thread, finished, broken
    finally:
        backend.may_step.set()
        await engine_thread.close()


@pytest.fixture
def adapter_folder(tmp_path: Path) -> Path:
    (tmp_path / "weights").write_text("1")
    return tmp_path


async def test_a_call_fails_if_the_backend_breaks_before_it(adapter_folder: Path) -> None:
    backend = Adapted(adapter_folder)
    async with held_back(backend) as (engine_thread, _, broken):
        engine_thread.submit([job(0)])
        assert await asyncio.to_thread(backend.is_stepping.wait, DEADLINE_S)
        broken_call = asyncio.create_task(engine_thread.load_adapter("broken", ""))
        await asyncio.sleep(0)  # This call is queued first.
        waiting = asyncio.create_task(engine_thread.run("test", lambda _: None))
        await asyncio.sleep(0)
        backend.may_step.set()
        with pytest.raises(WorkerError, match="the device is gone"):
            await broken_call
        with pytest.raises(WorkerError, match="the backend broke: the device is gone"):
            await waiting
        with pytest.raises(WorkerError, match="the backend broke before the test: the device is gone"):
            await engine_thread.run("test", lambda _: None)
        assert [str(error) for error in broken] == ["the device is gone"]


async def test_jobs_of_a_dropped_adapter_are_returned_and_not_computed(adapter_folder: Path) -> None:
    backend = Adapted(adapter_folder)
    (adapter,) = backend.adapters
    async with held_back(backend) as (engine_thread, finished, _):
        engine_thread.submit([job(0)])
        # Submit the other jobs during this step, so that they wait in the backend when the adapter is dropped.
        assert await asyncio.to_thread(backend.is_stepping.wait, DEADLINE_S)
        engine_thread.submit([job(1, adapter), job(2), job(3, adapter)])
        engine_thread.drop_adapter(adapter)
        engine_thread.submit([job(4, adapter), job(5)])
        capacity = engine_thread.capacity
        backend.may_step.set()

        async def ended() -> bool:
            return not engine_thread.owed

        await until_async(ended, "all have ended")
        stale = {prompt.digest[0] for step in finished for prompt in step.stale}
        assert stale == {1, 3, 4}
        assert {digest[0] for digest in backend.stepped} == {0, 2, 5}
        assert engine_thread.capacity == capacity + 6


async def test_aborted_prompts_are_not_computed_and_can_be_submitted_again(adapter_folder: Path) -> None:
    backend = Adapted(adapter_folder)
    async with held_back(backend) as (engine_thread, _, broken):
        engine_thread.submit([first := job(0)])
        assert await asyncio.to_thread(backend.is_stepping.wait, DEADLINE_S)
        capacity = engine_thread.capacity
        prompts = [job(1), job(2), job(3)]
        engine_thread.submit(prompts)
        # Of the aborted prompts, the first is being computed and gets a result; the last was never submitted.
        engine_thread.abort([first, *prompts[:2], job(9)])
        engine_thread.submit([again := job(2)])
        assert [prompt.status for prompt in (first, *prompts, again)] == [
            "ended",
            "ended",
            "ended",
            "pending",
            "pending",
        ]
        assert engine_thread.owed == 2
        backend.may_step.set()

        async def ended() -> bool:
            return not engine_thread.owed and engine_thread.capacity == capacity + 1

        await until_async(ended, "all have ended and there is room again")
        assert not broken
        assert sorted(digest[0] for digest in backend.stepped) == [0, 2, 3]


async def test_loading_an_adapter_returns_its_revision_or_the_reason(adapter_folder: Path) -> None:
    backend = Adapted(adapter_folder)
    async with held_back(backend) as (engine_thread, _, broken):
        revision = await engine_thread.load_adapter("b", str(adapter_folder))
        assert f"b@{revision}" in backend.adapters
        with pytest.raises(SettingsError, match="cannot be read"):
            await engine_thread.load_adapter("c", str(adapter_folder / "none"))
        assert not broken, "an adapter that cannot be loaded is no fault of the backend"
        with pytest.raises(WorkerError, match="the backend broke during the load of .* the device is gone"):
            await engine_thread.load_adapter("broken", str(adapter_folder))

        async def is_broken() -> bool:
            return bool(broken)

        await until_async(is_broken, "the worker hears that its backend broke")


@pytest.mark.parametrize("text", ["list index out of range", "CUDA error: out of range"])
async def test_an_adapter_that_cannot_be_removed_stays_loaded_unless_the_device_is_broken(
    adapter_folder: Path, text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_: str) -> None:
        raise IndexError(text)

    backend = Adapted(adapter_folder)
    (adapter,) = backend.adapters
    monkeypatch.setattr(backend, "drop_adapter", fails)
    backend.may_step.set()
    async with held_back(backend) as (engine_thread, _, broken):
        engine_thread.drop_adapter(adapter)
        engine_thread.submit([job(1)])

        async def ended() -> bool:
            return bool(broken) or not engine_thread.owed

        await until_async(ended, "the prompt behind it has ended, or the worker must")
        assert [str(error) for error in broken] == ([text] if "CUDA" in text else [])
        assert ("cannot be dropped" in caplog.text) == (not broken)


async def test_the_step_time_is_that_of_the_longest_recent_step() -> None:
    engine_thread = EngineThread(lambda: cast(Backend, None), lambda _: None, lambda _: None)
    engine_thread.batch = 4
    told = []
    # Report six steps as (seconds, number of results); the fourth is the longest.
    for seconds, answers in ((0.02, 4), (0.0, 0), (0.001, 1), (0.03, 2), (0.001, 4), (0.001, 4)):
        engine_thread._note_step_time(seconds, answers)
        told.append(engine_thread.step_s)
    assert told == pytest.approx([0.02, 0.02, 0.02, 0.03, 0.027, 0.0243])


# Continuations


def continuing(*tokens: int, most: int = 5, **changed: Any) -> InFlightPrompt:
    """A prompt of these tokens whose continuation is requested."""
    ids = np.array(tokens, "<u4").tobytes()
    return InFlightPrompt(digest_of(ids, "continued"), ids, generate=GenerateQuery(most, 1.0, 1.0, 7), **changed)


def advancing(prompts: Iterable[InFlightPrompt], finished: Finished) -> tuple[Finished, list[InFlightPrompt]]:
    """Begin continuations of prompts, and draw their first tokens from the rows of a step."""
    by_digest = {prompt.digest: prompt for prompt in prompts}
    for prompt in prompts:
        assert prompt.generate is not None
        begin(prompt, prompt.generate)
    return advance(finished, by_digest)


async def test_a_promoted_continuation_becomes_interactive() -> None:
    yielding, promoted = YieldingPrompts(2), continuing(1, bulk=True)
    yielding.keep([promoted])
    assert yielding.promote([promoted]) == [], "it is not a row"
    promoted.bulk = False
    assert yielding.next(held=2, continuations=0, bulk_tokens=0, capacity=2) == [promoted]
    _, longer = advancing([promoted], Finished([rows([promoted.digest])], {}))
    assert longer == [promoted]
    yielding.keep_longer(longer)
    assert yielding.next(held=2, continuations=0, bulk_tokens=0, capacity=2) == longer


async def test_a_continuation_whose_adapter_was_dropped_is_returned_as_stale(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("1")
    backend = SyntheticBackend(SyntheticSettings(name="syn", vocab_size=V))
    async with stepping(backend) as (engine_thread, outcome):
        revision = await engine_thread.load_adapter("one", str(tmp_path))
        adapter = f"one@{revision}"
        engine_thread.submit([continuing(1, most=100_000, adapter=adapter)])
        engine_thread.submit([continuing(2, most=100_000, adapter=adapter, bulk=True)])
        engine_thread.drop_adapter(adapter)
        await outcome.until(lambda: not engine_thread.owed, "both come back as stale")
    assert not outcome.broken


async def test_rows_next_to_continuations_are_computed_in_shared_memory() -> None:
    gate, given = OneByOne(), list[Row]()
    backend = GatedBackend(gate, vocab_size=V)
    continued, others = continuing(1, most=4), jobs(5, 6)

    def new_rows(count: int, vocab_size: int, encoding: Encoding) -> Row:
        given.append(np.empty((count, vocab_size), encoding.dtype))
        return given[-1]

    async with stepping(backend) as (engine_thread, outcome):
        engine_thread.write_to(new_rows)
        engine_thread.submit([others[0], continued, others[1]])
        for steps in (1, 2):
            gate.let(1)
            await outcome.until(lambda: len(outcome.finished) == steps, "a step has passed")  # noqa: B023
        blocks = outcome.finished[0].finished.blocks
        assert [digest for block in blocks for digest in block.digests] == [job.digest for job in others]
        assert all(np.shares_memory(block.numbers, given[0]) for block in blocks)
        assert len(given) == 1, "what is of continuations alone needs none"
        gate.open()
        await outcome.until(lambda: not engine_thread.owed, "the continuation ends")


@pytest.mark.parametrize(("count", "are_in_place"), [(1, True), (4, True), (5, False)])
def test_rows_between_continuations_are_not_copied_if_that_makes_few_blocks(count: int, are_in_place: bool) -> None:
    made = [continuing(token) for token in range(count)]
    others = [(bytes([at]) * 16, bytes([at, 99]) * 8) for at in range(count)]
    digests = [digest for job, pair in zip(made, others, strict=True) for digest in (job.digest, *pair)]
    # Give all tokens of a row the same logit.
    numbers = np.repeat(np.arange(len(digests), dtype=np.float16)[:, None], V, axis=1)
    log_z = numbers[:, 0] + np.float32(np.log(V))
    finished, longer = advancing(made, Finished([RowBlock(digests, numbers, log_z, Encoding.F16)], {}))
    assert [job.digest for job in longer] == [job.digest for job in made]
    assert len(finished.blocks) == (count if are_in_place else 1)
    assert [digest for block in finished.blocks for digest in block.digests] == [one for pair in others for one in pair]
    for block in finished.blocks:
        assert np.shares_memory(block.numbers, numbers) is are_in_place
        for index, digest in enumerate(block.digests):
            assert block.numbers[index, 0] == digests.index(digest)
            assert np.allclose(block.row(index), -np.log(V))
