"""Adapters that come and go while workers serve: all workers follow, and nothing that was replaced is served again."""

from __future__ import annotations

import asyncio
import random
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from lmpool.embedded import EmbeddedServer
from lmpool.errors import (
    AdapterRefused,
    DeadlineExceeded,
    NoWorker,
    SettingsError,
    UnknownAdapter,
)
from lmpool.producer import Producer, SyncProducer, adapter_changes
from lmpool.producer.client import adapters as adapters_module
from lmpool.producer.client import session as session_module
from lmpool.protocol.adapter import MAX_ADAPTERS, Adapter
from lmpool.workers.backends.synthetic import SyntheticBackend, SyntheticSettings
from lmpool.workers.execution.contract import WithoutAdapters
from lmpool.workers.membership.adapters import AdapterKeeper, AdapterSources
from lmpool.workers.settings import WorkerSettings
from tests.shared.broker.adapters.adapter_changes import QUICK, V, check, expected, no_offers, two_clients, write
from tests.shared.broker.adapters.test_adapters import serving
from tests.support.gate import GatedBackend, OneByOne, gated_worker
from tests.support.pool import Pool, deadline_ms, until_async


async def test_an_adapter_that_is_added_reaches_every_worker(pool: Pool, tmp_path: Path) -> None:
    workers = [pool.start(*QUICK) for _ in range(2)]
    async with two_clients(pool) as (client, other):
        assert await client.adapters() == {}
        with pytest.raises(UnknownAdapter, match="no adapter 'poet'; it has: none"):
            await other.logprobs([1], adapter="poet")
        revision = await client.add_adapter("poet", write(tmp_path, "a", "1"))
        assert await other.adapters() == {"poet": revision}
        await check(other, "poet", revision)
        await check(client, "", "")
        # Each of them by itself.
        workers[0].signal(signal.SIGTERM)
        assert workers[0].wait() == 0
        await check(client, "poet", revision, [4], [5])
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
    """A client, new weights for "poet", and a check that another client has those, which has just read of the old."""
    monkeypatch.setattr(session_module, "_WATCH_S", 60.0)
    for module in (adapters_module, adapter_changes):
        monkeypatch.setattr(module, "KNOWN_FOR_S", 16.0)  # Longer than two changes take that wait for nothing.
    pool.start(*QUICK)
    old, new = write(folder, "old", "1"), write(folder, "new", "2")
    async with two_clients(pool) as (changing, asking):
        before = await changing.add_adapter("poet", old)
        await check(asking, "poet", before, [1])
        session = asking._sessions.session
        assert session is not None
        session.adapters.doubt()
        await check(asking, "poet", before, [1])  # It has read the registry now.

        async def check_new() -> None:
            row = await asking.logprobs([1], adapter="poet")
            after = (await changing.adapters())["poet"]
            assert after != before
            assert np.array_equal(row, expected([1], after))

        yield changing, new, check_new


