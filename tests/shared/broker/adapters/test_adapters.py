"""Adapters: unknown names are refused, and rows of different adapters never mix."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from lmpool.broker import registries
from lmpool.broker.registries import AdapterRegistry
from lmpool.broker.server import Server
from lmpool.errors import AdapterChanged, DeadlineExceeded, ProtocolError, SettingsError, UnknownAdapter
from lmpool.producer import Producer, SyncProducer
from lmpool.producer.client import adapters as adapters_module
from lmpool.protocol.adapter import (
    MAX_ADAPTERS,
    MAX_LOADED,
    Adapter,
    Registered,
    check_adapter_name,
    is_qualified,
    name_of,
    qualify,
    revision_of,
)
from lmpool.protocol.job import Failure, Job, digest_of, encode_prompt, unpack_failure
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.row import Row
from lmpool.synthetic import synthetic_row
from lmpool.workers import dispatch as dispatch_module
from lmpool.workers.backends.synthetic import SyntheticBackend, SyntheticSettings
from lmpool.workers.execution.contract import Backend, Finished
from lmpool.workers.settings import WorkerSettings
from lmpool.workers.worker import Worker
from tests.support.pool import DEADLINE_S, Pool, Prepared, until

V = 64
NAMES = ("", "one", "other")


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """Two adapters of the synthetic backend, as its settings name them."""
    return write_adapters(tmp_path)


def write_adapters(folder: Path) -> list[str]:
    """Write two adapters; return the settings that name them."""
    for name in NAMES[1:]:
        (folder / name).write_text(name)
    return [f"{name}={folder / name}" for name in NAMES[1:]]


def adapted(folders: Sequence[str]) -> SyntheticBackend:
    """A backend that serves adapters."""
    return SyntheticBackend(SyntheticSettings(name="syn", vocab_size=V, max_batch=8, adapters=list(folders)))


@pytest.fixture(autouse=True)
def _short_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten blocking reads, because a worker notices only between two reads that it must stop."""
    monkeypatch.setattr(dispatch_module, "_MAX_BLOCK_MS", 20)


async def expected(producer: Producer, ids: list[int], adapter: str) -> Row:
    revision = (await producer.adapters())[adapter] if adapter else ""
    return synthetic_row(ids, vocab_size=V, adapter_revision=revision)


@asynccontextmanager
async def serving(
    pool: Pool, backend: Backend, max_adapters: int = MAX_LOADED, **settings: Any
) -> AsyncIterator[Worker]:
    """Run a worker in this process while the context is open."""
    worker = Worker(Server(pool.url), Prepared(backend, max_adapters), WorkerSettings(pool.prefix, **settings))
    ready = asyncio.Event()
    running = asyncio.create_task(worker.run(lambda _: ready.set()))
    await asyncio.wait_for(ready.wait(), DEADLINE_S)
    yield worker
    worker.stop()
    await asyncio.wait_for(running, DEADLINE_S)


# Rows of several adapters


async def test_rows_of_adapters_are_never_mixed(pool: Pool, folders: list[str]) -> None:
    asked = [(ids, adapter) for ids in ([1], [2], [1, 2], [2, 1]) for adapter in NAMES] * 2
    backend = adapted(folders)
    async with serving(pool, backend):
        for cache_bytes in (2**20, 0):
            async with pool.producer("syn", cache_bytes=cache_bytes) as producer:
                assert list(await producer.adapters()) == list(NAMES[1:])
                for _ in range(2):
                    rows = await asyncio.gather(*(producer.logprobs(ids, adapter=adapter) for ids, adapter in asked))
                    for (ids, adapter), row in zip(asked, rows, strict=True):
                        assert np.array_equal(row, await expected(producer, ids, adapter)), (ids, adapter)
        assert backend.stats().rows == len(asked) // 2, "each was computed once, for both producers"


async def test_a_batch_is_of_one_adapter(pool: Pool, folders: list[str]) -> None:
    prompts = [[1], [2, 3], [1]]
    async with serving(pool, adapted(folders)), pool.producer() as producer:
        for adapter in ("other", "", "one"):
            for given in (prompts, iter(prompts)):
                rows = await producer.batch_logprobs(given, adapter=adapter)
                assert np.array_equal(rows, [await expected(producer, ids, adapter) for ids in prompts])


