"""Trie queries with wrong inputs are refused with the reason; hostile jobs harm only the client that sent them."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

from lmpool import errors
from lmpool.producer import Producer
from lmpool.producer.trie import PooledTrie
from lmpool.protocol.job import Job, digest_of, query_digest, unpack_failure, unpack_job
from lmpool.protocol.query import TrieQuery, weights_name
from lmpool.protocol.row import VectorBlock
from lmpool.trie.trie import Trie
from lmpool.vocabulary import MAX_BYTES, Vocabulary
from lmpool.workers.backends.synthetic import SyntheticBackend, SyntheticSettings
from lmpool.workers.trie import TrieSettings
from tests.shared.broker.adapters.test_adapters import serving
from tests.support.pool import DEADLINE_S, Pool, until_async
from tests.support.trie_answers import answers, assert_right, draw_weights, words

V = 512
GOOD = np.ones(V, np.float32)
WORDS = words(30, V)


@pytest.fixture(scope="module")
def shared(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A model worker that answers trie queries, a model with another vocabulary size, and a trie worker."""
    pool = Pool(server_url, "input", tmp_path_factory.mktemp("input"))
    started = [
        pool.start("--lease-s", 3, "--with-trie", wait=False),
        pool.start_trie_worker("--lease-s", 3, wait=False),
    ]
    for worker in started:
        worker.until_says("serving ")
    yield pool
    pool.end()


@pytest.fixture
async def producer(shared: Pool) -> AsyncIterator[Producer]:
    async with shared.producer("syn") as producer:
        yield producer


def with_nan(place: int) -> Any:
    weights = GOOD.copy()
    weights[place] = np.nan
    return weights


BAD_WEIGHTS: list[tuple[Any, str]] = [
    (np.ones(V - 1, np.float32), f"{V - 1} weights for {V} tokens"),
    (np.ones(0, np.float32), f"0 weights for {V} tokens"),
    (np.ones(V), "dtype float64.*numpy.float32"),
    (np.ones(V, np.int64), "dtype int64"),
    (np.ones(V, np.float16), "dtype float16"),
    (np.ones((1, V), np.float32), rf"shape \(1, {V}\): one vector has shape \({V},\)"),
    (np.float32(1), r"shape \(\)"),
    ([1.0] * V, r"\(list\): pass a float32 array"),
    ("weights", r"'weights' \(str\)"),
    (7, r"7 \(int\)"),
    (with_nan(3), "weight 3 is NaN"),
]


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize(("weights", "message"), BAD_WEIGHTS)
async def test_bad_weights_are_refused_before_they_are_sent(
    producer: Producer, weights: Any, message: str, local: bool
) -> None:
    trie = await producer.trie(local=local)
    for call in (trie.weight_sum, trie.weight_max, trie.logsumexp):
        with pytest.raises(errors.InvalidWeights, match=message):
            await call(weights)


async def test_batches_with_an_error_are_refused_as_a_whole(producer: Producer) -> None:
    trie = await producer.trie()
    for weights, message in (
        (GOOD, rf"shape \({V},\): a batch has shape \(B, {V}\)"),
        (np.ones((2, V + 1), np.float32), f"{V + 1} weights for {V} tokens"),
        (np.stack([GOOD, with_nan(9)]), "weight 9 of row 1 is NaN"),
    ):
        with pytest.raises(errors.InvalidWeights, match=message):
            await trie.batch_weight_sum(weights)
    for prompts, kind in (([[1], []], errors.EmptyPrompt), ([[1], [V]], errors.TokenOutOfRange)):
        with pytest.raises(kind):
            await trie.batch_weight_sum(prompts=prompts)
    for given in (5, "text", b"bytes"):
        with pytest.raises(errors.SettingsError, match="prompts: (int|str|bytes) is not a sequence of prompts"):
            await trie.batch_weight_sum(prompts=given)


