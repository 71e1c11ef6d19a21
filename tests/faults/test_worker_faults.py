"""Faults of workers that must not affect clients: mismatching models, broken backends, repeated prompts."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import msgpack
import numpy as np
import pytest
from redis.asyncio import Redis

from lmpool.broker.server import Server
from lmpool.embedded import EmbeddedServer
from lmpool.errors import ModelMismatch, ProtocolError, ServerUnreachable, WorkerError
from lmpool.producer.client.discovery import Discovery
from lmpool.protocol.job import Job, digest_of
from lmpool.protocol.keys import GROUP, Keys
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.row import Block
from lmpool.synthetic import synthetic_row
from lmpool.workers.backends.synthetic import SyntheticBackend, SyntheticSettings
from lmpool.workers.execution.contract import Backend, Finished
from lmpool.workers.execution.engine_thread import EngineThread
from lmpool.workers.execution.in_flight import EntriesByDigest, InFlightPrompt
from lmpool.workers.membership.heartbeat import Heartbeat, new_worker_id
from lmpool.workers.metrics.counters import WorkerCounters
from lmpool.workers.queue.consumer import Consumer
from lmpool.workers.queue.jobs import JobReader, Taken
from lmpool.workers.settings import WorkerSettings
from lmpool.workers.worker import Worker
from tests.shared.broker.adapters.test_adapters import serving
from tests.support.gate import Gate, GatedBackend, OneByOne
from tests.support.pool import DEADLINE_S, Pool, Prepared, V, deadline_ms, entry_ids, is_held, until, until_async
from tests.support.servers.proxy import Proxy


def info_of(seed: int, lease_s: float = 15.0, name: str = "syn") -> ModelInfo:
    return ModelInfo(name, "synthetic", 64, 1000, f"seed-{seed}", "float32", lease_s=lease_s)


async def joined(redis: Redis, keys: Keys, info: ModelInfo, worker_id: str) -> Heartbeat:
    jobs = keys.model(info.name).jobs
    if not await redis.exists(jobs):
        await redis.xgroup_create(jobs, GROUP, id="0", mkstream=True)
    heartbeat = Heartbeat(redis, keys, info, worker_id, batch=8)
    await heartbeat.join({})
    return heartbeat


async def beat_on(heartbeat: Heartbeat) -> None:
    while True:
        await asyncio.sleep(0.05)
        await beat(heartbeat)


async def beat(heartbeat: Heartbeat) -> None:
    """Send a heartbeat as a worker does, and check the model's info if that is due."""
    if (await heartbeat.send({}, takes_turns=True)).is_complete:
        await heartbeat.keep_info()


# Registration


def test_no_two_workers_of_a_process_and_host_have_one_id() -> None:
    # Ids with only two random bytes would have about a hundred duplicates among 4,096.
    assert len({new_worker_id() for _ in range(4096)}) == 4096


def test_one_of_two_mismatching_workers_that_start_together_ends(pool: Pool) -> None:
    workers = [pool.start("--seed", seed, wait=False) for seed in (1, 2)]
    until(lambda: any(worker.process.poll() is not None for worker in workers), "one of them has ended")
    loser, winner = sorted(workers, key=lambda worker: worker.process.poll() is None)
    assert loser.wait() == 2
    assert "with another fingerprint (revision is '" in loser.text
    assert "Traceback" not in loser.text
    winner.until_says("serving ")
    assert len(pool.names("worker:*")) == 1


async def test_a_worker_ends_when_other_weights_have_replaced_its_model(pool: Pool) -> None:
    worker = pool.start("--lease-s", 0.5)
    other = info_of(2)
    # A live worker must serve the other model, because workers ignore an info without a live worker.
    heartbeat: dict[Any, Any] = {"model": "syn", "fingerprint": other.service_fingerprint, "state": "ready"}
    pool.redis.hset(pool.keys.worker("other"), mapping=heartbeat)
    pool.redis.zadd(pool.keys.model("syn").workers, {"other": deadline_ms()})
    pool.redis.hset(pool.keys.models(), "syn", other.pack())
    assert await asyncio.to_thread(worker.wait) == 2
    assert "another fingerprint" in worker.text
    assert "Traceback" not in worker.text
    assert pool.redis.hget(pool.keys.models(), "syn") == other.pack()


