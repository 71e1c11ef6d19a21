"""How a producer submits prompts: hit rate of lookups, refused and lost prompts, and lost connections."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from redis.exceptions import OutOfMemoryError

from lmpool.broker.scripts import MAX_AT_ONCE, Load
from lmpool.broker.server import Server
from lmpool.errors import LMPoolError, QueueFull, ServerUnreachable
from lmpool.producer.client import partitions as partitions_module
from lmpool.producer.client.discovery import AdoptedModel, Connections
from lmpool.producer.client.partitions import Partition, Partitions, Placed
from lmpool.producer.client.receive import Receiver
from lmpool.producer.client.requests import (
    PendingRequest,
    PendingRequests,
    Stage,
    Tasks,
)
from lmpool.producer.client.submit import Homes, Submitter
from lmpool.protocol.job import Prompt
from lmpool.protocol.keys import Keys
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.query import SentWeights
from lmpool.protocol.row import Encoding, RowBlock
from lmpool.rows.cache import Deliver
from lmpool.rows.datagram import DatagramReceiver, RowsReady
from lmpool.rows.shared_memory import SegmentReader
from tests.producer.client.tables import Listener, Table, prompt, row
from tests.support.pool import DEADLINE_S

INFO = ModelInfo("m", "synthetic", 3, 10, "seed", "float32")


@pytest.fixture
def table() -> Table:
    return Table()


# Lost connections


class Interrupted(Tasks):
    """Stand-in for connections: the reader fails once; then it records the prompts whose rows are fetched."""

    noting = Connections.noting

    def __init__(self, requests: PendingRequests) -> None:
        super().__init__()
        rows: Any = None
        self.model = AdoptedModel(INFO, "f", "f", Keys("test").model(INFO.name), rows)
        self.partition: Any = Partition(0, self, self, self.model.keys, b"reply")  # type: ignore[arg-type]
        self.ended_within_reply = False
        self.homes = Homes()
        self.fetched: asyncio.Future[list[Prompt]] = asyncio.get_running_loop().create_future()
        self._requests = requests
        self._calls = 0

    async def call(self, *_: Any) -> Any:
        self._calls += 1
        if self._calls == 1:
            raise ServerUnreachable("lost")
        await asyncio.Event().wait()

    async def fetch_announced(self, requests: Sequence[PendingRequest]) -> None:
        for request in requests:
            self._requests.resolve_found([request.prompt.digest], [row()])
        self.fetched.set_result([request.prompt for request in requests])

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
        parts = [group.create_task(part) for part in (receiver.read(connections.partition), receiver.collect())]
        assert await asyncio.wait_for(connections.fetched, DEADLINE_S) == [prompt(2)]
        for part in parts:
            part.cancel()
    assert list(table.requests) == [warming, waits_here], "rows of unsent requests are not fetched"


async def test_a_prompt_that_is_warmed_after_its_request_has_ended_stays_pending_until_its_row_is_stored(
    table: Table,
) -> None:
    connections: Any = Answering("Q")
    submitter, listener = submitter_of(table, connections), Listener()
    receiver = Receiver(connections, table.requests, submitter, lambda: None)
    ended, _ = table.requests.add(prompt(1), listener)
    assert table.requests.admit(deque([ended])) == [ended]
    receiver._announce_all(connections.partitions[0])  # As after a lost connection: perhaps the row was announced.
    table.requests.remove_waiter(ended, listener)
    warming, _ = table.requests.add(prompt(1), listener, warm=True)
    connections.spawn(receiver.collect())
    for _ in range(20):
        await asyncio.sleep(0)
    await connections.end_tasks()
    assert table.requests.is_open(warming)
    assert not listener.results


# The hit rate of lookups


class Answering(Tasks):
    """Stand-in for connections: a cache with some rows, and a script that returns one code for every prompt."""

    trouble: LMPoolError | None = None
    noting = Connections.noting

    def __init__(self, outcome: str, cached: Sequence[Prompt] = ()) -> None:
        super().__init__()
        rows: Any = self
        self.model = AdoptedModel(INFO, "f", "f", Keys("test").model(INFO.name), rows)
        self.partitions = Partitions(Server("redis://127.0.0.1"), Keys("test"))
        self.partitions.adopt(INFO, "reply", is_bulk=False)
        self.partitions[0].commands = self  # type: ignore[assignment]
        self.segments, self.datagrams, self.direct = SegmentReader(), DatagramReceiver(), None
        self.is_seen = True
        self.lookups: list[Sequence[bytes]] = []
        self.during_lookup: Callable[[], None] = lambda: None
        self._outcome = outcome
        self._cached = {prompt.digest for prompt in cached}

    def keys_of(self, digests: Iterable[bytes]) -> list[bytes]:
        return [b"row:" + digest for digest in digests]

    async def call(self, command: str, sha: str, keys: int, *rest: bytes) -> bytes:
        await asyncio.sleep(0)
        if command != "EVALSHA" or len(rest) <= keys + 1:
            return b""
        prefix = self.model.keys.waiting
        digests = [key.removeprefix(prefix) for key in rest[:keys] if key.startswith(prefix)]
        if self._outcome == "R":
            self._cached.update(digests)
        return self._outcome.encode() * len(digests)

    async def get_many(self, digests: Sequence[bytes], deliver: Deliver, lengths: Mapping[bytes, int]) -> int:
        self.lookups.append(digests)
        await asyncio.sleep(0)
        self.during_lookup()
        deliver(digests, [row() if digest in self._cached else None for digest in digests])
        return 0

    async def drop(self, keys: Sequence[bytes]) -> None:
        pass

    def describe_full_queue(self) -> str:
        return "full"


def submitter_of(table: Table, connections: Any, *, waits_when_full: bool = True) -> Submitter:
    return Submitter(connections, table.requests, waits=waits_when_full)


async def change_of_hit_rate(table: Table, connections: Any, *, way: str = "") -> float:
    """Submit 20 requests; return by how much they change the submitter's hit rate."""
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
        connections.during_lookup = cancel
    for _ in range(20):
        await asyncio.sleep(0)
    await connections.end_tasks()
    return submitter._hit_rate - 0.6