BAD_OPTIONS: list[tuple[dict[str, Any], type[errors.LMPoolError], str]] = [
    ({"nodes": [0, 10**6]}, errors.UnknownNode, r"node 1000000 is out of range: nodes go from 0 to \d+"),
    ({"nodes": [-1]}, errors.UnknownNode, "node -1 is out of range"),
    ({"nodes": [2**70]}, errors.UnknownNode, "1180591620717411303424"),
    ({"nodes": np.array([0, 2**40])}, errors.UnknownNode, "1099511627776"),
    ({"nodes": [0.5]}, errors.UnknownNode, "0.5 is of type float"),
    ({"nodes": [True]}, errors.UnknownNode, "bool"),
    ({"nodes": [[1, 2]]}, errors.UnknownNode, "list"),
    ({"nodes": np.zeros((2, 2), int)}, errors.UnknownNode, r"\(2, 2\)"),
    ({"nodes": 3}, errors.UnknownNode, "3"),
    ({"nodes": b"ab"}, errors.UnknownNode, "b'ab'"),
    ({"under": b"\xffno such"}, errors.UnknownNode, "xff"),
    ({"under": "text"}, errors.SettingsError, "under: 'text' is not bytes"),
    ({"under": b"", "nodes": [0]}, errors.SettingsError, "either nodes or under"),
    ({"timeout": 0}, errors.SettingsError, "timeout: 0"),
    ({"node": [0]}, errors.SettingsError, "node: not an option.*nodes"),
]


@pytest.mark.parametrize("source", [{"ws": GOOD}, {"prompt": [1]}, {"ws": GOOD, "local": True}])
@pytest.mark.parametrize(("options", "kind", "message"), BAD_OPTIONS)
async def test_bad_options_are_named(
    producer: Producer,
    source: dict[str, Any],
    options: dict[str, Any],
    kind: type[errors.LMPoolError],
    message: str,
) -> None:
    trie = await producer.trie()
    with pytest.raises(kind, match=message):
        await trie.weight_sum(**source, **options)


async def test_exactly_one_source_is_needed(producer: Producer) -> None:
    trie = await producer.trie()
    with pytest.raises(errors.SettingsError, match="both weights and prompt "):
        await trie.weight_sum(GOOD, prompt=[1])
    with pytest.raises(errors.SettingsError, match="neither weights nor prompt "):
        await trie.weight_sum()
    with pytest.raises(errors.SettingsError, match="both weights and prompts "):
        await trie.batch_weight_sum(GOOD[None], prompts=[[1]])


@pytest.mark.parametrize("options", [{}, {"nodes": []}, {"local": True}])
async def test_bad_prompts_and_adapters_are_refused_as_ever(producer: Producer, options: dict[str, Any]) -> None:
    trie = await producer.trie()
    for prompt, kind in (([], errors.EmptyPrompt), ([V], errors.TokenOutOfRange), ("text", errors.NotTokenIds)):
        with pytest.raises(kind):
            await trie.weight_sum(prompt=prompt, **options)
    with pytest.raises(errors.UnknownAdapter, match="no adapter 'x'"):
        await trie.weight_sum(prompt=[1], adapter="x", **options)


@pytest.mark.parametrize("options", [{}, {"local": True}])
async def test_all_prompts_of_a_batch_are_checked_before_the_first_is_sent(
    producer: Producer, options: dict[str, Any]
) -> None:
    trie = await producer.trie()
    with pytest.raises(errors.TokenOutOfRange):
        await trie.batch_weight_sum(prompts=[[40, 1], [40, 2], [V]], **options)
    assert producer.stats().requests == 0


async def test_the_name_of_trie_workers_is_reserved() -> None:
    with pytest.raises(errors.SettingsError, match=r"model: 'trie' is the name of trie workers.*producer\.trie\(\)"):
        Producer("trie")


@pytest.mark.parametrize("options", [{}, {"nodes": []}, {"local": True}])
async def test_a_vocabulary_of_another_size_than_the_model_s_takes_no_prompts(
    producer: Producer, options: dict[str, Any]
) -> None:
    trie = await producer.trie(words(31, V + 1))
    with pytest.raises(errors.InvalidWeights, match=rf"have {V} entries.*{V + 1} tokens.*producer\.trie\(\)"):
        await trie.weight_sum(prompt=[1], **options)


