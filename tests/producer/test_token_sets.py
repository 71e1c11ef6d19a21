"""Token sets: their total probability, and the top-k tokens or a sample from a set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lmpool.errors import LMPoolError, NoProbability, NotTokenIds, SettingsError, TokenOutOfRange, UnknownTokenSet
from lmpool.producer import Producer, SyncProducer
from lmpool.producer.client.queries import Mode
from lmpool.protocol.keys import Keys
from lmpool.protocol.picks import Sampling, mass_of, sample, top
from lmpool.protocol.row import Row, widen_bf16
from lmpool.protocol.token_set import TokenSet, unpack_tokens
from lmpool.synthetic import draw, fill, synthetic_row
from tests.support.pool import Pool, V, until_done

PROMPT, OTHER = [1, 2, 3], [4]
ROW, OTHER_ROW = (synthetic_row(prompt, vocab_size=V) for prompt in (PROMPT, OTHER))
FEW = [7, 300, 5, 7]
MODES: tuple[Mode, ...] = ("logprobs", "logits")
MANY = np.arange(0, V, 3)


def mask_of(ids: Any) -> np.ndarray[Any, np.dtype[np.bool_]]:
    mask = np.zeros(V, bool)
    mask[ids] = True
    return mask


def logits_of(prompt: list[int]) -> Row:
    """Return the logits of a prompt's row."""
    base, shifts = draw(np.array(prompt, "<u4").tobytes(), V, 0)
    fill(bits := np.empty(V, np.uint16), base.bits, shifts)
    return widen_bf16(bits)


def forms(ids: Any) -> list[Any]:
    """Return a set of tokens in all forms that a caller may use."""
    mask = mask_of(ids)
    bits = np.packbits(mask, bitorder="little").tobytes()
    return [list(ids), np.asarray(ids), mask, bits, TokenSet(np.flatnonzero(mask), V)]


async def assert_asked(producer: Producer, allowed: Any, ids: np.ndarray[Any, np.dtype[np.int64]]) -> None:
    """Make all kinds of queries about a set of tokens, and check the results."""
    assert await producer.mass(PROMPT, allowed) == mass_of(ROW, ids)
    masses = await producer.batch_mass([PROMPT, OTHER], [allowed, allowed])
    assert np.array_equal(masses, [mass_of(ROW, ids), mass_of(OTHER_ROW, ids)])
    best, expected = await producer.topk(PROMPT, 3, allowed=allowed), top(ROW, 3, ids)
    assert np.array_equal(best.values, expected.values)
    assert np.array_equal(best.ids, expected.ids)
    best, expected = await producer.topk(PROMPT, 3, allowed=allowed, mode="logits"), top(logits_of(PROMPT), 3, ids)
    assert np.array_equal(best.values, expected.values)
    assert np.array_equal(best.ids, expected.ids)
    for seed in range(5):
        drawn = await producer.sample(PROMPT, seed=seed, temperature=0.9, top_p=0.8, allowed=allowed)
        assert drawn == sample(ROW, Sampling(0.9, 0.8, seed), ids)
    assert await producer.sample(PROMPT, temperature=0, allowed=allowed) == ids[ROW[ids].argmax()]
    assert await producer.sample(PROMPT, allowed=allowed) in ids


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
@pytest.mark.parametrize("ids", [FEW, MANY], ids=["few", "many"])
async def test_all_forms_of_a_set_are_equivalent(pool: Pool, ids: Any, cache_bytes: int) -> None:
    pool.start()
    members = np.unique(ids)
    async with pool.producer(cache_bytes=cache_bytes) as producer:
        named = await producer.token_set(ids)
        for _ in range(2):
            for allowed in [*forms(ids), named, named.name.hex()]:
                await assert_asked(producer, allowed, members)
            # Repeat the queries with the rows in the producer's own cache, if it has one.
            await producer.batch_logprobs([PROMPT, OTHER])
        # Equal sets have one digest, so another form of the set stores no new result.
        stored = len(pool.names("row:*"))
        assert await producer.mass(PROMPT, list(reversed(members.tolist()))) == mass_of(ROW, members)
        assert len(pool.names("row:*")) == stored


