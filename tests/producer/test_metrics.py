"""Metrics of a producer count one outcome and one duration for each request."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
from dataclasses import asdict

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from lmpool.errors import DeadlineExceeded, ProducerClosed, WorkerError
from lmpool.producer import Producer, SyncProducer
from lmpool.producer.metrics import ProducerCollector
from lmpool.protocol.row import Encoding, encoded_size
from tests.support.pool import Pool, V
from tests.support.scrape import Scrape


def scraped(*producers: Producer | SyncProducer) -> Scrape:
    registry = CollectorRegistry()
    registry.register(ProducerCollector(*producers))
    return Scrape(generate_latest(registry).decode())


def requests(seen: Scrape, model: str = "syn") -> dict[str, float]:
    """Return the counts of requests by outcome, without zeros."""
    names = ("local_hit", "cache_hit", "joined", "computed", "failed")
    counts = {name: seen.value("lmpool_producer_requests_total", model=model, outcome=name) for name in names}
    return {name: count for name, count in counts.items() if count}


async def test_each_request_is_counted_once_by_its_outcome(pool: Pool) -> None:
    await asyncio.to_thread(pool.start, "--fail-token", 300)
    async with pool.producer() as first, pool.producer() as second:
        await asyncio.gather(*(first.logprobs([i]) for i in range(20)))
        await first.logprobs([1])
        seen = scraped(first)
        assert requests(seen) == {"computed": 20, "local_hit": 1}
        rows = 20 * encoded_size(V, Encoding.F32)
        assert seen.value("lmpool_producer_fetched_bytes_total", model="syn") == rows
        assert seen.value("lmpool_producer_cache_rows", model="syn") == 20
        assert seen.value("lmpool_producer_cache_bytes", model="syn") == 20 * 4 * V
        await second.batch_logprobs([[i] for i in range(10)])
        await second.logprobs([11], targets=[1, 2])
        await asyncio.gather(second.logprobs([400]), second.logprobs([400]))
        with pytest.raises(WorkerError):
            await second.logprobs([300])
        seen = scraped(second)
        assert requests(seen) == {"cache_hit": 11, "computed": 1, "joined": 1, "failed": 1}
        assert seen.value("lmpool_producer_failures_total", model="syn", kind="WorkerError") == 1
        for outcome, count in (("cache_hit", 11), ("computed", 1), ("joined", 1), ("failed", 1)):
            name = "lmpool_producer_request_seconds"
            assert seen.value(f"{name}_count", model="syn", outcome=outcome) == count
            assert 0 < seen.value(f"{name}_sum", model="syn", outcome=outcome) < 60
        assert seen.value("lmpool_producer_requests_under_way", model="syn") == 0


async def test_every_request_has_exactly_one_outcome(pool: Pool) -> None:
    worker = await asyncio.to_thread(pool.start, "--fail-token", 300, "--step-ms", 20, "--max-batch", 8)
    draw = random.Random(5)

    async def ask(producer: Producer) -> None:
        prompts = [[draw.choice((1, 2, 3, 300)), draw.randrange(9)] for _ in range(3)]
        timeout = draw.choice((30.0, 30.0, 0.01))
        calls = [
            producer.logprobs(prompts[0], timeout=timeout),
            producer.logprobs(prompts[0], targets=[4], timeout=timeout),
            producer.batch_logprobs(prompts, timeout=timeout),
            producer.topk(prompts[0], 2, timeout=timeout),
            producer.sample(prompts[0], seed=draw.choice((None, 1)), timeout=timeout),
            producer.warm(prompts[0], timeout=timeout),
        ]
        at = draw.randrange(len(calls))
        chosen = asyncio.create_task(calls.pop(at))
        for call in calls:
            call.close()
        if draw.random() < 0.2:
            for _ in range(draw.randrange(9)):
                await asyncio.sleep(0)
            chosen.cancel()
        await asyncio.gather(chosen, return_exceptions=True)

    first, second = pool.producer(cache_bytes=4 * V * 8), pool.producer()
    async with first, second:
        for _ in range(6):
            await asyncio.gather(*(ask(producer) for producer in (first, second) for _ in range(40)))
        worker.signal(signal.SIGSTOP)
        stalled = [asyncio.create_task(first.logprobs([7, at // 2])) for at in range(60)]
        await asyncio.sleep(0)
    ended = await asyncio.gather(*stalled, return_exceptions=True)
    assert set(map(type, ended)) == {ProducerClosed}
    for producer in (first, second):
        stats = producer.stats()
        outcomes = asdict(stats)
        del outcomes["requests"]
        assert all(outcomes.values()), f"each has been seen: {stats}"
        assert sum(outcomes.values()) == stats.requests, stats
        seen = scraped(producer)
        assert sum(requests(seen).values()) == stats.requests
        assert requests(seen)["joined"] == stats.joined
        assert requests(seen)["failed"] == stats.failed == sum(producer._counters.failures.values())
        assert seen.value("lmpool_producer_requests_under_way", model="syn") == 0


async def test_pending_late_and_cancelled_requests_are_counted(pool: Pool) -> None:
    await asyncio.to_thread(pool.start, "--step-ms", 600_000)
    async with pool.producer() as producer:
        waiting = [asyncio.create_task(producer.logprobs([i])) for i in range(3)]
        with pytest.raises(DeadlineExceeded):
            await producer.logprobs([9], timeout=0.2)
        seen = scraped(producer)
        assert seen.value("lmpool_producer_requests_under_way", model="syn") == 3
        assert seen.value("lmpool_producer_failures_total", model="syn", kind="DeadlineExceeded") == 1
        seconds = seen.value("lmpool_producer_request_seconds_sum", model="syn", outcome="failed")
        assert seconds >= 0.2
        waiting[0].cancel()
        await asyncio.wait(waiting[:1])
        seen = scraped(producer)
        assert seen.value("lmpool_producer_failures_total", model="syn", kind="cancelled") == 1
        assert seen.value("lmpool_producer_requests_under_way", model="syn") == 2
    await asyncio.gather(*waiting, return_exceptions=True)
    assert scraped(producer).value("lmpool_producer_requests_under_way", model="syn") == 0


def test_one_registry_takes_producers_of_several_models(pool: Pool) -> None:
    pool.start("--metrics-port", 0)
    pool.start("--name", "other")
    with (
        SyncProducer("syn", redis=pool.url, prefix=pool.prefix) as first,
        SyncProducer("other", redis=pool.url, prefix=pool.prefix) as other,
    ):
        first.logprobs([1])
        seen = scraped(first, other)
        assert requests(seen) == {"computed": 1}
        assert requests(seen, "other") == {}


def test_a_producer_that_has_not_connected_has_metrics() -> None:
    producers = [Producer(redis="redis://127.0.0.1:1") for _ in range(2)]
    seen = scraped(*producers)
    assert len(seen.kinds) == 10
    assert seen.value("lmpool_producer_requests_under_way", model="") == 0
    page = CollectorRegistry()
    page.register(ProducerCollector(*producers))
    series = [line.rpartition(" ")[0] for line in generate_latest(page).decode().splitlines() if line[0] != "#"]
    assert len(set(series)) == len(series), "Prometheus refuses a page that has a series twice"


def test_without_the_library_the_error_names_the_package_to_install() -> None:
    code = (
        "import sys; sys.modules['prometheus_client.core'] = sys.modules['prometheus_client'] = None\n"
        "import lmpool.producer.metrics\n"
        "from lmpool.producer import Producer\n"
        "try: lmpool.producer.metrics.ProducerCollector(Producer(redis='redis://127.0.0.1:1'))\n"
        "except ValueError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'lmpool[metrics]'" in done.stdout
