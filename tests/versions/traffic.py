"""Clients that request rows while versions of the weights change, and check each row against its version's seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np

from lmpool.producer import Producer
from lmpool.synthetic import synthetic_row
from tests.support.pool import DEADLINE_S, Pool, V

_PROMPTS = 50
"""Number of different prompts, so that some answers come from caches."""


def weights(seed: int) -> dict[str, np.ndarray]:
    """A full version of the synthetic model's weights."""
    return {"seed": np.array(seed)}


@dataclass
class Traffic:
    """The answers that clients got.

    Attributes:
        seeds: version -> seed of its rows, of all versions that were published or may have been.
        answers: number of checked answers of each version.
    """

    seeds: Mapping[int, int]
    answers: dict[int, int] = field(default_factory=dict)

    async def ask(self, producer: Producer, number: int) -> None:
        """Request rows one after another; each must be of the version that it names, and versions only increase."""
        draw, seen = random.Random(number), 0
        while True:
            prompt = [draw.randrange(V), draw.randrange(_PROMPTS)]
            row, version = await producer.versioned(producer.logprobs, prompt)
            assert version >= seen, f"version {version} after version {seen}"
            seen = version
            expected = synthetic_row(prompt, vocab_size=V, seed=self.seeds[version])
            assert np.array_equal(row, expected), f"a row of another version than {version}"
            self.answers[version] = self.answers.get(version, 0) + 1

    @asynccontextmanager
    async def running(self, pool: Pool, clients: int) -> AsyncIterator[None]:
        """Let clients request rows until the body ends; raises the first error of a client."""
        producers = [pool.producer("syn", timeout=DEADLINE_S) for _ in range(clients)]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.ask(producer, at)) for at, producer in enumerate(producers)]
                yield
                for task in tasks:
                    task.cancel()
        finally:
            for producer in producers:
                await producer.close()
