"""Hidden states and the output head of the hf backend: together they give the model's rows, in every architecture."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    PhiConfig,
    PreTrainedConfig,
)

import lmpool.batch
from lmpool.errors import SettingsError
from lmpool.producer import SyncProducer
from lmpool.producer.client.requests import Deadline
from lmpool.protocol import query
from lmpool.protocol.query import HeadQuery, PositionsQuery
from lmpool.protocol.row import FACTS, Head, unpack_numbers, width_of
from lmpool.workers.backends import output_head
from lmpool.workers.backends.hf.backend import HfBackend
from lmpool.workers.backends.settings import HfSettings
from tests.contract import model as contract_model
from tests.producer.batch.runs import run, write_texts
from tests.support.models.tiny_models import CONFIGS, VOCAB_SIZE, make_model
from tests.support.pool import Pool, until
from tests.workers.backends.hf.hf_tiny import drain, job, random_prompts

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 33, "intermediate_size": 48, "num_attention_heads": 3, "head_dim": 12,
    "num_key_value_heads": 3, "num_hidden_layers": 2, "max_position_embeddings": 64,
}  # fmt: skip
SPECIAL: dict[str, PreTrainedConfig] = {
    "soft-cap": Gemma2Config(**SHAPE, final_logit_softcapping=5.0),
    "scaled": CohereConfig(**{**SHAPE, "hidden_size": 36}, logit_scale=0.25),
    "divided": GraniteConfig(**{**SHAPE, "hidden_size": 36}, logits_scaling=8.0),
    "untied": LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "bias": PhiConfig(**{**SHAPE, "hidden_size": 36}),
}
MIN_KL = 1e-5


def write(folder: Path, kind: str, dtype: torch.dtype) -> Path:
    """Write a tiny model of the architecture `kind`; returns its folder."""
    if kind in CONFIGS:
        make_model(kind, dtype).save_pretrained(folder)
        return folder
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(SPECIAL[kind])
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 or name == "lm_head.bias":
            torch.nn.init.normal_(parameter, std=0.3)
    model.to(dtype).save_pretrained(folder)
    return folder


def head_of(backend: HfBackend) -> Head:
    """Assemble the output head from its parts, as a client does."""
    info = backend.info
    scale, soft_cap, has_bias = backend.head(HeadQuery("facts"), "")[:FACTS].tolist()
    bias = backend.head(HeadQuery("bias"), "") if has_bias else None
    parts = [
        unpack_numbers(backend.head(HeadQuery("weights", first, count), ""), count, info.hidden, info.dtype)
        for first, count in ((0, 50), (50, VOCAB_SIZE - 50))
    ]
    return Head(np.concatenate(parts), bias, scale, soft_cap or None, info.dtype)


def answers(backend: HfBackend, prompts: list[Any], wanted: PositionsQuery) -> list[NDArray[np.float32]]:
    """Run prompts together; returns the requested values of each prompt, an array (n, width)."""
    jobs = [job(ids)._replace(positions=wanted, digest=bytes([at]) * 16) for at, ids in enumerate(prompts)]
    backend.submit(jobs)
    found: dict[bytes, NDArray[np.float32]] = {}
    for finished in drain(backend):
        assert not finished.failures
        if finished.answers is not None:
            found.update(zip(finished.answers.digests, finished.answers.vectors, strict=True))
    return [found[asked.digest].reshape(len(asked.span), -1) for asked in jobs]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", [*sorted(CONFIGS), *SPECIAL])
def test_hidden_states_and_the_head_make_the_rows_of_every_architecture(tmp_path: Path, kind: str, dtype: str) -> None:
    backend = HfBackend(HfSettings(str(write(tmp_path, kind, getattr(torch, dtype))), device="cpu", dtype=dtype))
    info = backend.info
    assert info.hidden in (32, 33, 36)
    # Prompts of more than 20 positions take several chunks.
    backend._rules = backend._rules._replace(logits=20, chunk=20, tokens=60)
    prompts = random_prompts(3, (30, 45))
    size = width_of(info.hidden, info.dtype)
    # The first run fills the cache of keys and values. Later runs compute the same chunks, so they round alike.
    for _ in range(2):
        hidden = answers(backend, prompts, PositionsQuery(2, values="hidden", size=size))
    rows = answers(backend, prompts, PositionsQuery(2))
    head = head_of(backend)
    for packed, expected in zip(hidden, rows, strict=True):
        states = unpack_numbers(packed, len(packed), info.hidden, info.dtype)
        assert states.dtype == (np.float16 if dtype == "float16" else np.float32)
        made = head.logprobs(states)
        loss = (np.exp(expected.astype(np.float64)) * (expected - made)).sum(axis=1)
        assert np.abs(loss).max() < MIN_KL
    backend.close()


def test_a_head_that_does_not_compute_the_logits_is_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path, "soft-cap", torch.float32)
    monkeypatch.setattr(output_head.OutputHead, "finished", lambda _, logits: logits)
    backend = HfBackend(HfSettings(str(folder), device="cpu"))
    assert backend.info.hidden == 0
    assert backend.info.positions
    backend.close()


def test_a_hidden_state_that_is_not_finite_fails_its_prompt_alone(tmp_path: Path) -> None:
    backend = HfBackend(HfSettings(str(write(tmp_path, "llama", torch.bfloat16)), device="cpu", dtype="bfloat16"))
    model: Any = backend._forward.model
    with torch.no_grad():
        model.get_input_embeddings().weight[5] = float("inf")
    size = width_of(backend.info.hidden, "bfloat16")
    wanted = PositionsQuery(0, values="hidden", size=size)
    bad, good = (job(ids)._replace(positions=wanted) for ids in ((1, 5, 2), (1, 2, 3)))
    backend.submit([bad, good])
    steps = drain(backend)
    assert {digest for step in steps for digest in step.failures} == {bad.digest}
    assert [digest for step in steps if step.answers for digest in step.answers.digests] == [good.digest]
    backend.close()


def test_clients_compute_rows_from_hidden_states(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path, "untied", torch.float32)
    monkeypatch.setattr(query, "MAX_ANSWER", 33 * 20)  # Limit a result's size: the head is sent in six parts.
    pool.start("--backend", "hf", "--name", "tiny", "--device", "cpu", model=str(folder))
    text = list(range(30))
    with SyncProducer("tiny", redis=pool.url, prefix=pool.prefix, cache_bytes=0) as producer:
        assert producer.model.hidden == 33
        with ThreadPoolExecutor(4) as threads:
            head, *others = threads.map(lambda _: producer.head(), range(4))
        assert (head.weights.shape, head.weights.flags.writeable) == ((VOCAB_SIZE, 33), False)
        assert all(other is head for other in [*others, producer.head()])
        assert producer.stats().requests == 1 + -(-VOCAB_SIZE // 20), "its facts and its parts have come once"
        hidden: NDArray[Any] = producer.hidden(text, 4)
        assert hidden.shape == (26, 33)
        rows: NDArray[Any] = np.asarray(producer.positions(text, 4, full=True).full)
        made: NDArray[Any] = head.logprobs(hidden)
        assert np.abs((np.exp(rows) * (rows - made)).sum(axis=1)).max() < MIN_KL
        # A client may request the bias even if the model's head has no bias.
        session = producer._asynchronous._sessions.session
        assert session is not None

        async def ask_bias() -> NDArray[np.float32]:
            prompt = session.encode([0], "").with_query(HeadQuery("bias").pack(), VOCAB_SIZE)
            return await session.answer(prompt, Deadline(30.0), private=True)

        bias: NDArray[np.float32] = producer._wait_for(ask_bias())
        assert not bias.any()
        # Parts of the head and parts of results must not stay in Redis, because no other client can use them.
        until(lambda: not pool.names("row:*"), "nothing is left")
        with pytest.raises(SettingsError, match="start: 30 must be a whole number from 0 to 29"):
            producer.hidden(text, 30)


async def test_the_head_of_an_adapter_has_its_factors(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query, "MAX_ANSWER", 3000)  # Each factor of the head is sent in several parts.
    adapters = [f"--adapters={name}={contract_model.write_adapter(tmp_path / name, name)}" for name in ("head", "warm")]
    folder = contract_model.write_model(tmp_path / "model")
    await asyncio.to_thread(
        pool.start, "--backend", "hf", "--name", "tiny", "--device", "cpu", *adapters, model=str(folder)
    )
    async with pool.producer("tiny", cache_bytes=0) as producer:
        for adapter in ("head", "warm"):
            head = await producer.head(adapter=adapter)
            assert (head.up is not None) == (adapter == "head")
            assert not any(array.flags.writeable for array in (head.down, head.up) if array is not None)
            states = await producer.hidden(range(9), adapter=adapter)
            rows = np.stack([contract_model.reference_row(range(at + 1), adapter) for at in range(9)])
            np.testing.assert_allclose(head.logprobs(states), rows, atol=3e-4)
            # The worker has read the factors when it loaded the adapter; later changes of the files do not matter.
            (tmp_path / adapter / "adapter_model.safetensors").unlink()
        assert (await producer.head(adapter="head")).weights is (await producer.head()).weights


async def test_hidden_states_of_a_file_are_kept_in_the_dtype_of_the_model(pool: Pool, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "untied", torch.bfloat16)
    dtype = ("--dtype", "bfloat16")
    await asyncio.to_thread(
        pool.start, "--backend", "hf", "--name", "tiny", "--device", "cpu", *dtype, model=str(folder)
    )
    texts = [[1, 2, 3, 4], [5], list(range(40))]
    source = write_texts(tmp_path / "in.jsonl", texts)
    async with pool.producer("tiny", cache_bytes=0) as producer:
        await run(producer, source, tmp_path / "out", "hidden", shard_lines=2)
        found = lmpool.batch.open(tmp_path / "out")
        assert found.manifest.columns["hidden"].startswith("bfloat16 (n, 33)")
        for text, answer in zip(texts, found, strict=True):
            expected: NDArray[Any] = await producer.hidden(text)
            # Allow rounding: the two requests may run in different batches, and bfloat16 has 8 significant bits.
            np.testing.assert_allclose(answer["hidden"], expected, atol=0.1, rtol=0.1)
            assert not (answer["hidden"].view(np.uint32) & 0xFFFF).any()


async def test_a_batch_run_is_refused_without_hidden_states(pool: Pool, tmp_path: Path) -> None:
    pool.start()
    source = write_texts(tmp_path / "in.jsonl", [[1]])
    async with pool.producer() as producer:
        with pytest.raises(SettingsError, match="what: the backend 'synthetic' of 'syn' does not return hidden states"):
            await run(producer, source, tmp_path / "out", "hidden")


def test_workers_without_hidden_states_refuse(pool: Pool) -> None:
    pool.start()
    with SyncProducer("syn", redis=pool.url, prefix=pool.prefix) as producer:
        with pytest.raises(SettingsError, match="hidden: the workers of 'syn' return no hidden states"):
            producer.hidden([1, 2])
        with pytest.raises(SettingsError, match="head: the workers of 'syn' return no hidden states"):
            producer.head()
