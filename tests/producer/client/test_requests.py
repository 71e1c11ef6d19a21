"""Flights: one per prompt, any number of waiters on it, and counters that tell what became of each request."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from lmpool import errors
from lmpool.aio import Tasks, own
from lmpool.errors import CorruptRow, DeadlineExceeded, LMPoolError, NoWorker, QueueFull, ServerUnreachable, WorkerError
from lmpool.producer.client.connections import Adopted
from lmpool.producer.client.receive import Receiver
from lmpool.producer.client.requests import (
    Answer,
    BatchWaiter,
    Deadlines,
    PendingRequest,
    PendingRequests,
    ProducerStats,
    RowLRU,
    SingleWaiter,
    Stage,
)
from lmpool.producer.client.submit import Submitter
from lmpool.protocol.keys import Keys
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.prompt import Prompt, encode_prompt
from lmpool.rows.cache import Row
from tests.support.pool import DEADLINE_S


def prompt(*ids: int) -> Prompt:
    return encode_prompt(ids, vocab_size=100, max_tokens=10)


def row(value: float = 0.0) -> Row:
    return np.full(3, value, np.float32)


class Ear:
    """A waiter that remembers what it was told."""

    def __init__(self) -> None:
        self.heard: list[Answer] = []

    def __call__(self, answer: Answer) -> None:
        self.heard.append(answer)


class Desk:
    """A table with its cache and counters."""

    def __init__(self) -> None:
        self.cache = RowLRU(10_000)
        self.stats = ProducerStats()
        self.requests = PendingRequests(self.cache, self.stats)

    def counted(self) -> dict[str, int]:
        """The counters that are not zero."""
        return {name: count for name, count in asdict(self.stats).items() if count}


@pytest.fixture
def desk() -> Desk:
    return Desk()


# Boarding and leaving


def test_the_first_waiter_starts_a_request_and_the_next_ones_join_it(desk: Desk) -> None:
    request, is_new = desk.requests.board(prompt(1), Ear())
    assert is_new
    assert request.stage is Stage.UNSENT
    assert desk.requests.board(prompt(1), Ear()) == (request, False)
    assert desk.requests.board(prompt(1), Ear()) == (request, False)
    assert len(request.waiters) == 3
    assert len(desk.requests) == 1
    assert desk.counted() == {}, "nothing has ended"


def test_different_prompts_are_different_requests(desk: Desk) -> None:
    one, _ = desk.requests.board(prompt(1), Ear())
    two, is_new = desk.requests.board(prompt(1, 2), Ear())
    assert is_new
    assert one is not two
    assert desk.requests.get(prompt(1).digest) is one
    assert desk.requests.get(prompt(3).digest) is None
    assert list(desk.requests) == [one, two]


def test_a_request_ends_when_its_last_waiter_leaves(desk: Desk) -> None:
    first, second = Ear(), Ear()
    request, _ = desk.requests.board(prompt(1), first)
    desk.requests.board(prompt(1), second)
    assert desk.requests.leave(request, first) is False
    assert desk.requests.is_open(request)
    assert desk.requests.leave(request, second) is True
    assert not desk.requests.is_open(request)
    assert len(desk.requests) == 0
    assert desk.counted() == {"failed": 2}


def test_who_has_left_hears_nothing(desk: Desk) -> None:
    gone, stays = Ear(), Ear()
    request, _ = desk.requests.board(prompt(1), gone)
    desk.requests.board(prompt(1), stays)
    desk.requests.leave(request, gone)
    desk.requests.deliver([prompt(1).digest], [row()])
    assert (len(gone.heard), len(stays.heard)) == (0, 1)


def test_a_prompt_asked_for_again_after_all_have_left_is_a_new_request(desk: Desk) -> None:
    ear = Ear()
    old, _ = desk.requests.board(prompt(1), ear)
    desk.requests.leave(old, ear)
    new, is_new = desk.requests.board(prompt(1), Ear())
    assert is_new
    assert new is not old
    assert desk.requests.is_open(new)
    assert not desk.requests.is_open(old)


def test_requests_may_end_while_they_are_gone_through(desk: Desk) -> None:
    for i in range(5):
        desk.requests.board(prompt(i), Ear())
    for request in desk.requests:
        desk.requests.land(request, WorkerError("no"))
    assert len(desk.requests) == 0


# Landing


def test_a_row_reaches_every_waiter_once_and_stays_in_the_cache(desk: Desk) -> None:
    ears = [Ear() for _ in range(3)]
    for ear in ears:
        desk.requests.board(prompt(1), ear)
    found = row(1.0)
    desk.requests.deliver([prompt(1).digest], [found])
    desk.requests.deliver([prompt(1).digest], [found])
    assert [ear.heard for ear in ears] == [[found]] * 3
    assert desk.cache.get(prompt(1).digest) is found
    assert len(desk.requests) == 0


def test_a_failure_reaches_every_waiter_and_is_not_kept(desk: Desk) -> None:
    ears = [Ear(), Ear()]
    for ear in ears:
        request, _ = desk.requests.board(prompt(1), ear)
    desk.requests.land(request, WorkerError("no"))
    assert [[(type(heard), str(heard)) for heard in ear.heard] for ear in ears] == [[(WorkerError, "no")]] * 2
    assert len(desk.cache) == 0
    assert not desk.requests.is_open(request)
    assert desk.counted() == {"failed": 2}


def test_every_waiter_has_an_exception_of_its_own(desk: Desk) -> None:
    """Who adds a note to it, or raises it through many frames, changes nobody else's."""
    ears = [Ear() for _ in range(4)]
    requests = [desk.requests.board(prompt(1 + at // 2), ear)[0] for at, ear in enumerate(ears)]
    error = NoWorker("nobody")
    error.__cause__ = OSError("gone")
    error.add_note("told to all")
    for request in requests[::2]:
        desk.requests.land(request, error)
    heard = [one for ear in ears for one in ear.heard if isinstance(one, NoWorker)]
    assert len({id(one) for one in [*heard, error]}) == 5
    heard[0].add_note("mine")
    with pytest.raises(NoWorker):
        raise heard[1]
    assert heard[1].__traceback__ is not None
    for one in (heard[2], heard[3], error):
        assert (str(one), one.__cause__, one.__notes__) == ("nobody", error.__cause__, ["told to all"])
        assert one.__traceback__ is None


class Particular(LMPoolError):
    """An exception that is made from something else than its text."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


def test_every_exception_of_the_tree_can_be_made_again() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, LMPoolError)]
    assert len(kinds) > 20
    for error in [*(kind("why") for kind in kinds), Particular(7), TimeoutError(), OSError(2, "none", "here")]:
        other = own(error)
        assert other is not error
        assert type(other) is type(error)
        assert (str(other), other.args, vars(other)) == (str(error), error.args, vars(error))


@pytest.mark.parametrize("origin", ["cache_hits", "computed", "joined"])
def test_a_landing_is_counted_where_the_row_came_from(desk: Desk, origin: str) -> None:
    request, _ = desk.requests.board(prompt(1), Ear())
    request.origin = origin
    desk.requests.deliver([prompt(1).digest], [row()])
    assert desk.counted() == {origin: 1}


def test_a_row_comes_from_the_cache_unless_something_else_is_known(desk: Desk) -> None:
    for _ in range(3):
        desk.requests.board(prompt(1), Ear())
    desk.requests.deliver([prompt(1).digest], [row()])
    assert desk.counted() == {"cache_hits": 1, "joined": 2}


def test_nothing_in_the_cache_changes_nothing(desk: Desk) -> None:
    ear = Ear()
    request, _ = desk.requests.board(prompt(1), ear)
    desk.requests.deliver([prompt(1).digest], [None])
    assert desk.requests.is_open(request)
    assert ear.heard == []
    assert desk.counted() == {}


def test_a_row_that_nobody_waits_for_is_dropped(desk: Desk) -> None:
    desk.requests.deliver([prompt(1).digest], [row()])
    desk.requests.deliver([prompt(1).digest], [CorruptRow("bad")])
    assert len(desk.cache) == 0
    assert desk.counted() == {}


def test_landing_an_old_request_does_not_end_the_new_one_of_its_prompt(desk: Desk) -> None:
    ear = Ear()
    old, _ = desk.requests.board(prompt(1), ear)
    desk.requests.leave(old, ear)
    new, _ = desk.requests.board(prompt(1), Ear())
    desk.requests.land(old, WorkerError("late"))
    assert desk.requests.is_open(new)


# Damaged rows


def test_a_damaged_row_is_an_error_only_after_workers_were_asked_to_replace_it(desk: Desk) -> None:
    ear = Ear()
    request, _ = desk.requests.board(prompt(1), ear)
    for overwrites in (0, 0, 1):
        request.overwrites = overwrites
        desk.requests.deliver([prompt(1).digest], [CorruptRow("bad")])
        assert desk.requests.is_open(request)
        assert request.damaged
    request.overwrites = 2
    desk.requests.deliver([prompt(1).digest], [CorruptRow("still bad")])
    (last,) = ear.heard
    assert isinstance(last, CorruptRow)
    assert str(last) == "still bad"
    assert not desk.requests.is_open(request)
    assert desk.counted() == {"failed": 1}
    assert len(desk.cache) == 0


def test_a_mended_row_lands(desk: Desk) -> None:
    ear = Ear()
    desk.requests.board(prompt(1), ear)
    desk.requests.deliver([prompt(1).digest], [CorruptRow("bad")])
    found = row(2.0)
    desk.requests.deliver([prompt(1).digest], [found])
    assert ear.heard == [found]


# Another model


def test_after_a_restart_everything_is_sent_again_and_no_old_row_is_left(desk: Desk) -> None:
    for i, stage in enumerate(Stage):
        request, _ = desk.requests.board(prompt(i), Ear())
        request.stage = stage
    desk.cache.put(b"old", row())
    desk.requests.follow("other weights")
    assert [request.stage for request in desk.requests] == [Stage.UNSENT] * len(Stage)
    assert all(len(request.waiters) == 1 for request in desk.requests)
    assert len(desk.cache) == 0


# Waiters


async def test_a_single_waiter_gives_the_row() -> None:
    waiter, found = SingleWaiter(asyncio.get_running_loop(), 60.0), row()
    waiter(found)
    assert await waiter.future is found


async def test_a_single_waiter_raises_the_failure() -> None:
    waiter = SingleWaiter(asyncio.get_running_loop(), 60.0)
    waiter(DeadlineExceeded("late"))
    with pytest.raises(DeadlineExceeded, match="late"):
        await waiter.future


async def test_a_single_waiter_that_was_cancelled_ignores_the_answer() -> None:
    waiter = SingleWaiter(asyncio.get_running_loop(), 60.0)
    waiter.future.cancel()
    waiter(row())
    waiter(WorkerError("no"))
    assert waiter.future.cancelled()


async def test_waits_end_at_their_deadlines_unless_they_were_removed_before() -> None:
    loop = asyncio.get_running_loop()
    ended: asyncio.Queue[SingleWaiter] = asyncio.Queue()
    deadlines = Deadlines(loop, ended.put_nowait)
    first, second, removed, alone, patient = (SingleWaiter(loop, 60.0) for _ in range(5))
    soon = loop.time() + 0.05
    for waiter, until in ((first, soon), (second, soon), (removed, soon), (alone, soon + 0.02), (patient, soon + 9e8)):
        deadlines.add(waiter, until)
    deadlines.remove(removed)
    deadlines.remove(alone)
    assert {await asyncio.wait_for(ended.get(), DEADLINE_S) for _ in range(2)} == {first, second}
    for waiter in (first, second, patient):
        deadlines.remove(waiter)
    assert ended.empty()
    assert not deadlines._slots, "what has ended is kept by nobody"


async def test_a_wait_whose_deadline_has_passed_already_ends_at_once() -> None:
    loop = asyncio.get_running_loop()
    ended: asyncio.Queue[SingleWaiter] = asyncio.Queue()
    late = SingleWaiter(loop, 60.0)
    Deadlines(loop, ended.put_nowait).add(late, loop.time() - 60)
    assert await asyncio.wait_for(ended.get(), DEADLINE_S) is late


async def test_a_batch_is_done_with_its_last_row_whatever_the_order() -> None:
    batch = BatchWaiter(asyncio.get_running_loop(), 3, 3)
    for index in (2, 0):
        batch.at(index)(row(float(index)))
    assert not batch.future.done()
    batch.at(1)(row(1.0))
    assert batch.future.done()
    await batch.future
    assert batch.rows.dtype == np.float32
    assert batch.rows.tolist() == [[0.0] * 3, [1.0] * 3, [2.0] * 3]


async def test_a_batch_is_a_copy_that_its_owner_may_change() -> None:
    shared = row(1.0)
    shared.flags.writeable = False
    batch = BatchWaiter(asyncio.get_running_loop(), 2, 3)
    batch.at(0)(shared)
    batch.at(1)(shared)
    batch.rows[:] = 9.0
    assert shared.tolist() == [1.0] * 3


async def test_the_first_failure_ends_a_batch_and_what_comes_later_is_ignored() -> None:
    batch = BatchWaiter(asyncio.get_running_loop(), 3, 3)
    batch.at(0)(row())
    batch.at(1)(WorkerError("first"))
    batch.at(2)(WorkerError("second"))
    batch.at(2)(row())
    with pytest.raises(WorkerError, match="first"):
        await batch.future


async def test_an_empty_batch_is_done_at_once() -> None:
    batch = BatchWaiter(asyncio.get_running_loop(), 0, 3)
    assert batch.future.done()
    await batch.future
    assert batch.rows.shape == (0, 3)


async def test_a_cancelled_batch_ignores_what_comes() -> None:
    batch = BatchWaiter(asyncio.get_running_loop(), 1, 3)
    batch.future.cancel()
    batch.at(0)(row())
    batch.at(0)(WorkerError("no"))
    assert batch.future.cancelled()


async def test_one_prompt_twice_in_a_batch_fills_both_rows(desk: Desk) -> None:
    batch = BatchWaiter(asyncio.get_running_loop(), 2, 3)
    desk.requests.board(prompt(1), batch.at(0))
    desk.requests.board(prompt(1), batch.at(1))
    desk.requests.deliver([prompt(1).digest], [row(4.0)])
    assert batch.future.done()
    assert batch.rows.tolist() == [[4.0] * 3] * 2


# Counters


def test_a_snapshot_of_the_counters_stays_as_it_is() -> None:
    stats = ProducerStats(requests=1)
    before = stats.copy()
    stats.add("requests")
    stats.add("computed", 3)
    assert before == ProducerStats(requests=1)
    assert stats == ProducerStats(requests=2, computed=3)


# Lost connections


INFO = ModelInfo("m", "synthetic", 3, 10, "seed", "float32")


class Interrupted:
    """A channel whose reader loses its connection once; it tells what was looked for."""

    def __init__(self, requests: PendingRequests) -> None:
        rows: Any = None
        self.model = Adopted(INFO, "f", Keys("test").model(INFO.name), b"reply", rows)
        self.reader = self
        self.looked_for: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()
        self._requests = requests
        self._calls = 0

    async def call(self, *_: Any) -> Any:
        self._calls += 1
        if self._calls == 1:
            raise ServerUnreachable("gone")
        await asyncio.Event().wait()

    async def settle(self, digests: list[bytes]) -> None:
        for digest in digests:
            self._requests.deliver([digest], [row()])
        self.looked_for.set_result(digests)

    def note(self, error: BaseException) -> None:
        assert isinstance(error, ServerUnreachable)


async def test_after_a_lost_connection_no_touch_is_taken_for_done(desk: Desk) -> None:
    touched, _ = desk.requests.board(prompt(1), Ear(), touch=True)
    sent, _ = desk.requests.board(prompt(2), Ear())
    assert desk.requests.send(deque([sent])) == [sent]
    waits_here, _ = desk.requests.board(prompt(3), Ear())
    channel: Any = Interrupted(desk.requests)
    submitter: Any = None
    receiver = Receiver(channel, desk.requests, submitter, lambda: None)
    async with asyncio.TaskGroup() as group:
        parts = [group.create_task(part) for part in (receiver.read(), receiver.collect())]
        assert await asyncio.wait_for(channel.looked_for, DEADLINE_S) == [prompt(2).digest]
        for part in parts:
            part.cancel()
    assert list(desk.requests) == [touched, waits_here], "what the server does not have yet is not looked for"


# Learning what a look for rows finds


class Answering:
    """A channel whose cache has some rows, and whose script gives every prompt the same outcome."""

    trouble: LMPoolError | None = None

    def __init__(self, requests: PendingRequests, outcome: str, cached: Sequence[Prompt] = ()) -> None:
        rows: Any = self
        self.model = Adopted(INFO, "f", Keys("test").model(INFO.name), b"reply", rows)
        self.line = self
        self.is_seen = True
        self.looks: list[list[bytes]] = []
        self.meanwhile: Callable[[], None] = lambda: None
        self.lost: list[PendingRequest] = []
        self._requests = requests
        self._outcome = outcome
        self._cached = {one.digest for one in cached}

    def keys_of(self, digests: Iterable[bytes]) -> list[bytes]:
        return [b"row:" + digest for digest in digests]

    async def call(self, command: bytes, sha: str, keys: int, *rest: bytes) -> bytes:
        await asyncio.sleep(0)
        if command == b"EVALSHA" and len(rest) > keys + 1:
            return self._outcome.encode() * sum(key.startswith(self.model.keys.waiting) for key in rest[:keys])
        return b""

    async def fetch(self, digests: list[bytes]) -> None:
        self.looks.append(digests)
        await asyncio.sleep(0)
        self.meanwhile()
        for digest in digests:
            self._requests.deliver([digest], [row() if digest in self._cached else None])

    async def settle(self, digests: list[bytes]) -> None:
        for digest in digests:
            self._requests.deliver([digest], [row()])

    async def upload(self, requests: list[PendingRequest]) -> bool:
        return False

    async def unlink(self, keys: list[bytes]) -> None:
        assert not keys

    def note_lost(self, requests: list[PendingRequest]) -> bool:
        self.lost += requests
        return False

    def spent(self, requests: list[PendingRequest]) -> list[bytes]:
        return []

    def full(self) -> str:
        return "full"


async def learned(desk: Desk, channel: Any, *, way: str = "") -> float:
    """By how much the rate of hits has changed when some prompts have been asked for."""
    tasks = Tasks()
    submitter = Submitter(channel, desk.requests, tasks, waits_when_full=False)
    submitter._hit_rate = 0.6
    boarded: list[tuple[PendingRequest, Ear]] = []
    for at in range(20):
        ear = Ear()
        request, _ = desk.requests.board(prompt(at), ear, touch=way == "touched")
        request.is_private = way == "private"
        boarded.append((request, ear))
        submitter.add(request)

    def leave() -> None:
        for request, ear in boarded:
            desk.requests.leave(request, ear)
            submitter.take_back(request)

    if way == "cancelled":
        channel.meanwhile = leave
    for _ in range(20):
        await asyncio.sleep(0)
    await tasks.cancel()
    return submitter._hit_rate - 0.6


ASKED = [prompt(at) for at in range(20)]


async def test_a_look_that_finds_rows_raises_the_rate_and_one_that_does_not_lowers_it(desk: Desk) -> None:
    assert await learned(desk, Answering(desk.requests, "Q", ASKED)) > 0
    assert desk.counted() == {"cache_hits": 20}


@pytest.mark.parametrize(("outcome", "is_hit"), [("Q", False), ("J", False), ("R", True)])
async def test_the_rate_is_learned_from_what_the_script_says(desk: Desk, outcome: str, is_hit: bool) -> None:
    assert (await learned(desk, Answering(desk.requests, outcome)) > 0) == is_hit


@pytest.mark.parametrize(
    ("way", "outcome", "counted"),
    [
        ("cancelled", "Q", {"failed": 20}),
        ("refused", "F", {"failed": 20}),
        ("touched", "Q", {}),
        ("touched", "R", {"cache_hits": 20}),
        ("private", "Q", {}),
    ],
)
async def test_what_was_not_answered_and_what_no_look_could_find_teaches_nothing(
    desk: Desk, way: str, outcome: str, counted: dict[str, int]
) -> None:
    channel = Answering(desk.requests, outcome)
    assert await learned(desk, channel, way=way) == 0
    assert desk.counted() == counted
    # Nobody looks for what cannot be found.
    assert [len(look) for look in channel.looks] == ([] if way in ("touched", "private") else [20])


async def test_a_failure_on_the_way_teaches_nothing(desk: Desk) -> None:
    channel: Any = Answering(desk.requests, "Q")

    async def fails(*_: Any) -> bytes:
        raise QueueFull("no")

    channel.call, channel.note = fails, lambda error: None
    assert await learned(desk, channel) == 0


# Rows that are gone


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("outcome", ["Q", "J", "R"])
async def test_a_row_is_gone_when_its_job_has_ended_and_it_is_not_there(desk: Desk, outcome: str, again: bool) -> None:
    # After a lost connection all are asked for again: those that are computed are not gone.
    request, _ = desk.requests.board(prompt(1), Ear())
    channel: Any = Answering(desk.requests, outcome)
    await Submitter(channel, desk.requests, Tasks()).submit([request], again=again)
    assert channel.lost == ([request] if again and outcome == "Q" else [])
