"""Programs of genlm-control, genlm-bytes and llamppl have the same results on a pool as on genlm-backend.

Each test imports its program itself: imports at the head of the file would delay each collecting process by seconds.
"""

from __future__ import annotations

import asyncio
import copy
import multiprocessing
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from llamppl import CachedCausalLM, LMContext

from lmpool.producer.genlm import PooledLM
from tests.genlm.small import END, RowsOfThePool
from tests.support.pool import Pool

if TYPE_CHECKING:
    from genlm.control import PromptedLLM

TOLERANCE = 1e-4
TEXTS = ["The capital of France is", "Once upon a time", "The capital of France is Paris", "1"]


@pytest.fixture(scope="session")
def prompts(real: PooledLM) -> list[list[int]]:
    return [real.tokenizer.encode(text) for text in TEXTS]


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


async def both(call: Callable[[Any], Awaitable[Any]], ours: Any, theirs: Any) -> tuple[Any, Any]:
    return await call(ours), await call(theirs)


# Programs of genlm-backend


async def test_rows_equal_those_of_genlm_backend(real: PooledLM, theirs: Any, prompts: list[list[int]]) -> None:
    assert_close(*await both(lambda llm: llm.batch_next_token_logprobs(prompts), real, theirs))
    for ids in prompts:
        assert_close(*await both(lambda llm, ids=ids: llm.next_token_logprobs(ids), real, theirs))  # type: ignore[misc]
    assert_close(real.batch_next_token_logprobs_sync(prompts), theirs.batch_next_token_logprobs_sync(prompts))


async def test_a_seed_draws_the_same_text(real: PooledLM, theirs: Any, prompts: list[list[int]]) -> None:
    def draw(llm: Any) -> Awaitable[list[list[int]]]:
        tokens: Awaitable[list[list[int]]] = llm.batch_sample(prompts, 8, [llm.tokenizer.eos_token_id], seed=80808)
        return tokens

    ours, wanted = await both(draw, real, theirs)
    assert ours == wanted


def test_vocabularies_are_equal(real: PooledLM, theirs: Any) -> None:
    assert real.byte_vocab == theirs.byte_vocab
    assert [token.byte_string for token in real.byte_vocab] == [token.byte_string for token in theirs.byte_vocab]
    assert real.str_vocab == theirs.str_vocab


# Programs of genlm-control


@pytest.fixture(scope="module")
def prompted(real: PooledLM, theirs: Any, prompts: list[list[int]]) -> tuple[PromptedLLM, PromptedLLM]:
    """Two models of genlm-control with the same prompt: one on lmpool, one on genlm-backend."""
    from genlm.control import PromptedLLM

    ours = PromptedLLM(real, prompt_ids=prompts[0])
    return ours, PromptedLLM(theirs, prompt_ids=prompts[0], token_maps=ours.token_maps)


async def test_potentials_are_equal(prompted: tuple[PromptedLLM, PromptedLLM]) -> None:
    tokens = prompted[0].tokenize(" Paris, and")
    for change in ({}, {"temperature": 0.7}, {"prompt_ids": [1, 2]}, {"eos_byte_strings": [b"."]}):
        ours, theirs = (potential.spawn(**change) for potential in prompted)
        weights = [(await p.logw_next(tokens)).weights for p in (ours, theirs)]
        assert np.allclose(weights[0], weights[1], atol=1e-3)
        assert await ours.complete(tokens) == pytest.approx(await theirs.complete(tokens), abs=1e-3)
        assert await ours.prefix(tokens) == pytest.approx(await theirs.prefix(tokens), abs=1e-3)
        contexts = [tokens, tokens[:1], []]
        batches = [(await p.batch_logw_next(contexts)).weights for p in (ours, theirs)]
        assert np.allclose(batches[0], batches[1], atol=1e-3)


def constrained(potential: PromptedLLM, seed: int) -> list[Any]:
    """Run SMC under a regular expression in a new event loop; return the sequences and their weights."""
    from genlm.control import AWRS, BoolFSA

    async def run() -> Any:
        fsa = BoolFSA.from_regex(r" (Paris|Lyon|[a-z]+ city)[a-z .,]*").coerce(potential, f=b"".join)
        return await AWRS(potential, fsa, seed=seed).smc(n_particles=4, ess_threshold=0.5, max_tokens=6)

    np.random.seed(seed)
    torch.manual_seed(seed)
    sequences = asyncio.run(run())
    return [([*map(str, tokens)], pytest.approx(weight, abs=1e-2)) for tokens, weight in sequences]


def test_awrs_finds_the_same_sequences(prompted: tuple[PromptedLLM, PromptedLLM]) -> None:
    for seed in (1, 2):
        ours, theirs = (constrained(potential, seed) for potential in prompted)
        assert len(ours) == 4
        assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]


