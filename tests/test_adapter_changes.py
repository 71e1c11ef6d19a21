"""Adapters that come and go while workers serve: all workers follow, and nothing that was replaced is served again."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from lmpool.adapters import MAX_ADAPTERS, Adapter, Offer
from lmpool.embedded import EmbeddedServer
from lmpool.errors import (
    AdapterRefused,
    DeadlineExceeded,
    NoWorker,
    ProducerClosed,
    SettingsError,
    UnknownAdapter,
    WorkerError,
)
from lmpool.producer import Producer, SyncProducer, adapter_changes
from lmpool.producer import adapters as adapters_module
from lmpool.producer import session as session_module
from lmpool.server import Server
from lmpool.synthetic import synthetic_row
from lmpool.workers import adapters as workers_adapters
from lmpool.workers.adapter_sources import AdapterSources
from lmpool.workers.adapters import AdapterKeeper
from lmpool.workers.backend import WithoutAdapters
from lmpool.workers.backends.synthetic import SyntheticBackend, SyntheticSettings
from lmpool.workers.settings import WorkerSettings
from lmpool.workers.worker import Worker
from tests.pool import DEADLINE_S, Pool, Prepared, WorkerProcess, until, until_async
from tests.test_adapters import serving

V = 64
QUICK = ("--vocab-size", V, "--lease-s", 2, "--max-batch", 8)


@pytest.fixture
def short_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What clients know expires soon, so that changes take less time: for tests that are not about that."""
    for module in (adapters_module, adapter_changes):
        monkeypatch.setattr(module, "KNOWN_FOR_S", 0.2)
    monkeypatch.setattr(adapter_changes, "MARGIN_S", 0.1)


def write(folder: Path, name: str, content: str) -> Path:
    """An adapter of the synthetic backend."""
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "weights").write_text(content)
    return folder / name


def expected(ids: list[int], revision: str = "") -> NDArray[np.float32]:
    return synthetic_row(ids, vocab_size=V, adapter_revision=revision)


async def check(producer: Producer, adapter: str, revision: str, *prompts: list[int]) -> None:
    for ids in prompts or ([1], [2, 3]):
        assert np.array_equal(await producer.logprobs(ids, adapter=adapter), expected(ids, revision)), ids


@asynccontextmanager
async def two_clients(pool: Pool) -> AsyncIterator[tuple[Producer, Producer]]:
    async with pool.producer("syn") as one, pool.producer("syn") as other:
        yield one, other


async def test_an_adapter_that_is_added_reaches_every_worker(pool: Pool, tmp_path: Path) -> None:
    workers = [pool.start(*QUICK) for _ in range(2)]
    async with two_clients(pool) as (one, other):
        assert await one.adapters() == {}
        with pytest.raises(UnknownAdapter, match="no adapter 'poet'; it has: none"):
            await other.logprobs([1], adapter="poet")
        revision = await one.add_adapter("poet", write(tmp_path, "a", "1"))
        assert await other.adapters() == {"poet": revision}
        await check(other, "poet", revision)
        await check(one, "", "")
        # Each of them by itself.
        workers[0].signal(signal.SIGTERM)
        assert workers[0].wait() == 0
        await check(one, "poet", revision, [4], [5])
    assert all("serving the adapter 'poet'" in worker.text for worker in workers)


