"""Encoded queries (top-k, samples, masses, trie sums), their results, and the registry of vocabularies."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from lmpool.broker.registries import look_up, register
from lmpool.broker.server import Server
from lmpool.errors import ProtocolError, UnknownVocabulary
from lmpool.protocol.job import digest_of, encode_prompt, query_digest
from lmpool.protocol.picks import TopK, top
from lmpool.protocol.query import (
    MAX_GENERATED,
    Continuation,
    EntriesQuery,
    FreshQuery,
    GenerateQuery,
    HeadQuery,
    MassQuery,
    PositionsQuery,
    Query,
    SampleQuery,
    TopQuery,
    TrieQuery,
    pack_continuation,
    pack_stops,
    pack_top,
    unpack_continuation,
    unpack_query,
    unpack_top,
)
from lmpool.protocol.row import Row
from lmpool.vocabulary import Vocabulary
from tests.support.pool import Pool

QUERY = TrieQuery("sum", "0" * 32, "nodes", b"\x01\0\0\0\x02\0\0\0", "f" * 32, b"s" * 16)


@pytest.mark.parametrize(
    "query",
    [
        QUERY,
        TrieQuery("logsumexp", "0" * 32, "inner"),
        TrieQuery("max", "0" * 32, "under", b"\0\0\0\0"),
        replace(QUERY, nodes=b"", select="values"),
        TopQuery(1),
        TopQuery(2**31),
        SampleQuery(0.0, 1.0, 0),
        SampleQuery(0.0, 1.0, 0, b"b\7"),
        TopQuery(3, b"i\1\0\0\0"),
        MassQuery(b"n" + b"1" * 16),
        EntriesQuery(b"\1\0\0\0\1\0\0\0"),
        EntriesQuery(b"\1\0\0\0", 0.5),
        SampleQuery(0.7, 0.9, 2**64 - 1),
        FreshQuery(b"n" * 16),
        GenerateQuery(1, 0.0, 1.0, 0),
        GenerateQuery(MAX_GENERATED, 0.7, 0.9, 2**64 - 1, pack_stops([[1], [2, 3]])),
        PositionsQuery(0),
        PositionsQuery(5, 32),
        PositionsQuery(5, 0, b"\1\0\0\0\2\0\0\0"),
        PositionsQuery(5, next_token=True, tail=True, top=2, stop=9),
        PositionsQuery(5, 0, b"\1\0\0\0\2\0\0\0", 2, temperature=0.5),
        PositionsQuery(5, 2, values="logits", allowed=b"i\1\0\0\0"),
        PositionsQuery(0, 3, values="logits"),
        PositionsQuery(0, values="hidden", size=32),
        HeadQuery("facts"),
        HeadQuery("weights", 5, 6),
        PositionsQuery(2**32, logz=True),
    ],
)
def test_a_query_survives_the_wire(query: Query) -> None:
    assert unpack_query(query.pack()) == query


def test_the_wire_is_pinned_to_the_byte() -> None:
    # These bytes must not change, because the digest of a result is computed from them.
    assert TopQuery(300).pack().hex() == "93a3746f70cd012cc400"
    assert SampleQuery(0.5, 1.0, 7).pack().hex() == "95a673616d706c65cb3fe0000000000000cb3ff000000000000007c400"
    assert MassQuery(b"i\1\0\0\0").pack().hex() == "92a46d617373c4056901000000"
    assert EntriesQuery(b"\1\0\0\0").pack().hex() == "93a7656e7472696573c40401000000cb3ff0000000000000"
    wanted = PositionsQuery(3, 5, b"\1\0\0\0", tail=True).pack().hex()
    assert wanted == (
        "9eab70726564696374696f6e730305c4040100000000c2c2c3a86c6f6770726f6273cb3ff000000000000000c400c40000"
    )
    made = GenerateQuery(3, 0.5, 1.0, 7, pack_stops([[9]])).pack().hex()
    assert made == "96a867656e657261746503cb3fe0000000000000cb3ff000000000000007c4080100000009000000"
    assert FreshQuery(b"n" * 16).pack().hex() == "92a56672657368c410" + "6e" * 16
    assert QUERY.pack() == msgpack.packb(["sum", "0" * 32, "nodes", QUERY.nodes, "f" * 32, b"s" * 16])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"op": "mean"}, "not a query: Invalid enum value 'mean'"),
        ({"select": "all"}, "not a query: Invalid enum value 'all'"),
        ({"vocabulary": "0" * 31}, "digest of the wrong length"),
        ({"rows": "0"}, "digest of the wrong length"),
        ({"source": b"s" * 15}, "digest of the wrong length"),
        ({"nodes": b"\0" * 5}, "5 bytes of node ids"),
        ({"select": "under"}, "'under' has 8 bytes of node ids"),
        ({"select": "under", "nodes": b""}, "'under' has 0 bytes of node ids"),
        ({"nodes": "text"}, "not a query"),
        ({"nodes": b"\0" * (9 * 2**20)}, r"query of \d+ bytes is over the limit of 8388608"),
    ],
)
def test_a_malformed_query_is_refused_with_the_reason(changes: dict[str, object], message: str) -> None:
    packed = msgpack.packb(tuple({**asdict(QUERY), **changes}.values()))
    with pytest.raises(ProtocolError, match=message):
        unpack_query(packed)


@pytest.mark.parametrize(
    "fields",
    [
        ["top", 0],
        ["top", -1],
        ["top", 1.5],
        ["top"],
        ["top", True],
        ["top", 1, 1],
        ["score", 0],
        ["score", b"1"],
        ["positions", -1, 0, b""],
        ["positions", 0, -1, b""],
        ["positions", 0, 0, b"123"],
        ["positions", 0, 0, "1234"],
        ["positions", 0, 1.5, b""],
        ["positions", 0, 0, b"", 1],
        ["positions", 0, 0, b"", "logprobs", 0, b"i\1\0\0\0"],
        ["positions", 0, 2, b"\1\0\0\0", "logprobs", 0, b"i\1\0\0\0"],
        ["positions", 0, 2, b"", "logprobs", 0, "i"],
        ["positions", 0, 2, b"", "score_logits", 0, b""],
        ["fresh", b"n" * 15],
        ["fresh", "n" * 16],
        ["fresh", "bm5ubm5ubm5ubm5ubm5ubg=="],
        ["sum", "0" * 32, "inner", b"", "", b"", b""],
        ["sum", "0" * 32, "values", "AAAAAA==", "", b""],
        ["entries", b""],
        ["entries", b"\1\0\0\0\1"],
        ["entries", "\1\0\0\0"],
        ["entries", b"\1\0\0\0", 0.0],
        ["sample", -0.1, 1.0, 1],
        ["sample", float("nan"), 1.0, 1],
        ["sample", float("inf"), 1.0, 1],
        ["sample", 1.0, 0.0, 1],
        ["sample", 1.0, 1.5, 1],
        ["sample", 1.0, float("nan"), 1],
        ["sample", 1.0, 1.0, -1],
        ["sample", 1.0, 1.0, True],
        ["sample", 1.0, 1.0],
        ["sample", 1e7, 1.0, 1],
        ["unknown", 1],
    ],
)
def test_a_malformed_pick_is_refused(fields: list[object]) -> None:
    with pytest.raises(ProtocolError):
        unpack_query(msgpack.packb(fields))


def test_missing_last_fields_have_their_defaults() -> None:
    assert unpack_query(msgpack.packb(["top", 3])) == TopQuery(3)
    assert unpack_query(msgpack.packb(["predictions", 4, 2])) == PositionsQuery(4, 2)


def rows_of(count: int, vocab_size: int) -> Row:
    """`count` rows in which many entries are equal."""
    logits = np.random.default_rng(count).integers(0, 5, (count, vocab_size)).astype(np.float32)
    return np.asarray(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)), np.float32)


@pytest.mark.parametrize("k", [1, 3, 9])
def test_the_largest_entries_of_every_position_survive_the_wire(k: int) -> None:
    rows = rows_of(4, 9)
    packed = PositionsQuery(0, k).of(rows, np.zeros(4, np.float32), range(4), np.zeros(4, np.uint32))
    assert packed.shape == (4, PositionsQuery(0, k).width(9))
    largest = unpack_top(packed, 9)
    for at, row in enumerate(rows):
        assert np.array_equal(largest.values[at], top(row, k).values)
        assert np.array_equal(largest.ids[at], top(row, k).ids)


@pytest.mark.parametrize(
    ("at", "value", "what"),
    [(0, -9.0, "values"), (1, np.nan, "values"), (0, 5.0, "values"), (0, 9, "ids"), (1, 8, "ids"), (0, -1e9, "values")],
)
def test_entries_that_cannot_be_the_largest_are_refused(at: int, value: float, what: str) -> None:
    largest = TopK(np.array([[-0.5, -2.0], [-0.5, -2.0]], np.float32), np.array([[8, 3], [8, 3]]))
    assert np.array_equal(unpack_top(pack_top(largest), 9).ids, largest.ids)
    getattr(largest, what)[1, at] = value
    with pytest.raises(ProtocolError):
        unpack_top(pack_top(largest), 9)


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4), max_size=4))
def test_stop_sequences_survive_the_wire(stops: list[list[int]]) -> None:
    query = GenerateQuery(1, 1.0, 1.0, 0, pack_stops(stops))
    assert [np.frombuffer(stop, "<u4").tolist() for stop in query.stops] == stops


@pytest.mark.parametrize("stop", [b"\0\0\0\0", b"\2\0\0\0\1\0\0\0", b"\1\0\0", b"\xff\xff\xff\xff\1\0\0\0"])
def test_sequences_to_stop_at_that_are_cut_off_are_refused(stop: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack_query(GenerateQuery(1, 1.0, 1.0, 0, stop).pack())


@given(st.lists(st.integers(0, 8), min_size=1, max_size=5), st.integers(5, 7))
def test_a_continuation_survives_the_wire(tokens: list[int], length: int) -> None:
    made = Continuation(np.array(tokens, np.int64), -np.arange(len(tokens), dtype=np.float32))
    again = unpack_continuation(pack_continuation(made, length), 9)
    assert np.array_equal(again.ids, made.ids)
    assert np.array_equal(again.logprobs, made.logprobs)


@given(st.binary(max_size=200))
def test_no_bytes_do_worse_than_a_protocol_error(data: bytes) -> None:
    try:
        unpack_query(data)
    except ProtocolError:
        pass


@given(st.data())
def test_no_mutation_does_worse_than_a_protocol_error(data: st.DataObject) -> None:
    packed = bytearray(QUERY.pack())
    for _ in range(data.draw(st.integers(1, 4))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    try:
        unpack_query(bytes(packed))
    except ProtocolError:
        pass


def test_each_query_about_a_prompt_has_its_own_digest() -> None:
    prompt = encode_prompt([1, 2], vocab_size=9, max_tokens=9)
    queries = [QUERY, replace(QUERY, op="max"), replace(QUERY, nodes=b"\x01\0\0\0"), replace(QUERY, source=b"t" * 16)]
    asked = [prompt.with_query(query.pack(), 2) for query in queries]
    assert len({prompt.digest, *(request.digest for request in asked)}) == 5
    assert asked[0].ids == prompt.ids
    assert asked[0].digest == query_digest(digest_of(prompt.ids), QUERY.pack())
    other = encode_prompt([1, 3], vocab_size=9, max_tokens=9).with_query(QUERY.pack(), 2)
    adapted = encode_prompt([1, 2], vocab_size=9, max_tokens=9, adapter="a").with_query(QUERY.pack(), 2)
    assert len({asked[0].digest, other.digest, adapted.digest}) == 3


async def test_a_vocabulary_is_sent_only_when_the_pool_has_none_or_another(pool: Pool) -> None:
    redis, vocabulary = Server(pool.url).client(), Vocabulary([b"a", b"ab", b""])
    key = pool.keys.vocabulary(vocabulary.digest)
    try:
        with pytest.raises(UnknownVocabulary, match=vocabulary.digest):
            await look_up(redis, pool.keys, vocabulary.digest)
        await register(redis, pool.keys, vocabulary)
        assert await look_up(redis, pool.keys, vocabulary.digest) == vocabulary
        assert 23 * 3600 < await redis.ttl(key) <= 24 * 3600
        await redis.expire(key, 5)
        calls = await _sets(pool)
        await register(redis, pool.keys, vocabulary)
        assert await _sets(pool) == calls
        assert await redis.ttl(key) > 5
        await redis.set(key, b"something else")
        await register(redis, pool.keys, vocabulary)
        assert await look_up(redis, pool.keys, vocabulary.digest) == vocabulary
        await redis.delete(key)
        await redis.rpush(key, b"no string")
        await register(redis, pool.keys, vocabulary)
        assert await look_up(redis, pool.keys, vocabulary.digest) == vocabulary
        await redis.set(key, Vocabulary([b"c"]).pack())
        with pytest.raises(
            UnknownVocabulary, match=f"{vocabulary.digest} .its value is another: {Vocabulary([b'c']).digest}"
        ):
            await look_up(redis, pool.keys, vocabulary.digest)
        # A damaged value of the right size is replaced only with `anew`, which clients pass after UnknownVocabulary.
        wrong = bytearray(vocabulary.pack())
        wrong[-1] ^= 1
        await redis.set(key, bytes(wrong))
        await register(redis, pool.keys, vocabulary, anew=True)
        assert await look_up(redis, pool.keys, vocabulary.digest) == vocabulary
    finally:
        await redis.aclose()


async def _sets(pool: Pool) -> int:
    stats = pool.redis.info("commandstats")
    return int(stats.get("cmdstat_set", {"calls": 0})["calls"])