ASKED = [prompt(at) for at in range(20)]


async def test_a_lookup_with_hits_raises_the_hit_rate(table: Table) -> None:
    assert await change_of_hit_rate(table, Answering("Q", ASKED)) > 0
    assert table.counted() == {"cache_hits": 20}


@pytest.mark.parametrize(("outcome", "is_hit"), [("Q", False), ("J", False), ("R", True)])
async def test_the_hit_rate_follows_the_codes_of_the_script(table: Table, outcome: str, is_hit: bool) -> None:
    assert (await change_of_hit_rate(table, Answering(outcome)) > 0) == is_hit


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
    assert await change_of_hit_rate(table, connections, way=way) == 0
    assert table.counted() == counted
    # The submitter looks up no row that cannot be in the cache.
    assert [len(digests) for digests in connections.lookups] == ([] if way in ("warming", "private") else [20])


async def test_a_failed_submission_does_not_change_the_hit_rate(table: Table) -> None:
    connections: Any = Answering("Q")

    async def fails(*_: Any) -> bytes:
        raise QueueFull("no")

    connections.call, connections.note = fails, lambda error: None
    assert await change_of_hit_rate(table, connections) == 0


async def test_a_datagram_before_the_reply_to_the_submission_withdraws_no_job(table: Table) -> None:
    calls: list[str] = []
    small = RowBlock([prompt(1).digest], row(-np.log(3))[None], None, Encoding.F32).encode(0)

    class Overtaken(Answering):
        async def call(self, command: str, sha: str, keys: int, *rest: bytes) -> bytes:
            calls.append(command)
            receiver.on_datagram(RowsReady("f", b"w", {prompt(1).digest: small}, are_places=False))
            return await super().call(command, sha, keys, *rest)

    connections: Any = Overtaken("Q")
    submitter, listener = submitter_of(table, connections), Listener()
    receiver = Receiver(connections, table.requests, submitter, lambda: None)
    request, _ = table.requests.add(prompt(1), listener)
    submitter.add(request)
    for _ in range(20):
        await asyncio.sleep(0)
    await connections.end_tasks()
    assert len(listener.results) == len(calls) == 1
    assert table.counted() == {"computed": 1}