def test_samplers_run_in_one_event_loop_after_another(prompted: tuple[PromptedLLM, PromptedLLM]) -> None:
    from genlm.control import direct_token_sampler

    ours = prompted[0].spawn()
    for _ in range(3):
        sampler = direct_token_sampler(copy.deepcopy(ours.spawn(temperature=0.5)))
        assert len(asyncio.run(sampler.smc(n_particles=3, ess_threshold=0.5, max_tokens=3))) == 3
    batched = ours.to_autobatched()

    async def ask_together() -> Any:
        try:
            return await asyncio.gather(*[batched.logw_next(ours.tokenize(text)) for text in TEXTS])
        finally:
            await batched.cleanup()

    assert len(asyncio.run(ask_together())) == len(TEXTS)


def make_potential(model: PooledLM, prompt: list[int]) -> PromptedLLM:
    from genlm.control import PromptedLLM

    return PromptedLLM(model, prompt_ids=prompt)


def test_potentials_of_other_processes_use_the_same_pool(
    real: PooledLM,
    prompted: tuple[PromptedLLM, PromptedLLM],
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from genlm.control.potential import multi_proc

    # Spawn the processes: this process has used torch's OpenMP, which hangs in a forked child.
    spawning = partial(ProcessPoolExecutor, mp_context=multiprocessing.get_context("spawn"))
    monkeypatch.setattr(multi_proc, "ProcessPoolExecutor", spawning)
    tokens = prompted[0].tokenize(" Paris")
    spread = multi_proc.MultiProcPotential(make_potential, (real, prompts[0]), num_workers=1)
    try:
        here, there = (asyncio.run(p.logw_next(tokens)).weights for p in (prompted[0], spread))
    finally:
        spread.executor.shutdown()
    assert np.array_equal(here, there)


# Programs of genlm-bytes


async def test_beams_over_bytes_are_equal(small: PooledLM, tokenizer: Any) -> None:
    from genlm.bytes import BeamParams, ByteBeamState

    rows = []
    for llm in (small, RowsOfThePool(tokenizer)):
        beam = await ByteBeamState.initial(llm, BeamParams(K=3, eos_byte_strings=[END.encode()]))
        try:
            beam = await beam.prefill(b"The capital of France is")
            rows.append((await beam.logp_next()).ps)
        finally:
            await beam.cleanup()
    assert np.allclose(rows[0], rows[1], atol=1e-6)


async def test_masses_of_bytes_equal_those_of_a_beam_that_prunes_nothing(real: PooledLM, real_pool: Pool) -> None:
    from genlm.bytes import BeamParams, ByteBeamState

    start, end, text = real.tokenizer.bos_token_id, real.tokenizer.eos_token_id, b"s\xc3\xa9"
    params = BeamParams(K=10_000, heal=False, eos_byte_strings=[bytes(real.byte_vocab[end])])
    beam, expected = await ByteBeamState.initial(real, params), [0.0]
    try:
        for byte in text:
            expected.append(expected[-1] + (await beam.logp_next()).ps[byte])
            beam = await (beam << byte)
    finally:
        await beam.cleanup()
    async with real_pool.producer("smollm2") as producer:
        prefixes = [text[:size] for size in range(len(text) + 1)]
        found = (await producer.mass_of_bytes([start], prefixes)).logprobs
        assert np.allclose(found, expected, atol=1e-4)
        # All single bytes together have the probability of all tokens but the special ones.
        ids = [*real.tokenizer.encode("The end."), real.tokenizer.convert_tokens_to_ids("<|im_end|>"), 198]
        masses = (await producer.mass_of_bytes(ids, [bytes([byte]) for byte in range(256)])).logprobs
        added = real.tokenizer.added_tokens_decoder.items()
        special = await producer.mass(ids, [i for i, token in added if token.special])
        assert np.exp(special) > 0.01
        assert np.exp(masses).sum() + np.exp(special) == pytest.approx(1, abs=1e-4)


# Programs of llamppl


async def test_contexts_of_llamppl_are_equal(real: PooledLM, theirs: Any) -> None:
    texts = []
    for llm in (real, theirs):
        model = CachedCausalLM(llm)
        np.random.seed(0)
        # Programs of llamppl create the context synchronously inside a running event loop.
        context = LMContext(model, TEXTS[0], temp=0.7)
        for _ in range(4):
            await context.next_token().sample()
        is_word, _ = await context.mask_dist(model.masks.STARTS_NEW_WORD).sample()
        texts.append((str(copy.deepcopy(context)), bool(is_word)))
    assert texts[0] == texts[1]
