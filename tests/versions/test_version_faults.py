"""Processes end, and the server restarts, at any moment of a change of weights: one version is served in the end."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from lmpool.broker.registries import VersionRegistry
from lmpool.broker.scripts import read_alive
from lmpool.broker.server import Server
from lmpool.embedded import EmbeddedServer
from lmpool.errors import DeadlineExceeded, SettingsError, UnknownModel, WeightsRefused
from lmpool.producer import Producer
from lmpool.producer.client.requests import Deadline
from lmpool.protocol.tensors import sample_digest
from lmpool.protocol.version import Version
from lmpool.synthetic import synthetic_row
from tests.support.gate import Gate, GatedBackend, gated_worker
from tests.support.pool import DEADLINE_S, Pool, V, is_held, until, until_async
from tests.support.servers.proxy import Proxy, Way
from tests.versions.test_changes import is_of_seed
from tests.versions.traffic import Seeds, Traffic, weights

LEASE = ("--lease-s", 1)
MAX_FILE_BYTES = 1 << 16
LIMITED = f"""
import resource
from lmpool.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, ({MAX_FILE_BYTES}, {MAX_FILE_BYTES}))
main()
"""
"""A worker that cannot write larger files, as on a full disk."""


async def test_a_worker_that_is_killed_while_it_loads_is_followed_by_another(pool: Pool, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    first = pool.start(*LEASE, command=gate.command)
    async with pool.producer("syn") as publisher:
        publishing = asyncio.create_task(publisher.publish_weights(weights(1)))
        await asyncio.to_thread(first.until_says, "changing from version 0 to version 1")
        first.end()  # Its prompt with the new weights waits at the gate.
        second = pool.start(*LEASE)
        assert await publishing == 1
        second.until_says("serving 'syn@1'")
        assert await is_of_seed(publisher, 1)


async def test_weights_that_end_each_worker_are_refused(pool: Pool, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    pool.start(*LEASE, command=gate.command)
    async with pool.producer("syn") as publisher:
        publishing = asyncio.create_task(publisher.publish_weights(weights(1)))
        for _ in range(3):
            worker = pool.workers[-1]
            await asyncio.to_thread(worker.until_says, "changing from version 0 to version 1")
            worker.end()
            pool.start(*LEASE, command=gate.command)
        with pytest.raises(WeightsRefused, match="no worker serves version 1: 3 workers ended while they loaded it"):
            await publishing
        gate.open()
        assert await is_of_seed(publisher, 0)


@pytest.mark.parametrize("moment", ["before the publication", "during the drain for the change"])
async def test_a_worker_that_ends_leaves_the_change_to_others(moment: str, pool: Pool, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    ending = pool.start(*LEASE, command=gate.command)
    async with pool.producer("syn") as publisher:
        asked = asyncio.create_task(publisher.logprobs([9]))
        await until_async(lambda: is_held(pool), "the prompt is in a step, which waits at the gate")
        if moment == "before the publication":
            ending.signal(signal.SIGTERM)
            await asyncio.to_thread(ending.until_says, "stopping: ")
        publishing = asyncio.create_task(publisher.publish_weights(weights(1)))
        if moment == "before the publication":
            await asyncio.to_thread(until, lambda: bool(pool.names("{syn}:versions")), "the version is published")
        else:
            turn = pool.keys.model("syn").version_turn(0)
            await asyncio.to_thread(until, lambda: bool(pool.redis.exists(turn)), "the worker has the turn")
            ending.signal(signal.SIGTERM)
        pool.start(*LEASE)
        assert await publishing == 1
        gate.open()
        await asked
    assert await asyncio.to_thread(ending.wait) == 0


async def test_a_worker_whose_turn_has_expired_follows_the_decision_of_another(pool: Pool, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    slow = pool.start(*LEASE, command=gate.command)
    async with pool.producer("syn") as publisher:
        publishing = asyncio.create_task(publisher.publish_weights(weights(1)))
        await asyncio.to_thread(slow.until_says, "changing from version 0 to version 1")
        async with Server(pool.url).connected() as client:
            await VersionRegistry(client, pool.keys.model("syn")).decide(1, "refused: another worker has refused it")
        with pytest.raises(WeightsRefused, match="another worker has refused it"):
            await publishing
        gate.open()
        await asyncio.to_thread(slow.until_says, "version 1 is not served: another worker has refused it")
        assert await is_of_seed(publisher, 0)
        assert await publisher.publish_weights(weights(2)) == 2
        assert await is_of_seed(publisher, 2)


async def test_a_publisher_that_is_killed_leaves_a_version_or_none(pool: Pool) -> None:
    pool.start()
    async with Server(pool.url).connected() as client, pool.producer("syn") as producer:
        registry = VersionRegistry(client, pool.keys.model("syn"))
        # It ended before it added the version: the stored part expires.
        await registry.store("0" * 16, 0, memoryview(b"part"))
        (part,) = pool.names("{syn}:versions:data:*")
        assert 0 < pool.redis.pttl(part) <= 3_600_000
        # It ended after it had added the version, and the part of the file is missing.
        assert await registry.add(Version(1, "1" * 16, chunks=(bytes(16),)))

        async def is_refused() -> bool:
            return (await producer.versions())[1].startswith("refused: weights: part 0 of version 1 is missing")

        await until_async(is_refused, "the version is refused")
        assert await producer.publish_weights(weights(2)) == 2
        assert await is_of_seed(producer, 2)


async def test_a_worker_whose_disk_is_full_refuses_stored_weights(pool: Pool, tmp_path: Path) -> None:
    pool.start("--shm-bytes", 0, command=lambda: [sys.executable, "-c", LIMITED])
    large = tmp_path / "large.safetensors"
    save_file({"seed": np.array(1)}, large, {"note": "x" * 2 * MAX_FILE_BYTES})
    async with pool.producer("syn") as producer:
        with pytest.raises(WeightsRefused, match="cannot store the files: .*File too large"):
            await producer.publish_weights(large, stored=True)
        assert await is_of_seed(producer, 0)
        assert await producer.publish_weights(weights(2)) == 2
        assert await is_of_seed(producer, 2)


async def test_the_versions_survive_a_server_that_loses_its_memory(own_server: EmbeddedServer, tmp_path: Path) -> None:
    pool = Pool(own_server.url, "lp", tmp_path)
    try:
        worker = pool.start(*LEASE)
        async with pool.producer("syn") as producer:
            await producer.publish_weights(weights(1))
            await producer.publish_weights({"seed.indices": np.array([0]), "seed.values": np.array([2])})
            pool.redis.flushall()
            assert await is_of_seed(producer, 2, [7])

            async def is_restored() -> bool:
                return await producer.versions() == {1: "served", 2: "served"}

            await until_async(is_restored, "the worker restores the registry")
            pool.start(*LEASE).until_says("serving 'syn@2'")  # It reads the stored files.
            assert await producer.publish_weights(weights(3)) == 3
            assert await is_of_seed(producer, 3)
        worker.signal(signal.SIGTERM)
        assert await asyncio.to_thread(worker.wait) == 0
    finally:
        pool.end()


async def test_a_worker_stores_a_file_again_that_the_server_has_evicted(pool: Pool) -> None:
    first = pool.start(*LEASE)
    async with pool.producer("syn") as producer:
        await producer.publish_weights(weights(1))
        await producer.publish_weights({"seed.indices": np.array([0]), "seed.values": np.array([2])})
        parts = pool.names("{syn}:versions:data:*")
        assert len(parts) == 2
        pool.redis.delete(*parts)

        async def are_stored() -> bool:
            return pool.names("{syn}:versions:data:*") == parts

        await until_async(are_stored, "the worker stores the files")
        first.end()
        pool.start(*LEASE).until_says("serving 'syn@2'")
        assert await is_of_seed(producer, 2)


async def test_a_worker_restores_the_states_of_its_versions(pool: Pool) -> None:
    """As if the worker had lost the server after it restored the entries of the versions."""
    pool.start(*LEASE)
    async with pool.producer("syn") as producer:
        await producer.publish_weights(weights(1))
        await producer.publish_weights({"seed.indices": np.array([0]), "seed.values": np.array([2])})
        pool.redis.hdel(pool.keys.model("syn").version_states, "1", "2")

        async def are_restored() -> bool:
            return await producer.versions() == {1: "served", 2: "served"}

        await until_async(are_restored, "the worker restores the states")


async def test_a_worker_whose_connections_are_silent_changes_within_a_few_leases(
    own_server: EmbeddedServer, short_dir: Path, tmp_path: Path
) -> None:
    pool = Pool(own_server.url, "lp", tmp_path)
    try:
        async with Proxy(short_dir / "s" / "redis.sock", short_dir / "p") as proxy:
            direct, pool.url = pool.url, proxy.url
            await asyncio.to_thread(pool.start, *LEASE)
            producer = Producer("syn", redis=direct, prefix=pool.prefix, timeout=DEADLINE_S)
            await producer.open()
            proxy.swallow(Way.TO_CLIENT)
            async with asyncio.timeout(25):  # Far more than the two seconds after which a connection is broken.
                assert await producer.publish_weights(weights(1)) == 1
            await producer.close()
    finally:
        pool.end()


async def test_a_new_version_has_a_larger_number_than_the_used_one_before_the_registry_is_restored(pool: Pool) -> None:
    pool.start()
    async with Server(pool.url).connected() as client, pool.producer("syn") as producer:
        await producer.publish_weights(weights(1))
        registry = VersionRegistry(client, pool.keys.model("syn"))
        owner, tensors = producer.model.lineage, await registry.tensors()
        await registry.clear()
        assert await registry.claim(owner, tensors)
        with pytest.raises(SettingsError, match="no worker has registered version 1 again yet"):
            await producer.publish_weights({"seed.indices": np.array([0]), "seed.values": np.array([2])})
        assert await producer.publish_weights(weights(2)) == 2
        assert await is_of_seed(producer, 2)


async def test_a_worker_does_not_mix_its_versions_with_those_of_another_publisher(pool: Pool) -> None:
    worker = pool.start(*LEASE)
    keys, sparse = pool.keys.model("syn"), {"seed.indices": np.array([0]), "seed.values": np.array([2])}
    async with pool.producer("syn") as producer:
        await producer.publish_weights(weights(1))
        await producer.publish_weights(sparse)
        # The server loses its memory, and another publisher is faster than the worker.
        foreign = Version(1, "f" * 16, chunks=(bytes(16),))
        with pool.redis.pipeline(transaction=True) as changes:
            changes.delete(keys.versions)
            changes.hdel(keys.version_states, "1", "2")
            changes.xadd(keys.versions, {"v": foreign.pack()}, id=foreign.entry)
            changes.execute()
        await asyncio.to_thread(worker.until_says, "version 1 is not restored: another publisher has used the number")
        assert await producer.versions() == {1: ""}
        with pytest.raises(SettingsError, match="no worker has registered version 2 again yet"):
            await producer.publish_weights(sparse)
        assert await producer.publish_weights(weights(3)) == 3
        assert await is_of_seed(producer, 3)


async def test_a_version_without_workers_expires(pool: Pool) -> None:
    async with Server(pool.url).connected() as client:
        registry = VersionRegistry(client, pool.keys.model("syn"))
        assert await registry.add(Version(1, "1" * 16, source="/weights"))
        assert pool.redis.pttl(registry.keys.versions) > 0
        # A publisher whose connection breaks after the first command adds the version again.
        pool.redis.persist(registry.keys.versions)
        assert not await registry.add(Version(1, "1" * 16, source="/weights"))
        assert pool.redis.pttl(registry.keys.versions) > 0
        await registry.decide(1, "served")
        assert pool.redis.pttl(registry.keys.version_states) > 0
        pool.redis.delete(registry.keys.version_states)  # As an eviction does.
        assert await registry.count_try(1) == 1
        assert pool.redis.pttl(registry.keys.version_states) > 0


async def test_only_the_owner_of_a_turn_renews_and_ends_it(pool: Pool) -> None:
    async with Server(pool.url).connected() as client:
        registry = VersionRegistry(client, pool.keys.model("syn"))
        assert [await registry.take_turn(name, 2, 60_000) for name in ("a", "b", "c")] == [0, 1, None]
        await registry.end_turn(0, "b")
        assert not await registry.renew_turn(0, "b", 1)
        assert await registry.take_turn("c", 2, 60_000) is None
        await registry.end_turn(0, "a")
        assert await registry.take_turn("c", 2, 60_000) == 0
        pool.redis.delete(registry.keys.version_turn(0))
        # A turn that has expired is free: its last owner may take it again.
        assert await registry.renew_turn(0, "c", 60_000)
        assert [await registry.renew_turn(0, name, 60_000) for name in ("c", "d")] == [True, False]


async def test_a_worker_that_lost_its_turn_during_the_fetch_serves_on_and_changes_later(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, is_fetching, may_end = Gate(tmp_path / "gate"), asyncio.Event(), asyncio.Event()
    load, turn = VersionRegistry.load, pool.keys.model("syn").version_turn(0)

    async def load_late(registry: VersionRegistry, version: Version, index: int) -> bytes:
        is_fetching.set()
        await may_end.wait()
        return await load(registry, version, index)

    monkeypatch.setattr(VersionRegistry, "load", load_late)
    gate.open()
    async with gated_worker(pool, GatedBackend(gate)), pool.producer("syn") as producer, pool.producer("syn") as other:
        publishing = asyncio.create_task(producer.publish_weights(weights(1)))
        await is_fetching.wait()
        pool.redis.set(turn, "another worker", px=600_000)
        may_end.set()
        assert await is_of_seed(other, 0)
        pool.redis.delete(turn)
        assert await publishing == 1
        assert await is_of_seed(other, 1, min_version=1)


async def test_a_served_sparse_version_makes_its_base_count_as_served(pool: Pool, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    worker = pool.start(*LEASE, command=gate.command)
    async with Server(pool.url).connected() as client, pool.producer("syn") as producer:
        registry, file, changes = VersionRegistry(client, pool.keys.model("syn")), tmp_path / "1", tmp_path / "2"
        save_file({"seed": np.array(1)}, file)
        save_file({"seed.indices": np.array([0]), "seed.values": np.array([2])}, changes)
        asked = asyncio.create_task(producer.logprobs([9]))
        await until_async(lambda: is_held(pool), "a prompt delays the change")
        for number, base, path in ((1, -1, file), (2, 1, changes)):
            await registry.add(Version(number, f"{number}" * 16, base, str(path), (sample_digest(path),)))
        gate.open()
        await asked
        await producer.reach_version(2)
        assert (await registry.read()).chain(is_tried=False)[-1].number == 2
        worker.end()
        pool.start(*LEASE).until_says("serving 'syn@2'")


@pytest.mark.parametrize("moment", ["loading", "serving"])
async def test_the_server_restarts_during_a_change(moment: str, own_server: EmbeddedServer, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    pool = Pool(own_server.url, "lp", tmp_path)
    try:
        worker = pool.start(*LEASE, command=gate.command)
        if moment == "serving":
            gate.open()
        traffic = Traffic(Seeds({0: 0, 1: 1}))
        async with pool.producer("syn") as publisher:
            # If the server loses the version before the worker has read it, the publisher waits until its deadline.
            publishing = asyncio.create_task(publisher.publish_weights(weights(1), timeout=30))
            await asyncio.to_thread(worker.until_says, "changing from version 0 to version 1")
            await asyncio.to_thread(own_server.stop)
            await asyncio.to_thread(own_server.start)
            gate.open()
            await asyncio.gather(publishing, return_exceptions=True)
            # The server may have lost the version with its memory; the worker serves what it has loaded.
            async with traffic.running(pool, 2):

                async def are_served() -> bool:
                    return bool(traffic.answers)

                await until_async(are_served, "clients get rows")
    finally:
        pool.end()


async def test_a_worker_that_waits_for_the_server_during_a_change_can_be_stopped(
    own_server: EmbeddedServer, tmp_path: Path
) -> None:
    gate = Gate(tmp_path / "gate")
    pool = Pool(own_server.url, "lp", tmp_path)
    try:
        worker = pool.start(*LEASE, command=gate.command)
        async with pool.producer("syn") as publisher:
            publishing = asyncio.create_task(publisher.publish_weights(weights(1)))
            await asyncio.to_thread(worker.until_says, "changing from version 0 to version 1")
            await asyncio.to_thread(own_server.stop)
            publishing.cancel()
        gate.open()
        await asyncio.to_thread(worker.until_says, "will try again: ")
        worker.signal(signal.SIGTERM)
        await asyncio.to_thread(worker.wait)
    finally:
        pool.end()


async def test_a_publisher_is_told_that_the_server_has_lost_its_version(pool: Pool) -> None:
    pool.start(*LEASE)
    async with pool.producer("syn") as producer:
        assert await producer.publish_weights(weights(1), 5) == 5
        session: Any = producer._sessions.session

        async def is_told() -> bool:
            with pytest.raises(DeadlineExceeded, match=r"version 6 within 0\.2 s; ") as told:
                await session.versions._wait(Version(6, "6" * 16), Deadline.of(0.2, 1.0))
            return "the server has lost it" in str(told.value)

        # If the server takes longer than 0.2 s, the publisher does not know what the registry has.
        await until_async(is_told, "the publisher reads the registry in time")
        pool.redis.delete(pool.keys.model("syn").versions)
        with pytest.raises(SettingsError, match="version: 5 must be above 5, which workers serve"):
            await producer.publish_weights(weights(2), 5)


async def test_a_late_step_of_the_old_weights_gives_no_row_of_the_new_ones(pool: Pool, tmp_path: Path) -> None:
    gate, prompt = Gate(tmp_path / "gate"), [9]
    pool.start(*LEASE, command=gate.command)
    async with pool.producer("syn") as publisher, Server(pool.url).connected() as client:
        asked = asyncio.create_task(publisher.logprobs(prompt))
        await until_async(lambda: is_held(pool), "the prompt is in a step, which waits at the gate")
        publishing = asyncio.create_task(publisher.publish_weights(weights(1)))
        asked.cancel()

        async def has_left() -> bool:
            return not (pool.held() or (await read_alive(client, pool.keys.model("syn"))).serving)

        # The worker drops the prompt, which no client waits for, and leaves the queue during the step.
        await until_async(has_left, "the worker has left the old version")
        gate.open()
        assert await publishing == 1
    async with pool.producer("syn") as producer:
        assert await is_of_seed(producer, 1, prompt)


async def test_a_version_whose_files_are_lost_is_replaced_through_version_0(pool: Pool, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"seed": np.array(1)}, file)
    worker = pool.start(*LEASE)
    async with pool.producer("syn") as producer:
        assert await producer.publish_weights(file) == 1
    worker.end()
    file.unlink()
    pool.start(*LEASE).until_says("cannot load version 1, which was served before")
    # As if leases had passed since the first worker was killed.
    pool.redis.delete(pool.keys.model("syn@1").workers)
    pool.redis.hdel(pool.keys.models(), "syn@1")
    with pytest.raises(UnknownModel, match="'syn' is not served in version 1, which clients use: start a worker with"):
        await pool.producer("syn").open()
    async with pool.producer("syn@0") as producer:
        assert await producer.publish_weights(weights(2)) == 2
    async with pool.producer("syn") as producer:
        assert await is_of_seed(producer, 2)


async def test_a_worker_survives_a_silent_server_while_it_drains_for_a_change(short_dir: Path, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    with EmbeddedServer(1 << 28, short_dir / "s", appendonly=True) as server:
        pool = Pool(server.url, "lp", tmp_path)
        try:
            worker = pool.start(*LEASE, command=gate.command)
            async with pool.producer("syn") as producer, pool.producer("syn") as publisher:
                asking = asyncio.create_task(producer.logprobs([1, 2, 3]))
                await until_async(lambda: is_held(pool), "the prompt waits at the gate")
                publishing = asyncio.create_task(publisher.publish_weights(weights(1)))
                # A heartbeat expires while its worker is blocked for a lease.
                (key,) = await asyncio.to_thread(until, lambda: pool.names("worker:*"), "the worker has a heartbeat")

                async def is_draining() -> bool:
                    return bool(pool.redis.hget(key, "state") == b"draining")

                await until_async(is_draining, "the worker drains")
                await asyncio.to_thread(server.stop)
                gate.open()
                await asyncio.to_thread(worker.until_says, "the change of the version waits for them")
                await asyncio.to_thread(server.start)
                assert await publishing == 1
                assert len(await asking) == V
                assert await is_of_seed(producer, 1, [7], min_version=1)
        finally:
            pool.end()


async def test_rows_are_of_the_named_versions_while_workers_are_killed(pool: Pool) -> None:
    pool.start(*LEASE)
    pool.start(*LEASE)
    traffic = Traffic(Seeds({version: 50 + version if version else 0 for version in range(6)}))
    async with traffic.running(pool, 3), pool.producer("syn") as publisher:
        for version in range(1, 4):
            publishing = asyncio.create_task(publisher.publish_weights(weights(50 + version)))
            pool.workers[-2].end()
            pool.start(*LEASE, wait=False)
            assert await publishing == version
        await traffic.until_used(3)
    row = synthetic_row([1], vocab_size=V, seed=53)
    async with pool.producer("syn") as producer:
        assert np.array_equal(await producer.logprobs([1]), row)
