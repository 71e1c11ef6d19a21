"""Measuring a served model with random prompts."""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

import numpy as np

from lmpool.producer.producer import Producer

_ALONE = 50
_ALONE_S = 5.0


class Measurement(NamedTuple):
    """Rows a second, and the median and 99th percentile of single requests in milliseconds."""

    new_per_s: float
    new_p50_ms: float
    new_p99_ms: float
    cached_per_s: float
    cached_p50_ms: float
    cached_p99_ms: float
    alone_p50_ms: float
    alone_p99_ms: float


async def measure(producer: Producer, prompts: int, length: int, concurrency: int, seed: int | None) -> Measurement:
    """Ask for random prompts: all at once as new ones, then again from the cache, then some new ones one by one."""
    generator = np.random.default_rng(seed)
    drawn = generator.integers(0, producer.model.vocab_size, (prompts + _ALONE, length)).tolist()
    together, alone = drawn[:prompts], drawn[prompts:]
    new = await _ask_all(producer, together, concurrency)
    cached = await _ask_all(producer, together, concurrency)
    single: list[float] = []
    while alone and sum(single) < 1000 * _ALONE_S:  # A slow model has few.
        _, p50, _ = await _ask_all(producer, [alone.pop()], 1)
        single.append(p50)
    p50, p99 = np.quantile(single, [0.5, 0.99])
    return Measurement(*new, *cached, float(p50), float(p99))


async def _ask_all(producer: Producer, prompts: list[list[int]], concurrency: int) -> tuple[float, float, float]:
    slots = asyncio.Semaphore(concurrency)
    taken: list[float] = []

    async def ask(prompt: list[int]) -> None:
        async with slots:
            started = time.perf_counter()
            await producer.logprobs(prompt)
            taken.append(time.perf_counter() - started)

    started = time.perf_counter()
    await asyncio.gather(*map(ask, prompts))
    wall = time.perf_counter() - started
    p50, p99 = np.quantile(taken, [0.5, 0.99]) * 1000
    return len(prompts) / wall, float(p50), float(p99)
