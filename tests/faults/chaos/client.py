"""One client process: asks for rows until SIGTERM, compares each, and writes down how every request went.

Half of the prompts are new; the others are those that all clients ask for in the same two seconds. One request in ten
is a batch. A line `b NUMBER TIME` begins requests and `e NUMBER TIME OUTCOME` ends them, with the time of the monotonic
clock, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import random
import signal
import sys
import time
from pathlib import Path
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import LMPoolError
from lmpool.producer import Producer
from lmpool.synthetic import synthetic_row
from tests.faults.chaos.settings import ChaosSettings

_BATCH = 8
_SHARED = 40
_EPOCH_S = 2.0
_SHARED_FIRST = 2000
"""The first token of prompts that all clients share; those of one client begin with its number."""


class Client:
    """Asks under the settings of a run.

    Args:
        settings: the run.
        number: which of its clients.
        producer: what it asks.
        log: where it writes.
    """

    def __init__(self, settings: ChaosSettings, number: int, producer: Producer, log: TextIO) -> None:
        self._settings = settings
        self._number = number
        self._producer = producer
        self._log = log
        self._draw = random.Random(settings.seed * 100 + number)
        self._fresh = 0
        self._requests = 0
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Begin no more requests."""
        self._stopping.set()

    async def run(self) -> None:
        """Ask until `stop`, and until all requests have ended."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._settings.tasks):
                group.create_task(self._ask_on())

    async def _ask_on(self) -> None:
        while not self._stopping.is_set():
            await self._ask([self._prompt() for _ in range(_BATCH if self._draw.random() < 0.1 else 1)])
            try:
                async with asyncio.timeout(self._draw.expovariate(1 / self._settings.pause_s)):
                    await self._stopping.wait()
            except TimeoutError:
                pass

    def _prompt(self) -> list[int]:
        size = self._settings.vocab_size
        if self._draw.random() < 0.5:
            epoch = int(time.monotonic() / _EPOCH_S)
            return [_SHARED_FIRST, epoch % size, epoch // size % size, self._draw.randrange(_SHARED)]
        self._fresh += 1
        return [self._number, self._fresh // size, self._fresh % size]

    async def _ask(self, prompts: list[list[int]]) -> None:
        first, self._requests = self._requests, self._requests + len(prompts)
        numbers = range(first, self._requests)
        began = time.monotonic()
        self._log.writelines(f"b {number} {began:.4f}\n" for number in numbers)
        outcomes = await self._outcomes(prompts)
        ended = time.monotonic()
        self._log.writelines(f"e {n} {ended:.4f} {outcome}\n" for n, outcome in zip(numbers, outcomes, strict=True))

    async def _outcomes(self, prompts: list[list[int]]) -> list[str]:
        try:
            if len(prompts) == 1:
                rows = (await self._producer.logprobs(prompts[0]))[np.newaxis]
            else:
                rows = await self._producer.batch_logprobs(prompts)
        except LMPoolError as error:
            return [f"{type(error).__name__}: {error}".replace("\n", " ")] * len(prompts)
        return ["ok" if self._is_right(prompt, row) else "wrong" for prompt, row in zip(prompts, rows, strict=True)]

    def _is_right(self, prompt: list[int], row: NDArray[np.float32]) -> bool:
        return row.tobytes() == synthetic_row(prompt, vocab_size=self._settings.vocab_size).tobytes()


async def _main(settings: ChaosSettings, number: int, url: str, prefix: str, log: TextIO) -> None:
    # Those that keep hardly anything themselves ask the pool again.
    producer = Producer("syn", redis=url, prefix=prefix, timeout=settings.timeout_s, cache_bytes=number * 2**18)
    client = Client(settings, number, producer, log)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, client.stop)
    async with producer:
        print("asking", flush=True)
        await client.run()
    print("done", flush=True)


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)
    given, number, url, prefix, path = sys.argv[1:]
    with Path(path).open("w", buffering=1) as log:
        asyncio.run(_main(ChaosSettings(**json.loads(given)), int(number), url, prefix, log))
