"""Changes of adapters that meet, are given up, or lose a worker or their offer: one outcome, nothing left behind."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from lmpool.broker.registries import AdapterRegistry
from lmpool.errors import (
    AdapterRefused,
    ProducerClosed,
    WorkerError,
)
from lmpool.producer import adapter_changes
from lmpool.protocol.adapter import Adapter
from tests.shared.broker.adapters.adapter_changes import QUICK, check, is_offered, no_offers, two_clients, write
from tests.support.pool import DEADLINE_S, Pool, until_async


@pytest.mark.usefixtures("short_memory")
async def test_of_two_changes_at_once_one_is_told_and_the_other_is_in_service(pool: Pool, tmp_path: Path) -> None:
    for _ in range(2):
        pool.start(*QUICK)
    folders = [write(tmp_path, name, name) for name in "ab"]
    async with two_clients(pool) as clients:
        changes = [client.add_adapter("poet", folder) for client, folder in zip(clients, folders, strict=True)]
        outcomes = await asyncio.gather(*changes, return_exceptions=True)
        (refused,) = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        (revision,) = [outcome for outcome in outcomes if isinstance(outcome, str)]
        assert isinstance(refused, AdapterRefused)
        assert "somebody else has changed it meanwhile" in str(refused)
        for producer in clients:
            assert await producer.adapters() == {"poet": revision}
            await check(producer, "poet", revision)
        others = await asyncio.gather(*(client.add_adapter(f"n{n}", folders[n]) for n, client in enumerate(clients)))
        assert await clients[0].adapters() == {"poet": revision, "n0": others[0], "n1": others[1]}


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
    assert pool.names("{syn}:offers") == []
    await asyncio.gather(*(producer.close() for producer in producers))


async def test_a_change_that_is_given_up_leaves_nothing_behind(pool: Pool, tmp_path: Path) -> None:
    worker = pool.start(*QUICK)
    async with pool.producer("syn") as producer:
        revision = await producer.add_adapter("poet", write(tmp_path, "a", "1"))
        worker.signal(signal.SIGSTOP)
        change = asyncio.create_task(producer.add_adapter("poet", write(tmp_path, "b", "2")))

        await until_async(is_offered(pool), "the adapter is offered")
        change.cancel()
        await until_async(no_offers(pool), "the offer is taken back")
        worker.signal(signal.SIGCONT)
        assert await producer.adapters() == {"poet": revision}
        await check(producer, "poet", revision)


async def test_closing_the_producer_ends_its_changes(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_changes, "KNOWN_FOR_S", 600.0)
    worker = pool.start(*QUICK)
    async with pool.producer("syn") as producer:
        await producer.add_adapter("poet", write(tmp_path, "a", "1"))
        removal = asyncio.create_task(producer.remove_adapter("poet"))

        async def is_removed() -> bool:
            return pool.redis.exists(pool.keys.model("syn").replaced("poet")) == 1

        await until_async(is_removed, "the removal waits for clients that know it")
        worker.signal(signal.SIGSTOP)
        addition = asyncio.create_task(producer.add_adapter("judge", write(tmp_path, "b", "2")))

        await until_async(is_offered(pool), "the adapter is offered")
    worker.signal(signal.SIGCONT)
    for change in (removal, addition):
        with pytest.raises(ProducerClosed):
            await asyncio.wait_for(change, DEADLINE_S)


@pytest.mark.usefixtures("short_memory")
async def test_a_worker_that_dies_during_a_change_does_not_stop_it(pool: Pool, tmp_path: Path) -> None:
    workers = [pool.start(*QUICK) for _ in range(2)]
    async with pool.producer("syn") as producer:
        await producer.add_adapter("poet", write(tmp_path, "a", "1"))
        workers[0].signal(signal.SIGSTOP)
        change = asyncio.create_task(producer.add_adapter("poet", write(tmp_path, "b", "2")))
        await asyncio.sleep(0)
        workers[0].signal(signal.SIGKILL)
        revision = await change
        await check(producer, "poet", revision, [5], [6])


async def test_a_removal_during_a_change_ends_the_change(pool: Pool, tmp_path: Path) -> None:
    worker = pool.start(*QUICK)
    async with two_clients(pool) as (client, other):
        await client.add_adapter("poet", write(tmp_path, "a", "1"))
        worker.signal(signal.SIGSTOP)
        change = asyncio.create_task(client.add_adapter("poet", write(tmp_path, "b", "2")))
        await until_async(is_offered(pool), "the adapter is offered")
        removal = asyncio.create_task(other.remove_adapter("poet"))
        with pytest.raises(AdapterRefused, match="somebody else has changed it meanwhile"):
            await asyncio.wait_for(change, DEADLINE_S)
        worker.signal(signal.SIGCONT)
        await removal
        assert await client.adapters() == {}
    assert pool.names("{syn}:offers") == []


async def test_nothing_is_offered_when_all_who_did_have_given_up(pool: Pool, tmp_path: Path) -> None:
    worker, folder = pool.start(*QUICK), write(tmp_path, "a", "1")
    async with two_clients(pool) as clients:
        worker.signal(signal.SIGSTOP)
        changes, offers = [], set[bytes | str]()
        for count, client in enumerate(clients, 1):
            changes.append(asyncio.create_task(client.add_adapter("poet", folder)))

            async def is_offered_anew(count: int = count) -> bool:
                offers.update(pool.redis.hvals(pool.keys.model("syn").offers))
                return len(offers) == count

            await until_async(is_offered_anew, "this one has offered it too")
        for change in reversed(changes):
            await asyncio.sleep(3 * adapter_changes._LOOK_S)  # They look what is offered; nothing else shows that.
            change.cancel()
        await until_async(no_offers(pool), "both have taken their offers back")
        worker.signal(signal.SIGCONT)


async def test_an_offer_that_is_on_its_way_when_it_is_given_up_is_taken_back(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.start(*QUICK).signal(signal.SIGSTOP)
    offer, is_sent, is_given_up, is_there = AdapterRegistry.offer, *(asyncio.Event() for _ in range(3))

    async def arrive(registry: AdapterRegistry, *arguments: Any) -> bool:
        await is_given_up.wait()
        outcome = await offer(registry, *arguments)
        is_there.set()
        return outcome

    async def slowly(registry: AdapterRegistry, *arguments: Any) -> bool:
        is_sent.set()
        # What is sent arrives, whether or not somebody still waits for the answer.
        return await asyncio.shield(asyncio.create_task(arrive(registry, *arguments)))

    monkeypatch.setattr(AdapterRegistry, "offer", slowly)
    async with pool.producer("syn") as producer:
        change = asyncio.create_task(producer.add_adapter("poet", write(tmp_path, "a", "1")))
        await asyncio.wait_for(is_sent.wait(), DEADLINE_S)
        change.cancel()
        await asyncio.wait([change])
        is_given_up.set()
        await asyncio.wait_for(is_there.wait(), DEADLINE_S)
        await until_async(no_offers(pool), "it is taken back", 30)


@pytest.mark.usefixtures("short_memory")
async def test_an_offer_that_the_server_loses_is_made_again(pool: Pool, tmp_path: Path) -> None:
    worker = pool.start(*QUICK)
    async with pool.producer("syn") as producer:
        for content in "12":  # A new adapter, and one instead of another.
            worker.signal(signal.SIGSTOP)
            change = asyncio.create_task(producer.add_adapter("poet", write(tmp_path, "a", content)))

            await until_async(is_offered(pool), "the adapter is offered")
            pool.redis.delete(pool.keys.model("syn").offers)
            await until_async(is_offered(pool), "the adapter is offered once more")
            worker.signal(signal.SIGCONT)
            await check(producer, "poet", await change)


async def test_what_a_worker_cannot_load_any_more_fails_with_its_reason(pool: Pool, tmp_path: Path) -> None:
    """A registry that names what is not there, as after a mistake of other software."""
    pool.start(*QUICK)
    async with pool.producer("syn") as producer:
        await producer.add_adapter("poet", write(tmp_path, "a", "1"))
        lost = Adapter(str(tmp_path / "nowhere"), "0f")
        pool.redis.hset(pool.keys.model("syn").adapters, "lost", lost.pack())
        with pytest.raises(WorkerError, match="cannot load the adapter 'lost': .*nowhere.* cannot be read"):
            await producer.logprobs([1], adapter="lost")
        await check(producer, "", "")
