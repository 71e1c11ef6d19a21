"""Helpers for tests that add, replace and remove adapters."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from lmpool.broker import registries
from lmpool.broker.server import Server
from lmpool.producer import Producer
from lmpool.producer.client import adapters as adapters_module
from lmpool.protocol.adapter import Adapter
from lmpool.synthetic import synthetic_row
from lmpool.workers.backends.synthetic import SyntheticBackend, SyntheticSettings
from tests.support.pool import Pool

V = 64
QUICK = ("--vocab-size", V, "--lease-s", 6, "--max-batch", 8)
"""Options of workers whose jobs others take over soon, but not after a pause of seconds, as on a busy machine.

A worker that pauses for a lease while it loads an adapter counts as killed by this adapter.
"""


@pytest.fixture
def short_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time for which clients cache an adapter's entry, so that changes of adapters take less time."""
    for module in (adapters_module, registries):
        monkeypatch.setattr(module, "KNOWN_FOR_S", 0.2)
    monkeypatch.setattr(registries, "MARGIN_S", 0.1)


def write(folder: Path, name: str, content: str) -> Path:
    """Write an adapter of the synthetic backend; return its folder."""
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "weights").write_text(content)
    return folder / name


def expected(ids: list[int], revision: str = "") -> NDArray[np.float32]:
    return synthetic_row(ids, vocab_size=V, adapter_revision=revision)


async def check(producer: Producer, adapter: str, revision: str, *prompts: list[int]) -> None:
    for ids in prompts or ([1], [2, 3]):
        assert np.array_equal(await producer.logprobs(ids, adapter=adapter), expected(ids, revision)), ids


@asynccontextmanager
async def two_clients(pool: Pool) -> AsyncIterator[tuple[Producer, Producer]]:
    async with pool.producer("syn") as client, pool.producer("syn") as other:
        yield client, other


async def put(pool: Pool, producer: Producer, name: str, adapter: Adapter) -> None:
    """Write an adapter's entry to the registry, as a client does after a worker has checked the adapter."""
    redis = Server(pool.url).client()
    await registries.AdapterRegistry(redis, pool.keys.model("syn"), producer.model.fingerprint).put(name, adapter)
    await redis.aclose()


def revision_in(folder: Path) -> str:
    """The revision of the adapter that a folder contains, for the synthetic backend."""
    return SyntheticBackend(SyntheticSettings(vocab_size=V)).load_adapter("any", str(folder))