async def test_unknown_models_are_named(shared: Pool) -> None:
    other = shared.producer("other")
    with pytest.raises(errors.UnknownModel, match="'other' is not served; served are: syn"):
        await other.trie()
    trie = await other.trie(WORDS)
    with pytest.raises(errors.UnknownModel, match="'other' is not served"):
        await trie.weight_sum(prompt=[1])
    assert_right(await trie.weight_sum(GOOD, nodes=[0]), [V])
    await other.close()


async def test_a_model_without_a_vocabulary_fails_with_advice(pool: Pool) -> None:
    class Silent(SyntheticBackend):
        """A backend of a model without a tokenizer."""

        def vocabulary(self) -> Any:
            return None

    backend = Silent(SyntheticSettings(name="syn", vocab_size=V))
    async with serving(pool, backend), pool.producer() as producer:
        with pytest.raises(errors.UnknownVocabulary, match="'syn' publishes no vocabulary.*pass the byte strings"):
            await producer.trie()
        assert_right(await (await producer.trie(WORDS)).weight_sum(prompt=[1], nodes=[0], local=True), [1.0])


@pytest.mark.parametrize("vocabulary", [5, "text", ["text"], [b"a", None], [], [bytearray(b"a")]])
async def test_a_malformed_vocabulary_is_refused(producer: Producer, vocabulary: Any) -> None:
    with pytest.raises(errors.InvalidVocabulary):
        await producer.trie(vocabulary)


