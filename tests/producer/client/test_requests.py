"""Pending requests: one per prompt, with any number of waiters, and counters of their outcomes."""

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np
import pytest

from lmpool import errors
from lmpool.aio import copy_error
from lmpool.errors import CorruptRow, DeadlineExceeded, LMPoolError, NoWorker, WorkerError
from lmpool.producer.client.requests import (
    BatchWaiter,
    DeadlineTimers,
    SingleWaiter,
    Stage,
)
from lmpool.producer.metrics import ProducerStats
from tests.producer.client.tables import Listener, Table, prompt, row
from tests.support.pool import DEADLINE_S


@pytest.fixture
def table() -> Table:
    return Table()


# Waiters of a request


def test_the_first_waiter_starts_a_request_and_the_next_ones_join_it(table: Table) -> None:
    request, is_new = table.requests.add(prompt(1), Listener())
    assert is_new
    assert request.stage is Stage.UNSENT
    assert table.requests.add(prompt(1), Listener()) == (request, False)
    assert table.requests.add(prompt(1), Listener()) == (request, False)
    assert len(request.waiters) == 3
    assert len(table.requests) == 1
    assert table.counted() == {}, "no request has ended"


def test_different_prompts_are_different_requests(table: Table) -> None:
    first, _ = table.requests.add(prompt(1), Listener())
    second, is_new = table.requests.add(prompt(1, 2), Listener())
    assert is_new
    assert first is not second
    assert table.requests.get(prompt(1).digest) is first
    assert table.requests.get(prompt(3).digest) is None
    assert list(table.requests) == [first, second]


def test_a_request_ends_when_its_last_waiter_is_removed(table: Table) -> None:
    first, second = Listener(), Listener()
    request, _ = table.requests.add(prompt(1), first)
    table.requests.add(prompt(1), second)
    assert table.requests.remove_waiter(request, first) is False
    assert table.requests.is_open(request)
    assert table.requests.remove_waiter(request, second) is True
    assert not table.requests.is_open(request)
    assert len(table.requests) == 0
    assert table.counted() == {"failed": 2}


def test_a_removed_waiter_is_not_called(table: Table) -> None:
    removed, stays = Listener(), Listener()
    request, _ = table.requests.add(prompt(1), removed)
    table.requests.add(prompt(1), stays)
    table.requests.remove_waiter(request, removed)
    table.requests.resolve_found([prompt(1).digest], [row()])
    assert (len(removed.results), len(stays.results)) == (0, 1)


def test_a_prompt_requested_again_after_all_waiters_were_removed_is_a_new_request(table: Table) -> None:
    listener = Listener()
    old, _ = table.requests.add(prompt(1), listener)
    table.requests.remove_waiter(old, listener)
    new, is_new = table.requests.add(prompt(1), Listener())
    assert is_new
    assert new is not old
    assert table.requests.is_open(new)
    assert not table.requests.is_open(old)


def test_requests_may_end_during_iteration(table: Table) -> None:
    for i in range(5):
        table.requests.add(prompt(i), Listener())
    for request in table.requests:
        table.requests.resolve(request, WorkerError("no"))
    assert len(table.requests) == 0


# Results


def test_a_row_reaches_every_waiter_once_and_stays_in_the_cache(table: Table) -> None:
    listeners = [Listener() for _ in range(3)]
    for listener in listeners:
        table.requests.add(prompt(1), listener)
    answer = row(1.0)
    table.requests.resolve_found([prompt(1).digest], [answer])
    table.requests.resolve_found([prompt(1).digest], [answer])
    assert [listener.results for listener in listeners] == [[answer]] * 3
    assert table.cache.get(prompt(1).digest) is answer
    assert len(table.requests) == 0


def test_a_failure_reaches_every_waiter_and_is_not_kept(table: Table) -> None:
    listeners = [Listener(), Listener()]
    for listener in listeners:
        request, _ = table.requests.add(prompt(1), listener)
    table.requests.resolve(request, WorkerError("no"))
    assert [[(type(results), str(results)) for results in listener.results] for listener in listeners] == [
        [(WorkerError, "no")]
    ] * 2
    assert len(table.cache) == 0
    assert not table.requests.is_open(request)
    assert table.counted() == {"failed": 2}