async def test_rows_without_an_adapter_are_those_of_the_base_model(pool: Pool, folders: list[str]) -> None:
    async with serving(pool, adapted(folders)), pool.producer() as producer:
        await producer.logprobs([1], adapter="one")
        assert np.array_equal(await producer.logprobs([1]), synthetic_row([1], vocab_size=V))
        assert np.array_equal((await producer.batch_logprobs([[1]]))[0], synthetic_row([1], vocab_size=V))
        assert producer.stats().local_hits == 1


async def test_adapters_without_asyncio(pool: Pool, folders: list[str]) -> None:
    def ask() -> tuple[dict[str, str], dict[str, tuple[Row, Row]]]:
        with SyncProducer("syn", redis=pool.url, prefix=pool.prefix) as producer:
            return producer.adapters(), {
                adapter: (
                    producer.logprobs([1, 2], adapter=adapter),
                    producer.batch_logprobs([[1, 2], [3]], adapter=adapter),
                )
                for adapter in NAMES
            }

    async with serving(pool, adapted(folders)):
        revisions, answers = await asyncio.to_thread(ask)
    for adapter, (row, rows) in answers.items():
        wanted = [
            synthetic_row(ids, vocab_size=V, adapter_revision=revisions.get(adapter, "")) for ids in ([1, 2], [3])
        ]
        assert np.array_equal(row, wanted[0])
        assert np.array_equal(rows, wanted)


# Refused adapters

Query = Callable[[Producer, str], Any]

WAYS: dict[str, Query] = {
    "logprobs": lambda producer, adapter: producer.logprobs([1], adapter=adapter),
    "batch_logprobs": lambda producer, adapter: producer.batch_logprobs([[1], [2]], adapter=adapter),
}


@pytest.mark.parametrize("ask", WAYS.values(), ids=WAYS)
async def test_a_producer_refuses_an_adapter_that_there_is_not(pool: Pool, folders: list[str], ask: Query) -> None:
    async with serving(pool, adapted(folders)), pool.producer() as producer:
        adapters: list[Any] = ["two", "One", "one ", "on", "x" * 1000, "\ud800", None, 0, 5, [], ["one"], b"one"]
        for adapter in adapters:
            with pytest.raises(UnknownAdapter) as caught:
                await ask(producer, adapter)
            text = str(caught.value)
            assert text.startswith("the model 'syn' has no adapter ")
            assert text.endswith("; it has: one, other")
            assert len(text) < 400
        assert producer.stats().requests == 0
    assert pool.jobs() == 0


@pytest.mark.parametrize("ask", WAYS.values(), ids=WAYS)
async def test_the_error_for_a_model_without_adapters_is_clear(pool: Pool, ask: Query) -> None:
    async with serving(pool, adapted([])), pool.producer() as producer:
        with pytest.raises(UnknownAdapter) as caught:
            await ask(producer, "one")
    assert str(caught.value) == "the model 'syn' has no adapter 'one'; it has: none"


def test_an_unknown_adapter_is_refused_by_the_sync_producer(pool: Pool) -> None:
    pool.start()
    with SyncProducer(redis=pool.url, prefix=pool.prefix) as producer:
        with pytest.raises(UnknownAdapter, match="no adapter 'one'; it has: none"):
            producer.logprobs([1], adapter="one")
        with pytest.raises(UnknownAdapter, match="no adapter 'one'; it has: none"):
            producer.batch_logprobs([[1]], adapter="one")


def reply_to(pool: Pool, ids: bytes, adapter: str) -> dict[bytes, bytes]:
    """Queue a job without a client's checks of the adapter; return the notification that the client gets."""
    model = pool.keys.model("syn")
    info = ModelInfo.unpack(pool.redis.hget(pool.keys.models(), "syn"))  # type: ignore[arg-type]
    digest, reply = digest_of(ids, adapter), model.reply("raw")
    pool.redis.delete(reply)
    pool.redis.hset(model.waiting + digest, reply, b"")
    pool.redis.xadd(model.jobs, {"m": Job(ids, adapter, info.fingerprint).pack()})
    (told,) = until(lambda: pool.redis.xrange(reply), "the client is told")
    fields: dict[bytes, bytes] = told[1]
    assert fields[b"d"] == digest
    return fields


