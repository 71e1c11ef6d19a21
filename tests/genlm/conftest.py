"""Fixtures: one pool with random rows and one with a real model, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from genlm.backend.llm import AsyncTransformer

from lmpool.producer.genlm import PooledLM
from tests.genlm.small import SIZE, byte_tokenizer
from tests.support.pool import Pool


@pytest.fixture(scope="session")
def small_pool(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A pool with random rows over the vocabulary of `byte_tokenizer`."""
    pool = Pool(server_url, "genlm-small", tmp_path_factory.mktemp("small"))
    pool.start("--vocab-size", SIZE)
    yield pool
    pool.end()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The tokenizer of `small_pool`, with one token for every byte."""
    return byte_tokenizer()


@pytest.fixture
def small(small_pool: Pool, tokenizer: Any) -> Iterator[PooledLM]:
    """The language model of `small_pool`."""
    with PooledLM.from_name("syn", redis=small_pool.url, prefix=small_pool.prefix, tokenizer=tokenizer) as model:
        yield model


@pytest.fixture(scope="session")
def real_pool(server_url: str, smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A pool with one worker that serves the model SmolLM2."""
    pool = Pool(server_url, "genlm-real", tmp_path_factory.mktemp("real"))
    pool.start("--backend", "hf", "--name", "smollm2", model=str(smollm2_folder))
    yield pool
    pool.end()


@pytest.fixture(scope="session")
def real(real_pool: Pool) -> Iterator[PooledLM]:
    """The language model of `real_pool`."""
    with PooledLM.from_name("smollm2", redis=real_pool.url, prefix=real_pool.prefix) as model:
        yield model


@pytest.fixture(scope="session")
def theirs(smollm2_folder: Path) -> Any:
    """genlm-backend's own language model with the weights of SmolLM2."""
    return AsyncTransformer.from_name(str(smollm2_folder), hf_opts={"torch_dtype": "float32", "device_map": "cpu"})
