"""Masters that do not answer: workers and clients go on with the other partitions. Stand-ins, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lmpool.broker import scripts
from lmpool.broker.scripts import Alive, Load, read_loads
from lmpool.errors import ServerUnreachable
from lmpool.producer.client.discovery import Connections, Liveness
from lmpool.producer.client.requests import PendingRequest, Stage
from lmpool.producer.client.session import Session
from lmpool.producer.client.submit import Homes
from lmpool.protocol.keys import Keys
from lmpool.protocol.model_info import MAX_PARTITIONS, ModelInfo, partitions_in
from lmpool.workers.membership.partitions import PartitionMover
from lmpool.workers.worker import Worker
from tests.producer.client.tables import Listener, Table, prompt
from tests.support.pool import DEADLINE_S

INFO = ModelInfo("m", "synthetic", 3, 10, "seed", "float32", partitions=(0, 1))
KEYS = Keys("test")


def mover_of(heartbeat: SimpleNamespace, server: Any = None) -> PartitionMover:
    """A mover with a stand-in for the heartbeat, and without the other parts of a worker."""
    heartbeat.__dict__.update(keys=KEYS, partition=0)
    none = cast(Any, None)
    return PartitionMover(server, cast(Any, heartbeat), none, none, none, None)


async def lost(*_: object) -> Any:
    raise ServerUnreachable("lost")


async def test_a_worker_follows_its_partitions_while_the_master_of_the_infos_is_down() -> None:
    assert await mover_of(SimpleNamespace(redis=None, info=INFO, adopt_partitions=lost)).follow()


async def test_the_default_number_of_partitions_is_within_the_limit_of_an_info() -> None:
    class Cluster:
        """Each key is on the master that has the number of the key."""

        async def masters(self) -> list[int]:
            return list(range(MAX_PARTITIONS + 10))

        async def at(self, key: bytes) -> int:
            number = key.partition(b"{")[2].partition(b"{")[2].partition(b"}")[0]
            return int(number or 0)

    async def none() -> bytes:
        return b""

    async def unreadable(*_: object) -> Any:
        raise ServerUnreachable("no load is needed")

    redis = SimpleNamespace(execute_command=unreadable)
    heartbeat = SimpleNamespace(redis=redis, info=INFO, read_info=none)
    await mover_of(heartbeat, Cluster()).choose_first()
    assert len(heartbeat.info.partitions) == MAX_PARTITIONS
    assert partitions_in(heartbeat.info.pack()) == heartbeat.info.partitions


async def test_a_silent_master_does_not_hide_the_loads_of_other_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    async def read(_: object, keys: Any) -> Load:
        if keys.base == KEYS.model("m", 1).base:
            await asyncio.Event().wait()
        return Load(1, 1, 0)

    monkeypatch.setattr(scripts, "read_load", read)
    first, second = await asyncio.wait_for(read_loads(cast(Any, None), KEYS.partitions(INFO), 0.1), DEADLINE_S)
    assert first == Load(1, 1, 0)
    assert isinstance(second, TimeoutError)


async def test_a_worker_that_waits_until_it_may_move_sends_heartbeats() -> None:
    """A claim that runs a job alone holds up the move for as long as the job computes."""
    may_pause, waits = asyncio.Event(), asyncio.Event()
    moved: list[int] = []

    @asynccontextmanager
    async def paused() -> AsyncIterator[None]:
        waits.set()
        await may_pause.wait()
        yield

    async def move(target: int) -> None:
        assert lock.locked()
        moved.append(target)

    lock = asyncio.Lock()
    worker = SimpleNamespace(_stats_before=None, _heartbeat_lock=lock, _claim_soon=asyncio.Event())
    checking = asyncio.create_task(check_partitions(worker, move, is_idle=True, paused=paused))
    await asyncio.wait_for(waits.wait(), DEADLINE_S)
    assert not lock.locked()
    may_pause.set()
    await checking
    assert moved == [1]


class Moving:
    """The parts of a worker that a move uses; records in which partitions the worker is registered."""

    def __init__(self) -> None:
        self.redis, self.keys, self.info, self.partition = None, KEYS, INFO, 0
        self.registered, self.steps = {0}, list[set[int]]()
        self.reader, self.connection = SimpleNamespace(keys=None), SimpleNamespace(key=b"", hang_up=lambda _: None)

    async def go_on(self, *_: object) -> None:
        """Record the partitions in which the worker is registered at this step of the move."""
        self.steps.append(set(self.registered))

    close_lane = open_lane = ensure_group = release_all = go_on

    async def register(self) -> None:
        self.registered.add(self.partition)
        await self.go_on()

    async def leave_partition(self, number: int) -> None:
        self.registered.discard(number)
        await self.go_on()

    def use_queue(self, key: bytes) -> None:
        assert key == KEYS.model("m", self.partition).jobs

    async def move(self) -> None:
        parts = cast(Any, self)
        await PartitionMover(cast(Any, None), parts, parts, parts, parts, None).move(1)


async def test_a_worker_that_moves_is_registered_in_a_partition_at_every_moment() -> None:
    worker = Moving()
    await worker.move()
    assert all(worker.steps)
    assert {0, 1} in worker.steps
    assert worker.registered == {1}


async def test_a_worker_leaves_its_partition_although_the_next_one_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = Moving()
    monkeypatch.setattr(worker, "register", lost)
    with pytest.raises(ServerUnreachable):
        await worker.move()
    assert worker.partition == 1
    assert worker.registered == set()


async def test_a_worker_that_holds_jobs_reads_no_loads() -> None:
    worker = SimpleNamespace(_stats_before=None)
    assert await check_partitions(worker, lost, is_idle=False) == 0
    assert worker._stats_before == "stats"


async def check_partitions(worker: SimpleNamespace, move: Any, *, is_idle: bool, paused: Any = None) -> int:
    """Call `_check_partitions` with stand-ins; returns the number of times that the worker read the loads."""
    reads = list[int]()

    async def follow() -> bool:
        return True

    async def read() -> dict[int, Load]:
        reads.append(1)
        return {}

    mover = SimpleNamespace(follow=follow, read_loads=read, better_partition=lambda loads, was_idle: 1, move=move)
    loop = SimpleNamespace(is_idle=is_idle, paused=paused, check_now=lambda: None)
    engine_thread = SimpleNamespace(stats="stats")
    serving = SimpleNamespace(partitions=mover, fetch_loop=loop, engine_thread=engine_thread, info=INFO)
    await Worker._check_partitions(cast(Any, worker), cast(Any, serving))
    return len(reads)


class Client:
    """The parts of a session that check late requests and homes; stand-ins for the server."""

    def __init__(self, fetch: Any = lost, gone: Any = lost) -> None:
        table = Table()
        self.loop, self.info, self._requests, self._next_recheck = asyncio.get_running_loop(), INFO, table.requests, 0
        self.submitted: list[PendingRequest] = []
        self.trouble: BaseException | None = None
        self._submitter = SimpleNamespace(homes=Homes(), fetch=fetch, submit=self.submit)
        self._discovery, self._connections = SimpleNamespace(gone=gone), self

    noting = Connections.noting

    def note(self, error: BaseException) -> None:
        self.trouble = error

    async def submit(self, requests: Sequence[PendingRequest], *, again: bool) -> None:
        assert again
        self.submitted += requests


async def test_requests_are_submitted_again_while_the_master_of_a_late_row_is_down() -> None:
    client = Client()
    late, _ = client._requests.add(prompt(1), Listener())
    late.stage, late.since = Stage.WAITING, client.loop.time() - 2 * INFO.lease_s
    await Session._recheck(cast(Any, client))
    assert client.submitted == [late]
    assert isinstance(client.trouble, ServerUnreachable)


async def test_homes_in_other_partitions_are_checked_while_a_master_is_down() -> None:
    async def gone(_: str, workers: Sequence[bytes], partition: int) -> Sequence[bytes]:
        return await lost() if partition == 0 else workers

    client = Client(gone=gone)
    homes = client._submitter.homes
    homes.workers = {b"a": 0, b"b": 1}
    await Session._check_homes(cast(Any, client))
    assert homes.workers == {b"a": 0}
    assert client.trouble is None


async def test_a_worker_that_drains_is_not_missing() -> None:
    async def loads(_: ModelInfo) -> dict[int, Load]:
        return {0: Load(0, 0, 0), 1: Load(0, 0, 1)}

    async def alive(_: str, partitions: Sequence[int]) -> Alive:
        return Alive(partitions.count(1), 0, ())

    connections = SimpleNamespace(
        model=SimpleNamespace(info=INFO), partitions=SimpleNamespace(note_load=lambda *_: None)
    )
    discovery = SimpleNamespace(loads=loads, alive=alive)
    liveness = Liveness(cast(Any, connections), cast(Any, discovery))
    await liveness.poll()
    assert liveness.count == 1