async def test_the_mass_of_all_tokens_is_1_and_samples_are_renormalised(pool: Pool) -> None:
    pool.start()
    async with pool.producer() as producer:
        assert abs(await producer.mass(PROMPT, range(V))) < 1e-5
        assert await producer.mass(PROMPT, [9]) == ROW[9]
        first, second = np.argsort(-ROW)[[0, 3]].tolist()
        drawn = await producer.batch_sample([PROMPT] * 400, seed=0, allowed=[first, second])
        share = np.exp(ROW[first] - np.logaddexp(ROW[first], ROW[second]))
        assert abs((drawn == first).mean() - share) < 0.1
        assert set(drawn.tolist()) == {first, second}
        two = await producer.batch_sample([PROMPT, OTHER], seed=3, allowed=[[5], np.array([6])])
        assert two.tolist() == [5, 6]
        two = await producer.batch_sample([PROMPT, OTHER], allowed=np.stack([mask_of([5]), mask_of([6])]))
        assert two.tolist() == [5, 6]


async def test_a_named_set_is_sent_by_name_and_stored_again_when_evicted(pool: Pool) -> None:
    worker = pool.start()
    async with pool.producer(cache_bytes=0) as producer:
        named = await producer.token_set(MANY)
        assert len(named.packed) == 17
        key = Keys(pool.prefix).token_set(named.name)
        assert pool.redis.get(key) == named.bits
        assert 0 < int(pool.redis.pttl(key)) <= 24 * 3_600_000
        for forgotten in (None, b"", b"x" * len(named.bits), "a list"):
            worker.end()
            worker = pool.start()  # A new worker has cached no set.
            pool.redis.delete(key)
            if isinstance(forgotten, bytes):
                pool.redis.set(key, forgotten)
            elif forgotten is not None:
                pool.redis.rpush(key, forgotten)
            with pytest.raises(UnknownTokenSet, match=f"set of tokens {named.name.hex()}.*producer.token_set"):
                await producer.mass(PROMPT, named.name.hex())
            assert await producer.mass(PROMPT, named) == mass_of(ROW, MANY)
            await until_done(pool)
            assert pool.redis.get(key) == named.bits
            pool.redis.unlink(*pool.redis.scan_iter(match=f"{pool.prefix}:row:*"))
            # Without the key, the worker uses the set that it has cached.
            pool.redis.delete(key)
            assert await producer.mass(OTHER, named.name.hex()) == mass_of(OTHER_ROW, MANY)
            await until_done(pool)
            pool.redis.unlink(*pool.redis.scan_iter(match=f"{pool.prefix}:row:*"))
        for mode in MODES:
            with pytest.raises(SettingsError, match="k: 400 must be from 1 to"):
                await producer.topk(PROMPT, 400, allowed=named.name.hex(), mode=mode)
        best = await producer.topk(PROMPT, 2, allowed=named, mode="logits")
        await until_done(pool)
        pool.redis.delete(key)
        worker.end()
        pool.start()
        pool.redis.unlink(*pool.redis.scan_iter(match=f"{pool.prefix}:row:*"))
        # Use another producer, which has no message about the first answer left to read.
        async with pool.producer(cache_bytes=0) as other:
            again = await other.topk(PROMPT, 2, allowed=named, mode="logits")
        assert np.array_equal(again.values, best.values)
        assert pool.redis.get(key) == named.bits


async def test_no_token_is_sampled_if_all_allowed_ones_have_probability_0() -> None:
    row = np.full(9, -np.inf, np.float32)
    row[3] = 0
    assert mass_of(row, np.array([1, 2])) == -np.inf
    assert sample(row, Sampling(1.0, 1.0, 0), np.array([1, 3])) == 3
    with pytest.raises(NoProbability, match="none of the 2 allowed tokens"):
        sample(row, Sampling(1.0, 1.0, 0), np.array([1, 2]))