@pytest.mark.parametrize(
    "adapter", ["one", "@", "one@", "@0f", "one@0f@", "one@" + "0" * 65, "x" * 101 + "@0f", "a,b@0f"]
)
async def test_a_worker_refuses_a_job_that_names_no_adapter(pool: Pool, folders: list[str], adapter: str) -> None:
    ids = encode_prompt([1], vocab_size=V, max_tokens=1).ids
    async with serving(pool, adapted(folders)):
        told = await asyncio.to_thread(reply_to, pool, ids, adapter)
        failure = unpack_failure(told[b"e"])
        assert failure.kind == UnknownAdapter.__name__
        assert failure.text.endswith("is not the name of an adapter: a job names it as name@revision")
        assert not pool.redis.exists(pool.keys.model("syn").dead), "the job decodes, so it is no dead letter"
        async with pool.producer() as producer:
            assert np.array_equal(await producer.logprobs([1]), synthetic_row([1], vocab_size=V)), "it serves on"
    assert pool.jobs() == 0


async def test_a_worker_never_computes_with_other_weights_than_the_job_names(pool: Pool, folders: list[str]) -> None:
    ids = encode_prompt([1], vocab_size=V, max_tokens=1).ids
    backend = adapted(folders)
    async with serving(pool, backend):
        for adapter in ("one@0f", "two@0f", *(name + "0" for name in backend.adapters)):
            told = await asyncio.to_thread(reply_to, pool, ids, adapter)
            expected = Failure(AdapterChanged.__name__, f"the adapter {adapter!r} is not in service any more")
            assert unpack_failure(told[b"e"]) == expected
        assert backend.stats().rows == 0


def test_calls_of_a_producer_are_coroutine_functions() -> None:
    """Methods that take `adapter` are wrapped, but remain coroutine functions, because frameworks check that."""
    others, streams = {"at", "clear_cache", "close_soon", "stats"}, {"stream_positions"}
    for name, call in inspect.getmembers(Producer, inspect.isfunction):
        if not name.startswith("_"):
            assert inspect.iscoroutinefunction(call) == (name not in others | streams), name
            assert inspect.isasyncgenfunction(call) == (name in streams), name


async def test_the_error_at_a_deadline_has_the_callers_timeout(
    pool: Pool, folders: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters_module, "KNOWN_FOR_S", DEADLINE_S)
    backend = Gated(folders)
    async with serving(pool, backend), pool.producer("syn") as producer:
        await producer.adapters()  # The requests do not read the registry, which may take longer than their timeout.
        try:
            for ask in (producer.logprobs, producer.warm):
                with pytest.raises(DeadlineExceeded, match=r"^no row within 1\.5 s: "):
                    await ask([2], adapter="one", timeout=1.5)
        finally:
            backend.may_step.set()


class Gated(SyntheticBackend):
    """A backend whose steps wait until the test permits them."""

    def __init__(self, folders: Sequence[str]) -> None:
        super().__init__(SyntheticSettings(name="syn", vocab_size=V, adapters=list(folders)))
        self.may_step = threading.Event()

    def step(self) -> Finished:
        self.may_step.wait()
        return super().step()


async def test_adapters_leave_the_fingerprint_as_it_is(folders: list[str]) -> None:
    assert adapted(folders).info.fingerprint == adapted([]).info.fingerprint


# Names of adapters


def test_the_digest_of_a_prompt_is_another_one_for_each_adapter() -> None:
    names = ["", "one", "One", "one ", "other", "x" * 64, "x" * 65, "x" * 200]
    prompts = [encode_prompt([1, 2], vocab_size=V, max_tokens=9, adapter=name) for name in names]
    assert len({prompt.digest for prompt in prompts}) == len(names)
    assert {prompt.ids for prompt in prompts} == {prompts[0].ids}
    assert [prompt.adapter for prompt in prompts] == names
    assert [digest_of(prompt.ids, prompt.adapter) for prompt in prompts] == [prompt.digest for prompt in prompts]


GOOD_NAMES = ["a", "x" * 100, "ü ☃", "a.b/c", "lora_a", "{a}"]
BAD_NAMES: list[Any] = [
    "", "x" * 101, "a@b", "a,b", "a=b", "a\n", "\0", "\x7f", "\x85", "\u2028", "\ud800", " a", "a ", None, 1, b"a",
]  # fmt: skip


