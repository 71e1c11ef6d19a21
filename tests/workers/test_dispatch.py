"""A worker joins equal requests, drops prompts that no client waits for, and reads jobs up to its capacity."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace as replace_info
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from msgspec.structs import replace

from lmpool.errors import SourceMissing
from lmpool.protocol.job import Failure
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.query import TrieQuery
from lmpool.protocol.row import Encoding, RowBlock, VectorBlock
from lmpool.rows.segment import SegmentWriter
from lmpool.workers import dispatch as dispatch_module
from lmpool.workers.dispatch import Dispatcher, FetchLoop, Lifecycle, ResultQueue
from lmpool.workers.execution.contract import Finished
from lmpool.workers.execution.engine_thread import StepResult
from lmpool.workers.execution.in_flight import DrawnTokens, EntriesByDigest, InFlight, InFlightPrompt, StreamEntry
from lmpool.workers.membership.adapters import AdapterCache
from lmpool.workers.queries import QueryAnswerer
from lmpool.workers.queue.jobs import Taken
from tests.support.pool import DEADLINE_S

PROMPT, ANSWER = b"p" * 16, b"a" * 16
INFO = ModelInfo("m", "synthetic", vocab_size=4, max_prompt_tokens=8, revision="r", dtype="float32")
NO_SEGMENT = SegmentWriter(INFO, "w", 0)


def taken(*prompts: InFlightPrompt) -> Taken:
    return Taken(list(prompts), [])


def reading(
    entry_id: bytes, digest: bytes = PROMPT, *, query: TrieQuery | None = None, **changed: Any
) -> InFlightPrompt:
    """A prompt in flight, as read from one stream entry."""
    entry = StreamEntry(entry_id, digest if query is None else ANSWER, query=query)
    return InFlightPrompt(digest, bytes(4), entries={entry_id: entry}, has_query=query is not None, **changed)


class Recorder:
    """Stands in for a backend and a server, and records calls. By default no client waits for any job.

    Attributes:
        is_waited_for: one bool per job: whether a client waits for the job.
    """

    segment = NO_SEGMENT

    def __init__(self) -> None:
        self.submitted: list[bytes] = []
        self.promoted: list[bytes] = []
        self.aborted: list[bytes] = []
        self.ended: list[StreamEntry] = []
        self.published: list[bytes] = []
        self.checked: list[EntriesByDigest] = []
        self.is_waited_for = False
        self.during_check: Callable[[], Awaitable[None]] | None = None

    def submit(self, prompts: Sequence[InFlightPrompt]) -> None:
        for prompt in prompts:
            prompt.status = "pending"
        self.submitted += [prompt.digest for prompt in prompts]

    def promote(self, prompts: Sequence[InFlightPrompt]) -> None:
        for prompt in prompts:
            prompt.bulk = False
        self.promoted += [prompt.digest for prompt in prompts]

    def abort(self, prompts: Sequence[InFlightPrompt]) -> None:
        self.aborted += [prompt.digest for prompt in prompts]

    def published_answers(self, prompts: Sequence[InFlightPrompt]) -> None:
        """Ignore the call: this stand-in does not count the memory of results."""

    async def publish(self, block: RowBlock, entries: EntriesByDigest, overwrite: Collection[bytes]) -> None:
        self.published += block.digests

    async def fail(self, entries: Sequence[StreamEntry]) -> None:
        self.ended += entries

    async def still_wanted(self, entries: EntriesByDigest) -> EntriesByDigest:
        self.checked.append(entries)
        if self.during_check is not None:
            await self.during_check()
        return entries if self.is_waited_for else {}


def dispatching(recorder: Recorder) -> tuple[Dispatcher, InFlight]:
    """A dispatcher, and its prompts in flight."""
    ends, none = cast(Any, recorder), cast(Any, None)
    engine = cast(
        Any,
        SimpleNamespace(
            submit=recorder.submit, promote=recorder.promote, abort=recorder.abort, published=recorder.published_answers
        ),
    )
    in_flight: InFlight = {}
    queries = QueryAnswerer(none, ends, INFO, none, none)
    adapters = AdapterCache(none, none, {}, 0, none, "w", in_flight)
    return Dispatcher(Lifecycle(), in_flight, engine, queries, adapters), in_flight


async def test_a_request_for_the_row_that_joins_queries_is_computed_and_not_dropped() -> None:
    recorder = Recorder()
    dispatcher, in_flight = dispatching(recorder)
    await dispatcher.accept(taken(reading(b"1-0", query=TrieQuery("sum", "0" * 32, "inner"))))
    await dispatcher.accept(taken(reading(b"2-0")))
    preparing = asyncio.create_task(dispatcher.prepare())
    async with asyncio.timeout(10):
        await dispatcher.lifecycle.wait_for_change()
    preparing.cancel()
    assert recorder.submitted == [PROMPT]
    assert set(in_flight[PROMPT].entries) == {b"1-0", b"2-0"}


async def test_a_request_for_a_row_that_joins_a_query_while_another_row_is_published_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rows of both prompts are in this worker's shared memory."""
    recorder, other, is_publishing, may_end = Recorder(), b"o" * 16, asyncio.Event(), asyncio.Event()
    dispatcher, in_flight = dispatching(recorder)

    async def publish_rows(*_: object) -> None:
        is_publishing.set()
        await may_end.wait()

    async def answer(*_: object) -> None:
        """The query is answered."""

    monkeypatch.setattr(dispatcher, "_find_row", lambda prompt, digest: object())
    monkeypatch.setattr(dispatcher, "_publish_rows", publish_rows)
    monkeypatch.setattr(dispatcher.queries, "answer", answer)
    query = TrieQuery("sum", "0" * 32, "inner")
    prompts = reading(b"1-0", query=query), reading(b"2-0", other, query=query)
    for prompt in prompts:
        in_flight[prompt.digest] = prompt
    await dispatcher.accept(taken(reading(b"3-0")))
    answering = asyncio.create_task(dispatcher._answer_from_rows(prompts))
    await asyncio.wait_for(is_publishing.wait(), DEADLINE_S)
    await dispatcher.accept(taken(reading(b"4-0", other)))
    may_end.set()
    await answering
    assert list(in_flight[other].entries) == [b"4-0"]
    assert in_flight[other] in dispatcher._to_prepare.get_nowait()


