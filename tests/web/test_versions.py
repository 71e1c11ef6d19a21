"""Commands and pages that show a pool in which workers serve two versions of a model's weights."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from lmpool.admin.queue import DeadLetters
from lmpool.broker.server import Server
from lmpool.producer import Producer
from lmpool.producer.metrics import ProducerCollector
from lmpool.protocol.version import pointer_of
from lmpool.web.app import read_demand
from tests.support.pool import Pool, run_lmpool, until, until_async
from tests.web.service import Stream, WebService

QUEUED = {"syn@0": 2, "syn@1": 3}


@pytest.fixture
async def producer(pool: Pool, tmp_path: Path) -> AsyncIterator[Producer]:
    """A producer of a pool with a stopped worker and a queue of each version, and an adapter."""
    (tmp_path / "weights").write_text("1")
    workers = [pool.start("--lease-s", 60) for _ in range(2)]

    def is_used() -> bool:
        return pool.redis.hget(pool.keys.models(), pointer_of("syn")) == b"1"

    async with pool.producer() as producer:
        await producer.add_adapter("poet", tmp_path)
        workers[0].signal(signal.SIGSTOP)
        await producer.publish_weights({"seed": np.array(7)})
        await asyncio.to_thread(until, is_used, "new clients use version 1")
        workers[1].signal(signal.SIGSTOP)
        asked = [asyncio.ensure_future(producer.logprobs([each], version=0)) for each in range(QUEUED["syn@0"])]
        asked += [asyncio.ensure_future(producer.logprobs([each])) for each in range(QUEUED["syn@1"])]

        async def is_queued() -> bool:
            return pool.jobs("syn") == QUEUED["syn@0"] and pool.jobs("syn@1") == QUEUED["syn@1"]

        await until_async(is_queued, "all prompts are queued")
        yield producer
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def on(pool: Pool, *arguments: str) -> str:
    """The output of a command on the pool."""
    done = await asyncio.to_thread(run_lmpool, *arguments, "--redis", pool.url, "--prefix", pool.prefix)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_commands_show_the_queue_and_the_workers_of_each_version(pool: Pool, producer: Producer) -> None:
    status = json.loads(await on(pool, "status", "--json"))
    assert {model["name"]: model["queued"] for model in status} == QUEUED
    assert [len(model["workers"]) for model in status] == [1, 1]
    assert [model["info"]["name"] for model in status] == ["syn", "syn@1"]
    queues = json.loads(await on(pool, "queue", "show", "--json"))
    assert {name: counts["queued"] for name, counts in queues.items()} == QUEUED
    for name, count in {**QUEUED, "syn": QUEUED["syn@1"]}.items():  # Clients use version 1.
        assert json.loads(await on(pool, "queue", "show", name, "--json"))["queued"] == count
    for view in (("status",), ("top", "--once")):
        shown = await on(pool, *view)
        assert all(name in shown for name in QUEUED)
    assert "syn (1 worker), syn@1 (1 worker)" in await on(pool, "doctor")


async def test_versions_without_workers_are_left_out(pool: Pool, producer: Producer) -> None:
    pool.redis.delete(pool.keys.model("syn").workers)  # As if the worker of version 0 had left.
    service = await asyncio.to_thread(WebService, pool)
    assert [model["name"] for model in json.loads(await on(pool, "status", "--json"))] == ["syn@1"]
    models = (await asyncio.to_thread(service.request, "/api/models")).json["models"]
    assert [model["name"] for model in models] == ["syn", "syn@1"]
    pool.redis.delete(pool.keys.model("syn@1").workers)
    assert len(json.loads(await on(pool, "status", "--json"))) == len(QUEUED), "no worker serves the model"


async def test_the_demand_for_a_model_includes_all_versions(pool: Pool, producer: Producer) -> None:
    async with Server(pool.url).client() as redis:
        demand = {name: await read_demand(redis, pool.keys, name) for name in ("syn", "syn@1", "syn@5")}
    assert {name: (found.queued, found.workers) for name, found in demand.items()} == {
        "syn": (5, 2), "syn@1": (3, 1), "syn@5": (0, 0)
    }  # fmt: skip


async def test_pages_show_versions_in_tables_and_one_curve_for_each_model(pool: Pool, producer: Producer) -> None:
    service = await asyncio.to_thread(WebService, pool)

    def shown() -> Any:
        stream = Stream(service)
        try:
            while not (frame := stream.frame()).get("models"):
                pass
            return frame
        finally:
            stream.close()

    frame = await asyncio.to_thread(shown)
    assert {model["name"]: model["queued"] for model in frame["models"]} == QUEUED
    assert {name: values[1] for name, values in frame["drawn"].items()} == {"syn": 5}
    assert [len(model["adapters"]) for model in frame["models"]] == [1, 1]
    models = (await asyncio.to_thread(service.request, "/api/models")).json["models"]
    assert {model["name"]: len(model["adapters"]) for model in models} == {"syn": 1, "syn@0": 1, "syn@1": 1}


async def test_adapters_and_metrics_belong_to_all_versions(pool: Pool, producer: Producer) -> None:
    (revision,) = (await producer.adapters()).values()
    async with Server(pool.url).client() as redis:
        letters = DeadLetters(redis, pool.keys.model("syn@1"))
        assert await letters.served_adapters(pool.keys, producer.model) == {f"poet@{revision}"}
    registry = CollectorRegistry()
    registry.register(ProducerCollector(producer))
    labels = {"model": "syn", "outcome": "computed"}
    assert producer.model.name == "syn@1"
    assert registry.get_sample_value("lmpool_producer_requests_total", labels) is not None