def test_every_waiter_has_an_exception_of_its_own(table: Table) -> None:
    """If one caller adds a note or a traceback to its exception, other callers must not see it."""
    listeners = [Listener() for _ in range(4)]
    requests = [table.requests.add(prompt(1 + at // 2), listener)[0] for at, listener in enumerate(listeners)]
    error = NoWorker("no worker")
    error.__cause__ = OSError("lost")
    error.add_note("for all waiters")
    for request in requests[::2]:
        table.requests.resolve(request, error)
    results = [answer for listener in listeners for answer in listener.results if isinstance(answer, NoWorker)]
    assert len({id(answer) for answer in [*results, error]}) == 5
    results[0].add_note("mine")
    with pytest.raises(NoWorker):
        raise results[1]
    assert results[1].__traceback__ is not None
    for other in (results[2], results[3], error):
        assert (str(other), other.__cause__, other.__notes__) == ("no worker", error.__cause__, ["for all waiters"])
        assert other.__traceback__ is None


class Particular(LMPoolError):
    """An exception whose constructor takes a code instead of its text."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


def test_every_exception_of_the_tree_can_be_copied() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, LMPoolError)]
    assert len(kinds) > 20
    for error in [*(kind("why") for kind in kinds), Particular(7), TimeoutError(), OSError(2, "none", "here")]:
        other = copy_error(error)
        assert other is not error
        assert type(other) is type(error)
        assert (str(other), other.args, vars(other)) == (str(error), error.args, vars(error))
    error.__cause__ = error  # Like `raise error from error`.
    assert copy_error(error).__cause__ is None


@pytest.mark.parametrize("origin", ["cache_hits", "computed", "joined"])
def test_a_row_is_counted_under_its_origin(table: Table, origin: str) -> None:
    request, _ = table.requests.add(prompt(1), Listener())
    request.origin = origin
    table.requests.resolve_found([prompt(1).digest], [row()])
    assert table.counted() == {origin: 1}


def test_a_row_without_an_origin_counts_as_a_cache_hit(table: Table) -> None:
    for _ in range(3):
        table.requests.add(prompt(1), Listener())
    table.requests.resolve_found([prompt(1).digest], [row()])
    assert table.counted() == {"cache_hits": 1, "joined": 2}


def test_a_cache_miss_leaves_the_request_pending(table: Table) -> None:
    listener = Listener()
    request, _ = table.requests.add(prompt(1), listener)
    table.requests.resolve_found([prompt(1).digest], [None])
    assert table.requests.is_open(request)
    assert listener.results == []
    assert table.counted() == {}


def test_a_row_without_a_request_is_dropped(table: Table) -> None:
    table.requests.resolve_found([prompt(1).digest], [row()])
    table.requests.resolve_found([prompt(1).digest], [CorruptRow("bad")])
    assert len(table.cache) == 0
    assert table.counted() == {}


def test_ending_an_old_request_does_not_end_a_newer_one(table: Table) -> None:
    listener = Listener()
    old, _ = table.requests.add(prompt(1), listener)
    table.requests.remove_waiter(old, listener)
    new, _ = table.requests.add(prompt(1), Listener())
    table.requests.resolve(old, WorkerError("late"))
    assert table.requests.is_open(new)


# Damaged rows


def test_a_damaged_row_fails_the_request_only_after_two_overwrites(table: Table) -> None:
    listener = Listener()
    request, _ = table.requests.add(prompt(1), listener)
    for overwrites in (0, 0, 1):
        request.overwrites = overwrites
        table.requests.resolve_found([prompt(1).digest], [CorruptRow("bad")])
        assert table.requests.is_open(request)
        assert request.damaged
    request.overwrites = 2
    table.requests.resolve_found([prompt(1).digest], [CorruptRow("still bad")])
    (last,) = listener.results
    assert isinstance(last, CorruptRow)
    assert str(last) == "still bad"
    assert not table.requests.is_open(request)
    assert table.counted() == {"failed": 1}
    assert len(table.cache) == 0


def test_an_overwritten_row_resolves_the_request(table: Table) -> None:
    listener = Listener()
    table.requests.add(prompt(1), listener)
    table.requests.resolve_found([prompt(1).digest], [CorruptRow("bad")])
    answer = row(2.0)
    table.requests.resolve_found([prompt(1).digest], [answer])
    assert listener.results == [answer]


# Requests after a restart


def test_after_a_restart_all_requests_are_unsent_and_no_old_row_is_left(table: Table) -> None:
    for i, stage in enumerate(Stage):
        request, _ = table.requests.add(prompt(i), Listener())
        request.stage = stage
    table.cache.put(b"old", row())
    table.requests.restart("other weights")
    assert [request.stage for request in table.requests] == [Stage.UNSENT] * len(Stage)
    assert all(len(request.waiters) == 1 for request in table.requests)
    assert len(table.cache) == 0


# Waiters for one prompt and for a batch


async def test_a_single_waiter_returns_the_row() -> None:
    waiter, answer = SingleWaiter(asyncio.get_running_loop(), 60.0), row()
    waiter(answer)
    assert await waiter.future is answer


async def test_a_single_waiter_raises_the_failure() -> None:
    waiter = SingleWaiter(asyncio.get_running_loop(), 60.0)
    waiter(DeadlineExceeded("late"))
    with pytest.raises(DeadlineExceeded, match="late"):
        await waiter.future


async def test_a_cancelled_single_waiter_ignores_the_result() -> None:
    waiter = SingleWaiter(asyncio.get_running_loop(), 60.0)
    waiter.future.cancel()
    waiter(row())
    waiter(WorkerError("no"))
    assert waiter.future.cancelled()


async def test_waiters_expire_at_their_deadlines_unless_removed() -> None:
    loop = asyncio.get_running_loop()
    ended: asyncio.Queue[SingleWaiter] = asyncio.Queue()
    deadlines = DeadlineTimers(loop, ended.put_nowait)
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
    assert not deadlines._buckets, "no ended waiter is kept"


async def test_a_waiter_with_a_past_deadline_expires_at_once() -> None:
    loop = asyncio.get_running_loop()
    ended: asyncio.Queue[SingleWaiter] = asyncio.Queue()
    late = SingleWaiter(loop, 60.0)
    DeadlineTimers(loop, ended.put_nowait).add(late, loop.time() - 60)
    assert await asyncio.wait_for(ended.get(), DEADLINE_S) is late


def batch_of(count: int) -> BatchWaiter:
    return BatchWaiter(asyncio.get_running_loop(), np.empty((count, 3), np.float32))


async def test_a_batch_is_done_with_its_last_row_in_any_order() -> None:
    batch = batch_of(3)
    for index in (2, 0):
        batch.put(index, row(float(index)))
    assert not batch.future.done()
    batch.put(1, row(1.0))
    assert batch.future.done()
    await batch.future
    assert batch.rows.dtype == np.float32
    assert batch.rows.tolist() == [[0.0] * 3, [1.0] * 3, [2.0] * 3]


async def test_a_batch_is_a_writable_copy() -> None:
    shared = row(1.0)
    shared.flags.writeable = False
    batch = batch_of(2)
    batch.put(0, shared)
    batch.put(1, shared)
    batch.rows[:] = 9.0
    assert shared.tolist() == [1.0] * 3


async def test_the_first_failure_ends_a_batch_and_later_results_are_ignored() -> None:
    batch = batch_of(3)
    batch.put(0, row())
    batch.put(1, WorkerError("first"))
    batch.put(2, WorkerError("second"))
    batch.put(2, row())
    with pytest.raises(WorkerError, match="first"):
        await batch.future


async def test_an_empty_batch_is_done_at_once() -> None:
    batch = batch_of(0)
    assert batch.future.done()
    await batch.future
    assert batch.rows.shape == (0, 3)


async def test_a_cancelled_batch_ignores_results() -> None:
    batch = batch_of(1)
    batch.future.cancel()
    batch.put(0, row())
    batch.put(0, WorkerError("no"))
    assert batch.future.cancelled()


async def test_one_prompt_twice_in_a_batch_fills_both_rows(table: Table) -> None:
    batch = batch_of(2)
    table.requests.add(prompt(1), partial(batch.put, 0))
    table.requests.add(prompt(1), partial(batch.put, 1))
    table.requests.resolve_found([prompt(1).digest], [row(4.0)])
    assert batch.future.done()
    assert batch.rows.tolist() == [[4.0] * 3] * 2


def test_a_snapshot_of_the_counters_does_not_change() -> None:
    stats = ProducerStats(requests=1)
    before = stats.copy()
    stats.requests += 1
    assert before == ProducerStats(requests=1)
