"""Batch runs in a mixed pool: each is killed at times, and continued by a process of either release."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

import lmpool.batch
from lmpool.protocol.picks import top
from lmpool.synthetic import synthetic_row
from tests.faults.chaos.fleet import Process

_TEXTS = 40  # Texts of one run.
_TOKENS = 5  # Tokens of a text.
_K = 4  # Most likely tokens to request at each position.
_FIRST_TOKEN = 1980  # First token of every text; no client of a chaos run uses it.


class Batches:
    """One batch run after the other.

    Args:
        folder: folder for inputs, outputs and logs.
        vocab_size: number of tokens of the model's vocabulary.
        options: command-line options that name the server, the prefix and the model.
        start: starts a process with a number, a command and a log.

    Attributes:
        finished: number of runs that ended, each with the right result of every text.
        continued: number of killed runs that another process continued.
        wrong: results that are missing or differ from the synthetic rows.
        failed: runs that ended with an error: exit code and last output.
    """

    def __init__(
        self, folder: Path, vocab_size: int, options: list[str], start: Callable[[int, list[str], Path], Process]
    ) -> None:
        self._folder, self._vocab_size, self._options, self._start = folder, vocab_size, options, start
        self._processes = self._runs = self.finished = self.continued = 0
        self.wrong: list[str] = []
        self.failed: list[str] = []
        self.process = self._next()

    def mend(self) -> None:
        """Continue a killed run, or check a run that has ended and begin the next one."""
        process = self.process
        if process.code is None:
            return
        if process.is_struck and process.code:
            self.continued += 1
            self.process = self._launch()
            return
        self.check()
        self.process = self._next()

    def kill(self) -> None:
        """Kill the process of the current run, if it has finished a shard: so each process makes progress."""
        if self._shards > self._shards_before:
            self.process.is_struck = True
            self.process.signal(signal.SIGKILL)

    def check(self) -> None:
        """Check the results of a run that has ended."""
        if self.process.code:
            self.failed.append(f"batch run ended with {self.process.code}: {self.process.last_words}")
            return
        batch = lmpool.batch.open(self._output)
        texts = self._texts()
        found = {answer["custom_id"]: answer for answer in batch}
        for number, ids in enumerate(texts):
            expected = [top(synthetic_row(ids[: at + 1], vocab_size=self._vocab_size), _K) for at in range(len(ids))]
            result = found.get(f"text-{number}")
            values = np.stack([largest.values for largest in expected])
            tokens = np.stack([largest.ids for largest in expected])
            if result is None or (result["logprobs"] != values).any() or (result["top_ids"] != tokens).any():
                self.wrong.append(f"text {number} of run {self._runs}")
        self.finished += 1

    @property
    def _shards(self) -> int:
        return len(list(self._output.glob("shard-*.jsonl")))

    @property
    def _output(self) -> Path:
        return self._folder / f"out-{self._runs}"

    def _texts(self) -> list[list[int]]:
        generator = np.random.default_rng(self._runs)
        tokens = generator.integers(0, self._vocab_size, (_TEXTS, _TOKENS))
        return [[_FIRST_TOKEN, self._runs % self._vocab_size, *text] for text in tokens.tolist()]

    def _next(self) -> Process:
        self._runs += 1
        lines = (json.dumps({"custom_id": f"text-{number}", "ids": ids}) for number, ids in enumerate(self._texts()))
        (self._folder / f"in-{self._runs}.jsonl").write_text("\n".join(lines) + "\n")
        return self._launch()

    def _launch(self) -> Process:
        self._processes += 1
        self._shards_before = self._shards
        command = [sys.executable, "-m", "lmpool", "batch", "run", str(self._folder / f"in-{self._runs}.jsonl")]
        command += [str(self._output), "--what", f"topk:{_K}", "--shard-lines", "5", "--concurrency", "4"]
        return self._start(self._processes, [*command, *self._options], self._folder / f"batch-{self._processes}.log")