@pytest.mark.parametrize("warms", [(False, True), (True, False)])
async def test_a_datagram_does_not_end_a_request_that_warms_the_cache(table: Table, warms: tuple[bool, bool]) -> None:
    """Another caller waits for the row itself. The row is stored when the server's message arrives."""
    small = RowBlock([prompt(1).digest], row(-np.log(3))[None], None, Encoding.F32).encode(0)
    connections: Any = Answering("Q")
    receiver = Receiver(connections, table.requests, submitter_of(table, connections), lambda: None)
    added = [table.requests.add(prompt(1), Listener(), warm=warm) for warm in warms]
    receiver.on_datagram(RowsReady("f", b"w", {prompt(1).digest: small}, are_places=False))
    assert all(table.requests.is_open(request) for request, _ in added)


async def test_continuations_are_sent_after_other_prompts_with_their_max_tokens(table: Table) -> None:
    sent: list[tuple[list[bytes], tuple[object, ...]]] = []

    class Recording(Answering):
        async def call(self, command: str, sha: str, keys: int, *rest: bytes) -> bytes:
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
        raise ServerUnreachable("lost")

    await submitter._send([request])
    assert (request.stage, request.is_refused) == (Stage.UNSENT, True)
    connections.call, connections.note = fails, lambda error: None
    await submitter._send([request])
    assert (request.stage, request.is_refused) == (Stage.UNSENT, True)
    await connections.end_tasks()