async def test_a_joining_worker_compares_its_model_with_that_of_live_workers(pool: Pool) -> None:
    redis = Server(pool.url).client()
    try:
        await joined(redis, pool.keys, info_of(1, lease_s=60), "first")
        theirs, ours = info_of(1).revision, info_of(2).revision
        message = rf"served by first with another fingerprint \(revision is '{theirs}' there and '{ours}' here\)"
        with pytest.raises(ModelMismatch, match=message):
            await joined(redis, pool.keys, info_of(2), "second")
        await redis.delete(pool.keys.worker("first"), pool.keys.worker("second"))
        await joined(redis, pool.keys, info_of(2), "second")
        first = Heartbeat(redis, pool.keys, info_of(1, lease_s=1), "first", batch=8)
        # After a failover, removed workers may be listed again, so a worker waits for a lease before it ends.
        await beat(first)
        with pytest.raises(ModelMismatch, match="seed-2.*there.*seed-1.*here"):
            await asyncio.wait_for(beat_on(first), DEADLINE_S)
        await redis.delete(pool.keys.models())
        await beat(first)
        assert await redis.hget(pool.keys.models(), "syn") == info_of(1, lease_s=1).pack()
    finally:
        await redis.aclose()


def test_another_backend_under_a_name_is_refused_before_the_model_is_loaded(pool: Pool, tmp_path: Path) -> None:
    pool.start("--lease-s", 600)
    (tmp_path / "config.json").write_text("{")  # The worker would fail if it loaded the model.
    other = pool.start("--backend", "hf", "--name", "syn", model=str(tmp_path), wait=False)
    assert other.wait() == 2
    assert "the model 'syn' is served by the backend synthetic, not hf: serve it under another --name" in other.text


async def test_a_worker_does_not_join_workers_of_an_older_release_with_the_same_weights(pool: Pool) -> None:
    redis, info = Server(pool.url).client(), info_of(1)
    # The model info as releases without a wire version write it.
    told = {name: value for name, value in asdict(info).items() if name not in ("positions", "hidden", "tokenizer")}
    told["scores"] = False
    older, heartbeat = msgpack.packb(told), {"model": "syn", "fingerprint": info.fingerprint, "state": "ready"}
    try:
        await redis.hset(pool.keys.worker("older"), mapping=heartbeat)  # type: ignore[arg-type]
        await redis.zadd(pool.keys.model("syn").workers, {"older": deadline_ms()})
        await redis.hset(pool.keys.models(), "syn", older)
        with pytest.raises(ModelMismatch, match="served by older .* lacks fields that this release needs"):
            await joined(redis, pool.keys, info, "newer")
        assert await redis.hget(pool.keys.models(), "syn") == older
        with pytest.raises(ProtocolError, match="lacks fields that this release needs"):
            await Discovery(redis, pool.keys).info("syn")
    finally:
        await redis.aclose()


async def test_a_worker_of_an_older_release_detects_the_other_model(pool: Pool) -> None:
    redis, info = Server(pool.url).client(), info_of(1)
    try:
        await joined(redis, pool.keys, info, "newer")
        # An older release cannot read this info; it ends if live workers have another fingerprint than its own.
        written = msgpack.unpackb(await redis.hget(pool.keys.models(), "syn"))
        assert written.keys() - asdict(info).keys() == {"wire_version"}
        assert await redis.hget(pool.keys.worker("newer"), "fingerprint") not in (None, info.fingerprint.encode())
    finally:
        await redis.aclose()


async def test_the_last_worker_removes_the_info_of_a_worker_with_another_lease(pool: Pool) -> None:
    redis = Server(pool.url).client()
    try:
        first = await joined(redis, pool.keys, info_of(1, lease_s=5), "first")
        second = await joined(redis, pool.keys, info_of(1, lease_s=7), "second")
        await second.leave()
        assert await redis.hexists(pool.keys.models(), "syn")
        await first.leave()
        assert not await redis.hexists(pool.keys.models(), "syn")
        assert not await redis.xinfo_consumers(pool.keys.model("syn").jobs, GROUP)
        assert await redis.zrange(pool.keys.model("syn").lanes, 0, -1) == [b""]
    finally:
        await redis.aclose()


