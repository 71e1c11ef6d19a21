"""The explorer opens each model once, and closes idle models when too many are open, but never during a request."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lmpool.errors import UnknownModel
from lmpool.producer import Producer
from lmpool.protocol.model_info import ModelInfo
from lmpool.web import models as web_models
from lmpool.web.explorer import ExploredModel
from lmpool.web.models import MAX_MODELS, Models
from tests.support.gate import Gate
from tests.support.pool import Pool, until
from tests.web.service import WebService


class CountedProducer(Producer):
    """A producer class that counts its instances, and records which of its instances are open."""

    made = 0
    now_open: ClassVar[set[str | None]] = set()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        CountedProducer.made += 1

    async def open(self, **options: Any) -> None:
        """Open the producer and record it."""
        self.now_open.add(self._model)
        await super().open(**options)

    async def close(self) -> None:
        """Close the producer and record it."""
        self.now_open.discard(self._model)
        await super().close()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> type[CountedProducer]:
    """Let the explorer use `CountedProducer`, with its counts at zero."""
    monkeypatch.setattr(web_models, "Producer", CountedProducer)
    CountedProducer.made = 0
    CountedProducer.now_open = set()
    return CountedProducer


def register_others(pool: Pool, count: int) -> list[str]:
    """Register models that have an info but no worker; return their names."""
    names = [f"other{number}" for number in range(count)]
    packed: Any = pool.redis.hget(pool.keys.models(), "syn")
    info = ModelInfo.unpack(packed)
    for name in names:
        pool.redis.hset(pool.keys.models(), name, replace(info, name=name).pack())
    return names


def test_a_pending_request_keeps_its_model_open(pool: Pool, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "open")
    # Use a long lease: after a third of the lease, workers remove the infos of models without workers.
    pool.start("--lease-s", 600, command=gate.command)
    service = WebService(pool)
    with ThreadPoolExecutor(1) as thread:
        held = thread.submit(service.request, "/api/row", {"model": "syn", "ids": [1, 2]})
        try:
            until(pool.jobs, "the worker holds the prompt")
            for name in register_others(pool, MAX_MODELS):

                def is_open(name: str = name) -> bool:
                    """Open the model by a request with a too long prompt, which fails without a worker."""
                    register_others(pool, MAX_MODELS)  # Repeat: the worker's first sweep may remove infos at any time.
                    answer = service.request("/api/row", {"model": name, "ids": [1] * 5000})
                    return "Shorten it" in answer.json["error"]

                until(is_open, f"the explorer opens {name}")
            assert not held.done()
        finally:
            gate.open()
        answer = held.result()
    assert (answer.status, answer.json.get("error")) == (200, None)


async def test_concurrent_requests_share_one_producer(pool: Pool, counted: type[CountedProducer]) -> None:
    await asyncio.to_thread(pool.start)
    models = Models(ExploredModel, pool.url, pool.prefix)

    async def use() -> int:
        async with models.use("syn") as model:
            return id(model)

    try:
        assert len(set(await asyncio.gather(*[use() for _ in range(5)]))) == 1
        assert counted.made == 1
    finally:
        await models.close()
    assert counted.now_open == set()


async def test_the_least_recently_used_models_without_requests_are_closed(
    pool: Pool, counted: type[CountedProducer]
) -> None:
    # Use a long lease: after a third of the lease, workers remove the infos of models without workers.
    await asyncio.to_thread(pool.start, "--lease-s", 600)
    others = await asyncio.to_thread(register_others, pool, MAX_MODELS + 1)
    models = Models(ExploredModel, pool.url, pool.prefix)
    try:
        async with models.use("syn"):
            for name in others:
                async with models.use(name):
                    assert {"syn", name} <= counted.now_open
            assert counted.now_open == {"syn", *others[2:]}
        async with models.use(others[0]):
            pass
        # "syn" was released last but its request began first, so the service has closed "syn".
        assert counted.now_open == {*others[2:], others[0]}
    finally:
        await models.close()
    assert counted.now_open == set()


async def test_a_failed_model_is_opened_again_and_a_cancelled_request_cancels_no_other(
    pool: Pool, counted: type[CountedProducer]
) -> None:
    models = Models(ExploredModel, pool.url, pool.prefix)

    async def use() -> None:
        async with models.use("syn"):
            pass

    try:
        for failed in await asyncio.gather(use(), use(), return_exceptions=True):
            assert isinstance(failed, UnknownModel)
        assert counted.now_open == set()
        await asyncio.to_thread(pool.start)
        first, second = asyncio.create_task(use()), asyncio.create_task(use())
        await asyncio.sleep(0)
        first.cancel()
        await second
        assert first.cancelled()
        assert counted.now_open == {"syn"}
    finally:
        await models.close()
