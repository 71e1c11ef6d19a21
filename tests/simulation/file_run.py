"""A run over a file (`lmpool batch run`) in a process that is started again until the run is finished."""

from __future__ import annotations

import asyncio
import json
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from lmpool.batch.folder import ERRORS
from lmpool.batch.run import BatchSettings, Pool, Progress, run_batch
from lmpool.batch.shards import open_batch
from lmpool.errors import LMPoolError
from lmpool.protocol.picks import top
from lmpool.synthetic import synthetic_row
from tests.simulation.loop import Process
from tests.simulation.workers import MODEL, URL

if TYPE_CHECKING:
    from tests.simulation.world import World

FIRST = 7
"""First token of the texts."""

_MAX_TEXT = 4  # Tokens of a text beyond its first three, at most one less.
_MAX_RESTART_S = 2.0  # Max seconds until a run that has ended starts again.
_TOP = 2  # Most likely tokens that the run requests at each position.


class _Silent(Progress):
    """Progress that prints nothing."""

    def shown(self, total: int, done: int) -> AbstractContextManager[None]:  # type: ignore[override]
        """See `Progress`."""
        return nullcontext()

    def advance(self, lines: int, positions: int) -> None:
        """See `Progress`."""


class FileRun:
    """See the module's docstring.

    Attributes:
        process: its present process.
    """

    def __init__(self, world: World) -> None:
        self.world, self.process, self.draw = world, Process(""), Random(f"run {world.plan.seed}")
        size = world.plan.vocab_size
        self.texts = [
            [FIRST, at // size, at % size, *(self.draw.randrange(size) for _ in range(self.draw.randrange(_MAX_TEXT)))]
            for at in range(world.plan.lines)
        ]
        self._is_over, self._starts, self._began = False, 0, 0.0

    async def supervise(self) -> None:
        """Start the run until it is finished, and check its results."""
        if not self.texts:
            return
        source, output = Path(self.world.folder, "in.jsonl"), Path(self.world.folder, "out")
        lines = ({"custom_id": str(at), "ids": ids} for at, ids in enumerate(self.texts))
        source.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        while not self._is_over:
            self._starts += 1
            self._began = self.world.loop.time()
            self.process = process = Process(f"run {self._starts}")
            ended = asyncio.Event()
            process.on_kill.append(ended.set)
            work = self._run(process, source, output)
            self.world.spawn(process, work, on_end=partial(self.world.loop.kill, process))
            await ended.wait()
            await asyncio.sleep(self.draw.random() * _MAX_RESTART_S)
        self._check(output)

    async def _run(self, process: Process, source: Path, output: Path) -> None:
        settings = BatchSettings(f"topk:{_TOP}", shard_lines=5, concurrency=8)
        try:
            async with Pool(MODEL).producer(URL, "wait") as producer:
                outcome = await run_batch(producer, source, output, settings, _Silent())
            self.world.log(f"{process.name}: {outcome}")
            self._is_over = True
        except LMPoolError as error:
            self.world.log(f"{process.name} ends: {type(error).__name__}: {error}")
            if not self.world.plan.faults:
                self.world.oracle.violation(f"{process.name} ended with {type(error).__name__}: {error}")

    def _check(self, output: Path) -> None:
        """Each text has its result, or an error that a worker's end explains."""
        oracle, size, found = self.world.oracle, self.world.plan.vocab_size, open_batch(output)
        for answer in found:
            ids = self.texts[int(answer["custom_id"])]
            tops = [top(synthetic_row(ids[: at + 1], vocab_size=size), _TOP) for at in range(len(ids))]
            given = [[list(row) for row in answer[name]] for name in ("logprobs", "top_ids")]
            if given != [[list(each.values) for each in tops], [list(each.ids) for each in tops]]:
                oracle.violation(f"the result of the text {ids} is wrong: {answer}")
        failed = (output / ERRORS).read_text().splitlines() if (output / ERRORS).exists() else []
        lines = [json.loads(line) for line in failed]
        for line in lines:
            oracle.check_failed_text(self.texts[line["line"] - 1], line["error"], self._began)
        numbers = sorted([*(int(answer["custom_id"]) for answer in found), *(line["line"] - 1 for line in lines)])
        if numbers != list(range(len(self.texts))):
            oracle.violation(f"of {len(self.texts)} texts, these have a result or an error: {numbers}")
