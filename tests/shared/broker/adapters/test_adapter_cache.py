"""A worker loads an adapter when a request first needs it, and evicts it when another adapter needs its slot."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest
from redis.exceptions import OutOfMemoryError, ReadOnlyError, ResponseError

from lmpool.errors import AdapterRefused
from lmpool.protocol.adapter import Adapter, name_of
from lmpool.workers.backends.synthetic import SyntheticBackend, SyntheticSettings
from lmpool.workers.membership.adapters import AdapterCache
from tests.shared.broker.adapters.adapter_changes import (
    QUICK,
    V,
    check,
    expected,
    put,
    revision_in,
    two_clients,
    write,
)
from tests.shared.broker.adapters.test_adapters import serving
from tests.support.gate import GatedBackend, OneByOne
from tests.support.pool import DEADLINE_S, Pool, until_async


@pytest.mark.usefixtures("short_memory")
async def test_two_workers_with_8_slots_each_serve_200_adapters(pool: Pool, tmp_path: Path) -> None:
    workers = [pool.start(*QUICK, "--max-adapters", 8) for _ in range(2)]
    folders = [write(tmp_path, f"a{number}", str(number)) for number in range(200)]
    async with two_clients(pool) as (client, other):
        added = [client.add_adapter(f"a{number}", folder) for number, folder in enumerate(folders)]
        revisions = await asyncio.gather(*added)
        assert len(set(revisions)) == 200
        assert await other.adapters() == {f"a{number}": revision for number, revision in enumerate(revisions)}
        for producer in (client, other):
            checks = [check(producer, f"a{number}", revision) for number, revision in enumerate(revisions)]
            await asyncio.gather(*checks, check(producer, "", "", *([token] for token in range(64))))
    for worker in workers:
        loads, evictions = worker.text.count("serving the adapter"), worker.text.count("evicting the adapter")
        assert 0 <= loads - evictions <= 8
        assert evictions > 50, "both serve far more adapters than they have slots"


@pytest.mark.usefixtures("short_memory")
async def test_the_adapter_that_was_used_the_longest_ago_is_evicted(pool: Pool, tmp_path: Path) -> None:
    backend = SyntheticBackend(SyntheticSettings(name="syn", vocab_size=V))
    async with serving(pool, backend, max_adapters=2), pool.producer("syn", cache_bytes=0) as producer:
        revisions = {name: await producer.add_adapter(name, write(tmp_path, name, name)) for name in "abc"}
        for number, (name, loaded) in enumerate([("a", "ca"), ("b", "ab"), ("a", "ba"), ("c", "ac"), ("a", "ca")]):
            await check(producer, name, revisions[name], [number])
            assert {name_of(adapter) for adapter in backend.adapters} == set(loaded)


@pytest.mark.usefixtures("short_memory")
async def test_an_adapter_is_evicted_only_when_its_jobs_have_finished(pool: Pool, tmp_path: Path) -> None:
    gate = OneByOne()
    backend = GatedBackend(gate, batch=2, vocab_size=V)
    async with serving(pool, backend, max_adapters=1), pool.producer("syn") as producer:
        folders = {name: write(tmp_path, name, name) for name in "ab"}
        revisions = {name: revision_in(folder) for name, folder in folders.items()}
        for name, folder in folders.items():
            await put(pool, producer, name, Adapter(str(folder), revisions[name]))
        asked = {name: [asyncio.create_task(producer.logprobs([at], adapter=name)) for at in range(9)] for name in "ab"}
        await asyncio.to_thread(backend.is_stepping.wait, DEADLINE_S)
        while not all(task.done() for tasks in asked.values() for task in tasks):
            gate.let(1)
            await asyncio.wait([task for tasks in asked.values() for task in tasks], timeout=0.1)
            assert len(backend.adapters) <= 1
        for name, tasks in asked.items():
            for at, row in enumerate(await asyncio.gather(*tasks)):
                assert np.array_equal(row, expected([at], revisions[name]))
        gate.open()


async def test_a_worker_without_slots_refuses_adapters(pool: Pool, tmp_path: Path) -> None:
    backend = SyntheticBackend(SyntheticSettings(name="syn", vocab_size=V))
    async with serving(pool, backend, max_adapters=0), pool.producer("syn") as producer:
        with pytest.raises(AdapterRefused, match="no slot for one: start the workers with --max-adapters"):
            await producer.add_adapter("poet", write(tmp_path, "a", "1"))
        await check(producer, "", "")


async def test_a_load_is_tried_again_after_a_refusal_that_passes(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = [
        ReadOnlyError("You can't write against a read only replica."),
        ResponseError("BUSY running a script"),
        OutOfMemoryError("command not allowed when used memory > 'maxmemory'."),
    ]
    write_note = AdapterCache._write_note

    async def refuse_at_first(cache: AdapterCache, content: str) -> None:
        if refusals:
            raise refusals.pop()
        await write_note(cache, content)

    monkeypatch.setattr(AdapterCache, "_write_note", refuse_at_first)
    backend = SyntheticBackend(SyntheticSettings(name="syn", vocab_size=V))
    async with serving(pool, backend), pool.producer("syn") as producer:
        await check(producer, "poet", await producer.add_adapter("poet", write(tmp_path, "a", "1")))
    assert not refusals


async def test_no_note_of_a_load_stays_if_the_server_is_away_at_its_end(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave, was_away = AdapterCache.leave, list[bytes]()

    async def fail_at_first(cache: AdapterCache) -> None:
        if cache._note and not was_away:
            was_away.append(cache._note)
            raise ConnectionResetError
        await leave(cache)

    monkeypatch.setattr(AdapterCache, "leave", fail_at_first)
    folder = write(tmp_path, "a", "1")
    revision = revision_in(folder)
    backend = SyntheticBackend(SyntheticSettings(name="syn", vocab_size=V))
    async with serving(pool, backend), pool.producer("syn") as producer:
        await put(pool, producer, "poet", Adapter(str(folder), revision))
        await check(producer, "poet", revision)
        assert was_away
        assert not pool.redis.exists(*was_away)


async def test_an_own_adapter_that_was_evicted_is_loaded_again_after_a_change_of_weights(
    pool: Pool, tmp_path: Path
) -> None:
    own = write(tmp_path, "own", "1")
    backend = SyntheticBackend(SyntheticSettings(name="syn", vocab_size=V, adapters=[f"own={own}"]))
    async with serving(pool, backend, max_adapters=1), pool.producer("syn", timeout=20) as producer:
        await check(producer, "own", revision_in(own))
        await check(producer, "other", await producer.add_adapter("other", write(tmp_path, "other", "2")))
        assert await producer.publish_weights({"seed": np.array(0)}) == 1
        row = await producer.logprobs([9], adapter="own", min_version=1)
        assert np.array_equal(row, expected([9], revision_in(own)))


async def test_a_worker_that_ends_computes_a_prompt_whose_adapter_it_loads(pool: Pool, tmp_path: Path) -> None:
    backend = _LoadsLater(SyntheticSettings(name="syn", vocab_size=V, step_ms=2500))
    folder = write(tmp_path, "a", "1")
    revision = revision_in(folder)
    async with serving(pool, backend, lease_s=1.0) as worker, pool.producer("syn", timeout=DEADLINE_S) as producer:
        await put(pool, producer, "poet", Adapter(str(folder), revision))
        asked = asyncio.create_task(producer.logprobs([1], adapter="poet"))
        assert await asyncio.to_thread(backend.is_loading.wait, DEADLINE_S)
        worker.stop()

        async def reads_no_jobs() -> bool:
            return all(task.get_name() != "fetch" for task in asyncio.all_tasks())

        await until_async(reads_no_jobs, "the worker only waits for the prompts that it holds")
        backend.may_load.set()
        assert np.array_equal(await asked, expected([1], revision))


class _LoadsLater(SyntheticBackend):
    """A backend that loads adapters when the test permits it."""

    def __init__(self, settings: SyntheticSettings) -> None:
        super().__init__(settings)
        self.is_loading, self.may_load = threading.Event(), threading.Event()

    def load_adapter(self, name: str, source: str) -> str:
        """See `Backend.load_adapter`."""
        self.is_loading.set()
        assert self.may_load.wait(DEADLINE_S)
        return super().load_adapter(name, source)
