"""Measures bulk runs over files: their speed next to a producer with the same requests, and their peak memory."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
from contextlib import ExitStack
from pathlib import Path

from benchmarks.harness.pairs import Goal, Result, Side, alternate
from benchmarks.harness.processes import BenchmarkError, Child
from benchmarks.harness.testbed import Testbed
from benchmarks.measures.real_model import smollm2_folder

_V, _FIRST_ORDINARY_ID = 512, 3  # Vocabulary size; token ids below 3 are special in SmolLM2.
_SHORT_TOKENS, _STEP_MS = 12, 5  # Tokens per short text; milliseconds per step of the synthetic worker.
_TEXTS, _TEXT_TOKENS, _TOP = 64, 128, 32  # Texts for the real model; tokens per text; top-k tokens per position.
_MAX_MB, _LINES = 300, 1_000_000  # Max megabytes of memory of a run; number of texts in this run.


def bulk_run(testbed: Testbed) -> list[Result]:
    """Measure many short texts on a synthetic worker with slow steps, and longer texts on a real model."""
    results = []
    for name, model, options, lines, tokens, top in (
        ("bulk-run", "synthetic", ("--vocab-size", str(_V), "--step-ms", str(_STEP_MS)), 40_000, _SHORT_TOKENS, 8),
        ("bulk-run-hf", str(smollm2_folder()), ("--backend", "hf", "--device", "cpu"), _TEXTS, _TEXT_TOKENS, _TOP),
    ):
        backend = () if "--backend" in options else ("--backend", "synthetic")
        with ExitStack() as stack:
            stack.enter_context(testbed.workers(name, model, *backend, *options))
            arguments = ("--redis", testbed.url, "--model", name)
            client = stack.enter_context(testbed.child("clients.bulk_client", *arguments))
            count = testbed.scaled(lines, min(lines, 2000))
            pair = _Pair(testbed, client, count, tokens, top)
            pair.run()
            samples = alternate({"batch run": pair.run, "producer": pair.stream}, testbed.repeats)
        meaning = (
            f"texts/s of a run over a file of {count:,} texts of {tokens} tokens, top-{top} at every position, "
            f"{'SmolLM2-135M f32, hf' if 'hf' in options else f'synthetic steps of {_STEP_MS} ms'} ÷ a producer in "
            "the same process that requests as many texts and discards the results"
        )
        results.append(
            Result(name, meaning, Goal(0.9), *[Side(side, "texts/s", taken) for side, taken in samples.items()])
        )
    return results


def bulk_memory(testbed: Testbed) -> list[Result]:
    """Measure the peak memory of a run over a million texts, as the kernel reports the memory at exit."""
    count = testbed.scaled(_LINES, 20_000)
    with testbed.workers("bulk", "synthetic", "--backend", "synthetic", "--vocab-size", str(_V)):
        source = write_texts(testbed.folder / "many.jsonl", count, 8, _V)
        command = ["lmpool", "batch", "run", str(source), str(testbed.folder / "many"), "--what", "topk:2"]
        log = testbed.folder / "bulk.log"
        with log.open("wb") as out:
            process = subprocess.Popen([*command, "--redis", testbed.url, "--model", "bulk"], stdout=out, stderr=out)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise BenchmarkError(f"the run ended with {process.returncode}: {log.read_text('utf-8')[-1000:]}")
    meaning = f"peak memory of the process of a run over {count:,} texts of 8 tokens ÷ the allowed memory"
    peak = Side("batch run", "MB", [usage.ru_maxrss / 1000])
    return [Result("bulk-memory", meaning, Goal(1, at_most=True), peak, Side("allowed", "MB", [_MAX_MB]))]


class _Pair:
    """A bulk run and a producer; each sample computes the top-`top` tokens of `count` new texts of `tokens` tokens."""

    def __init__(self, testbed: Testbed, client: Child, count: int, tokens: int, top: int) -> None:
        self._folder = testbed.folder
        self._client = client
        self._count = count
        self._tokens = tokens
        self._top = top

    def run(self) -> float:
        """Texts per second of a run over a file."""
        source = self._source()
        seconds: float = self._client.request(
            "run", source=str(source), output=str(source.with_suffix("")), top=self._top
        )
        return self._count / seconds

    def stream(self) -> float:
        """Texts per second of a `Producer` that requests the results of these texts without `lmpool batch`."""
        seconds: float = self._client.request("stream", source=str(self._source()), top=self._top)
        return self._count / seconds

    def _source(self) -> Path:
        path = self._folder / f"texts-{next(_numbers)}.jsonl"
        return write_texts(path, self._count, self._tokens, _V)


_numbers = itertools.count()


def write_texts(path: Path, count: int, tokens: int, vocab_size: int) -> Path:
    """A JSONL file of random texts."""
    draw = random.Random()
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            ids = [draw.randrange(_FIRST_ORDINARY_ID, vocab_size) for _ in range(tokens)]
            file.write(json.dumps({"custom_id": f"text-{number}", "ids": ids}) + "\n")
    return path