async def test_a_bulk_prompt_becomes_interactive_when_another_client_joins() -> None:
    recorder = Recorder()
    dispatcher, in_flight = dispatching(recorder)
    await dispatcher.accept(taken(reading(b"1-0", bulk=True), reading(b"2-0", bulk=True)))
    assert (recorder.submitted, recorder.promoted) == ([PROMPT], [])
    assert in_flight[PROMPT].bulk
    await dispatcher.accept(taken(reading(b"3-0")))
    assert (recorder.submitted, recorder.promoted) == ([PROMPT], [PROMPT])
    assert list(in_flight[PROMPT].entries) == [b"1-0", b"2-0", b"3-0"]


async def test_queries_are_refused_by_a_worker_without_tries() -> None:
    recorder = Recorder()
    dispatcher, in_flight = dispatching(recorder)
    await dispatcher.accept(taken(reading(b"1-0", query=TrieQuery("sum", "0" * 32, "inner"))))
    preparing = asyncio.create_task(dispatcher.prepare())
    async with asyncio.timeout(10):
        await dispatcher.lifecycle.wait_for_change()
    preparing.cancel()
    assert [(entry.id, entry.digest, entry.failure.kind if entry.failure else "") for entry in recorder.ended] == [
        (b"1-0", ANSWER, SourceMissing.__name__)
    ]
    assert len(in_flight) == 0
    assert recorder.submitted == []


# Prompts without a client


