"""Pending requests: one per prompt, with any number of waiters, and counters of their outcomes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from lmpool import errors
from lmpool.aio import copy_error
from lmpool.errors import CorruptRow, DeadlineExceeded, LMPoolError, NoWorker, QueueFull, ServerUnreachable, WorkerError
from lmpool.producer.client.discovery import AdoptedModel, Connections, Tasks
from lmpool.producer.client.receive import Receiver
from lmpool.producer.client.requests import (
    Answer,
    BatchWaiter,
    DeadlineTimers,
    PendingRequest,
    PendingRequests,
    RowLRU,
    SingleWaiter,
    Stage,
)
from lmpool.producer.client.submit import Homes, Submitter
from lmpool.producer.metrics import Counters, ProducerStats
from lmpool.protocol.job import Prompt, encode_prompt
from lmpool.protocol.keys import Keys
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.row import Row
from lmpool.rows.cache import Deliver
from lmpool.rows.shared_memory import SegmentReader
from tests.support.pool import DEADLINE_S


def prompt(*ids: int) -> Prompt:
    return encode_prompt(ids, vocab_size=100, max_tokens=10)


def row(value: float = 0.0) -> Row:
    return np.full(3, value, np.float32)


class Listener:
    """A waiter that records its results."""

    def __init__(self) -> None:
        self.heard: list[Answer] = []

    def __call__(self, answer: Answer) -> None:
        self.heard.append(answer)


class Table:
    """Pending requests with their cache and counters."""

    def __init__(self) -> None:
        self.cache = RowLRU(10_000)
        self.stats = ProducerStats()
        self.requests = PendingRequests(self.cache, Counters(self.stats, self.cache))

    def counted(self) -> dict[str, int]:
        """Return the counters that are not zero."""
        return {name: count for name, count in asdict(self.stats).items() if count}


@pytest.fixture
def table() -> Table:
    return Table()


# Waiters that come and go


def test_the_first_waiter_starts_a_request_and_the_next_ones_join_it(table: Table) -> None:
    request, is_new = table.requests.add(prompt(1), Listener())
    assert is_new
    assert request.stage is Stage.UNSENT
    assert table.requests.add(prompt(1), Listener()) == (request, False)
    assert table.requests.add(prompt(1), Listener()) == (request, False)
    assert len(request.waiters) == 3
    assert len(table.requests) == 1
    assert table.counted() == {}, "nothing has ended"


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
    gone, stays = Listener(), Listener()
    request, _ = table.requests.add(prompt(1), gone)
    table.requests.add(prompt(1), stays)
    table.requests.remove_waiter(request, gone)
    table.requests.resolve_found([prompt(1).digest], [row()])
    assert (len(gone.heard), len(stays.heard)) == (0, 1)


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


# Answers


def test_a_row_reaches_every_waiter_once_and_stays_in_the_cache(table: Table) -> None:
    listeners = [Listener() for _ in range(3)]
    for listener in listeners:
        table.requests.add(prompt(1), listener)
    answer = row(1.0)
    table.requests.resolve_found([prompt(1).digest], [answer])
    table.requests.resolve_found([prompt(1).digest], [answer])
    assert [listener.heard for listener in listeners] == [[answer]] * 3
    assert table.cache.get(prompt(1).digest) is answer
    assert len(table.requests) == 0


def test_a_failure_reaches_every_waiter_and_is_not_kept(table: Table) -> None:
    listeners = [Listener(), Listener()]
    for listener in listeners:
        request, _ = table.requests.add(prompt(1), listener)
    table.requests.resolve(request, WorkerError("no"))
    assert [[(type(heard), str(heard)) for heard in listener.heard] for listener in listeners] == [
        [(WorkerError, "no")]
    ] * 2
    assert len(table.cache) == 0
    assert not table.requests.is_open(request)
    assert table.counted() == {"failed": 2}


def test_every_waiter_has_an_exception_of_its_own(table: Table) -> None:
    """A note or a traceback that one caller adds does not appear in the exceptions of others."""
    listeners = [Listener() for _ in range(4)]
    requests = [table.requests.add(prompt(1 + at // 2), listener)[0] for at, listener in enumerate(listeners)]
    error = NoWorker("nobody")
    error.__cause__ = OSError("gone")
    error.add_note("told to all")
    for request in requests[::2]:
        table.requests.resolve(request, error)
    heard = [answer for listener in listeners for answer in listener.heard if isinstance(answer, NoWorker)]
    assert len({id(answer) for answer in [*heard, error]}) == 5
    heard[0].add_note("mine")
    with pytest.raises(NoWorker):
        raise heard[1]
    assert heard[1].__traceback__ is not None
    for other in (heard[2], heard[3], error):
        assert (str(other), other.__cause__, other.__notes__) == ("nobody", error.__cause__, ["told to all"])
        assert other.__traceback__ is None


class Particular(LMPoolError):
    """An exception whose constructor does not take its text."""

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
    error.__cause__ = error  # As `raise error from error` does it.
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
    assert listener.heard == []
    assert table.counted() == {}


def test_a_row_without_a_request_is_dropped(table: Table) -> None:
    table.requests.resolve_found([prompt(1).digest], [row()])
    table.requests.resolve_found([prompt(1).digest], [CorruptRow("bad")])
    assert len(table.cache) == 0
    assert table.counted() == {}


def test_resolving_an_old_request_does_not_end_a_newer_one(table: Table) -> None:
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
    (last,) = listener.heard
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
    assert listener.heard == [answer]


# Another model


def test_after_a_restart_all_requests_are_unsent_and_no_old_row_is_left(table: Table) -> None:
    for i, stage in enumerate(Stage):
        request, _ = table.requests.add(prompt(i), Listener())
        request.stage = stage
    table.cache.put(b"old", row())
    table.requests.restart("other weights")
    assert [request.stage for request in table.requests] == [Stage.UNSENT] * len(Stage)
    assert all(len(request.waiters) == 1 for request in table.requests)
    assert len(table.cache) == 0


# Waiters


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
    assert not deadlines._buckets, "what has ended is kept by nobody"


async def test_a_waiter_with_a_past_deadline_expires_at_once() -> None:
    loop = asyncio.get_running_loop()
    ended: asyncio.Queue[SingleWaiter] = asyncio.Queue()
    late = SingleWaiter(loop, 60.0)
    DeadlineTimers(loop, ended.put_nowait).add(late, loop.time() - 60)
    assert await asyncio.wait_for(ended.get(), DEADLINE_S) is late


async def test_a_batch_is_done_with_its_last_row_in_any_order() -> None:
    batch = BatchWaiter(asyncio.get_running_loop(), np.empty((3, 3), np.float32))
    for index in (2, 0):
        batch.at(index)(row(float(index)))
    assert not batch.future.done()
    batch.at(1)(row(1.0))
    assert batch.future.done()
    await batch.future
    assert batch.rows.dtype == np.float32
    assert batch.rows.tolist() == [[0.0] * 3, [1.0] * 3, [2.0] * 3]


async def test_a_batch_is_a_writable_copy() -> None:
    shared = row(1.0)
    shared.flags.writeable = False
    batch = BatchWaiter(asyncio.get_running_loop(), np.empty((2, 3), np.float32))
    batch.at(0)(shared)
    batch.at(1)(shared)
    batch.rows[:] = 9.0
    assert shared.tolist() == [1.0] * 3


async def test_the_first_failure_ends_a_batch_and_later_results_are_ignored() -> None:
    batch = BatchWaiter(asyncio.get_running_loop(), np.empty((3, 3), np.float32))
    batch.at(0)(row())
    batch.at(1)(WorkerError("first"))
    batch.at(2)(WorkerError("second"))
    batch.at(2)(row())
    with pytest.raises(WorkerError, match="first"):
        await batch.future


async def test_an_empty_batch_is_done_at_once() -> None:
    batch = BatchWaiter(asyncio.get_running_loop(), np.empty((0, 3), np.float32))
    assert batch.future.done()
    await batch.future
    assert batch.rows.shape == (0, 3)


async def test_a_cancelled_batch_ignores_results() -> None:
    batch = BatchWaiter(asyncio.get_running_loop(), np.empty((1, 3), np.float32))
    batch.future.cancel()
    batch.at(0)(row())
    batch.at(0)(WorkerError("no"))
    assert batch.future.cancelled()


async def test_one_prompt_twice_in_a_batch_fills_both_rows(table: Table) -> None:
    batch = BatchWaiter(asyncio.get_running_loop(), np.empty((2, 3), np.float32))
    table.requests.add(prompt(1), batch.at(0))
    table.requests.add(prompt(1), batch.at(1))
    table.requests.resolve_found([prompt(1).digest], [row(4.0)])
    assert batch.future.done()
    assert batch.rows.tolist() == [[4.0] * 3] * 2


# Counters


def test_a_snapshot_of_the_counters_does_not_change() -> None:
    stats = ProducerStats(requests=1)
    before = stats.copy()
    stats.add("requests")
    stats.add("computed", 3)
    assert before == ProducerStats(requests=1)
    assert stats == ProducerStats(requests=2, computed=3)


# Lost connections


INFO = ModelInfo("m", "synthetic", 3, 10, "seed", "float32")


class Interrupted(Tasks):
    """Connections whose reader fails once; records the digests that are fetched after that."""

    noting = Connections.noting

    def __init__(self, requests: PendingRequests) -> None:
        super().__init__()
        rows: Any = None
        self.model = AdoptedModel(INFO, "f", Keys("test").model(INFO.name), b"reply", rows)
        self.reader = self
        self.ended_within_reply = False
        self.homes = Homes()
        self.looked_for: asyncio.Future[Sequence[bytes]] = asyncio.get_running_loop().create_future()
        self._requests = requests
        self._calls = 0

    async def call(self, *_: Any) -> Any:
        self._calls += 1
        if self._calls == 1:
            raise ServerUnreachable("gone")
        await asyncio.Event().wait()

    async def fetch_announced(self, digests: Sequence[bytes]) -> None:
        for digest in digests:
            self._requests.resolve_found([digest], [row()])
        self.looked_for.set_result(digests)

    def note(self, error: BaseException) -> None:
        assert isinstance(error, ServerUnreachable)


async def test_after_a_lost_connection_warming_requests_stay_pending(table: Table) -> None:
    warming, _ = table.requests.add(prompt(1), Listener(), warm=True)
    sent, _ = table.requests.add(prompt(2), Listener())
    assert table.requests.admit(deque([sent])) == [sent]
    waits_here, _ = table.requests.add(prompt(3), Listener())
    connections: Any = Interrupted(table.requests)
    receiver = Receiver(connections, table.requests, connections, lambda: None)
    async with asyncio.TaskGroup() as group:
        parts = [group.create_task(part) for part in (receiver.read(), receiver.collect())]
        assert await asyncio.wait_for(connections.looked_for, DEADLINE_S) == [prompt(2).digest]
        for part in parts:
            part.cancel()
    assert list(table.requests) == [warming, waits_here], "what the server does not have yet is not looked for"


# Learning what a look for rows finds


class Answering(Tasks):
    """Connections to a cache with some rows, and to a script that returns one code for every prompt."""

    trouble: LMPoolError | None = None
    noting = Connections.noting

    def __init__(self, outcome: str, cached: Sequence[Prompt] = ()) -> None:
        super().__init__()
        rows: Any = self
        self.model = AdoptedModel(INFO, "f", Keys("test").model(INFO.name), b"reply", rows)
        self.commands = self
        self.segments = SegmentReader()
        self.is_seen = True
        self.looks: list[Sequence[bytes]] = []
        self.meanwhile: Callable[[], None] = lambda: None
        self._outcome = outcome
        self._cached = {prompt.digest for prompt in cached}

    def keys_of(self, digests: Iterable[bytes]) -> list[bytes]:
        return [b"row:" + digest for digest in digests]

    async def call(self, command: bytes, sha: str, keys: int, *rest: bytes) -> bytes:
        await asyncio.sleep(0)
        if command != b"EVALSHA" or len(rest) <= keys + 1:
            return b""
        prefix = self.model.keys.waiting
        digests = [key.removeprefix(prefix) for key in rest[:keys] if key.startswith(prefix)]
        if self._outcome == "R":
            self._cached.update(digests)
        return self._outcome.encode() * len(digests)

    async def get_many(self, digests: Sequence[bytes], deliver: Deliver, lengths: Mapping[bytes, int]) -> int:
        self.looks.append(digests)
        await asyncio.sleep(0)
        self.meanwhile()
        deliver(digests, [row() if digest in self._cached else None for digest in digests])
        return 0

    async def drop(self, keys: Sequence[bytes]) -> None:
        pass

    def describe_full_queue(self) -> str:
        return "full"


def submitter_of(table: Table, connections: Any, *, waits_when_full: bool = True) -> Submitter:
    return Submitter(connections, table.requests, waits_when_full=waits_when_full)


async def learned(table: Table, connections: Any, *, way: str = "") -> float:
    """Return the change of the hit rate after some requests."""
    submitter = submitter_of(table, connections, waits_when_full=False)
    submitter._hit_rate = 0.6
    waits: list[tuple[PendingRequest, Listener]] = []
    for at in range(20):
        listener = Listener()
        request, _ = table.requests.add(prompt(at), listener, warm=way == "warming")
        request.is_private = way == "private"
        waits.append((request, listener))
        submitter.add(request)

    def cancel() -> None:
        for request, listener in waits:
            table.requests.remove_waiter(request, listener)
            submitter.cancel(request)

    if way == "cancelled":
        connections.meanwhile = cancel
    for _ in range(20):
        await asyncio.sleep(0)
    await connections.end_tasks()
    return submitter._hit_rate - 0.6


ASKED = [prompt(at) for at in range(20)]


async def test_a_lookup_with_hits_raises_the_hit_rate(table: Table) -> None:
    assert await learned(table, Answering("Q", ASKED)) > 0
    assert table.counted() == {"cache_hits": 20}


@pytest.mark.parametrize(("outcome", "is_hit"), [("Q", False), ("J", False), ("R", True)])
async def test_the_hit_rate_follows_the_codes_of_the_script(table: Table, outcome: str, is_hit: bool) -> None:
    assert (await learned(table, Answering(outcome)) > 0) == is_hit


@pytest.mark.parametrize(
    ("way", "outcome", "counted"),
    [
        ("cancelled", "Q", {"failed": 20}),
        ("refused", "F", {"failed": 20}),
        ("warming", "Q", {}),
        ("warming", "R", {"cache_hits": 20}),
        ("private", "Q", {}),
    ],
)
async def test_requests_without_a_result_or_a_lookup_do_not_change_the_hit_rate(
    table: Table, way: str, outcome: str, counted: dict[str, int]
) -> None:
    connections = Answering(outcome)
    assert await learned(table, connections, way=way) == 0
    assert table.counted() == counted
    # Nobody looks for what cannot be found.
    assert [len(look) for look in connections.looks] == ([] if way in ("warming", "private") else [20])


async def test_a_failed_submission_does_not_change_the_hit_rate(table: Table) -> None:
    connections: Any = Answering("Q")

    async def fails(*_: Any) -> bytes:
        raise QueueFull("no")

    connections.call, connections.note = fails, lambda error: None
    assert await learned(table, connections) == 0


async def test_continuations_are_sent_after_other_prompts_with_their_max_tokens(table: Table) -> None:
    sent: list[tuple[list[bytes], tuple[object, ...]]] = []

    class Recording(Answering):
        async def call(self, command: bytes, sha: str, keys: int, *rest: bytes) -> bytes:
            waiting = self.model.keys.waiting
            if digests := [key.removeprefix(waiting) for key in rest[:keys] if key.startswith(waiting)]:
                sent.append((digests, rest[-2 * len(digests) :]))
            return await super().call(command, sha, keys, *rest)

    connections: Any = Recording("Q")
    rows = [prompt(at) for at in range(2)]
    continuations = [prompt(at).with_query(b"q", 8, 4 + at) for at in range(2, 5)]
    mixed = [continuations[0], rows[0], *continuations[1:], rows[1]]
    await submitter_of(table, connections)._send([table.requests.add(one, Listener())[0] for one in mixed])
    assert [digests for digests, _ in sent] == [[one.digest for one in kind] for kind in (rows, continuations)]
    assert sent[1][1] == (b"", b"", b"", 6, 7, 8)
    await connections.end_tasks()


async def test_a_refused_prompt_stays_refused_when_it_cannot_be_sent_again(table: Table) -> None:
    connections: Any = Answering("F")
    submitter = submitter_of(table, connections)
    request, _ = table.requests.add(prompt(1), Listener())

    async def fails(*_: Any) -> bytes:
        raise ServerUnreachable("gone")

    await submitter._send([request])
    assert request.stage is Stage.REFUSED
    connections.call, connections.note = fails, lambda error: None
    await submitter._send([request])
    assert request.stage is Stage.REFUSED
    await connections.end_tasks()


# Rows that are gone


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("outcome", ["Q", "J", "R"])
async def test_a_row_counts_as_lost_when_its_job_has_ended_without_it(table: Table, outcome: str, again: bool) -> None:
    # After a lost connection all are asked for again: those that are computed are not gone.
    request, _ = table.requests.add(prompt(1), Listener())
    connections = Answering(outcome)
    await submitter_of(table, connections).submit([request], again=again)
    assert request.lost == (1 if again and outcome == "Q" else 0)
    await connections.end_tasks()
