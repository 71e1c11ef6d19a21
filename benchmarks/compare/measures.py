"""The measures of `make bench-compare`, and the lmpool pool on which a measure runs."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from benchmarks.compare.environments import Environment
from benchmarks.harness.comparison import FULL_V
from benchmarks.harness.processes import Child, Process, processor_seconds, run
from benchmarks.harness.testbed import Testbed, wait_until
from benchmarks.measures.real_model import smollm2_folder
from benchmarks.measures.transport import CONCURRENCY, CONCURRENCY_TINY, TINY_V

_READY_S = 180.0  # Max seconds until started workers are ready: some workers load models.
# A worker counts as idle below this share of a core, measured over this many seconds.
_IDLE_SHARE, _IDLE_S = 0.04, 0.5
_MAX_IDLE_S = 30.0  # Max seconds to wait for idle workers: in some commits, workers are never idle.
_MODEL = "compared"
_QUICK = 16  # A burst of a quick run has one sixteenth of the rows.
_FIRST_ORDINARY_ID = 3  # Lowest ordinary token id of SmolLM2; smaller ids are special tokens.

Arguments = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Measure:
    """A measure that runs on both pools.

    Attributes:
        meaning: definition of the measure's figures.
        do: name of the client's handler, see `compare_client`.
        arguments: function from a number of rows to the arguments of a burst, which both pools receive.
        rows: rows per burst.
        options: options of the workers; the default is a synthetic backend.
        workers: number of workers.
        cache_bytes: the producer's `cache_bytes`; None for the default.
        cached_rows: number of rows computed before the bursts, which fetch these rows from the cache.
        extra: the extra of the package lmpool that the workers need, such as "hf".
        pairs: default number of pairs of bursts.
    """

    meaning: str
    do: str
    arguments: Callable[[int], Arguments]
    rows: int
    options: Sequence[str] = ()
    workers: int = 1
    cache_bytes: int | None = None
    cached_rows: int = 0
    extra: str = "worker"
    pairs: int = 40


def _new(concurrency: int) -> Callable[[int], Arguments]:
    return lambda rows: {"rows": rows, "concurrency": concurrency}


def _draw(number: int, length: int) -> list[list[int]]:
    return [[random.randrange(_FIRST_ORDINARY_ID, FULL_V) for _ in range(length)] for _ in range(number)]


_TINY = ("--vocab-size", str(TINY_V))
_CACHED_ROWS = 1024  # Number of rows that are cached before the bursts: 192 MiB of float32 rows.
_CONTEXTS, _SHARED_TOKENS = 16, 64  # Number of growing contexts; number of tokens that all contexts share.

MEASURES = {
    "tiny": Measure("new rows/s, V = 64", "new", _new(CONCURRENCY_TINY), 16_384, _TINY),
    "new-f32": Measure("new rows/s, V = 49,152, f32", "new", _new(CONCURRENCY), 4096),
    "new-bf16": Measure("new rows/s, V = 49,152, bf16", "new", _new(CONCURRENCY), 6144, ("--encoding", "bf16")),
    "cached": Measure(
        "rows/s from the cache in Redis, V = 49,152, f32",
        "again",
        lambda rows: {"times": max(1, rows // _CACHED_ROWS), "concurrency": CONCURRENCY},
        8 * _CACHED_ROWS,
        cache_bytes=0,
        cached_rows=_CACHED_ROWS,
    ),
    "alone-tiny": Measure("1 ÷ p50 of one request alone, V = 64", "alone", lambda n: {"requests": n}, 512, _TINY),
    "alone-f32": Measure("1 ÷ p50 of one request alone, V = 49,152", "alone", lambda n: {"requests": n}, 512),
    "scaling": Measure(
        "new rows/s of 4 workers with steps of 20 ms, V = 64",
        "new",
        _new(CONCURRENCY_TINY),
        8192,
        (*_TINY, "--step-ms", "20"),
        workers=4,
    ),
    "hf-random": Measure(
        "rows/s for random prompts of 32 tokens, SmolLM2-135M f32",
        "together",
        lambda rows: {"prompts": _draw(rows, 32)},
        64,
        ("--backend", "hf", "--device", "cpu"),
        extra="hf",
        pairs=10,
    ),
    "hf-shared": Measure(
        "rows/s for 16 contexts that share 64 tokens and grow token by token, SmolLM2-135M f32",
        "extend",
        lambda rows: {
            "shared": _draw(1, _SHARED_TOKENS)[0],
            "tokens": _draw(_CONTEXTS, max(1, rows // _CONTEXTS)),
        },
        256,
        ("--backend", "hf", "--device", "cpu"),
        extra="hf",
        pairs=10,
    ),
}
DEFAULT_MEASURES = ("tiny", "new-f32", "new-bf16", "cached", "alone-tiny", "alone-f32")
"""The measures that run if `--measures` is not given."""


@dataclass(frozen=True, slots=True)
class Burst:
    """The figures of one burst, a short series of requests.

    Attributes:
        rate: rows or requests per second.
        processor: process -> microseconds of processor time per row; "together" is the sum.
    """

    rate: float
    processor: dict[str, float]


class Pool:
    """Workers and a client of one side while a measure runs; all of them are idle between bursts."""

    def __init__(self, testbed: Testbed, environment: Environment, measure: Measure) -> None:
        self._testbed = testbed
        self._environment = environment
        self._measure = measure
        # Separate the shared memory of the pools: rows are keyed by model and prompt, so a client would read rows
        # that the other pool computed.
        self._variables = {"PYTHONPATH": "", "LMPOOL_SHM_DIR": str(testbed.folder)}
        self._client: Child
        self._processes: dict[str, list[int]] = {}

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Start and warm up the processes; they end with the `with` block."""
        measure = self._measure
        with ExitStack() as stack:
            workers = [stack.enter_context(self._worker()) for _ in range(measure.workers)]
            self._await(workers)
            options = [] if measure.cache_bytes is None else ["--cache-bytes", str(measure.cache_bytes)]
            arguments = ["--redis", self._testbed.url, "--model", _MODEL, *options]
            child = self._testbed.child(
                "clients.compare_client", *arguments, python=self._environment.python, **self._variables
            )
            self._client = stack.enter_context(child)
            self._processes = {
                "client": [child.pid],
                "workers": [worker.pid for worker in workers],
                "server": [self._testbed.server],
            }
            self._wait_until_idle()
            if measure.cached_rows:
                self._client.request("new", rows=measure.cached_rows, concurrency=CONCURRENCY)
            self.burst(self.draw())
            yield

    def draw(self) -> Arguments:
        """Draw the arguments of a burst, for both pools."""
        return self._measure.arguments(self._rows)

    def burst(self, arguments: Arguments) -> Burst:
        """Run one burst."""
        before = self._used()
        taken = self._client.request(self._measure.do, **arguments)
        seconds = float(taken["seconds"] if isinstance(taken, dict) else taken)
        # The handler `again` requests all cached rows `times` times.
        rows = arguments["times"] * _CACHED_ROWS if "times" in arguments else self._rows
        used = {name: (after - before[name]) / rows * 1e6 for name, after in self._used().items()}
        rate = 1 / seconds if self._measure.do == "alone" else rows / seconds
        return Burst(rate, {**used, "together": sum(used.values())})

    def _wait_until_idle(self) -> None:
        """Wait until the workers have finished start-up work, such as creating shared memory."""
        until = time.monotonic() + _MAX_IDLE_S
        while time.monotonic() < until:
            before = self._used()["workers"]
            time.sleep(_IDLE_S)
            if self._used()["workers"] - before <= _IDLE_S * _IDLE_SHARE * self._measure.workers:
                return

    @property
    def _rows(self) -> int:
        return self._testbed.scaled(self._measure.rows, max(_CONTEXTS, self._measure.rows // _QUICK))

    def _used(self) -> dict[str, float]:
        return {name: sum(processor_seconds(pid) for pid in pids) for name, pids in self._processes.items()}

    def _worker(self) -> Process:
        options = list(self._measure.options)
        model = str(smollm2_folder()) if "hf" in options else _MODEL
        backend = [] if "--backend" in options else ["--backend", "synthetic"]
        command = [self._environment.command, "worker", model, "--name", _MODEL, "--redis", self._testbed.url]
        return self._testbed.process("worker", *command, *backend, *options, **self._variables)

    def _await(self, workers: list[Process]) -> None:
        """Wait until the workers are ready, as `lmpool status` of their commit reports: keys differ between commits."""

        def are_ready() -> bool:
            for worker in workers:
                worker.check()
            models = json.loads(run(self._environment.command, "status", "--json", "--redis", self._testbed.url))
            states = [worker["state"] for model in models for worker in model["workers"]]
            return states.count("ready") >= len(workers)

        wait_until(are_ready, _READY_S, f"{len(workers)} workers of {self._environment.commit}")