async def test_a_replacement_that_is_tried_again_waits_for_those_that_know_the_old_one(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replaced_while_known(pool, tmp_path, monkeypatch) as (producer, new, check_new):
        with pytest.raises(DeadlineExceeded, match=r"it is in service \(clients may use"):
            await producer.add_adapter("poet", new, timeout=8)
        await producer.add_adapter("poet", new)
        await check_new()


async def test_an_adapter_in_the_place_of_one_that_was_just_removed_waits_for_those_that_know_it(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replaced_while_known(pool, tmp_path, monkeypatch) as (producer, new, check_new):
        with pytest.raises(DeadlineExceeded, match="it is not in service any more"):
            await producer.remove_adapter("poet", timeout=8)
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
    gates = [OneByOne(), OneByOne()]
    backends = [GatedBackend(gate, vocab_size=V) for gate in gates]
    async with (
        gated_worker(pool, backends[0]), gated_worker(pool, backends[1]), two_clients(pool) as (client, other),
    ):  # fmt: skip
        old = await client.add_adapter("poet", write(tmp_path, "old", "1"))
        base = asyncio.gather(*(other.logprobs([5, token]) for token in range(V)))
        asked = [
            asyncio.create_task(other.logprobs([token, at], adapter="poet")) for token in range(V) for at in range(9)
        ]

        async def are_queued() -> bool:
            return pool.jobs() == 11 * V

        batch = asyncio.create_task(other.batch_logprobs(iter([[at] for at in range(V)]), adapter="poet"))
        await until_async(are_queued, "all have asked")
        while not any(request.done() for request in asked):
            for gate in gates:
                gate.let(1)
            await asyncio.wait(asked, timeout=0.2, return_when=asyncio.FIRST_COMPLETED)
        change = asyncio.create_task(client.add_adapter("poet", write(tmp_path, "new", "2")))
        while not change.done():
            # Workers load an adapter between two steps.
            for gate in gates:
                gate.let(1)
            await asyncio.wait([change], timeout=0.5)
        new = await change
        for gate in gates:
            gate.open()
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
    pauses = [begin - end for end, begin in zip(tries, [ended - 20.0 for ended in tries[1:]], strict=False)]
    assert pauses == pytest.approx([5, 10, 20, 40, 60, 60], abs=0.6)


async def test_adapters_go_with_the_last_worker_of_the_model(pool: Pool, tmp_path: Path) -> None:
    worker = pool.start(*QUICK, "--lease-s", 6)  # So long it may take to leave.
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
        async with two_clients(pool) as (client, other):
            revision = await client.add_adapter("poet", write(tmp_path, "a", "1"))
            await client.add_adapter("gone", write(tmp_path, "b", "2"))
            await client.remove_adapter("gone")
            for round_ in range(3):
                pool.redis.flushall()
                await check(other, "poet", revision, [round_], [round_, 1])
                with pytest.raises(UnknownAdapter, match="has no adapter 'gone'; it has: poet"):
                    await client.logprobs([1], adapter="gone")
            pool.redis.flushall()
            newer = await client.add_adapter("poet", write(tmp_path, "c", "3"))
            pool.redis.flushall()
            await check(other, "poet", newer, [1], [2])
    finally:
        pool.end()


# Refusals


async def test_what_cannot_be_loaded_is_refused_and_the_old_one_stays(pool: Pool, tmp_path: Path) -> None:
    workers = [pool.start(*QUICK) for _ in range(2)]
    async with two_clients(pool) as (client, other):
        revision = await client.add_adapter("poet", write(tmp_path, "a", "1"))
        (tmp_path / "empty").mkdir()
        for source, why in [
            (tmp_path / "none", "cannot be read: No such file"),
            (tmp_path / "empty", "an empty folder"),
        ]:
            with pytest.raises(AdapterRefused, match=rf"the worker \S+ cannot load it: adapters: .*{why}"):
                await other.add_adapter("poet", source)
            with pytest.raises(AdapterRefused, match=why):
                await other.add_adapter("new", str(source))
        assert await client.adapters() == {"poet": revision}
        await check(other, "poet", revision, [1], [2])
        await until_async(no_offers(pool), "offers are taken back")
    assert all(worker.is_running for worker in workers)


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
    # While its lease lasts a worker that is silent may be loading.
    worker = pool.start("--vocab-size", V, "--lease-s", 600)
    async with pool.producer("syn") as producer:
        await producer.add_adapter("poet", write(tmp_path, "a", "1"))
        worker.signal(signal.SIGSTOP)
        with pytest.raises(
            DeadlineExceeded,
            match=r"not done within 3 s .*not in service, revision \w+ still is \(still loading or silent",
        ):
            await producer.add_adapter("poet", write(tmp_path, "b", "2"), timeout=3)
        worker.signal(signal.SIGKILL)
        # As when its lease has passed.
        workers = pool.keys.model("syn").workers
        names: Any = pool.redis.zrange(workers, 0, -1)
        pool.redis.zadd(workers, dict.fromkeys(names, deadline_ms(-1)))
        with pytest.raises(NoWorker, match="no live worker serves the model; start one with `lmpool worker`"):
            await producer.add_adapter("other", write(tmp_path, "b", "2"), timeout=3)


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
