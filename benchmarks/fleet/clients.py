"""A process with many producers, which runs until its standard input ends: `python -m benchmarks.fleet.clients`."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import uvloop

from benchmarks.harness.line_protocol import serve
from lmpool.errors import LMPoolError
from lmpool.producer import Producer
from lmpool.synthetic import synthetic_row

_WAVE = 32  # Max producers that connect concurrently.
_CACHE_BYTES = 1 << 20  # Bytes of rows that each producer keeps: no prompt is requested twice.
_TIMEOUT_S = 60.0  # Seconds after which a request counts as lost.
_FIRST_TOKENS, _LAST_TOKENS = 32, 64  # Tokens of a new prompt, and tokens at which a growing prompt starts again.

Ids = list[int]


class Load:
    """The requests of one period, and their results.

    Attributes:
        sent: number of requests.
        wrong: number of rows that differ from the row that the synthetic model has for the prompt.
        failed: class and text of an error -> number of requests that raised it.
        latencies_s: seconds from the time at which a request was due until its row was returned.
        late_s: seconds by which requests were sent late, because this process had no processor time.
    """

    def __init__(self, vocab_size: int, check_every: int) -> None:
        self.sent = self.wrong = 0
        self.failed: Counter[str] = Counter()
        self.latencies_s: list[float] = []
        self.late_s: list[float] = []
        self._vocab_size, self._check_every = vocab_size, check_every

    async def request(self, producer: Producer, ids: Ids, due: float) -> None:
        """Request the row of a prompt that was due at a monotonic time, and check the row."""
        self.sent += 1
        self.late_s.append(time.monotonic() - due)
        number = self.sent
        try:
            row = await producer.logprobs(ids)
        except LMPoolError as error:
            self.failed[f"{type(error).__name__}: {error}"] += 1
            return
        self.latencies_s.append(time.monotonic() - due)
        if number % self._check_every == 0:
            self.wrong += not np.array_equal(row, synthetic_row(ids, vocab_size=self._vocab_size))

    def report(self) -> dict[str, Any]:
        """The results as JSON."""
        latencies, late = ([round(seconds, 6) for seconds in found] for found in (self.latencies_s, self.late_s))
        return {"sent": self.sent, "wrong": self.wrong, "failed": self.failed, "latencies_s": latencies, "late_s": late}


class Clients:
    """The producers of this process, and their prompts."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._producers: list[Producer] = []
        self._contexts: list[Ids] = []  # The growing prompt of each producer.
        self._random = random.Random()
        self._vocab_size = 0

    async def start(self, number: int, model: str, redis: str, prefix: str) -> float:
        """Connect producers, a few at a time; return the seconds until all are connected."""
        began, free = time.monotonic(), asyncio.Semaphore(_WAVE)

        async def start_one() -> Producer:
            async with free:
                producer = Producer(model, redis=redis, prefix=prefix, timeout=_TIMEOUT_S, cache_bytes=_CACHE_BYTES)
                return await self._stack.enter_async_context(producer)

        self._producers = await asyncio.gather(*[start_one() for _ in range(number)])
        self._vocab_size = self._producers[0].model.vocab_size
        self._contexts = [self._fresh() for _ in self._producers]
        return time.monotonic() - began

    async def load(self, rate: float, seconds: float, prompts: str, check_every: int) -> dict[str, Any]:
        """Send requests at random times, `rate` per second on average, whether or not earlier requests have ended."""
        load, tasks, next_prompt = Load(self._vocab_size, check_every), set(), self._chooser(prompts)
        due = began = time.monotonic()
        while (due := due + self._random.expovariate(rate)) < began + seconds:
            await asyncio.sleep(due - time.monotonic())
            client = self._random.randrange(len(self._producers))
            task = asyncio.create_task(load.request(self._producers[client], next_prompt(client), due))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)
        return load.report()

    async def saturate(self, in_flight: int, seconds: float, prompts: str, check_every: int) -> dict[str, Any]:
        """Keep `in_flight` requests in flight, spread over all producers."""
        load, next_prompt = Load(self._vocab_size, check_every), self._chooser(prompts)
        until = time.monotonic() + seconds

        async def repeat(client: int) -> None:
            while (due := time.monotonic()) < until:
                await load.request(self._producers[client], next_prompt(client), due)

        await asyncio.gather(*[repeat(number % len(self._producers)) for number in range(in_flight)])
        return load.report()

    def _chooser(self, prompts: str) -> Callable[[int], Ids]:
        """A function that returns the next prompt of a client."""

        def mixed(client: int) -> Ids:
            return self._grown(client) if self._random.random() < 0.5 else self._fresh()

        return {"fresh": lambda _: self._fresh(), "growing": self._grown, "mixed": mixed}[prompts]

    def _fresh(self) -> Ids:
        return self._random.choices(range(self._vocab_size), k=_FIRST_TOKENS)

    def _grown(self, client: int) -> Ids:
        """Extend the growing prompt of a client by one token; a prompt that has become long starts again."""
        ids = self._contexts[client]
        ids = self._fresh() if len(ids) >= _LAST_TOKENS else [*ids, self._random.randrange(self._vocab_size)]
        self._contexts[client] = ids
        return ids


async def main() -> None:
    """Respond to requests on stdin until stdin ends."""
    logging.basicConfig(level=logging.WARNING)
    async with AsyncExitStack() as stack:
        clients = Clients(stack)
        handlers: dict[str, Callable[..., Awaitable[Any]]] = {
            "start": clients.start, "load": clients.load, "saturate": clients.saturate, "close": stack.aclose,
        }  # fmt: skip
        await serve(handlers)


if __name__ == "__main__":
    uvloop.run(main())