async def test_after_a_replacement_nobody_gets_a_row_of_the_old_weights(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Then what clients know is as old as it may ever be.
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
                # Few prompts: most rows are in the cache, or in the producer's own memory.
                token, oldest = draw.randrange(4), in_service
                found = rows[(await producer.logprobs([token], adapter="poet")).tobytes()]
                assert found >= oldest, f"a row of version {found} after {oldest} had been put in service"
                seen.add(found)
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
    """A client, new weights for "poet", and a check that another client has those, which has just read of the old."""
    monkeypatch.setattr(session_module, "_WATCH_S", 60.0)
    for module in (adapters_module, adapter_changes):
        monkeypatch.setattr(module, "KNOWN_FOR_S", 4.0)  # Longer than two changes take that wait for nothing.
    pool.start(*QUICK)
    old, new = write(folder, "old", "1"), write(folder, "new", "2")
    async with two_clients(pool) as (changing, asking):
        before = await changing.add_adapter("poet", old)
        await check(asking, "poet", before, [1])
        session = asking._rows.session
        assert session is not None
        session.adapters.doubt()
        await check(asking, "poet", before, [1])  # It has read the registry now.

        async def check_new() -> None:
            found = await asking.logprobs([1], adapter="poet")
            after = (await changing.adapters())["poet"]
            assert after != before
            assert np.array_equal(found, expected([1], after))

        yield changing, new, check_new


async def test_a_replacement_that_is_tried_again_waits_for_those_that_know_the_old_one(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replaced_while_known(pool, tmp_path, monkeypatch) as (producer, new, check_new):
        with pytest.raises(DeadlineExceeded, match=r"it is in service \(clients may use"):
            await producer.add_adapter("poet", new, timeout=2)
        await producer.add_adapter("poet", new)
        await check_new()


async def test_an_adapter_in_the_place_of_one_that_was_just_removed_waits_for_those_that_know_it(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replaced_while_known(pool, tmp_path, monkeypatch) as (producer, new, check_new):
        with pytest.raises(DeadlineExceeded, match="it is not in service any more"):
            await producer.remove_adapter("poet", timeout=1)
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
async def test_requests_that_wait_survive_a_replacement(pool: Pool, tmp_path: Path) -> None:
    for _ in range(2):
        pool.start(*QUICK, "--step-ms", 100)
    async with two_clients(pool) as (one, other):
        old = await one.add_adapter("poet", write(tmp_path, "old", "1"))
        base = asyncio.gather(*(other.logprobs([5, token]) for token in range(V)))
        asked = [
            asyncio.create_task(other.logprobs([token, at], adapter="poet")) for token in range(V) for at in range(9)
        ]
        batch = asyncio.create_task(other.batch_logprobs(iter([[at] for at in range(V)]), adapter="poet"))
        await asyncio.sleep(0)
        new = await one.add_adapter("poet", write(tmp_path, "new", "2"))
        rows = await asyncio.gather(*asked)
        olds = 0
        for (token, at), row in zip(((t, a) for t in range(V) for a in range(9)), rows, strict=True):
            is_old = np.array_equal(row, expected([token, at], old))
            olds += is_old
            assert is_old or np.array_equal(row, expected([token, at], new))
        assert 0 < olds < len(rows)
        batched = await batch
        wanted = [np.stack([expected([at], revision) for at in range(V)]) for revision in (old, new)]
        assert any(np.array_equal(batched, rows) for rows in wanted), "a batch is of one revision"
        for token, row in enumerate(await base):
            assert np.array_equal(row, expected([5, token]))


async def test_what_is_removed_is_unknown_to_everybody(pool: Pool, tmp_path: Path) -> None:
    for _ in range(2):
        pool.start(*QUICK)
    async with two_clients(pool) as (one, other):
        await one.add_adapter("poet", write(tmp_path, "a", "1"))
        revision = await other.add_adapter("judge", write(tmp_path, "b", "2"))
        await check(other, "poet", (await one.adapters())["poet"])
        await one.remove_adapter("poet")
        for producer in (one, other):
            with pytest.raises(UnknownAdapter, match="no adapter 'poet'; it has: judge"):
                await producer.logprobs([1], adapter="poet")
            with pytest.raises(UnknownAdapter, match="no adapter 'poet'; it has: judge"):
                await producer.remove_adapter("poet")
        await check(other, "judge", revision)
        await check(one, "", "")
        again = await other.add_adapter("poet", write(tmp_path, "c", "3"))
        await check(one, "poet", again)


async def test_a_worker_that_comes_later_has_what_is_in_service(pool: Pool, tmp_path: Path) -> None:
    first = pool.start(*QUICK)
    async with pool.producer("syn") as producer:
        revision = await producer.add_adapter("poet", write(tmp_path, "a", "1"))
        second = pool.start(*QUICK)
        first.signal(signal.SIGKILL)
        await check(producer, "poet", revision, [7], [8])
        assert "serving the adapter 'poet'" in second.text
        second.signal(signal.SIGKILL)
        second.wait()
        waiting = asyncio.create_task(producer.logprobs([9], adapter="poet"))
        pool.start(*QUICK)
        assert np.array_equal(await waiting, expected([9], revision)), "a killed worker's adapters stay registered"


async def test_a_worker_with_an_adapter_that_others_lack_does_not_start(pool: Pool, tmp_path: Path) -> None:
    """Jobs that name it would go to all of them."""
    pool.start(*QUICK)
    folder = write(tmp_path, "a", "1")
    late = pool.start(*QUICK, "--adapters", f"poet={folder}", wait=False)
    assert late.wait() == 2
    message = r"'poet' is not in service, and the worker \S+ serves the model without it: .*`lmpool adapters add poet /"
    assert re.search(message, late.text)
    async with pool.producer("syn") as producer:
        assert await producer.adapters() == {}
        revision = await producer.add_adapter("poet", folder)
        pool.start(*QUICK, "--adapters", f"poet={folder}")
        await check(producer, "poet", revision)


async def test_workers_that_start_together_with_the_same_adapter_serve_it(pool: Pool, tmp_path: Path) -> None:
    folder = write(tmp_path, "a", "1")
    for worker in [pool.start(*QUICK, "--adapters", f"poet={folder}", wait=False) for _ in range(3)]:
        worker.until_says("serving ")
    async with pool.producer("syn") as producer:
        await check(producer, "poet", (await producer.adapters())["poet"])


async def test_rows_are_computed_while_an_adapter_is_fetched_from_the_hub(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def fetch(source: str) -> Path:
        assert source == "org/poet"
        begun.set()
        assert may_end.wait(DEADLINE_S)
        write(tmp_path, "poet", "1")
        return tmp_path / "poet"

    monkeypatch.setattr(workers_adapters, "adapter_folder", fetch)
    monkeypatch.setitem(sys.modules, "huggingface_hub", ModuleType("huggingface_hub"))
    async with serving(pool, FromHub(tmp_path), adapter_hub=True), pool.producer("syn") as producer:
        change = asyncio.create_task(producer.add_adapter("poet", "org/poet"))
        assert await asyncio.to_thread(begun.wait, DEADLINE_S)
        await check(producer, "", "")
        assert not change.done()
        may_end.set()
        await check(producer, "poet", await change)


class FromHub(SyntheticBackend):
    """A backend that finds what was fetched from the hub in a folder."""

    def __init__(self, cache: Path) -> None:
        super().__init__(SyntheticSettings(name="syn", vocab_size=V))
        self._cache = cache

    def load_adapter(self, name: str, source: str) -> str:
        return super().load_adapter(name, str(self._cache / source.removeprefix("org/")))


async def test_an_adapter_that_does_not_load_is_tried_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try keeps the prompts waiting for as long as it takes."""
    loop = asyncio.get_running_loop()
    now, tries = 1000.0, list[float]()
    monkeypatch.setattr(loop, "time", lambda: now)

    class Failing:
        async def load_adapter(self, name: str, source: str) -> str:
            nonlocal now
            now += 20.0
            tries.append(now)
            raise SettingsError("it does not fit")

    sources, trials = AdapterSources.of(WorkerSettings()), SimpleNamespace(in_service=lambda _: nullcontext())
    nobody = cast(Any, None)
    keeper = AdapterKeeper(nobody, cast(Any, Failing()), {}, sources, cast(Any, trials), nobody, nobody)
    while len(tries) < 7:
        await keeper._serve("poet", Adapter("/nowhere", "0f"))
        now += 0.5
    pauses = [begin - end for end, begin in zip(tries, [one - 20.0 for one in tries[1:]], strict=False)]
    assert pauses == pytest.approx([5, 10, 20, 40, 60, 60], abs=0.6)


async def test_adapters_go_with_the_last_worker_of_the_model(pool: Pool, tmp_path: Path) -> None:
    worker = pool.start(*QUICK)
    async with two_clients(pool) as (producer, other):
        revision = await producer.add_adapter("poet", write(tmp_path, "a", "1"))
        await check(other, "poet", revision)
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
        assert pool.names("{syn}:adapters") == []
        pool.start(*QUICK)
        async with pool.producer("syn") as late:
            assert await late.adapters() == {}
        assert await other.adapters() == {}, "for a lease it may be a server that has forgotten them"


async def test_a_worker_that_cannot_load_what_is_in_service_does_not_start(pool: Pool, tmp_path: Path) -> None:
    pool.start(*QUICK)
    async with pool.producer("syn") as producer:
        folder = write(tmp_path, "a", "1")
        revision = await producer.add_adapter("poet", folder)
        (folder / "weights").write_text("changed since")
        late = pool.start(*QUICK, wait=False)
        assert late.wait() == 2
        assert "has other weights on this worker" in late.text
        (folder / "weights").unlink()
        late = pool.start(*QUICK, wait=False)
        assert late.wait() == 2
        assert "is an empty folder" in late.text
        await check(producer, "poet", revision, [1], [2])


@pytest.mark.usefixtures("short_memory")
async def test_a_server_that_loses_everything_is_told_again(
    pool: Pool, tmp_path: Path, own_server: EmbeddedServer
) -> None:
    pool = Pool(own_server.url, "lost", tmp_path)
    try:
        for _ in range(2):
            pool.start(*QUICK)
        async with two_clients(pool) as (one, other):
            revision = await one.add_adapter("poet", write(tmp_path, "a", "1"))
            await one.add_adapter("gone", write(tmp_path, "b", "2"))
            await one.remove_adapter("gone")
            for round_ in range(3):
                pool.redis.flushall()
                await check(other, "poet", revision, [round_], [round_, 1])
                with pytest.raises(UnknownAdapter, match="has no adapter 'gone'; it has: poet"):
                    await one.logprobs([1], adapter="gone")
            pool.redis.flushall()
            newer = await one.add_adapter("poet", write(tmp_path, "c", "3"))
            pool.redis.flushall()
            await check(other, "poet", newer, [1], [2])
    finally:
        pool.end()


# Refusals


async def test_what_cannot_be_loaded_is_refused_and_the_old_one_stays(pool: Pool, tmp_path: Path) -> None:
    workers = [pool.start(*QUICK) for _ in range(2)]
    async with two_clients(pool) as (one, other):
        revision = await one.add_adapter("poet", write(tmp_path, "a", "1"))
        (tmp_path / "empty").mkdir()
        for source, why in [
            (tmp_path / "none", "cannot be read: No such file"),
            (tmp_path / "empty", "an empty folder"),
        ]:
            with pytest.raises(AdapterRefused, match=rf"the worker \S+ cannot load it: adapters: .*{why}"):
                await other.add_adapter("poet", source)
            with pytest.raises(AdapterRefused, match=why):
                await other.add_adapter("new", str(source))
        assert await one.adapters() == {"poet": revision}
        await check(other, "poet", revision, [1], [2])
        await until_async(no_offers(pool), "offers are taken back")
    assert all(worker.is_running for worker in workers)


def no_offers(pool: Pool) -> Any:
    async def none() -> bool:
        return not pool.names("{syn}:offers")

    return none


async def test_a_backend_without_adapters_says_so(pool: Pool, tmp_path: Path) -> None:
    async with serving(pool, NoAdapters(SyntheticSettings(name="syn", vocab_size=V))), pool.producer("syn") as producer:
        with pytest.raises(AdapterRefused, match="'poet' cannot be loaded: this backend serves no adapters"):
            await producer.add_adapter("poet", write(tmp_path, "a", "1"))


class NoAdapters(WithoutAdapters, SyntheticBackend):
    """A backend that has none."""

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
async def test_a_model_has_so_many_adapters_and_no_more(pool: Pool, tmp_path: Path) -> None:
    folder = write(tmp_path, "a", "1")
    backend = SyntheticBackend(
        SyntheticSettings(name="syn", vocab_size=V, adapters=[f"a{number}={folder}" for number in range(MAX_ADAPTERS)])
    )
    async with serving(pool, backend), pool.producer("syn") as producer:
        assert len(await producer.adapters()) == MAX_ADAPTERS
        with pytest.raises(SettingsError, match="'more' is one too many: a model may have 64"):
            await producer.add_adapter("more", folder)
        revision = await producer.add_adapter("a3", write(tmp_path, "b", "2"))
        await check(producer, "a3", revision)
        await producer.remove_adapter("a4")
        await check(producer, "more", await producer.add_adapter("more", folder))


@pytest.mark.usefixtures("short_memory")
async def test_without_workers_a_change_ends_with_its_deadline(pool: Pool, tmp_path: Path) -> None:
    worker = pool.start(*QUICK)
    async with pool.producer("syn") as producer:
        await producer.add_adapter("poet", write(tmp_path, "a", "1"))
        worker.signal(signal.SIGSTOP)
        with pytest.raises(
            DeadlineExceeded,
            match=r"not done within 1 s .*not in service, revision \w+ still is \(still loading or silent",
        ):
            await producer.add_adapter("poet", write(tmp_path, "b", "2"), timeout=1)
        worker.signal(signal.SIGKILL)
        with pytest.raises(NoWorker, match="no live worker serves the model; start one with `lmpool worker`"):
            await producer.add_adapter("other", write(tmp_path, "b", "2"), timeout=4)


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


# Changes that meet


@pytest.mark.usefixtures("short_memory")
async def test_of_two_changes_at_once_one_is_told_and_the_other_is_in_service(pool: Pool, tmp_path: Path) -> None:
    for _ in range(2):
        pool.start(*QUICK)
    folders = [write(tmp_path, name, name) for name in "ab"]
    async with two_clients(pool) as clients:
        changes = [one.add_adapter("poet", folder) for one, folder in zip(clients, folders, strict=True)]
        outcomes = await asyncio.gather(*changes, return_exceptions=True)
        (refused,) = [one for one in outcomes if isinstance(one, BaseException)]
        (revision,) = [one for one in outcomes if isinstance(one, str)]
        assert isinstance(refused, AdapterRefused)
        assert "somebody else has changed it meanwhile" in str(refused)
        for producer in clients:
            assert await producer.adapters() == {"poet": revision}
            await check(producer, "poet", revision)
        others = await asyncio.gather(*(one.add_adapter(f"n{n}", folders[n]) for n, one in enumerate(clients)))
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

        async def is_offered() -> bool:
            return bool(pool.names("{syn}:offers"))

        await until_async(is_offered, "the adapter is offered")
        change.cancel()
        await until_async(no_offers(pool), "the offer is taken back")
        worker.signal(signal.SIGCONT)
        assert await producer.adapters() == {"poet": revision}
        await check(producer, "poet", revision)


async def test_closing_the_producer_ends_its_changes(pool: Pool, tmp_path: Path) -> None:
    worker = pool.start(*QUICK)
    async with pool.producer("syn") as producer:
        await producer.add_adapter("poet", write(tmp_path, "a", "1"))
        removal = asyncio.create_task(producer.remove_adapter("poet"))

        async def is_removed() -> bool:
            return pool.redis.exists(pool.keys.model("syn").replaced("poet")) == 1

        await until_async(is_removed, "the removal waits for clients that know it")
        worker.signal(signal.SIGSTOP)
        addition = asyncio.create_task(producer.add_adapter("judge", write(tmp_path, "b", "2")))

        async def is_offered() -> bool:
            return bool(pool.names("{syn}:offers"))

        await until_async(is_offered, "the adapter is offered")
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
    async with two_clients(pool) as (one, other):
        await one.add_adapter("poet", write(tmp_path, "a", "1"))
        worker.signal(signal.SIGSTOP)
        change = asyncio.create_task(one.add_adapter("poet", write(tmp_path, "b", "2")))
        await until_async(is_offered(pool), "the adapter is offered")
        removal = asyncio.create_task(other.remove_adapter("poet"))
        with pytest.raises(AdapterRefused, match="somebody else has changed it meanwhile"):
            await asyncio.wait_for(change, DEADLINE_S)
        worker.signal(signal.SIGCONT)
        await removal
        assert await one.adapters() == {}
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


def is_offered(pool: Pool) -> Any:
    async def offered() -> bool:
        return bool(pool.names("{syn}:offers"))

    return offered


@pytest.mark.usefixtures("short_memory")
async def test_an_offer_that_the_server_loses_is_made_again(pool: Pool, tmp_path: Path) -> None:
    worker = pool.start(*QUICK)
    async with pool.producer("syn") as producer:
        for content in "12":  # A new adapter, and one instead of another.
            worker.signal(signal.SIGSTOP)
            change = asyncio.create_task(producer.add_adapter("poet", write(tmp_path, "a", content)))

            async def is_offered() -> bool:
                return bool(pool.names("{syn}:offers"))

            await until_async(is_offered, "the adapter is offered")
            pool.redis.delete(pool.keys.model("syn").offers)
            await until_async(is_offered, "the adapter is offered once more")
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


# Where adapters may come from


@pytest.mark.usefixtures("short_memory")
async def test_an_adapter_that_lies_outside_of_the_root_is_refused(pool: Pool, tmp_path: Path) -> None:
    root, outside = tmp_path / "root", write(tmp_path, "outside", "1")
    root.mkdir()
    inside = write(root, "inside", "1")
    (root / "alias").symlink_to(inside)
    (root / "link").symlink_to(outside)
    (root / "linked").mkdir()
    (root / "linked" / "weights").symlink_to(outside / "weights")
    roots: dict[str, Any] = {"adapter_root": [str(root), str(write(tmp_path, "other", "2"))]}
    plain = SyntheticSettings(name="syn", vocab_size=V)
    message = rf"lies outside of {root}, {tmp_path}/other: .* --adapter-root"
    async with serving(pool, SyntheticBackend(plain)), pool.producer("syn") as producer:
        async with serving(pool, SyntheticBackend(plain), **roots):
            for source in (outside, root / "link", root / "linked", root / ".." / "outside", "/"):
                with pytest.raises(AdapterRefused, match=message):
                    await producer.add_adapter("poet", str(source))
            # The other worker, which has no root, may be the first to try it.
            with pytest.raises(AdapterRefused, match=f"{message}|none' cannot be read"):
                await producer.add_adapter("poet", str(tmp_path / "none"))
            for source in (inside, root / "alias", tmp_path / "other"):
                await check(producer, "poet", await producer.add_adapter("poet", source))
        await producer.add_adapter("poet", outside)
        for started in (plain, SyntheticSettings(name="syn", vocab_size=V, adapters=[f"poet={outside}"])):
            with pytest.raises(SettingsError, match=message):  # What is in service, and what it was started with.
                await Worker(Server(pool.url), started, WorkerSettings(pool.prefix, **roots)).run()


async def test_names_on_a_hub_are_for_workers_that_take_them(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path, "poet", "1")
    # Asked where something has imported the hub's package.
    monkeypatch.setattr(workers_adapters, "adapter_folder", lambda source: folder)
    async with serving(pool, FromHub(tmp_path)), pool.producer("syn") as producer:
        with pytest.raises(AdapterRefused, match=r"'org/poet' is no folder .* or start all workers with --adapter-hub"):
            await producer.add_adapter("poet", "org/poet")
    async with serving(pool, FromHub(tmp_path), adapter_hub=True), pool.producer("syn") as producer:
        await check(producer, "poet", await producer.add_adapter("poet", "org/poet"))


async def test_whoever_starts_a_worker_may_name_adapters_on_a_hub(tmp_path: Path) -> None:
    sources = AdapterSources.of(WorkerSettings())
    assert sources.place("org/poet", is_own=True) == "org/poet"
    with pytest.raises(SettingsError, match="names on a hub are not taken"):
        sources.place("org/poet")
    assert sources.place(str(tmp_path / "none")) == str(tmp_path / "none"), "the backend says that it is not there"


async def test_an_adapter_that_is_too_large_is_refused_before_it_is_read(pool: Pool, tmp_path: Path) -> None:
    folder = write(tmp_path, "a", "1")
    os.truncate(folder / "weights", 2_000_000)
    backend = SyntheticBackend(SyntheticSettings(name="syn", vocab_size=V))
    async with serving(pool, backend, adapter_mb=1), pool.producer("syn") as producer:
        with pytest.raises(AdapterRefused, match=r"have 2 MB, and 1 MB are taken: .* --adapter-mb"):
            await producer.add_adapter("poet", folder)
    late = pool.start(*QUICK, "--adapter-mb", 1, "--adapters", f"poet={folder}", wait=False)
    assert late.wait() == 2
    assert "have 2 MB, and 1 MB are taken" in late.text


def test_a_root_must_be_a_folder(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"adapter_root: '.*/none' is no folder"):
        WorkerSettings(adapter_root=[str(tmp_path / "none")])


# Adapters that end workers

DEADLY = """
import os, signal, sys
from pathlib import Path
from lmpool.server import Server
from lmpool.workers.backends.synthetic import SyntheticBackend, SyntheticSettings
from lmpool.workers.serving import serve
from lmpool.workers.settings import WorkerSettings

class Engine(SyntheticBackend):
    def load_adapter(self, name, source):
        if "deadly" in (Path(source) / "weights").read_text():
            print("loading what is deadly", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().load_adapter(name, source)

class Settings(SyntheticSettings):
    def open(self):
        return Engine(self)

url, prefix = sys.argv[1:]
serve(Server(url), Settings(name="syn", vocab_size=64), WorkerSettings(prefix, lease_s=1))
"""


def start_mortal(pool: Pool, *, wait: bool = True) -> WorkerProcess:
    """A worker that some adapters kill."""
    return pool._launch([sys.executable, "-c", DEADLY, pool.url, pool.prefix], None, wait=wait)


async def test_an_offer_that_kills_a_worker_kills_no_other_and_is_refused(pool: Pool, tmp_path: Path) -> None:
    workers = [start_mortal(pool, wait=False) for _ in range(3)]
    for worker in workers:
        await asyncio.to_thread(worker.until_says, "serving ")
    async with pool.producer("syn") as producer:
        with pytest.raises(AdapterRefused, match=r"the worker \S+ ended or fell silent while it loaded it"):
            await producer.add_adapter("poet", write(tmp_path, "a", "deadly"))
        assert sorted(worker.is_running for worker in workers) == [False, True, True]
        assert await producer.adapters() == {}
        await check(producer, "", "")
        await check(producer, "poet", await producer.add_adapter("poet", write(tmp_path, "a", "mended")))
    await until_async(no_offers(pool), "the offer is taken back")
    assert pool.names("{syn}:trying:*") != [], "it is known for a while"


async def test_an_offer_that_killed_a_worker_does_not_kill_it_again_when_it_is_restarted(
    pool: Pool, tmp_path: Path
) -> None:
    first = start_mortal(pool)
    # By nobody who would take it back.
    offer = Offer(str(write(tmp_path, "a", "deadly")), "nonce")
    pool.redis.hset(pool.keys.model("syn").offers, "poet", offer.pack())
    assert await asyncio.to_thread(first.wait) == -signal.SIGKILL
    again = await asyncio.to_thread(start_mortal, pool)
    await asyncio.to_thread(again.until_says, "ended or fell silent while it loaded it, so no other does")
    async with pool.producer("syn") as producer:
        await check(producer, "", "")
    assert again.is_running


async def test_an_adapter_in_service_that_kills_workers_as_they_start_is_tried_so_often_and_no_more(
    pool: Pool, tmp_path: Path
) -> None:
    keeps = start_mortal(pool)  # So that the registry stays.
    folder, adapters = write(tmp_path, "a", "1"), pool.keys.model("syn").adapters
    async with pool.producer("syn") as producer:
        revision = await producer.add_adapter("poet", folder)
        (folder / "weights").write_text("deadly")
        for _ in range(2):
            victim = start_mortal(pool, wait=False)
            assert await asyncio.to_thread(victim.wait) == -signal.SIGKILL

        (key,) = [name for name in pool.names("{syn}:trying:*") if revision in name]

        def are_overdue() -> bool:
            now = pool.redis.time()[0]
            return all(now - int(began) / 1000 > 2 for began in pool.redis.hvals(key))

        await asyncio.to_thread(until, are_overdue, "both have been silent for long enough")
        spared = start_mortal(pool, wait=False)
        assert await asyncio.to_thread(spared.wait) == 1
        assert "is in service, and the workers" in spared.text
        assert "loading what is deadly" not in spared.text
        (folder / "weights").write_text("1")
        pool.redis.delete(key)  # As time does.
        healthy = await asyncio.to_thread(start_mortal, pool)
        assert healthy.is_running
        assert keeps.is_running
        assert not [name for name in pool.names("{syn}:trying:*") if revision in name]
        assert pool.redis.hexists(adapters, "poet")


async def test_an_offer_over_which_a_worker_hangs_is_refused(pool: Pool, tmp_path: Path) -> None:
    may_go_on = threading.Event()

    class Hanging(SyntheticBackend):
        def load_adapter(self, name: str, source: str) -> str:
            may_go_on.wait()
            return super().load_adapter(name, source)

    settings = SyntheticSettings(name="syn", vocab_size=V)
    try:
        async with serving(pool, SyntheticBackend(settings)), pool.producer("syn") as producer:
            hanging = Worker(
                Server(pool.url), Prepared(Hanging(settings)), WorkerSettings(pool.prefix, step_timeout_s=0.3)
            )
            ready = asyncio.Event()
            running = asyncio.create_task(hanging.run(lambda _: ready.set()))
            await asyncio.wait_for(ready.wait(), DEADLINE_S)
            change = asyncio.create_task(producer.add_adapter("poet", write(tmp_path, "a", "1")))
            with pytest.raises(WorkerError, match="the backend hangs"):
                await running
            with pytest.raises(AdapterRefused, match=rf"the worker {hanging.worker_id} ended or fell silent"):
                await change
    finally:
        may_go_on.set()
