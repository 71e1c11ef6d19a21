"""Pickles, copies and reprs of producers, tries and pools."""

from __future__ import annotations

import asyncio
import copy
import multiprocessing
import os
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import redis as redis_sync
import redis.asyncio as redis_async

import lmpool.testing
from lmpool.errors import LMPoolError, ProducerClosed, SettingsError
from lmpool.producer import Producer, SyncProducer
from lmpool.synthetic import synthetic_row
from lmpool.testing.memory_pool import MemoryPool
from lmpool.trie.trie import Trie
from tests.support.pool import DEADLINE_S, Pool, V


def thawed(something: Any) -> Any:
    """Pickle and unpickle an object."""
    return pickle.loads(pickle.dumps(something))  # noqa: S301


def ask_elsewhere(producer: Producer, sync: SyncProducer, answers: Any) -> None:
    """Request a row from each unpickled producer; put the rows and this process's id into the queue."""
    with sync:
        answers.put((os.getpid(), asyncio.run(producer.logprobs([1])), sync.logprobs([2]), sync.model.name))


async def test_an_unpickled_producer_works_in_another_process(pool: Pool) -> None:
    pool.start()
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    settings: Any = {"redis": pool.url, "prefix": pool.prefix}
    with SyncProducer(**settings) as sync:
        async with Producer(**settings) as producer:
            child = context.Process(target=ask_elsewhere, args=(producer, sync, answers))
            child.start()
            pid, row, other, name = await asyncio.to_thread(answers.get, timeout=DEADLINE_S)
            child.join()
            assert pid != os.getpid()
            assert np.array_equal(row, synthetic_row([1], vocab_size=V))
            assert np.array_equal(other, synthetic_row([2], vocab_size=V))
            assert name == "syn"
            # The producers that were pickled still work.
            assert np.array_equal(await producer.logprobs([3]), sync.logprobs([3]))


@pytest.fixture(scope="module")
def served() -> Any:
    """A pool of `lmpool.testing`, whose workers run in this process."""
    with lmpool.testing.pool(lmpool.testing.SyntheticModel("a")) as pool:
        yield pool


async def test_an_unpickled_producer_has_the_same_settings_and_model(served: MemoryPool) -> None:
    settings: Any = {"timeout": 7.0, "cache_bytes": 0, "when_full": "raise", "when_absent": "wait", "priority": "bulk",
                     "keep_answers": False, "direct": False, "tracing": False}  # fmt: skip
    async with Producer(redis=served.url, **settings) as producer:
        other = thawed(producer)
        assert "Producer('a', " in repr(other)
        assert other._options == {**settings, "prefix": "lmpool"}
        assert thawed(other)._redis == served.url
    assert thawed(Producer())._redis is None, "the environment of the other process says where"


@pytest.mark.parametrize("client", [redis_sync.Redis(), redis_async.Redis()], ids=["a client", "an asyncio client"])
def test_pickling_a_producer_made_with_a_client_raises_a_helpful_error(client: Any) -> None:
    with pytest.raises(SettingsError, match="redis: .* cannot be pickled: make the producer with the server's URL"):
        pickle.dumps(Producer(redis=client))


async def test_the_error_for_pickling_a_trie_or_pool_names_the_object_to_pickle(served: MemoryPool) -> None:
    with SyncProducer(redis=served.url) as producer:
        trie = producer.trie()
        for value, instead in [
            (trie, r"pickle the producer, .* `producer.trie\(vocabulary\)`"),
            (trie._asynchronous, r"pickle the producer, .* `producer.trie\(vocabulary\)`"),
            (served, "pass its `url` to others"),
        ]:
            with pytest.raises(LMPoolError, match=f"cannot be pickled: {instead}"):
                pickle.dumps(value)
        # Objects without a connection can be pickled, and stay equal.
        assert thawed(trie.structure) == trie.structure
        assert np.array_equal(thawed(trie.structure).parent, Trie(trie.structure.vocabulary).parent)
        for value in (producer.model, producer.stats(), SettingsError("x: y")):
            assert repr(thawed(value)) == repr(value)


async def test_a_copy_is_the_object_itself(served: MemoryPool) -> None:
    """Programs deep-copy their own objects, such as particles, that hold a producer."""
    with SyncProducer(redis=served.url) as sync:
        trie = sync.trie()
        for value in (Producer(redis=served.url), sync, trie, trie._asynchronous):
            assert copy.copy(value) is value
            assert copy.deepcopy([value])[0] is value


CLIENT: Any = {"host": "h", "port": 7, "password": "hunter2"}


@pytest.mark.parametrize(
    ("redis", "shown"),
    [
        ("redis://user:hunter2@h:7/3", "redis://…@h:7/3"),
        ("unix:///none/r.sock", "unix:///none/r.sock"),
        ("rediss://h?ssl_ca_certs=/none", "rediss://h?…"),
        ("redis+cluster://:hunter2@h:7", "redis+cluster://…@h:7"),
        ("what", "what"),
        (redis_sync.Redis(**CLIENT), "redis://h:7"),
        (redis_async.Redis(**CLIENT, ssl=True), "rediss://h:7"),
        (redis_async.Redis(unix_socket_path="/r.sock"), "unix:///r.sock"),
        (redis_async.RedisCluster(**CLIENT), "redis+cluster://h:7"),
        (None, "your embedded server"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,  # Equal in all pytest processes.
)  # fmt: skip
def test_a_producer_shows_model_server_and_state(redis: Any, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LMPOOL_REDIS_URL", raising=False)
    assert repr(Producer("m", redis=redis)) == f"Producer('m', redis={shown!r}, closed)"
    monkeypatch.setenv("LMPOOL_REDIS_URL", "redis://:hunter2@there")
    assert repr(Producer()) == "Producer(None, redis='redis://…@there', closed)"


async def test_repr_follows_the_state(served: MemoryPool) -> None:
    producer = Producer(redis=served.url)
    closed, opened = f"Producer(None, redis={served.url!r}, closed)", f"Producer('a', redis={served.url!r}, open)"
    assert repr(producer) == closed
    async with producer:
        assert repr(producer) == opened
    assert repr(producer) == closed
    sync = SyncProducer(redis=served.url)
    assert repr(sync) == f"Sync{opened}"
    sync.close()
    assert repr(sync) == f"Sync{closed}"
    with pytest.raises(ProducerClosed, match="this SyncProducer is closed"):
        print(sync.model)


UNPICKLED: list[Callable[[SyncProducer], Any]] = [
    lambda producer: producer.logprobs([1])[:3].tolist(),
    lambda producer: producer.model,
    lambda producer: producer.trie().structure,
]


@pytest.mark.parametrize("ask", UNPICKLED, ids=["a row", "the model", "a trie"])
def test_an_unpickled_sync_producer_connects_with_its_first_call(
    served: MemoryPool, ask: Callable[[SyncProducer], Any]
) -> None:
    with SyncProducer("a", redis=served.url) as producer, thawed(producer) as other:
        assert ask(other) == ask(producer)
    with thawed(producer) as again:
        assert ask(again) is not None, "one that was pickled when it was closed is open"