@pytest.mark.parametrize("name", GOOD_NAMES)
def test_a_name_that_an_adapter_can_have(name: str) -> None:
    assert check_adapter_name("name", name) == name
    assert is_qualified(qualify(name, "0f"))
    assert name_of(qualify(name, "0f")) == name
    assert revision_of(qualify(name, "0f")) == "0f"


@pytest.mark.parametrize("name", BAD_NAMES, ids=repr)
def test_a_name_that_no_adapter_can_have(name: Any) -> None:
    with pytest.raises(SettingsError, match=r"^name: .* must be 1 to 100 characters without @, comma, = and control"):
        check_adapter_name("name", name)


def test_registry_entries_are_decoded_and_other_values_refused(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Clients may use the replaced entry until the end of this test, also on a busy machine.
    monkeypatch.setattr(registries, "KNOWN_FOR_S", 1000.0)
    asyncio.run(_read_back(pool))


async def _read_back(pool: Pool) -> None:
    redis, keys = Server(pool.url).client(), pool.keys.model("syn")
    registry, other = (AdapterRegistry(redis, keys, digit * 32) for digit in "fe")
    one, two = Adapter("/a", "0f"), Adapter("/b", "1e")
    try:
        assert await registry.read() == Registered(0, {}, {})
        assert await registry.put("\xfc", one, is_new=True) == (1, 0)
        assert await registry.put("\xfc", two, is_new=True) == (1, 0), "the name has an entry"
        assert await registry.read() == Registered(1, {"\xfc": one}, {"\xfc": 1})
        since = 1000 * pool.redis.time()[0]
        version, wait_s = await registry.put("one", one)
        until_ms = 1000 * (pool.redis.time()[0] + 1)
        assert (since <= version <= until_ms, wait_s) == (True, 0), "no client can know another"
        assert (await registry.put("one", one))[0] == version, "nothing has changed"
        later, wait_s = await registry.put("one", two)
        assert (later > version, 1000 < wait_s <= 1000.5) == (True, True)
        again, wait_s = await registry.put("one", two)
        assert (again == later, 700 < wait_s <= 1000.5) == (True, True), "clients may use the replaced entry still"
        assert await registry.read("one", "none") == Registered(later, {"one": two}, {"one": later})
        assert await registry.put("none", None) == (0, 0)
        removed, wait_s = await registry.put("one", None)
        assert (removed > later, 1000 < wait_s <= 1000.5) == (True, True)
        assert await registry.read() == Registered(removed, {"\xfc": one}, {"\xfc": 1})
        assert await registry.version() == removed
        assert await other.read() == Registered(0, {}, {}), "these are adapters of another model"
        assert (await other.put("one", one))[0] > removed
        assert list((await other.read()).adapters) == ["one"]
        assert await registry.version() == 0
        await registry.put("one", one)
        assert one.pack() == b"\x93\1\xa2/a\xa20f"
        for bad in (b"x", b"-1", b"9" * 16, b"1.5"):
            pool.redis.hset(keys.adapters, "@", bad)
            with pytest.raises(ProtocolError, match="is no version of a registry"):
                await registry.read()
        pool.redis.hset(keys.adapters, "@", b"7")
        for bad in (b"", b"\xc1", b"x" * 20_000, msgpack.packb([2, "/a", "0f"]), msgpack.packb([1]),
                    msgpack.packb([1, "/a", 5]), msgpack.packb([True, "/a", "0f"]),
                    msgpack.packb([1, "/a", b"0f"]), msgpack.packb({"a": 1}), msgpack.packb(1)):  # fmt: skip
            for version_of_entry in (b"1 ", b"", b"x "):
                pool.redis.hset(keys.adapters, "bad", version_of_entry + bad)
                with pytest.raises(ProtocolError):
                    await registry.read()
        pool.redis.hset(keys.adapters, mapping={f"n{number}": b"" for number in range(MAX_ADAPTERS + 1)})
        with pytest.raises(ProtocolError, match="there can be 4098"):
            await registry.read()
        await registry.begin_check("n", "/a", 60)
        assert await registry.read_check("n") == Adapter("/a")
        await registry.end_check("n", one)
        assert await registry.read_check("n") == one
        assert 0 < pool.redis.pttl(keys.adapter_check("n")) <= 60_000
        await registry.end_check("other", one)
        assert await registry.read_check("other") is None, "it has expired"
    finally:
        await redis.aclose()
