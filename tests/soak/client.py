"""Client process of a soak run: sends requests until SIGTERM, checks each result, and reports to the run's program.

The report is a file with one JSON object per line: a `status` each second, and one line for each request that ended
wrong, late or with an exception, or that should have ended. Times are of the monotonic clock of the machine.
"""

from __future__ import annotations

import asyncio
import faulthandler
import itertools
import json
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from lmpool.errors import AdapterRefused, DeadlineExceeded, LMPoolError
from lmpool.producer import Producer
from tests.faults.chaos.settings import MODEL, ChaosSettings
from tests.soak.traffic import ADAPTED, ADAPTER, HURRIED, Request, Traffic, WrongValue

_STATUS_S = 1.0
_CLOCK_S = 0.01  # Max seconds by which a request ends before its deadline, because clocks and timers are inexact.
_OVERDUE_S = 30.0  # Seconds after its deadline at which a request without an end counts as lost; > any freeze.


class Client:
    """The requests of one client process.

    Args:
        settings: settings of the run.
        traffic: draws the requests.
        report: file for the lines of the report.
    """

    def __init__(self, settings: ChaosSettings, traffic: Traffic, report: TextIO) -> None:
        self._settings = settings
        self._traffic = traffic
        self._report = report
        self._stopping = asyncio.Event()
        self._numbers = itertools.count()
        self._pending: dict[int, tuple[Request, float]] = {}
        self._ended: Counter[str] = Counter()
        self._expired: Counter[str] = Counter()
        self.needs_adapter = asyncio.Event()

    def stop(self) -> None:
        """Send no more requests."""
        self._stopping.set()

    async def run(self) -> None:
        """Send requests until `stop`; return when all have ended."""
        reporting = asyncio.create_task(self._report_status())
        async with asyncio.TaskGroup() as group:
            for _ in range(self._settings.tasks):
                group.create_task(self._ask_on())
            for _ in range(self._settings.groups):
                group.create_task(self._grow())
        reporting.cancel()
        self._write_status()

    async def serve_adapter(self, producer: Producer, folder: Path) -> None:
        """Put an adapter in service again whenever a request does not find it, or another one if it is refused."""
        number = 0
        while True:
            place = folder / str(number)
            place.mkdir(parents=True, exist_ok=True)
            (place / "weights").write_text(f"adapter {number}")
            self.needs_adapter.clear()
            try:
                self._traffic.revision = await producer.add_adapter(ADAPTER, place)
                await self.needs_adapter.wait()
            except AdapterRefused:  # A worker was killed while it loaded the adapter, which is refused for ten minutes.
                number += 1
            except LMPoolError:  # A fault: the server may be down, or may have lost the adapter again.
                await asyncio.sleep(_STATUS_S)

    async def _ask_on(self) -> None:
        while not self._stopping.is_set():
            await self._ask(self._traffic.next())

    async def _grow(self) -> None:
        while not self._stopping.is_set():
            for request in self._traffic.rounds():
                await self._ask(request)
                if self._stopping.is_set():
                    break

    async def _ask(self, request: Request) -> None:
        number, began = next(self._numbers), time.monotonic()
        self._pending[number] = request, began
        try:
            await request.ask()
        except WrongValue as wrong:
            self._write("wrong", request, began, prompt=wrong.prompt, got=wrong.got, expected=wrong.expected)
        except Exception as error:  # noqa: BLE001  every exception is an outcome, which the run's program judges
            is_expired = time.monotonic() - began >= request.timeout_s - _CLOCK_S
            if request.kind == HURRIED and isinstance(error, DeadlineExceeded) and is_expired:
                self._expired[type(error).__name__] += request.size
            else:
                self._write("error", request, began, error=type(error).__name__, text=str(error)[:500])
            if request.kind == ADAPTED:
                self._traffic.revision = ""
                self.needs_adapter.set()
        del self._pending[number]
        if time.monotonic() - began > request.timeout_s + self._settings.grace_s:
            self._write("late", request, began)
        self._ended[request.kind] += request.size

    async def _report_status(self) -> None:
        while True:
            await asyncio.sleep(_STATUS_S)
            now = time.monotonic()
            overdue = [number for number, (r, began) in self._pending.items() if now > began + r.timeout_s + _OVERDUE_S]
            for number in overdue:
                request, began = self._pending[number]
                self._write("never ended", request, began)
                self._pending[number] = request, now  # Report it again only after the same time.
            self._write_status()

    def _write_status(self) -> None:
        fields = {"ended": self._ended, "expired": self._expired, "pending": len(self._pending)}
        self._report.write(json.dumps({"event": "status", "at": time.monotonic(), **fields}) + "\n")

    def _write(self, event: str, request: Request, began: float, **fields: Any) -> None:
        line = {"event": event, "kind": request.kind, "size": request.size, "timeout_s": request.timeout_s}
        self._report.write(json.dumps({**line, "began": began, "at": time.monotonic(), **fields}) + "\n")


async def _main(settings: ChaosSettings, number: int, url: str, prefix: str, adapters: Path, report: TextIO) -> None:
    options: Any = {"redis": url, "prefix": prefix, "timeout": settings.timeout_s, "when_absent": "wait"}
    # A small cache of its own, so that most popular rows come from the pool's cache.
    async with (
        Producer(MODEL, cache_bytes=2**16, **options) as producer,
        Producer(MODEL, cache_bytes=0, priority="bulk", **options) as bulk,
    ):
        traffic = Traffic(settings, number, producer, bulk)
        await traffic.open()
        client = Client(settings, traffic, report)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, client.stop)
        serving = asyncio.create_task(client.serve_adapter(producer, adapters)) if number == 0 else None
        print("asking", flush=True)
        await client.run()
        if serving is not None:
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving
    print("done", flush=True)


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)
    given, number, url, prefix, adapters, path = sys.argv[1:]
    with Path(path).open("w", buffering=1) as report:
        asyncio.run(_main(ChaosSettings(**json.loads(given)), int(number), url, prefix, Path(adapters), report))