@pytest.fixture
def checks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the dispatcher check prompts of any age for a waiting client."""
    monkeypatch.setattr(dispatch_module, "STALE_S", -1.0)


async def test_prompts_that_have_just_arrived_are_not_checked() -> None:
    recorder = Recorder()
    dispatcher, in_flight = dispatching(recorder)
    await dispatcher.accept(taken(reading(b"1-0")))
    assert await dispatcher.drop_unwanted() == 0
    assert not recorder.checked
    assert PROMPT in in_flight


def many_prompts(count: int) -> list[InFlightPrompt]:
    """Different prompts."""
    return [reading(b"%d-0" % at, at.to_bytes(16, "little")) for at in range(count)]


@pytest.mark.usefixtures("checks_at_once")
async def test_each_check_covers_some_prompts_and_every_prompt_is_checked_in_turn() -> None:
    recorder = Recorder()
    recorder.is_waited_for = True
    dispatcher, in_flight = dispatching(recorder)
    await dispatcher.accept(taken(*many_prompts(3 * dispatch_module.MAX_CHECKED - 1)))
    for _ in range(3):
        assert await dispatcher.drop_unwanted() == 0
    assert {len(jobs) for jobs in recorder.checked} == {dispatch_module.MAX_CHECKED}
    assert {digest for entries in recorder.checked for digest in entries} == set(in_flight)


@pytest.mark.usefixtures("checks_at_once")
async def test_an_old_prompt_is_checked_in_turn_while_many_new_prompts_arrive() -> None:
    recorder = Recorder()
    recorder.is_waited_for = True
    dispatcher, _ = dispatching(recorder)
    first, *others = many_prompts(1 + 4 * dispatch_module.MAX_CHECKED)
    await dispatcher.accept(taken(first))
    for at in range(0, len(others), dispatch_module.MAX_CHECKED):
        assert await dispatcher.drop_unwanted() == 0
        arrived = others[at : at + dispatch_module.MAX_CHECKED]
        for prompt in arrived:
            prompt.entries.update((at, replace(entry, since=time.monotonic())) for at, entry in prompt.entries.items())
        await dispatcher.accept(taken(*arrived))
    assert sum(first.digest in checked for checked in recorder.checked) > 1


async def test_one_check_drops_all_prompts_of_a_client_that_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = Recorder()
    recorder.is_waited_for = True
    dispatcher, in_flight = dispatching(recorder)
    prompts = many_prompts(3 * dispatch_module.MAX_CHECKED)
    await dispatcher.accept(taken(*prompts))
    now = time.monotonic()
    monkeypatch.setattr(dispatch_module, "time", SimpleNamespace(monotonic=lambda: now))
    for _ in range(100):
        now += 1
        assert await dispatcher.drop_unwanted() == 0
    recorder.is_waited_for = False
    now += 1
    assert await dispatcher.drop_unwanted() == len(prompts)
    assert not in_flight
    assert sorted(recorder.aborted) == sorted(prompt.digest for prompt in prompts)


@pytest.mark.usefixtures("checks_at_once")
async def test_a_prompt_without_a_waiting_client_is_dropped() -> None:
    recorder = Recorder()
    dispatcher, in_flight = dispatching(recorder)
    await dispatcher.accept(taken(reading(b"1-0")))
    assert await dispatcher.drop_unwanted() == 1
    assert recorder.aborted == [PROMPT]
    assert PROMPT not in in_flight


@pytest.mark.usefixtures("checks_at_once")
async def test_dropped_prompts_are_logged_at_once_and_then_once_a_minute_as_a_sum(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="lmpool.worker")
    dispatcher, _ = dispatching(Recorder())
    began = time.monotonic() + 10
    for second in (0, 1, 2, 59):
        await dispatcher.accept(taken(reading(b"1-0", bytes([second]) * 16)))
        monkeypatch.setattr(dispatch_module, "time", SimpleNamespace(monotonic=lambda second=second: began + second))
        assert await dispatcher.drop_unwanted() == 1
    line = "dropped {} prompts that no client waits for any more"
    assert caplog.messages == [line.format(1)]
    monkeypatch.setattr(dispatch_module, "time", SimpleNamespace(monotonic=lambda: began + 61))
    for _ in range(2):
        assert await dispatcher.drop_unwanted() == 0
    assert caplog.messages == [line.format(1), line.format(3)]


@pytest.mark.usefixtures("checks_at_once")
async def test_a_prompt_that_is_requested_again_during_the_check_stays() -> None:
    recorder = Recorder()
    dispatcher, in_flight = dispatching(recorder)
    await dispatcher.accept(taken(reading(b"1-0")))

    async def ask_again() -> None:
        await dispatcher.accept(taken(reading(b"2-0")))

    recorder.during_check = ask_again
    assert await dispatcher.drop_unwanted() == 0
    assert not recorder.aborted
    assert list(in_flight[PROMPT].entries) == [b"2-0"]


@pytest.mark.usefixtures("checks_at_once")
async def test_a_prompt_that_is_computed_during_the_check_is_published() -> None:
    recorder = Recorder()
    dispatcher, in_flight = dispatching(recorder)
    await dispatcher.accept(taken(reading(b"1-0")))

    async def answer() -> None:
        in_flight[PROMPT].status = "ended"

    recorder.during_check = answer
    assert await dispatcher.drop_unwanted() == 0
    assert not recorder.aborted
    assert list(in_flight[PROMPT].entries) == [b"1-0"]


# Results of several steps


def rows(*digests: bytes, encoding: Encoding = Encoding.F32) -> RowBlock:
    """Rows of four numbers, each filled with the first byte of its digest."""
    numbers = np.array([[digest[0]] * 4 for digest in digests], encoding.dtype)
    log_z = None if encoding is Encoding.F32 else np.array([digest[0] for digest in digests], np.float32)
    return RowBlock(list(digests), numbers, log_z, encoding)


def join(*steps: Finished) -> Finished:
    return dispatch_module._joined([StepResult(step) for step in steps])


@pytest.mark.parametrize("encoding", list(Encoding))
def test_joined_steps_equal_one_step(encoding: Encoding) -> None:
    # Both steps return a result for "x", because "x" was aborted and requested again between the steps.
    second = VectorBlock([b"y", b"x"], [np.ones(1, np.float32), np.zeros(2, np.float32)])
    answers = VectorBlock([b"x"], [np.zeros(2, np.float32)]), second
    steps = [
        Finished([rows(b"a", b"b", encoding=encoding)], {b"f": "no"}, answers[0]),
        Finished([rows(b"c", encoding=encoding)], {}),
        Finished([], {b"g": "neither"}, answers[1]),
    ]
    joined = join(*steps)
    (block,) = joined.blocks
    assert [block.encode(at) for at in range(3)] == [
        step.blocks[0].encode(at) for step, at in ((steps[0], 0), (steps[0], 1), (steps[1], 0))
    ]
    assert sorted(joined.digests) == [b"a", b"b", b"c", b"f", b"g", b"x", b"y"]
    assert joined.failures == {b"f": "no", b"g": "neither"}
    assert joined.answers is not None
    assert [vector.tolist() for vector in joined.answers.vectors] == [[0, 0], [1]]


def test_blocks_with_a_prompt_twice_or_of_different_encodings_are_not_joined() -> None:
    twice = [Finished([rows(b"a")], {}), Finished([rows(b"a", b"b")], {})]
    assert join(*twice).blocks == [block for step in twice for block in step.blocks]
    unlike = [Finished([rows(b"a")], {}), Finished([rows(b"b", encoding=Encoding.F16)], {})]
    assert len(join(*unlike).blocks) == 2
    assert join(Finished([], {}), Finished([], {})) == Finished([], {})


# Number of jobs to read at once


def fetch_loop(engine_thread: SimpleNamespace, info: ModelInfo) -> FetchLoop:
    """A fetch loop for an engine thread, without the other parts of a worker."""
    dispatcher = SimpleNamespace(lifecycle=Lifecycle(), in_flight={}, engine_thread=engine_thread, info=info)
    return FetchLoop(cast(Any, dispatcher), cast(Any, None), cast(Any, None))


@pytest.mark.parametrize(("step_s", "counts"), [(0.0001, [1, 2, 4, 4]), (0.01, [1, 2, 2, 2])], ids=["short", "long"])
async def test_one_read_takes_several_batches_only_if_a_step_is_shorter_than_a_read(
    step_s: float, counts: list[int]
) -> None:
    loop = fetch_loop(SimpleNamespace(batch=2, step_s=step_s), INFO)
    assert [loop._count_to_take(capacity) for capacity in (1, 2, 4, 5)] == counts


async def test_one_read_takes_one_batch_if_prompts_may_be_long() -> None:
    loop = fetch_loop(SimpleNamespace(batch=256, step_s=0.0001), replace_info(INFO, max_prompt_tokens=131_072))
    assert loop._count_to_take(1024) == 256


@pytest.mark.parametrize(("yielding", "takes"), [(0, 0), (8, 2)])
async def test_yielding_prompts_do_not_count_as_unpublished(yielding: int, takes: int) -> None:
    """The worker has four batches of two prompts in flight, and reads new jobs only if prompts yield to others."""
    loop = fetch_loop(SimpleNamespace(batch=2, capacity=2, yielding=yielding), INFO)
    loop.in_flight = cast(Any, range(8))
    assert loop._capacity_for_new() == takes


async def test_no_read_begins_while_a_task_waits_to_pause_the_loop() -> None:
    loop, reads = fetch_loop(SimpleNamespace(batch=2, capacity=2, step_s=1, yielding=0), INFO), list[int]()

    async def end_read() -> None:
        """Do nothing: no read is in flight."""

    async def take(count: int, block_ms: int) -> Taken:
        reads.append(count)
        return taken()

    async def accept(_: Taken) -> None:
        """Do nothing: the reads return no job."""

    async def pause() -> None:
        async with loop.paused():
            assert reads == []

    loop.consumer = cast(Any, SimpleNamespace(end_read=end_read, take=take, woken_ms=None))
    cast(Any, loop.dispatcher).accept = accept
    async with loop.paused():
        tasks = [asyncio.create_task(part()) for part in (loop._take, pause)]
        await asyncio.sleep(0)  # Both tasks wait for the lock, the read first.
        waiters: Any = loop._taking._waiters
        assert len(waiters) == 2
    await asyncio.wait_for(asyncio.gather(*tasks), DEADLINE_S)
    assert reads == []
    await loop._take()
    assert reads == [2]


async def test_an_error_is_retrieved_if_the_worker_ends_while_it_waits_to_pause_the_loop() -> None:
    loop, unread, may_fail = fetch_loop(SimpleNamespace(batch=2), INFO), list[object](), asyncio.Event()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unread.append(context))

    async def end_read() -> None:
        await may_fail.wait()
        raise ConnectionError("the connection was cut")

    async def pause() -> None:
        async with loop.paused():
            raise AssertionError("the lock is not free")

    loop.consumer = cast(Any, SimpleNamespace(end_read=end_read))
    async with loop._taking:
        pausing = asyncio.create_task(pause())
        while not cast(Any, may_fail)._waiters:  # noqa: ASYNC110  # The task above has not begun yet.
            await asyncio.sleep(0)
        may_fail.set()
        await asyncio.sleep(0)
        pausing.cancel()
        await asyncio.wait([pausing])
    del pausing
    gc.collect()
    assert not unread


class Suspect:
    """A queue with a prompt that must run alone; the prompt stays in the queue until another worker claims it.

    Attributes:
        is_there: whether the prompt is still in the queue.
        asked: for each claim call, the entries that the worker held.
    """

    def __init__(self) -> None:
        self.is_there = True
        self.asked: list[int] = []

    async def claim(self, count: int, in_flight: Sequence[bytes]) -> tuple[Taken, bool, int]:
        self.asked.append(len(in_flight))
        return Taken([], []), self.is_there, 0


@pytest.mark.parametrize("ends", [False, True], ids=["goes on", "ends"])
async def test_a_prompt_that_must_run_alone_blocks_a_busy_worker_for_part_of_a_lease_at_most(ends: bool) -> None:
    loop = fetch_loop(
        SimpleNamespace(batch=2, capacity=2, yielding=0), replace_info(INFO, lease_s=3600.0 if ends else 0.03)
    )
    suspect, in_flight = Suspect(), {PROMPT: reading(b"1-0")}
    loop.leases, loop.in_flight = cast(Any, suspect), in_flight
    loop.consumer = cast(Any, SimpleNamespace(end_read=lambda: asyncio.sleep(0)))
    loop.dispatcher = cast(Any, SimpleNamespace(accept=lambda jobs: asyncio.sleep(0)))
    async with asyncio.timeout(DEADLINE_S):
        claiming = asyncio.create_task(loop.claim())
        if ends:
            while not suspect.asked:  # noqa: ASYNC110  # the task above goes on meanwhile
                await asyncio.sleep(0)
            assert loop._taking.locked()
            in_flight.clear()
            suspect.is_there = False
            loop.lifecycle.notify()
        else:
            while loop._taking.locked() or not suspect.asked:  # noqa: ASYNC110
                await asyncio.sleep(0)
            assert not claiming.done(), "first it takes new prompts for a while"
        await claiming
    assert suspect.asked == ([1, 0] if ends else [1]), "it tries again at the next claim, or when it is empty"
    assert not loop._taking.locked()


async def test_small_rows_are_published_together_and_large_rows_and_failures_do_not_wait() -> None:
    queue = ResultQueue(Lifecycle())
    large = RowBlock([b"l"], np.zeros((1, 20_000), np.float32), None, Encoding.F32)
    for finished in (Finished([rows(b"a")], {}), Finished([large], {}), Finished([], {b"f": "no"})):
        queue.put(StepResult(finished))
    assert [queue._small.qsize(), queue._large.qsize()] == [1, 2]


async def test_a_result_of_an_aborted_prompt_does_not_end_the_prompt_that_was_requested_again() -> None:
    recorder = Recorder()
    dispatcher, in_flight = dispatching(recorder)
    dispatcher.adapters = cast(Any, SimpleNamespace(failure_of=lambda adapter: Failure("AdapterChanged", "changed")))
    aborted, again = reading(b"1-0"), reading(b"2-0")
    await dispatcher.accept(taken(again))
    await dispatcher.publish([StepResult(Finished([rows(PROMPT)], {}), [aborted], [aborted])])
    assert in_flight == {PROMPT: again}
    await dispatcher.publish([StepResult(Finished([rows(PROMPT)], {}), [again], [aborted])])
    assert not in_flight
    assert not recorder.ended, "nothing has failed"


async def test_a_prompt_that_entries_joined_during_publishing_is_submitted_again_from_its_beginning() -> None:
    recorder = Recorder()
    dispatcher, in_flight = dispatching(recorder)
    prompt = reading(b"1-0", bulk=True)
    await dispatcher.accept(taken(prompt))
    prompt.ids, prompt.drawn, prompt.is_damaged = bytes(12), DrawnTokens(frozenset(), (), [0, 0], []), True

    async def publish(*_: object) -> None:
        await dispatcher.accept(taken(reading(b"2-0")))

    dispatcher.publisher = cast(Any, SimpleNamespace(publish=publish))
    await dispatcher.publish([StepResult(Finished([rows(PROMPT)], {}), [prompt])])
    assert recorder.submitted == [PROMPT, PROMPT]
    assert list(in_flight[PROMPT].entries) == [b"2-0"]
    again = in_flight[PROMPT]
    assert (again.ids, again.drawn, again.is_damaged, again.bulk) == (bytes(4), None, False, False)


async def test_a_query_that_joined_during_publishing_is_answered_from_the_stored_row() -> None:
    recorder = Recorder()
    dispatcher, _ = dispatching(recorder)
    prompt = reading(b"1-0")
    await dispatcher.accept(taken(prompt))
    asked: asyncio.Future[Sequence[InFlightPrompt]] = asyncio.get_running_loop().create_future()

    async def publish(*_: object) -> None:
        await dispatcher.accept(taken(reading(b"2-0", query=TrieQuery("sum", "0" * 32, "inner"))))

    async def answer(prompts: Sequence[InFlightPrompt]) -> dict[InFlightPrompt, Sequence[StreamEntry]]:
        asked.set_result(prompts)
        return {each: list(each.entries.values()) for each in prompts}

    dispatcher.publisher = cast(Any, SimpleNamespace(publish=publish))
    dispatcher.queries = cast(Any, SimpleNamespace(answer_from_cache=answer))
    await dispatcher.publish([StepResult(Finished([rows(PROMPT)], {}), [prompt])])
    preparing = asyncio.create_task(dispatcher.prepare())
    assert await asyncio.wait_for(asked, DEADLINE_S) == [prompt]
    assert recorder.submitted == [PROMPT], "the row is computed once"
    preparing.cancel()


async def test_a_damaged_row_is_replaced() -> None:
    recorder, overwritten = Recorder(), list[Collection[bytes]]()
    dispatcher, _ = dispatching(recorder)
    prompt = reading(b"1-0")
    await dispatcher.accept(taken(prompt))
    prompt.is_damaged = True

    async def publish(block: RowBlock, entries: EntriesByDigest, overwrite: Collection[bytes]) -> None:
        overwritten.append(overwrite)

    dispatcher.publisher = cast(Any, SimpleNamespace(publish=publish))
    await dispatcher.publish([StepResult(Finished([rows(PROMPT)], {}), [prompt])])
    assert overwritten == [{PROMPT}]