BAD: list[tuple[Any, type[LMPoolError], str]] = [
    ([], SettingsError, "allowed: the set of tokens is empty; give at least one"),
    (np.zeros(V, bool), SettingsError, "allowed: the set of tokens is empty; give at least one"),
    (np.ones(V - 1, bool), SettingsError, rf"allowed: bools of shape \({V - 1},\): expected \({V},\)"),
    (b"\xff", SettingsError, "allowed: a set of tokens has 1 bytes of bits"),
    (bytes(-(-V // 8)), SettingsError, "allowed: a set of tokens of a vocabulary of .* is empty"),
    ("digits", SettingsError, "allowed: 'digits' names no set of tokens: expected 32 hexadecimal digits"),
    ([V], TokenOutOfRange, f"allowed: token id {V} is out of range"),
    ([-1], TokenOutOfRange, "allowed: token id -1"),
    ([1.5], NotTokenIds, "allowed: .* must be a list of at least 1 token id"),
    ([True], NotTokenIds, "allowed: "),
    (5, NotTokenIds, "allowed: 5"),
    (None, SettingsError, "allowed: None: give the tokens"),
    (TokenSet(np.array([1]), V + 1), SettingsError, f"of a vocabulary of {V + 1}: this model's V is {V}"),
    ("0" * 32, UnknownTokenSet, "the pool does not know the set of tokens 0000"),
]


async def test_bad_sets_are_refused(pool: Pool) -> None:
    pool.start()
    async with pool.producer() as producer:
        for allowed, kind, message in BAD:
            with pytest.raises(kind, match=message):
                await producer.mass(PROMPT, allowed)
        with pytest.raises(
            SettingsError, match="k: 3 must be a whole number from 1 to 2, the number of allowed tokens"
        ):
            await producer.topk(PROMPT, 3, allowed=[1, 2])
        with pytest.raises(SettingsError, match="allowed: 3 sets for 2 prompts"):
            await producer.batch_mass([PROMPT, OTHER], [[1], [2], [3]])
        for mode in MODES:
            with pytest.raises(UnknownTokenSet, match="the pool does not know the set of tokens 0000"):
                await producer.topk(PROMPT, 1, allowed="0" * 32, mode=mode)
        with pytest.raises(SettingsError, match="allowed: '0000.*: give the tokens that the set has"):
            await producer.token_set("0" * 32)
        options: Any = {"allowed": [1]}
        with pytest.raises(SettingsError, match="allowed: not an option; there are temperature, top_p, seed"):
            await producer.generate(PROMPT, 2, **options)


def test_without_asyncio_too(pool: Pool) -> None:
    pool.start()
    with SyncProducer("syn", redis=pool.url, prefix=pool.prefix) as producer:
        named = producer.token_set([4, 5])
        assert producer.mass(PROMPT, named) == mass_of(ROW, np.array([4, 5]))
        assert producer.batch_mass([PROMPT], named).shape == (1,)
        assert producer.topk(PROMPT, 1, allowed=[5]).ids.tolist() == [5]
        assert producer.topk(PROMPT, 1, allowed=[5], mode="logits").values.tolist() == [logits_of(PROMPT)[5]]
        best = producer.batch_topk([PROMPT, OTHER], 2, allowed=named, mode="logits")
        assert np.array_equal(best.values[1], top(logits_of(OTHER), 2, np.array([4, 5])).values)


@pytest.mark.parametrize("vocab_size", [1, 7, 8, 9, 300])
def test_sets_are_packed_into_unique_bytes(vocab_size: int) -> None:
    for count in {1, -(-vocab_size // 2), vocab_size}:
        ids = np.sort(np.random.default_rng(count).permutation(vocab_size)[:count])
        tokens = TokenSet(ids, vocab_size)
        assert np.array_equal(unpack_tokens(tokens.packed, vocab_size).ids, ids)
        assert len(tokens.packed) <= 1 + len(tokens.bits)