async def test_a_vocabulary_of_a_gigabyte_is_refused_without_its_memory(producer: Producer) -> None:
    token = bytes(60_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(errors.InvalidVocabulary, match=rf"1080000000 bytes.*{MAX_BYTES}"):
        await producer.trie([token] * 18_000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000, "kilobytes"


# Jobs of a worker


async def good(trie: PooledTrie, seeds: range) -> None:
    """Send requests that must succeed, whichever other jobs are in the batch."""
    told = answers(tuple(trie.structure.vocabulary.tokens))
    weights = [draw_weights(seed, V) for seed in seeds]
    replies = await asyncio.gather(*(trie.weight_sum(ws) for ws in weights))
    for ws, reply in zip(weights, replies, strict=True):
        assert_right(reply, told.of("sum", ws))


def stored(pool: Pool, secret: bytes, weights: Any) -> bytes:
    """Store weights, or any other bytes, under the key that trie workers read; returns the name of the weights."""
    name = weights_name(secret)
    block = VectorBlock([name], [] if isinstance(weights, bytes) else [np.asarray(weights, np.float32)])
    encoded = weights if isinstance(weights, bytes) else b"".join(*block.encoded())
    pool.redis.set(pool.keys.weights() + name, secret + encoded, px=60_000)
    return name


def hostile_jobs(pool: Pool, trie: Trie) -> list[tuple[bytes, str | None]]:
    """Pairs of a job that no producer sends and the expected failure, or None if the job gets a result."""
    info = TrieSettings().open().info
    known = trie.digest
    nodes = np.array([0, trie.n_nodes], "<i4").tobytes()
    fine = stored(pool, b"fine" * 4, GOOD)
    wide = Vocabulary(words(32, 40))
    pool.redis.set(pool.keys.vocabulary(wide.digest), wide.pack(), px=60_000)
    garbage, other, huge, listed = ("0" * 31 + digit for digit in "1234")
    pool.redis.set(pool.keys.vocabulary(garbage), b"LMPV" + bytes(100), px=60_000)
    pool.redis.set(pool.keys.vocabulary(other), wide.pack(), px=60_000)
    pool.redis.set(pool.keys.vocabulary(huge), bytes(65 * 2**20), px=60_000)
    pool.redis.rpush(pool.keys.vocabulary(listed), b"a")
    enormous = stored(pool, b"huge" * 4, bytes(65 * 2**20))
    replaced = stored(pool, b"mine" * 4, GOOD)
    of_another: Any = pool.redis.get(pool.keys.weights() + fine)
    pool.redis.set(pool.keys.weights() + replaced, of_another, px=60_000)

    def job(query: TrieQuery | bytes, ids: bytes = b"", fingerprint: str = info.fingerprint) -> bytes:
        return Job(ids, "", fingerprint, False, query if isinstance(query, bytes) else query.pack()).pack()

    return [
        (job(TrieQuery("sum", known, "inner", b"", "", fine)), None),
        (job(TrieQuery("sum", known, "nodes", b"", "", fine)), None),
        (job(TrieQuery("sum", known, "under", np.array([trie.n_nodes - 1], "<i4").tobytes(), "", fine)), None),
        (job(TrieQuery("sum", known, "nodes", nodes, "", fine)), f"node {trie.n_nodes} is out of range"),
        (job(TrieQuery("sum", known, "nodes", b"\xff" * 4, "", fine)), "node -1 is out of range"),
        (job(TrieQuery("max", known, "under", b"\xff" * 4, "", fine)), "node -1 is out of range"),
        (job(TrieQuery("sum", known, "inner", b"", "", b"none" * 4)), "weights .* are not in the cache"),
        (job(TrieQuery("sum", known, "inner", b"", "", stored(pool, b"long" * 4, np.ones(V + 3)))), f"V = {V + 3}"),
        (job(TrieQuery("sum", known, "inner", b"", "", stored(pool, b"nan!" * 4, with_nan(5)))), "weight 5 .*is NaN"),
        (
            job(TrieQuery("sum", known, "inner", b"", "", enormous)),
            r"68157456 bytes is over the limit of 67108864|not a row|is none",
        ),
        (
            job(TrieQuery("sum", known, "inner", b"", "", stored(pool, b"junk" * 4, os.urandom(4 * V + 16)))),
            "not a row",
        ),
        (job(TrieQuery("sum", known, "inner", b"", "", replaced)), "another client has overwritten them"),
        (job(TrieQuery("sum", wide.digest, "inner", b"", "", fine)), f"V = {V}"),
        (job(TrieQuery("sum", garbage, "inner", b"", "", fine)), garbage),
        (job(TrieQuery("sum", other, "inner", b"", "", fine)), wide.digest),
        (
            job(TrieQuery("sum", huge, "inner", b"", "", fine)),
            r"68157440 bytes is over the limit of 67108864|not a row|not a vocabulary",
        ),
        (job(TrieQuery("sum", listed, "inner", b"", "", fine)), "does not know the vocabulary"),
        (job(TrieQuery("sum", "f" * 32, "inner", b"", "", fine)), "does not know the vocabulary f"),
        (job(TrieQuery("sum", "é" * 32, "inner", b"", "", fine)), "does not know the vocabulary é"),
        (job(TrieQuery("sum", known, "inner")), "are not in the cache|no.* source|does not name"),
        (job(TrieQuery("sum", known, "inner", b"", "e" * 32, fine)), "row of prompt .* is not in the cache"),
        (job(b""), "received a request for a row"),
        (job(TrieQuery("sum", known, "inner", b"", "", fine), fingerprint="0" * 32), "fingerprint"),
    ] + [(junk, "") for junk in (b"", os.urandom(50), job(b"\xc1"), job(b"\x96\xa4mean"), job(b"digest"))]


async def test_hostile_jobs_fail_alone(shared: Pool, producer: Producer) -> None:
    trie = await producer.trie(WORDS)
    await good(trie, range(2))
    worker, keys = shared.workers[1], shared.keys.model("trie")
    sent = hostile_jobs(shared, trie.structure)
    worker.signal(signal.SIGSTOP)
    asked = []
    for number, (packed, _) in enumerate(sent):
        shared.redis.xadd(keys.jobs, {"m": packed})
        asked.append(asyncio.ensure_future(good(trie, range(number, number + 3))))
        await asyncio.sleep(0)
    worker.signal(signal.SIGCONT)
    await asyncio.wait_for(asyncio.gather(*asked), DEADLINE_S)

    async def ended() -> bool:
        return shared.jobs("trie") == 0

    await until_async(ended, "all hostile jobs have ended")
    assert worker.is_running
    assert "Traceback" not in worker.text


async def test_each_hostile_job_fails_with_its_reason(shared: Pool, producer: Producer) -> None:
    trie = await producer.trie(WORDS)
    await good(trie, range(2))
    keys = shared.keys.model("trie")
    reply = keys.reply("hostile")
    reasons: dict[bytes, str | None] = {}
    for packed, reason in hostile_jobs(shared, trie.structure):
        if reason == "":
            continue
        job = unpack_job(packed)
        digest = query_digest(digest_of(b""), job.query) if job.query else digest_of(b"")
        if job.fingerprint == "0" * 32:
            continue  # Skip a job with the digest of an earlier job.
        reasons[digest] = reason
        # Register the reply stream before the job is queued, because the job may end at once.
        shared.redis.hset(keys.waiting + digest, reply, "")
        shared.redis.xadd(keys.jobs, {"m": packed})
    told: dict[bytes, str | None] = {}

    async def all_told() -> bool:
        entries: Any = shared.redis.xrange(reply)
        for _, fields in entries:
            for at in range(0, len(fields[b"d"]), 16):
                told[fields[b"d"][at : at + 16]] = unpack_failure(fields[b"e"]).text if b"e" in fields else None
        return len(told) >= len(reasons)

    await until_async(all_told, f"all {len(reasons)} are told")
    for digest, reason in reasons.items():
        text = told[digest]
        assert (text is None) == (reason is None), (text, reason)
        assert reason is None or re.search(reason, text or ""), (text, reason)


async def test_hostile_queries_to_a_model_with_tries_fail_alone(shared: Pool, producer: Producer) -> None:
    trie = await producer.trie()
    model, digest = producer.model, trie.structure.digest
    asks: list[TrieQuery | bytes] = [
        TrieQuery("sum", digest, "nodes", b"\xff" * 4),
        TrieQuery("sum", "f" * 32, "values"),
        TrieQuery("sum", Vocabulary(words(33, 9)).digest, "values"),
        TrieQuery("sum", digest, "values", b"", "e" * 32, b"s" * 16),
        TrieQuery("sum", digest, "nodes"),
        b"\xc1",
        os.urandom(30),
    ]
    small = Vocabulary(words(33, 9))
    shared.redis.set(shared.keys.vocabulary(small.digest), small.pack(), px=60_000)
    for number, query in enumerate(asks * 3):
        ids = np.array([number % 4], "<u4").tobytes()
        packed = Job(ids, "", model.fingerprint, False, query if isinstance(query, bytes) else query.pack()).pack()
        shared.redis.xadd(shared.keys.model("syn").jobs, {"m": packed})
    replies = await asyncio.gather(*(trie.weight_sum(prompt=[number], nodes=[0]) for number in range(8)))
    assert_right(np.concatenate(replies), np.ones(8))

    async def ended() -> bool:
        return shared.jobs() == 0

    await until_async(ended, "all hostile jobs have ended")
    assert shared.workers[0].is_running


@pytest.mark.parametrize("bad", [b"LMPV" + bytes(100), b"", None])
async def test_a_client_stores_an_overwritten_vocabulary_again(
    shared: Pool, producer: Producer, bad: bytes | None
) -> None:
    trie = await producer.trie(words(34, V))
    key = shared.keys.vocabulary(trie.structure.digest)
    shared.redis.delete(key)
    if bad is None:
        shared.redis.rpush(key, b"x")
    else:
        shared.redis.set(key, bad)
    await good(trie, range(3))


async def test_the_bytes_of_another_vocabulary_under_a_model_s_name_are_noticed(pool: Pool) -> None:
    backend = SyntheticBackend(SyntheticSettings(name="syn", vocab_size=V))
    vocabulary, other = backend.vocabulary(), Vocabulary(words(35, V))
    assert vocabulary is not None
    async with serving(pool, backend), pool.producer() as producer:
        pool.redis.set(pool.keys.vocabulary(vocabulary.digest), other.pack())
        with pytest.raises(
            errors.UnknownVocabulary, match=rf"{vocabulary.digest} .its value is another: {other.digest}"
        ):
            await producer.trie()
        pool.redis.set(pool.keys.vocabulary(vocabulary.digest), b"LMPV")
        with pytest.raises((errors.UnknownVocabulary, errors.ProtocolError)):
            await producer.trie()
