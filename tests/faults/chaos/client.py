"""Client process of a chaos run: sends requests until SIGTERM, checks each result, and logs how requests end.

Most of its tasks send one request after the other. Some let contexts grow in lockstep, and one task of the first
client puts adapters in service. The log has a line `b NUMBER TIME KIND` when a request begins, and a line
`e NUMBER TIME OUTCOME` when it ends. TIME is the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from lmpool.errors import LMPoolError
from lmpool.producer import Producer
from tests.faults.chaos.load import ADAPTED, ADAPTER, CHANGE, OK, Adapters, Load, Question
from tests.faults.chaos.settings import MODEL, ChaosSettings

_MIN_ROUNDS = 4
_MIN_CHANGES = 2
_LOOK_S = 0.2
_CHANGE_PAUSE_S = 4.0


class Client:
    """The requests of one client process.

    Args:
        settings: settings of the chaos run.
        number: number of the client.
        producer: producer that sends the requests.
        adapters: the folder of the adapters.
        log: file for the lines about the start and end of requests.
    """

    def __init__(self, settings: ChaosSettings, number: int, producer: Producer, adapters: Path, log: TextIO) -> None:
        self._settings = settings
        self._producer = producer
        self._load = Load(settings, number, producer, adapters)
        self._adapters = Adapters(settings.vocab_size, adapters) if number == 0 else None
        self._log = log
        self._requests = 0
        self._stopping = asyncio.Event()
        self._has_adapter = asyncio.Event()

    def stop(self) -> None:
        """Stop sending requests."""
        self._stopping.set()

    async def run(self) -> None:
        """Send requests until `stop`, but at least one of each kind; return when all requests have ended."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._look_for_adapter())
            for _ in range(self._settings.tasks):
                group.create_task(self._ask_on())
            for _ in range(self._settings.groups):
                group.create_task(self._grow())
            if self._adapters is not None:
                group.create_task(self._change_adapters(self._adapters))

    async def _ask_on(self) -> None:
        while not self._stopping.is_set():
            await self._ask(self._load.next())
            # All clients pause in the same second, because their processes share the monotonic clock.
            lull_s = max(0.0, 1.0 - time.monotonic() % self._settings.lulls_s)
            await self._pause(lull_s + self._load.draw_pause(self._settings.pause_s))

    async def _grow(self) -> None:
        rounds = 0
        while not self._stopping.is_set() or rounds < _MIN_ROUNDS:
            for question in self._load.rounds():
                await self._ask(question)
                rounds += 1
                if self._stopping.is_set() and rounds >= _MIN_ROUNDS:
                    break

    async def _change_adapters(self, adapters: Adapters) -> None:
        """Put the first adapter in service, and then replace it again and again."""
        changes = 0
        while not self._stopping.is_set() or changes < _MIN_CHANGES:
            place = await asyncio.to_thread(adapters.make)

            async def change(place: Path = place) -> list[str]:
                await self._producer.add_adapter(ADAPTER, place)
                return [OK]

            changes += await self._ask(Question(CHANGE, 1, change)) == [OK]
            await self._pause(self._load.draw_pause(_CHANGE_PAUSE_S))

    async def _look_for_adapter(self) -> None:
        while not self._has_adapter.is_set():
            with suppress(LMPoolError):
                if ADAPTER in await self._producer.adapters():
                    self._load.has_adapter = True
                    self._has_adapter.set()
            await asyncio.sleep(_LOOK_S)

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    async def _ask(self, question: Question) -> Sequence[str]:
        if question.kind == ADAPTED:
            await self._has_adapter.wait()
        first, self._requests = self._requests, self._requests + question.size
        numbers = range(first, self._requests)
        began = time.monotonic()
        self._log.writelines(f"b {number} {began:.4f} {question.kind}\n" for number in numbers)
        try:
            outcomes = await question.ask()
        except LMPoolError as error:
            outcomes = [f"{type(error).__name__}: {error}".replace("\n", " ")] * question.size
        ended = time.monotonic()
        self._log.writelines(f"e {n} {ended:.4f} {outcome}\n" for n, outcome in zip(numbers, outcomes, strict=True))
        return outcomes


async def _main(settings: ChaosSettings, number: int, url: str, prefix: str, adapters: Path, log: TextIO) -> None:
    # With almost no cache of its own, a producer requests each row from the pool again.
    producer = Producer(
        MODEL, redis=url, prefix=prefix, timeout=settings.timeout_s, when_absent=settings.when_absent,
        cache_bytes=number * 2**18,
    )  # fmt: skip
    client = Client(settings, number, producer, adapters, log)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, client.stop)
    async with producer:
        print("asking", flush=True)
        await client.run()
    print("done", flush=True)


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)
    given, number, url, prefix, adapters, path = sys.argv[1:]
    with Path(path).open("w", buffering=1) as log:
        asyncio.run(_main(ChaosSettings(**json.loads(given)), int(number), url, prefix, Path(adapters), log))