async def test_a_prompt_that_is_requested_again_during_its_cancellation_keeps_its_job(table: Table) -> None:
    withdrawn: list[bytes] = []

    class Recording(Answering):
        async def call(self, command: str, sha: str, keys: int, *rest: bytes) -> bytes:
            waiting = self.model.keys.waiting
            withdrawn.extend(key.removeprefix(waiting) for key in rest[:keys] if key.startswith(waiting))
            # During the call for the first portion, the last prompt of the second portion is requested again.
            table.requests.add(prompts[-1], Listener())
            return await super().call(command, sha, keys, *rest)

    connections, prompts = Recording("Q"), [prompt(at // 50, at % 50) for at in range(MAX_AT_ONCE + 3)]
    submitter, listener = submitter_of(table, connections), Listener()
    for one in prompts:
        request, _ = table.requests.add(one, listener)
        request.stage = Stage.WAITING
        table.requests.remove_waiter(request, listener)
        submitter.cancel(request)
    for _ in range(20):
        await asyncio.sleep(0)
    assert withdrawn == [one.digest for one in prompts[:-1]]
    await connections.end_tasks()


# Lost rows


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("outcome", ["Q", "J", "R"])
async def test_a_row_counts_as_lost_when_its_job_has_ended_without_it(table: Table, outcome: str, again: bool) -> None:
    # When a client submits a prompt again, the row is lost only if the server queued the prompt as new (Q).
    request, _ = table.requests.add(prompt(1), Listener())
    connections = Answering(outcome)
    await submitter_of(table, connections).submit([request], again=again)
    assert request.lost == (1 if again and outcome == "Q" else 0)
    await connections.end_tasks()


# Several partitions


class Partitioned(Answering):
    """Stand-in for connections to two partitions: the master of the second answers one call, and then is down."""

    def __init__(self) -> None:
        super().__init__("Q")
        self.partitions.adopt(dataclasses.replace(INFO, partitions=(0, 1)), "reply", is_bulk=False)
        self.second = self.partitions[1]
        self.second.commands = SimpleNamespace(call=self.call_second)  # type: ignore[assignment]
        self.partitions.read(self.second)
        self.server, self.redis, self.unlinked = Server("redis://127.0.0.1"), self, list[bytes]()
        self._calls = 0

    async def call_second(self, command: str, *rest: Any) -> bytes:
        self._calls += 1
        if self._calls > 1:
            raise ServerUnreachable("lost")
        return b"Q" * sum(key.startswith(self.second.keys.waiting) for key in rest if isinstance(key, bytes))

    async def unlink(self, key: bytes) -> None:
        self.unlinked.append(key)

    async def put_weights(self, weights: Sequence[SentWeights]) -> dict[bytes, Exception]:
        return {weights[0].name: OutOfMemoryError("full")}

    def note(self, error: BaseException) -> None:
        assert isinstance(error, LMPoolError)


async def test_loads_are_polled_before_prompts_are_placed_if_the_last_poll_is_old(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections, polls = Partitioned(), list[int]()
    partitions, first = connections.partitions, connections.partitions[0]
    prompts = map(prompt, range(100))
    one = next(one for one in prompts if partitions_module._of_digest(one.digest, partitions.current) is first)
    request, _ = table.requests.add(one, Listener())

    async def poll() -> None:
        polls.append(1)
        partitions.note_load(0, Load(1, 1, 0))

    async def place() -> None:
        (placed,) = await partitions.place([request], Homes().find_partition)
        assert (placed.partition, placed.requests) == (first, [request])

    partitions.poll = poll
    for _ in range(2):
        await place()
    assert polls == [1]
    monkeypatch.setattr(partitions_module, "_OLD_S", -1)
    await place()
    assert polls == [1, 1]


async def test_all_requests_are_submitted_if_the_queue_gets_a_single_partition_meanwhile(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections = Partitioned()
    requests = [table.requests.add(prompt(at), Listener())[0] for at in range(2)]

    async def place(*_: object) -> list[Placed]:
        connections.partitions.adopt(INFO, "reply", is_bulk=False)
        parts = zip((connections.partitions[0], connections.second), requests, strict=True)
        return [Placed(partition, [request], False) for partition, request in parts]

    monkeypatch.setattr(connections.partitions, "place", place)
    await submitter_of(table, connections).submit(requests)
    assert [request.stage for request in requests] == [Stage.WAITING] * 2
    await connections.end_tasks()


async def test_a_reply_after_a_change_of_the_model_leaves_the_requests_unsent(table: Table) -> None:
    class Changing(Answering):
        async def call(self, command: str, sha: str, keys: int, *rest: bytes) -> bytes:
            self.model = dataclasses.replace(self.model, rows=copy.copy(self.model.rows))
            table.requests.restart("g")
            return await super().call(command, sha, keys, *rest)

    connections = Changing("Q")
    request, _ = table.requests.add(prompt(1), Listener())
    await submitter_of(table, connections).submit([request])
    assert request.stage is Stage.UNSENT, "the next submission sends it to the changed model"
    assert request.origin is None
    await connections.end_tasks()


@pytest.mark.parametrize("again", [False, True])
async def test_only_requests_that_a_lost_partition_did_not_accept_are_sent_again(table: Table, again: bool) -> None:
    connections = Partitioned()
    requests = [table.requests.add(prompt(at // 50, at % 50), Listener())[0] for at in range(MAX_AT_ONCE + 1)]
    for request in requests:
        request.stage = Stage.WAITING if again else Stage.SENDING
    await submitter_of(table, connections)._try_to_submit(Placed(connections.second, requests, False), again)
    assert {request.stage for request in requests[:MAX_AT_ONCE]} == {Stage.WAITING}
    assert requests[-1].stage is Stage.UNSENT
    assert connections.partitions.reachable == [connections.partitions[0]]
    await connections.end_tasks()


async def test_refused_weights_do_not_refuse_their_partition(table: Table) -> None:
    connections = Partitioned()
    request, _ = table.requests.add(prompt(1), Listener())
    request.weights = SentWeights(row())
    await submitter_of(table, connections)._try_to_submit(Placed(connections.second, [request], False), False)
    assert request.stage is Stage.UNSENT
    assert connections.second in connections.partitions.reachable
    await connections.end_tasks()


async def test_a_client_leaves_the_partitions_whose_masters_answer(table: Table) -> None:
    connections = Partitioned()
    request, _ = table.requests.add(prompt(1), Listener())
    submitter = submitter_of(table, connections)
    await submitter._try_to_submit(Placed(connections.second, [request], False), False)
    await submitter.cancel_all()
    assert connections.unlinked == [connections.partitions[0].reply]
    await connections.end_tasks()
