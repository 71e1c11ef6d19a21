"""A process that computes results for every line of a file, with a run over the file or with a producer."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path

import uvloop

from benchmarks.harness.line_protocol import serve
from lmpool.batch.run import BatchSettings, Progress, run_batch
from lmpool.producer import Producer

_CONCURRENCY = BatchSettings("scores").concurrency


class BulkClient:
    """Handlers that return timings of an open producer without a cache, and of runs over files."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer

    async def run(self, source: str, output: str, top: int) -> float:
        """Seconds of a run over a file, from its start until all shards are complete."""
        start = time.perf_counter()
        outcome = await run_batch(self._producer, Path(source), Path(output), BatchSettings(f"topk:{top}"), Progress())
        if outcome.errors or outcome.resumed:
            raise RuntimeError(f"the run ended with {outcome}")
        return time.perf_counter() - start

    async def stream(self, source: str, top: int) -> float:
        """Seconds to request the results of all lines with a producer; the time to read the file does not count."""
        lines = await asyncio.to_thread(Path(source).read_text, "utf-8")
        texts = iter([json.loads(line)["ids"] for line in lines.splitlines()])

        async def consume() -> None:
            for ids in texts:
                await self._producer.positions(ids, top=top)

        start = time.perf_counter()
        await asyncio.gather(*[consume() for _ in range(_CONCURRENCY)])
        return time.perf_counter() - start


async def main() -> None:
    """Respond to requests on stdin until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--redis", required=True)
    parser.add_argument("--model", required=True)
    given = parser.parse_args()
    async with Producer(given.model, redis=given.redis, cache_bytes=0, keep_answers=False, timeout=3600) as producer:
        client = BulkClient(producer)
        await serve({"run": client.run, "stream": client.stream})


if __name__ == "__main__":
    uvloop.run(main())
