"""Clients that request rows while versions of the weights change, and check each row against its version."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from lmpool.producer import Producer
from lmpool.synthetic import synthetic_row
from tests.support.pool import DEADLINE_S, Pool, V, until_async

PROMPTS = tuple([first, second] for first in range(10) for second in range(10))
"""The prompts that clients draw from: few, so that some answers come from caches."""


class Rows(Protocol):
    """An oracle: the weights and the rows of every version."""

    model: str
    options: tuple[str | int, ...]

    def weights(self, version: int) -> dict[str, Any]:
        """The full weights of a version."""
        ...

    def rows(self, version: int, prompt: list[int]) -> np.ndarray:
        """The row of a prompt in a version."""
        ...


def weights(seed: int) -> dict[str, np.ndarray]:
    """A full version of the synthetic model's weights."""
    return {"seed": np.array(seed)}


class Seeds:
    """The versions of a synthetic model: `seeds` has the seed of each version."""

    model = "syn"
    options: tuple[str | int, ...] = ()

    def __init__(self, seeds: Mapping[int, int]) -> None:
        self._seeds = seeds

    def weights(self, version: int) -> dict[str, np.ndarray]:
        """The full weights of a version."""
        return weights(self._seeds[version])

    def rows(self, version: int, prompt: list[int]) -> np.ndarray:
        """The row of a prompt in a version."""
        return synthetic_row(prompt, vocab_size=V, seed=self._seeds[version])


@dataclass
class Traffic:
    """The answers that clients got.

    Attributes:
        versions: the oracle.
        tolerance: max difference of an entry from the oracle's.
        answers: number of checked answers of each version.
        prompts: the prompts that clients draw from.
        pause_s: seconds for which a client pauses after each answer.
        seen: version of the last answer of each client.
    """

    versions: Rows
    tolerance: float = 0.0
    prompts: Sequence[list[int]] = PROMPTS
    pause_s: float = 0.0
    seen: dict[int, int] = field(default_factory=dict)
    answers: dict[int, int] = field(default_factory=dict)

    async def ask(self, producer: Producer, number: int) -> None:
        """Request rows one after another; each must be of the version that it names, and versions only increase."""
        draw, self.seen[number] = random.Random(number), 0
        while True:
            prompt = draw.choice(self.prompts)
            row, version = await producer.versioned(producer.logprobs, prompt)
            assert version >= self.seen[number], f"version {version} after version {self.seen[number]}"
            self.seen[number] = version
            error = float(np.abs(row - self.versions.rows(version, prompt)).max())
            assert error <= self.tolerance, f"a row that is off by {error} from version {version}"
            self.answers[version] = self.answers.get(version, 0) + 1
            await asyncio.sleep(self.pause_s)  # An answer from the producer's memory takes no turn of the event loop.

    async def until_used(self, version: int) -> None:
        """Wait until a client has got a row of a version."""

        async def is_used() -> bool:
            return version in self.answers

        await until_async(is_used, f"a client gets a row of version {version}")

    @asynccontextmanager
    async def running(self, pool: Pool, clients: int) -> AsyncIterator[None]:
        """Let clients request rows until the body ends; raises the first error of a client."""
        producers = [pool.producer("syn", timeout=DEADLINE_S, when_absent="wait") for _ in range(clients)]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.ask(producer, at)) for at, producer in enumerate(producers)]
                yield
                for task in tasks:
                    task.cancel()
        finally:
            for producer in producers:
                await producer.close()
