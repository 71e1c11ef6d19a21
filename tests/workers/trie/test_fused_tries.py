"""Model workers that answer trie queries themselves, and trie workers for models without such workers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lmpool.errors import UnknownModel
from lmpool.producer import Producer
from lmpool.producer.trie import PooledTrie
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.query import OPS, Op
from lmpool.synthetic import synthetic_row, synthetic_vocabulary
from lmpool.workers.backends.synthetic import SyntheticBackend, SyntheticSettings
from tests.shared.broker.adapters.test_adapters import serving
from tests.support.pool import Pool, until_done
from tests.support.trie_answers import (
    answers,
    answers_of,
    assert_right,
    row_weights,
    words,
)
from tests.workers.trie.asking import LEASE, V, ask_batch, current, fused_fixture, keep, selections  # noqa: F401


@pytest.mark.parametrize("op", OPS)
async def test_a_model_worker_with_tries_computes_the_same_values(fused: Pool, op: Op) -> None:
    async with fused.producer() as producer:
        for trie in (await producer.trie(), await producer.trie(words(1, V))):
            told = answers_of(trie.structure)
            for options, nodes in selections(trie):
                prompts = [[OPS.index(op), 3, i] for i in range(5)]
                exact = np.stack([told.of(op, row_weights(prompt, V, op)) for prompt in prompts])[:, nodes]
                assert_right(await ask_batch(trie, op, prompts=prompts, **options), exact)


async def test_a_model_on_a_device_without_float64_computes_tries_on_the_cpu(pool: Pool) -> None:
    """Torch has no float64 on `mps`, the GPU of a Mac."""
    backend = SyntheticBackend(SyntheticSettings("syn", vocab_size=300))
    backend.device = "mps"
    async with serving(pool, backend, with_trie=True), pool.producer("syn") as producer:
        trie = await producer.trie()
        exact = answers_of(trie.structure).of("sum", row_weights([5], 300, "sum"))
        assert_right(await trie.weight_sum(prompt=[5]), exact)


async def test_one_step_computes_the_row_and_answers(fused: Pool) -> None:
    async with fused.producer() as producer:
        trie = await producer.trie()
        await producer.logprobs([1010])
        before = await current(fused, "syn")
        for _ in range(3):  # The prompt's row is cached, so no step computes the row again.
            await trie.weight_sum(prompt=[1010], nodes=[1])
            await trie.weight_sum(prompt=[1010], nodes=[2])
        await asyncio.gather(trie.weight_sum(prompt=[1011]), trie.weight_max(prompt=[1011]), producer.logprobs([1011]))
        await producer.logprobs([1012])
        after = await current(fused, "syn")
        assert after["rows"] == before["rows"] + 2
        assert after["failures"] == before["failures"]


async def test_rows_and_queries_mix_in_one_model(fused: Pool) -> None:
    async with fused.producer(cache_bytes=0) as first, fused.producer(cache_bytes=0) as second:
        tries = [await first.trie(), await second.trie(words(1, V)), await second.trie()]

        async def both(producer: Producer, trie: PooledTrie, seed: int) -> None:
            prompt = [1020, seed % 20]
            told = answers_of(trie.structure).of("sum", row_weights(prompt, V, "sum"))
            row, value, values = await asyncio.gather(
                producer.logprobs(prompt), trie.weight_sum(prompt=prompt, nodes=[3, 1]), trie.weight_sum(prompt=prompt)
            )
            assert np.array_equal(row, synthetic_row(prompt, vocab_size=V))
            assert_right(value, told[[3, 1]])
            assert_right(values, told)

        await asyncio.gather(
            *(both(producer, trie, seed) for producer in (first, second) for trie in tries for seed in range(40))
        )
    await until_done(fused)


async def test_answers_evict_no_rows_from_the_cache_of_a_producer(fused: Pool) -> None:
    async with fused.producer(cache_bytes=2 * 4 * V + 1000) as producer:
        trie = await producer.trie()
        await keep(producer, [1030])
        await trie.batch_weight_sum(prompts=[[1031, i] for i in range(8)])
        before = producer.stats().local_hits
        await producer.logprobs([1030])
        assert producer.stats().local_hits == before + 1


async def test_a_worker_without_tries_is_made_up_for_by_trie_workers_or_named(pool: Pool) -> None:
    size, told = 300, answers(tuple(synthetic_vocabulary(300).tokens))
    pool.start(*LEASE, "--vocab-size", size, "--max-batch", 2)
    for says in (True, False):
        set_info(pool, answers_tries=says)
        async with pool.producer() as producer:
            trie = await producer.trie()
            with pytest.raises(UnknownModel, match=r"no trie worker serves: .*`lmpool trie-worker`.*local=True"):
                await trie.weight_sum(prompt=[5])
            exact = told.of("sum", row_weights([5], size, "sum"))
            assert_right(await trie.weight_sum(prompt=[5], local=True), exact)
    able = pool.start(*LEASE, "--vocab-size", size, "--max-batch", 2, "--with-trie", wait=False)
    pool.start_trie_worker(*LEASE)
    able.until_says("serving ")
    for says in (True, False):
        set_info(pool, answers_tries=says)
        async with pool.producer() as producer:
            trie = await producer.trie()
            prompts = [[int(says), i] for i in range(60)]
            exact = np.stack([told.of("sum", row_weights(prompt, size, "sum")) for prompt in prompts])
            assert_right(await trie.batch_weight_sum(prompts=prompts), exact)


def set_info(pool: Pool, *, answers_tries: bool) -> None:
    """Set `answers_tries` in the info of the model in Redis."""
    data: Any = pool.redis.hget(pool.keys.models(), "syn")
    info = replace(ModelInfo.unpack(data), answers_tries=answers_tries)
    pool.redis.hset(pool.keys.models(), "syn", info.pack())
