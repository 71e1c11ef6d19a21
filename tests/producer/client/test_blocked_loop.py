"""If a program blocks its event loop, its requests continue when the loop runs again."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from lmpool.aio import silence_limit
from lmpool.producer import Producer
from lmpool.producer.client import discovery
from lmpool.producer.client.requests import ENDLESS_S
from lmpool.rows.shared_memory import SegmentReader
from lmpool.synthetic import synthetic_row
from tests.support.gate import Gate
from tests.support.pool import Pool, SkippingLoop, V, run_skipping, until_async

PAUSE_S = 31.0
"""Duration of a pause, longer than any limit for the server's silence."""
PAUSES = 15
"""Number of pauses, fewer than the parts into which a client divides its limit for the server's silence."""
PROMPT = [1, 2, 3]
LARGE_V = 8192
"""Entries of a row that is large enough for shared memory."""


async def pause(loop: SkippingLoop, every: int, times: int = PAUSES) -> None:
    """Simulate repeated pauses of the event loop, each for `PAUSE_S`, while the server replies."""
    for _ in range(times):
        for _ in range(every):
            await asyncio.sleep(0)
        time.sleep(0.005)
        loop.skipped_s += PAUSE_S


@pytest.mark.parametrize("timeout", [1e6, ENDLESS_S])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_request_survives_a_blocked_loop_while_the_session_opens(pool: Pool, timeout: float, every: int) -> None:
    pool.start()

    async def ask(loop: SkippingLoop) -> None:
        pausing = asyncio.create_task(pause(loop, every))
        async with Producer("syn", redis=pool.url, prefix=pool.prefix, timeout=timeout) as producer:
            assert np.array_equal(await producer.logprobs(PROMPT), synthetic_row(PROMPT, vocab_size=V))
            await pausing

    run_skipping(ask)


@pytest.mark.parametrize("timeout", [1e6, ENDLESS_S])
def test_a_request_survives_a_blocked_loop_while_it_is_pending(pool: Pool, tmp_path: Path, timeout: float) -> None:
    gate = Gate(tmp_path / "gate")
    pool.start(command=gate.command)

    async def ask(loop: SkippingLoop) -> None:
        async with Producer("syn", redis=pool.url, prefix=pool.prefix, timeout=timeout) as producer:
            asked = asyncio.create_task(producer.logprobs(PROMPT))
            await until_async(lambda: asyncio.to_thread(lambda: pool.held() == 1), "the worker has the prompt")
            for every in (1, 2, 3):
                await pause(loop, every)
            assert not asked.done()
            gate.open()
            assert np.array_equal(await asked, synthetic_row(PROMPT, vocab_size=V))

    run_skipping(ask)


async def test_requests_succeed_when_no_thread_can_start(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python starts no threads after the main thread has ended, but other threads may still use a producer."""
    monkeypatch.setattr(discovery, "_SCAN_S", 0.001)
    refresh, scanned = SegmentReader.refresh, asyncio.Event()

    async def observed(reader: SegmentReader, fingerprint: str) -> None:
        scanned.set()
        await refresh(reader, fingerprint)

    async def publish() -> None:
        async with pool.producer("syn") as publisher:
            await publisher.publish_weights({"seed": np.array(4)})

    pool.start("--vocab-size", LARGE_V)
    async with pool.producer("syn", cache_bytes=0) as producer:
        await producer.logprobs(PROMPT)
        await asyncio.get_running_loop().shutdown_default_executor()
        monkeypatch.setattr(SegmentReader, "refresh", observed)
        await asyncio.wait_for(scanned.wait(), 60)
        assert np.array_equal(await producer.logprobs([4, 5]), synthetic_row([4, 5], vocab_size=LARGE_V))
        publishing = threading.Thread(target=asyncio.run, args=[publish()])
        publishing.start()
        changed = synthetic_row([4, 5], vocab_size=LARGE_V, seed=4)
        assert np.array_equal(await producer.logprobs([4, 5], min_version=1), changed)
        async with pool.producer("syn") as opened_later:
            assert np.array_equal(await opened_later.logprobs([4, 5], min_version=1), changed)
        publishing.join()


def test_a_silence_limit_expires_in_a_running_loop_and_after_many_pauses() -> None:
    async def wait(loop: SkippingLoop) -> None:
        loop.call_later(0.01, setattr, loop, "skipped_s", 100.0)
        with pytest.raises(TimeoutError):
            async with silence_limit(0.1):
                await asyncio.Event().wait()
        async with silence_limit(0.1) as timer:
            await pause(loop, 1)
        assert not timer.expired()
        with pytest.raises(TimeoutError):
            async with silence_limit(0.1):
                await pause(loop, 1, 100)
        async with silence_limit(None):
            await pause(loop, 1)

    run_skipping(wait)