async def test_a_crash_during_leave_keeps_the_info_until_the_queue_has_a_lifetime(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis, model = Server(pool.url).client(), pool.keys.model("syn")
    try:
        worker, calls = await joined(redis, pool.keys, info_of(1), "w"), itertools.count()
        await redis.xadd(model.jobs, {"m": b"job"})
        expire = redis.pexpire

        async def is_cut_off(key: bytes, ttl_ms: int) -> bool:
            if next(calls) == 0:
                raise ConnectionError("cut off")
            return bool(await expire(key, ttl_ms))

        monkeypatch.setattr(redis, "pexpire", is_cut_off)
        with pytest.raises(ConnectionError):
            await worker.leave()
        assert await redis.hexists(pool.keys.models(), "syn"), "the info stays, so another worker repeats the removal"
        await (await joined(redis, pool.keys, info_of(1), "next")).leave()
        assert not await redis.hexists(pool.keys.models(), "syn")
        assert await redis.pttl(model.jobs) > 0
    finally:
        await redis.aclose()


async def test_the_last_worker_of_all_versions_removes_the_adapters(pool: Pool) -> None:
    redis, adapters = Server(pool.url).client(), pool.keys.model("syn").adapters
    try:
        workers = [await joined(redis, pool.keys, info_of(1, name=f"syn@{number}"), f"w{number}") for number in (2, 3)]
        await redis.hset(adapters, "poet", "an adapter")
        for worker, is_kept in zip(workers, (True, False), strict=True):
            await worker.leave()
            assert bool(await redis.exists(adapters)) == is_kept
    finally:
        await redis.aclose()


async def test_a_sweep_removes_only_the_keys_of_dead_workers(pool: Pool) -> None:
    redis, keys = Server(pool.url).client(), pool.keys
    try:
        sweeper = await joined(redis, keys, info_of(1), "sweeper")
        for name in ("live", "dead", "asked"):
            await joined(redis, keys, info_of(1, name=name), f"of-{name}")
        dead = ("idle", "busy", "queued", "claimed")
        for worker_id in dead:
            await joined(redis, keys, info_of(1), worker_id)
        jobs, lanes = keys.model("syn").jobs, keys.model("syn").lanes
        await redis.xadd(jobs, {"m": b"job"})
        await redis.xreadgroup(GROUP, "busy", {jobs: ">"})
        await redis.xadd(keys.model("asked").jobs, {"m": b"job"})
        for worker_id in ("idle", "queued", "claimed"):
            lane = keys.model("syn").lane(worker_id)
            await redis.xgroup_create(lane, GROUP, id="0", mkstream=True)
            if worker_id != "idle":
                await redis.xadd(lane, {"m": b"job"})
        await redis.xreadgroup(GROUP, "sweeper", {keys.model("syn").lane("claimed"): ">"})
        for model, *gone in (("dead", "of-dead"), ("asked", "of-asked"), ("syn", *dead)):
            await redis.zadd(keys.model(model).workers, dict.fromkeys(gone, deadline_ms(-1)))
            await redis.delete(*map(keys.worker, gone))
        await sweeper.sweep(is_complete=True)
        assert sorted(await redis.hkeys(keys.models())) == [b"asked", b"live", b"syn"]
        consumers = await redis.xinfo_consumers(jobs, GROUP)
        # Jobs of removed lanes are not lost: unread entries move to the shared stream, held entries stay.
        assert sorted(consumer["name"] for consumer in consumers) == [b"busy", b"claimed", b"sweeper"]
        assert pool.streams() == [jobs, keys.model("syn").lane("claimed")]
        assert await redis.xlen(jobs) == 2
        assert b"idle" not in await redis.zrange(lanes, 0, -1)
    finally:
        await redis.aclose()


# Backends that break


class _Faulty(SyntheticBackend):
    """A backend that fails in the given call."""

    def __init__(self, at: str) -> None:
        super().__init__(SyntheticSettings(name="syn", vocab_size=64))
        self._at = at

    def _fail(self, here: str) -> None:
        if here == self._at:
            raise RuntimeError(f"no {here}")

    def capacity(self) -> int:
        self._fail("capacity")
        return super().capacity()

    def step(self) -> Finished:
        self._fail("step")
        return super().step()

    def close(self) -> None:
        self._fail("close")
        super().close()


def make(backend: Backend) -> Callable[[], Backend]:
    return lambda: backend


async def test_a_backend_that_fails_after_its_construction_fails_the_start() -> None:
    engine_thread = EngineThread(make(_Faulty("capacity")), lambda _: None, lambda _: None)
    with pytest.raises(RuntimeError, match="no capacity"):
        await asyncio.wait_for(engine_thread.start(), DEADLINE_S)
    await asyncio.wait_for(engine_thread.close(), DEADLINE_S)


@pytest.mark.parametrize("at", ["step", "close"])
async def test_a_backend_that_fails_later_is_reported_and_closed(at: str) -> None:
    broken: list[BaseException] = []
    engine_thread = EngineThread(make(_Faulty(at)), lambda _: None, broken.append)
    await asyncio.wait_for(engine_thread.start(), DEADLINE_S)
    if at == "step":
        engine_thread.submit([InFlightPrompt(bytes(16), bytes(4))])

        async def told() -> bool:
            return bool(broken)

        await until_async(told, "the fault is told")
    await asyncio.wait_for(engine_thread.close(), DEADLINE_S)
    await asyncio.sleep(0)
    assert [str(error) for error in broken] == [f"no {at}"]


async def test_a_wrong_address_is_reported_before_the_model_is_loaded() -> None:
    made: list[bool] = []

    class Loaded(Prepared):
        def open(self) -> Backend:
            made.append(True)
            return super().open()

    with pytest.raises(ServerUnreachable):
        await Worker(Server("redis://127.0.0.1:1"), Loaded(_Faulty(""))).run()
    assert not made


# The worker's loop


async def test_the_queue_of_a_worker_whose_lease_expires_during_its_heartbeat_gets_a_lifetime(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis, model = Server(pool.url).client(), pool.keys.model("syn")
    slow, other = [await joined(redis, pool.keys, info_of(1, name=name), name) for name in ("syn", "other")]

    async def renew() -> None:
        await redis.zrem(model.workers, slow.worker_id)
        await other.sweep(is_complete=True)

    nothing: Any = None
    consumer = Consumer(JobReader(redis, model, slow.info, slow.worker_id, WorkerCounters()), nothing)
    serving: Any = SimpleNamespace(heartbeat=slow, consumer=consumer, info=slow.info)
    serving.adapters = SimpleNamespace(renew=renew)
    worker = Worker(Server(pool.url), Prepared(_Faulty("")), WorkerSettings(prefix=pool.prefix))
    monkeypatch.setattr(worker, "_beat", AsyncMock(return_value=SimpleNamespace(is_complete=True)))
    monkeypatch.setattr(worker, "versions", AsyncMock(), raising=False)
    await worker.send_heartbeat(serving)
    assert not await redis.hexists(pool.keys.models(), "syn")
    assert await redis.pttl(model.jobs) > 0
    await consumer.keep_queue()
    assert await redis.pttl(model.jobs) == -1
    await slow.leave(for_good=False)
    assert await redis.pttl(model.jobs) > 0
    await redis.aclose()


async def test_a_worker_keeps_and_logs_the_first_of_the_errors_that_break_its_backend(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = Worker(Server("redis://127.0.0.1:1"), Prepared(_Faulty("")))
    first = WorkerError("rank 1 of the model has failed")
    for error in (first, WorkerError("rank 1 of the model has failed"), RuntimeError("cancelled")):
        worker._break(error)
    assert worker._lifecycle.broken is first
    assert worker.health.why_dead() == "the backend broke: rank 1 of the model has failed"
    assert caplog.messages == ["the backend broke: rank 1 of the model has failed"]
    assert caplog.records[0].exc_info is None, "an error of one line needs no traceback"


async def test_small_rows_that_become_ready_during_a_publication_are_published_together(pool: Pool) -> None:
    settings = WorkerSettings(prefix=pool.prefix)
    backend = GatedBackend(OneByOne(), batch=2)
    worker = Worker(Server(pool.url), Prepared(backend), settings)
    ready = asyncio.Event()
    running = asyncio.create_task(worker.run(lambda _: ready.set()))
    await asyncio.wait_for(ready.wait(), DEADLINE_S)
    serving = worker._serving
    assert serving is not None
    publish, published, may_end = serving.publisher.publish, list[int](), asyncio.Event()

    async def held_up(block: Block, entries: EntriesByDigest, overwrite: Collection[bytes]) -> None:
        published.append(len(block.digests))
        await may_end.wait()
        await publish(block, entries, overwrite)

    serving.publisher.publish = held_up  # type: ignore[method-assign]
    async with pool.producer("syn") as producer:
        asked = [asyncio.create_task(producer.logprobs([token])) for token in range(6)]

        async def publishes() -> bool:
            return len(published) > 0

        backend.gate.let(1)
        await until_async(publishes, "the publication of the first step has begun")
        backend.gate.open()

        async def computed() -> bool:
            return serving.engine_thread.stats.rows == 6

        await until_async(computed, "all rows are computed")
        may_end.set()
        for token, row in enumerate(await asyncio.gather(*asked)):
            assert np.array_equal(row, synthetic_row([token], vocab_size=V))
    assert len(published) == 2, "those of the first step, and all others"
    assert sum(published) == 6
    await asyncio.wait_for(worker._results.join(), DEADLINE_S)
    worker.stop()
    await asyncio.wait_for(running, DEADLINE_S)


@pytest.mark.parametrize("place", ["shared stream", "lane"])
async def test_a_prompt_requested_again_while_its_row_is_stored_is_computed_again(pool: Pool, place: str) -> None:
    backend = SyntheticBackend(SyntheticSettings(name="syn", vocab_size=64))
    worker = Worker(Server(pool.url), Prepared(backend), WorkerSettings(prefix=pool.prefix))
    ready = asyncio.Event()
    running = asyncio.create_task(worker.run(lambda _: ready.set()))
    await asyncio.wait_for(ready.wait(), DEADLINE_S)
    ids = np.array([1, 2], "<u4").tobytes()
    model, digest = pool.keys.model("syn"), digest_of(ids, "")
    stream = model.lane(worker.worker_id) if place == "lane" else model.jobs
    serving = worker._serving
    assert serving is not None
    fingerprint = serving.info.fingerprint
    publish = serving.publisher.publish
    overwritten: list[bool] = []

    async def slow_publish(block: Block, entries: EntriesByDigest, overwrite: Collection[bytes]) -> None:
        await publish(block, entries, overwrite)
        overwritten.append(digest in overwrite)
        if len(overwritten) == 1:
            pool.redis.xadd(stream, {"m": Job(ids, "", fingerprint, overwrite=True).pack()})

            async def taken() -> bool:
                return len(serving.in_flight[digest].entries) == 2

            await until_async(taken, "the second entry is held")

    serving.publisher.publish = slow_publish  # type: ignore[method-assign]
    pool.redis.xadd(stream, {"m": Job(ids, "", fingerprint).pack()})

    async def ended() -> bool:
        return len(overwritten) == 2 and not serving.in_flight

    await until_async(ended, "both entries have ended")
    assert overwritten == [False, True]
    assert backend.stats().rows == 2
    assert pool.jobs() == 0
    assert pool.held() == 0
    worker.stop()
    await asyncio.wait_for(running, DEADLINE_S)


async def test_unpublished_rows_leave_capacity_for_whole_batches(pool: Pool) -> None:
    class Roomy(SyntheticBackend):
        def capacity(self) -> int:
            return 1000

    batch = 4
    backend = Roomy(SyntheticSettings(name="syn", vocab_size=64, max_batch=batch))
    worker = Worker(Server(pool.url), Prepared(backend), WorkerSettings(prefix=pool.prefix))
    ready, go = asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(worker.run(lambda _: ready.set()))
    await asyncio.wait_for(ready.wait(), DEADLINE_S)
    serving = worker._serving
    assert serving is not None
    publish, take = serving.publisher.publish, serving.consumer.take
    asked: list[int] = []

    async def delayed_publish(block: Block, entries: EntriesByDigest, overwrite: Collection[bytes]) -> None:
        await go.wait()
        await publish(block, entries, overwrite)

    async def noted_take(count: int, block_ms: int) -> Taken:
        asked.append(count)
        return await take(count, block_ms)

    serving.publisher.publish = delayed_publish  # type: ignore[method-assign]
    serving.consumer.take = noted_take  # type: ignore[method-assign]
    jobs, fingerprint = pool.keys.model("syn").jobs, serving.info.fingerprint
    # A worker holds at most four batches of unpublished rows: leave room for two rows, which is less than a batch.
    with pool.redis.pipeline(transaction=True) as pipe:
        for token in range(4 * batch - 2):
            pipe.xadd(jobs, {"m": Job(np.array([token], "<u4").tobytes(), "", fingerprint).pack()})
        pipe.execute()

    async def computed() -> bool:
        return backend.stats().rows == 4 * batch - 2

    await until_async(computed, "all are computed, and held")
    go.set()

    async def ended() -> bool:
        return not serving.in_flight

    await until_async(ended, "all have ended")
    worker.stop()
    await asyncio.wait_for(running, DEADLINE_S)
    assert asked
    assert all(count % batch == 0 for count in asked), "never a part of a batch"


async def test_a_suspect_runs_alone_while_other_prompts_keep_arriving(pool: Pool) -> None:
    steps: list[set[bytes]] = []

    class Watched(SyntheticBackend):
        def step(self) -> Finished:
            steps.append({job.ids for job in self._jobs.values()})
            return super().step()

    backend = Watched(SyntheticSettings(name="syn", vocab_size=64, step_ms=100))
    jobs, fingerprint = pool.keys.model("syn").jobs, backend.info.fingerprint

    def ask(token: int) -> bytes:
        ids = np.array([token % 64, token // 64], "<u4").tobytes()
        pool.redis.xadd(jobs, {"m": Job(ids, "", fingerprint).pack()})
        return ids

    pool.redis.xgroup_create(jobs, GROUP, id="0", mkstream=True)
    suspect = ask(0)
    taken: Any = pool.redis.xreadgroup(GROUP, "dead", {jobs: ">"})
    pool.redis.xclaim(jobs, GROUP, "dead", 0, [*entry_ids(taken)[:1]], idle=60_000, retrycount=1, justid=True)
    worker = Worker(Server(pool.url), Prepared(backend), WorkerSettings(pool.prefix, lease_s=2, max_deliveries=2))
    running = asyncio.create_task(worker.run())
    others = itertools.count(1)
    while not any(suspect in step for step in steps):
        ask(next(others))
        await asyncio.sleep(0.03)  # Send other prompts all the time until the suspect runs.

    async def ended() -> bool:
        return pool.jobs() == 0

    await until_async(ended, "all prompts have ended")
    worker.stop()
    await asyncio.wait_for(running, DEADLINE_S)
    assert [step for step in steps if suspect in step] == [{suspect}]
    assert not pool.names("worker:*")


def test_a_worker_without_prompts_stops_without_its_server(own_server: EmbeddedServer, tmp_path: Path) -> None:
    pool = Pool(own_server.url, "gone", tmp_path)
    try:
        worker = pool.start("--lease-s", 1)
        own_server.stop()
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
        assert "cannot deregister" in worker.text
        assert "Traceback" not in worker.text
    finally:
        pool.end()


async def test_a_drain_that_cannot_publish_ends_after_a_lease(own_server: EmbeddedServer, tmp_path: Path) -> None:
    pool = Pool(own_server.url, "gone", tmp_path)
    try:
        gate = Gate(tmp_path / "gate")
        worker = pool.start("--lease-s", 1, command=gate.command)
        ids = np.array([1], "<u4").tobytes()
        info = ModelInfo.unpack(pool.redis.hget(pool.keys.models(), "syn"))  # type: ignore[arg-type]
        pool.redis.xadd(pool.keys.model("syn").jobs, {"m": Job(ids, "", info.fingerprint).pack()})
        await until_async(lambda: is_held(pool), "the worker holds the prompt")
        await asyncio.to_thread(own_server.stop)
        worker.signal(signal.SIGTERM)
        gate.open()
        assert await asyncio.to_thread(worker.wait) == 2
        assert "1 prompts could not be published" in worker.text
    finally:
        pool.end()


async def test_a_refused_heartbeat_is_reported_after_a_broken_connection(
    own_server: EmbeddedServer, short_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In a failover, refused writes can follow a broken connection: the worker logs both faults."""
    async with Proxy(short_dir / "s" / "redis.sock", short_dir / "p.sock") as proxy:
        pool = Pool(own_server.url, "own", tmp_path)
        pool.url = proxy.url
        async with serving(pool, SyntheticBackend(SyntheticSettings()), lease_s=1.0) as worker:
            proxy.refuse()
            proxy.cut()

            async def is_troubled() -> bool:
                return bool(worker.health.trouble)

            async def is_told() -> bool:
                return "its heartbeat is refused: " in caplog.text

            await until_async(is_troubled, "a heartbeat finds no server")
            assert not await is_told()
            pool.redis.replicaof("127.0.0.1", "1")
            proxy.heal()
            await until_async(is_told, "the refusal is told of")
            pool.redis.replicaof("NO", "ONE")

            async def is_well() -> bool:
                return not worker.health.trouble

            await until_async(is_well, "it is well again")
        pool.end()
