"""Adapters are added, replaced and removed while workers serve: no client gets a row of replaced weights."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmpool.broker import registries
from lmpool.embedded import EmbeddedServer
from lmpool.errors import (
    AdapterRefused,
    DeadlineExceeded,
    ProducerClosed,
    ServerError,
    SettingsError,
    UnknownAdapter,
    UnknownModel,
)
from lmpool.producer import Producer, SyncProducer
from lmpool.producer.client import adapters as adapters_module
from lmpool.producer.client import session as session_module
from lmpool.protocol.adapter import Adapter
from lmpool.workers.backends.synthetic import SyntheticBackend, SyntheticSettings
from lmpool.workers.execution.contract import WithoutAdapters
from tests.shared.broker.adapters.adapter_changes import QUICK, V, check, expected, put, revision_in, two_clients, write
from tests.shared.broker.adapters.test_adapters import serving
from tests.support.gate import GatedBackend, OneByOne, gated_worker
from tests.support.pool import DEADLINE_S, Pool, until_async


async def test_an_adapter_that_is_added_is_served_by_every_worker(pool: Pool, tmp_path: Path) -> None:
    workers = [pool.start(*QUICK) for _ in range(2)]
    async with two_clients(pool) as (client, other):
        assert await client.adapters() == {}
        with pytest.raises(UnknownAdapter, match="no adapter 'poet'; it has: none"):
            await other.logprobs([1], adapter="poet")
        revision = await client.add_adapter("poet", write(tmp_path, "a", "1"))
        loads = [worker.text.count("serving the adapter 'poet'") for worker in workers]
        assert sorted(loads) == [0, 1], "one worker has checked it"
        assert await other.adapters() == {"poet": revision}
        await check(other, "poet", revision)
        await check(client, "", "")
        workers[loads.index(1)].signal(signal.SIGTERM)
        assert workers[loads.index(1)].wait() == 0
        await check(client, "poet", revision, [4], [5])
    assert all("serving the adapter 'poet'" in worker.text for worker in workers)


async def test_after_a_replacement_no_client_gets_a_row_of_the_old_weights(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Clients check the registry every 60 s, so that their cached entries are as old as possible.
    monkeypatch.setattr(session_module, "_WATCH_S", 60.0)
    for _ in range(2):
        pool.start(*QUICK)
    folders = [write(tmp_path, f"v{version}", str(version)) for version in range(4)]
    backend = SyntheticBackend(SyntheticSettings(vocab_size=V))
    revisions = [backend.load_adapter("poet", str(folder)) for folder in folders]
    rows = {expected([token], revision).tobytes(): n for n, revision in enumerate(revisions) for token in range(4)}
    async with two_clients(pool) as clients:
        assert await clients[0].add_adapter("poet", folders[0]) == revisions[0]
        in_service = 0
        seen: set[int] = set()
        done = asyncio.Event()

        async def hammer(producer: Producer, seed: int) -> None:
            draw = random.Random(seed)
            while not done.is_set():
                # Request only four prompts, so that most rows come from the cache in Redis or in the producer's memory.
                token, oldest = draw.randrange(4), in_service
                row_version = rows[(await producer.logprobs([token], adapter="poet")).tobytes()]
                assert row_version >= oldest, f"a row of version {row_version} after {oldest} had been put in service"
                seen.add(row_version)
                await asyncio.sleep(0)

        hammers = [asyncio.create_task(hammer(producer, seed)) for seed in range(3) for producer in clients]
        for version in (1, 2, 3):
            assert await clients[version % 2].add_adapter("poet", folders[version]) == revisions[version]
            in_service = version
            for producer in clients:
                await check(producer, "poet", revisions[version], [0], [1], [2], [3])
                assert await producer.adapters() == {"poet": revisions[version]}
        done.set()
        await asyncio.gather(*hammers)
        assert seen >= {0, 1, 2}, "requests went on while adapters were replaced"


@asynccontextmanager
async def replaced_while_known(
    pool: Pool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Producer, Path, Callable[[], Awaitable[None]]]]:
    """Yield a client, new weights for "poet", and a check that a client with a cached old entry gets the new rows."""
    monkeypatch.setattr(session_module, "_WATCH_S", 60.0)
    for module in (adapters_module, registries):
        monkeypatch.setattr(module, "KNOWN_FOR_S", 16.0)  # Two unhindered changes take less than 16 s.
    pool.start(*QUICK)
    old, new = write(folder, "old", "1"), write(folder, "new", "2")
    async with two_clients(pool) as (changing, asking):
        before = await changing.add_adapter("poet", old)
        await check(asking, "poet", before, [1])
        session = asking._sessions.session
        assert session is not None
        session.adapters.doubt()
        await check(asking, "poet", before, [1])  # This client has now read the registry.

        async def check_new() -> None:
            row = await asking.logprobs([1], adapter="poet")
            after = (await changing.adapters())["poet"]
            assert after != before
            assert np.array_equal(row, expected([1], after))

        yield changing, new, check_new


async def test_a_repeated_replacement_waits_for_clients_that_cached_the_old_entry(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replaced_while_known(pool, tmp_path, monkeypatch) as (producer, new, check_new):
        with pytest.raises(DeadlineExceeded, match="'poet' is in service, but within 8 s other clients may still use"):
            await producer.add_adapter("poet", new, timeout=8)
        await producer.add_adapter("poet", new)
        await check_new()


async def test_of_two_that_put_the_same_in_service_the_second_waits_too(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        replaced_while_known(pool, tmp_path, monkeypatch) as (producer, new, check_new),
        pool.producer("syn") as second,
    ):
        before = await second.adapters()
        first = asyncio.create_task(producer.add_adapter("poet", new))

        async def is_replaced() -> bool:
            return await second.adapters() != before

        await until_async(is_replaced, "the new one is in service")
        assert not first.done()
        revision = await second.add_adapter("poet", new)
        await check_new()
        assert await first == revision


@pytest.mark.usefixtures("short_memory")
async def test_requests_in_flight_finish_with_the_weights_that_they_named(pool: Pool, tmp_path: Path) -> None:
    gate = OneByOne()
    async with gated_worker(pool, GatedBackend(gate, vocab_size=V)), two_clients(pool) as (client, other):
        adding = asyncio.create_task(client.add_adapter("poet", write(tmp_path, "old", "1")))
        gate.let(1)
        old = await adding
        asked = [asyncio.create_task(other.logprobs([token], adapter="poet")) for token in range(V)]
        batch = asyncio.create_task(other.batch_logprobs(iter([[at, at] for at in range(V)]), adapter="poet"))

        async def are_queued() -> bool:
            return pool.jobs() == 2 * V

        await until_async(are_queued, "all requests are queued")
        folder = write(tmp_path, "new", "2")
        new = revision_in(folder)
        await put(pool, client, "poet", Adapter(str(folder), new))
        gate.open()
        for token, row in enumerate(await asyncio.gather(*asked)):
            assert np.array_equal(row, expected([token], old))
        assert np.array_equal(await batch, [expected([at, at], old) for at in range(V)])
        assert await other.adapters() == {"poet": new}
        await check(other, "poet", new, [1], [2])


@pytest.mark.usefixtures("short_memory")
async def test_a_request_for_replaced_weights_that_no_worker_has_gets_a_row_of_the_new_ones(
    pool: Pool, tmp_path: Path
) -> None:
    worker = pool.start(*QUICK)
    async with two_clients(pool) as (client, other):
        await client.add_adapter("poet", write(tmp_path, "old", "1"))
        worker.signal(signal.SIGKILL)
        worker.wait()
        asked = asyncio.create_task(other.logprobs([9], adapter="poet"))

        async def is_queued() -> bool:
            return pool.jobs() == 1

        await until_async(is_queued, "it is queued")
        folder = write(tmp_path, "new", "2")
        new = revision_in(folder)
        await put(pool, client, "poet", Adapter(str(folder), new))
        pool.start(*QUICK)
        assert np.array_equal(await asked, expected([9], new))


async def test_a_removed_adapter_is_unknown_to_all_clients(pool: Pool, tmp_path: Path) -> None:
    for _ in range(2):
        pool.start(*QUICK)
    async with two_clients(pool) as (client, other):
        await client.add_adapter("poet", write(tmp_path, "a", "1"))
        revision = await other.add_adapter("judge", write(tmp_path, "b", "2"))
        await check(other, "poet", (await client.adapters())["poet"])
        await client.remove_adapter("poet")
        for producer in (client, other):
            with pytest.raises(UnknownAdapter, match="no adapter 'poet'; it has: judge"):
                await producer.logprobs([1], adapter="poet")
            with pytest.raises(UnknownAdapter, match="no adapter 'poet'; it has: judge"):
                await producer.remove_adapter("poet")
        await check(other, "judge", revision)
        await check(client, "", "")
        again = await other.add_adapter("poet", write(tmp_path, "c", "3"))
        await check(client, "poet", again)


async def test_a_worker_that_starts_later_loads_an_adapter_when_it_needs_it(pool: Pool, tmp_path: Path) -> None:
    first = pool.start(*QUICK)
    async with pool.producer("syn") as producer:
        revision = await producer.add_adapter("poet", write(tmp_path, "a", "1"))
        second = pool.start(*QUICK)
        first.signal(signal.SIGKILL)
        await check(producer, "poet", revision, [7], [8])
        second.until_says("serving the adapter 'poet'")
        second.signal(signal.SIGKILL)
        second.wait()
        waiting = asyncio.create_task(producer.logprobs([9], adapter="poet"))
        pool.start(*QUICK)
        assert np.array_equal(await waiting, expected([9], revision)), "a killed worker's adapters stay registered"


async def test_an_adapter_of_one_worker_s_options_is_served_by_the_others(pool: Pool, tmp_path: Path) -> None:
    other = pool.start(*QUICK)
    folder = write(tmp_path, "a", "1")
    own = pool.start(*QUICK, "--adapters", f"poet={folder}")
    async with pool.producer("syn") as producer:
        revision = (await producer.adapters())["poet"]
        own.signal(signal.SIGTERM)
        assert own.wait() == 0
        await check(producer, "poet", revision)
    assert "serving the adapter 'poet'" in other.text


async def test_workers_that_start_together_with_the_same_adapter_serve_it(pool: Pool, tmp_path: Path) -> None:
    folder = write(tmp_path, "a", "1")
    for worker in [pool.start(*QUICK, "--adapters", f"poet={folder}", wait=False) for _ in range(3)]:
        worker.until_says("serving ")
    async with pool.producer("syn") as producer:
        await check(producer, "poet", (await producer.adapters())["poet"])


async def test_an_adapter_in_service_is_not_replaced_by_one_of_a_worker_s_options(pool: Pool, tmp_path: Path) -> None:
    pool.start(*QUICK)
    async with pool.producer("syn") as producer:
        revision = await producer.add_adapter("poet", write(tmp_path, "a", "1"))
        late = pool.start(*QUICK, "--adapters", f"poet={write(tmp_path, 'b', '2')}")
        late.until_says("the adapter 'poet' is in service with other weights")
        assert await producer.adapters() == {"poet": revision}
        await check(producer, "poet", revision, *([token] for token in range(9)))


async def test_adapters_go_with_the_last_worker_of_the_model(pool: Pool, tmp_path: Path) -> None:
    worker = pool.start(*QUICK, "--lease-s", 6)  # The worker may take 6 s to stop.
    async with pool.producer("syn") as producer:
        await producer.add_adapter("poet", write(tmp_path, "a", "1"))
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
        assert pool.names("{syn}:adapters") == []
        pool.start(*QUICK)
        async with pool.producer("syn") as late:
            assert await late.adapters() == {}


@pytest.mark.usefixtures("short_memory")
async def test_a_folder_whose_weights_have_changed_is_refused_until_it_is_added_again(
    pool: Pool, tmp_path: Path
) -> None:
    first, folder = pool.start(*QUICK), write(tmp_path, "a", "1")
    async with pool.producer("syn") as producer:
        revision = await producer.add_adapter("poet", folder)
        (folder / "weights").write_text("changed since")
        await check(producer, "poet", revision, [1], [2])
        first.signal(signal.SIGTERM)
        assert first.wait() == 0
        pool.redis.delete(pool.keys.model("syn").adapters)
        second = pool.start(*QUICK, "--adapters", f"other={folder}")
    async with pool.producer("syn") as producer:
        registered = Adapter(str(folder), revision)
        await put(pool, producer, "poet", registered)
        for _ in range(2):
            with pytest.raises(AdapterRefused, match=r"has other weights on this worker .* `lmpool adapters add`"):
                await producer.logprobs([3], adapter="poet")
        await check(producer, "poet", await producer.add_adapter("poet", folder), [3])
        await check(producer, "", "")
        (folder / "weights").unlink()
        await put(pool, producer, "gone", registered)
        with pytest.raises(AdapterRefused, match="cannot load the adapter 'gone': .* an empty folder"):
            await producer.logprobs([3], adapter="gone")
    assert second.is_running


@pytest.mark.usefixtures("short_memory")
async def test_after_a_server_has_lost_everything_a_worker_s_own_adapters_are_in_service_again(
    tmp_path: Path, own_server: EmbeddedServer
) -> None:
    pool, own = Pool(own_server.url, "lost", tmp_path), write(tmp_path, "own", "1")
    try:
        for _ in range(2):
            pool.start(*QUICK, "--adapters", f"own={own}")
        async with two_clients(pool) as (client, other):
            revision = (await client.adapters())["own"]
            await check(client, "own", revision)
            added = await client.add_adapter("poet", write(tmp_path, "a", "1"))
            await check(other, "poet", added)
            pool.redis.flushall()

            async def is_back() -> bool:
                try:
                    async with pool.producer("syn") as late:
                        return await late.adapters() == {"own": revision}
                except UnknownModel:
                    return False

            await until_async(is_back, "workers have registered their own adapters")
            await check(other, "own", revision, [3], [4])
            for producer in (client, other):
                with pytest.raises(ServerError, match="has lost a change of the adapter 'poet'"):
                    await producer.logprobs([5], adapter="poet")
            newer = await client.add_adapter("poet", write(tmp_path, "b", "2"))
            for producer in (client, other):
                await check(producer, "poet", newer, [1], [2])
    finally:
        pool.end()


@pytest.mark.usefixtures("short_memory")
async def test_all_processes_of_a_program_may_add_the_same_adapter_at_once(pool: Pool, tmp_path: Path) -> None:
    for _ in range(2):
        pool.start(*QUICK)
    producers = [pool.producer("syn") for _ in range(5)]
    for content in ("first", "second"):
        folder = write(tmp_path, "a", content)
        revisions = await asyncio.gather(*(producer.add_adapter("poet", folder) for producer in producers))
        assert len(set(revisions)) == 1
        for producer in producers:
            await check(producer, "poet", revisions[0])
    await asyncio.gather(*(producer.close() for producer in producers))


async def test_a_cancelled_change_has_no_effect(pool: Pool, tmp_path: Path) -> None:
    worker = pool.start(*QUICK)
    async with pool.producer("syn") as producer:
        revision = await producer.add_adapter("poet", write(tmp_path, "a", "1"))
        worker.signal(signal.SIGSTOP)
        change = asyncio.create_task(producer.add_adapter("poet", write(tmp_path, "b", "2")))

        async def is_queued() -> bool:
            return pool.jobs() == 1

        await until_async(is_queued, "the check is queued")
        change.cancel()
        await asyncio.wait([change])
        worker.signal(signal.SIGCONT)
        assert await producer.adapters() == {"poet": revision}
        await check(producer, "poet", revision)


async def test_closing_the_producer_ends_its_changes(pool: Pool, tmp_path: Path) -> None:
    worker = pool.start(*QUICK)
    async with pool.producer("syn") as producer:
        await producer.adapters()
        worker.signal(signal.SIGSTOP)
        change = asyncio.create_task(producer.add_adapter("judge", write(tmp_path, "b", "2")))

        async def is_queued() -> bool:
            return pool.jobs() == 1

        await until_async(is_queued, "the check is queued")
    worker.signal(signal.SIGCONT)
    with pytest.raises(ProducerClosed):
        await asyncio.wait_for(change, DEADLINE_S)


# Refused changes of adapters


async def test_an_adapter_that_cannot_be_loaded_is_refused_and_the_old_one_stays(pool: Pool, tmp_path: Path) -> None:
    workers = [pool.start(*QUICK) for _ in range(2)]
    async with two_clients(pool) as (client, other):
        revision = await client.add_adapter("poet", write(tmp_path, "a", "1"))
        (tmp_path / "empty").mkdir()
        for source, why in [
            (tmp_path / "none", "cannot be read: No such file"),
            (tmp_path / "empty", "an empty folder"),
        ]:
            with pytest.raises(AdapterRefused, match=rf"a worker cannot load the adapter 'poet': adapters: .*{why}"):
                await other.add_adapter("poet", source)
            with pytest.raises(AdapterRefused, match=why):
                await other.add_adapter("new", str(source))
        assert await client.adapters() == {"poet": revision}
        await check(other, "poet", revision, [1], [2])
    assert all(worker.is_running for worker in workers)


async def test_a_backend_without_adapters_refuses_them_with_the_reason(pool: Pool, tmp_path: Path) -> None:
    async with serving(pool, NoAdapters(SyntheticSettings(name="syn", vocab_size=V))), pool.producer("syn") as producer:
        with pytest.raises(AdapterRefused, match="'poet' cannot be loaded: this backend serves no adapters"):
            await producer.add_adapter("poet", write(tmp_path, "a", "1"))


class NoAdapters(WithoutAdapters, SyntheticBackend):  # type: ignore[misc]  # the dict of its second base stays empty
    """A backend without adapters."""

    def __init__(self, settings: SyntheticSettings) -> None:
        super().__init__(settings)


@pytest.mark.parametrize("name", ["", "a@b", "a,b", "a=b", "a\n", "x" * 101, " a", 5, None])
async def test_bad_names_are_refused(pool: Pool, tmp_path: Path, name: Any) -> None:
    backend = SyntheticBackend(SyntheticSettings(name="syn", vocab_size=V))
    async with serving(pool, backend), pool.producer("syn") as producer:
        for change in (producer.add_adapter(name, write(tmp_path, "a", "1")), producer.remove_adapter(name)):
            with pytest.raises(SettingsError, match=r"^name: .* must be 1 to 100 characters"):
                await change
        for source in ("", " ", "a\nb", "x" * 5000, 5, None, b"a"):
            with pytest.raises(SettingsError, match="^source: "):
                await producer.add_adapter("poet", source)  # type: ignore[arg-type]
        assert await producer.adapters() == {}


@pytest.mark.usefixtures("short_memory")
async def test_a_registry_has_a_limit(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmpool.protocol.adapter.MAX_ADAPTERS", 4)
    folder = write(tmp_path, "a", "1")
    settings = SyntheticSettings(name="syn", vocab_size=V, adapters=[f"a{number}={folder}" for number in range(4)])
    async with serving(pool, SyntheticBackend(settings)), pool.producer("syn") as producer:
        assert len(await producer.adapters()) == 4
        with pytest.raises(SettingsError, match="'more' is one too many: a model may have 4"):
            await producer.add_adapter("more", folder)
        revision = await producer.add_adapter("a3", write(tmp_path, "b", "2"))
        await check(producer, "a3", revision)
        await producer.remove_adapter("a2")
        await check(producer, "more", await producer.add_adapter("more", folder))


async def test_without_workers_a_change_ends_with_its_deadline(pool: Pool, tmp_path: Path) -> None:
    worker = pool.start(*QUICK)
    async with pool.producer("syn") as producer:
        revision = await producer.add_adapter("poet", write(tmp_path, "a", "1"))
        worker.signal(signal.SIGKILL)
        with pytest.raises(DeadlineExceeded, match=r"within 3 s"):
            await producer.add_adapter("poet", write(tmp_path, "b", "2"), timeout=3)
        assert await producer.adapters() == {"poet": revision}


@pytest.mark.usefixtures("short_memory")
def test_changes_without_asyncio(pool: Pool, tmp_path: Path) -> None:
    pool.start(*QUICK)
    with SyncProducer(redis=pool.url, prefix=pool.prefix) as producer:
        revision = producer.add_adapter("poet", write(tmp_path, "a", "1"))
        assert producer.adapters() == {"poet": revision}
        assert np.array_equal(producer.logprobs([1], adapter="poet"), expected([1], revision))
        producer.remove_adapter("poet")
        with pytest.raises(UnknownAdapter):
            producer.batch_logprobs([[1]], adapter="poet")
