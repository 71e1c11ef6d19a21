"""Compares the pool with genlm-backend in one process, both with a real model."""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.harness.comparison import FULL_V, PromptSource, agree, compare
from benchmarks.harness.pairs import Goal, Result, Side, Take, alternate
from benchmarks.harness.processes import REPOSITORY, BenchmarkError, Child, run
from benchmarks.harness.testbed import Testbed
from benchmarks.peers.environment import peers_python

Ids = list[int]

_PROMPTS, _PROMPT_TOKENS = 64, 32  # Number of random prompts per sample; tokens per prompt.
_CONTEXTS, _SHARED_TOKENS, _STEPS = 16, 64, 16  # 16 contexts share 64 tokens, and each grows by 16 tokens.
_LONG_TOKENS, _QUICK_LONG_TOKENS = 8192, 2048  # Tokens of the long prompt, in a full run and in a quick run.
_SHORT_TOKENS, _LONG_REPEATS = 3, 2  # Tokens of a short prompt; samples with a long prompt, which take 90 s each.
_FIRST_ORDINARY_ID = 3  # Lowest ordinary token id of SmolLM2; smaller ids are special tokens.


def hf_random(testbed: Testbed) -> list[Result]:
    """Measure rows of random prompts that share no prefix."""
    with ExitStack() as stack:
        contest = _Contest(stack, testbed)
        sides: dict[str, Take] = {"pool": contest.pool_random, "peer": contest.peer_random}
        for take in sides.values():
            take()
        samples = alternate(sides, testbed.repeats)
    meaning = (
        f"rows/s for {_PROMPTS} random prompts of {_PROMPT_TOKENS} tokens, SmolLM2-135M f32, through the pool (one "
        f"producer, one hf worker) ÷ genlm-backend's AsyncTransformer (batch_size 64), the same prompts"
    )
    return [Result("hf-random", meaning, Goal(1.5), *[Side(side, "rows/s", taken) for side, taken in samples.items()])]


def hf_shared(testbed: Testbed) -> list[Result]:
    """Measure rows of contexts that share a prompt and grow token by token."""
    with ExitStack() as stack:
        contest = _Contest(stack, testbed)
        # Warm up with two steps only: with its defaults, genlm-backend takes half a minute for all steps.
        contest.pool_shared(2), contest.peer_shared(2, cache_kv=False), contest.peer_shared(2, cache_kv=True)
        samples = alternate(
            {
                "pool": contest.pool_shared,
                "defaults": lambda: contest.peer_shared(cache_kv=False),
                "cache_kv": lambda: contest.peer_shared(cache_kv=True),
            },
            testbed.repeats,
        )
    meaning = (
        f"rows/s for {_CONTEXTS} contexts that share a prompt of {_SHARED_TOKENS} tokens and grow token by token, "
        f"{_STEPS} rows each, SmolLM2-135M f32, through the pool ÷ AsyncTransformer "
    )
    ours = Side("pool", "rows/s", samples["pool"])
    plain, kept = (Side(name, "rows/s", samples[name]) for name in ("defaults", "cache_kv"))
    return [
        Result("hf-shared", f"{meaning}with its defaults", Goal(10), ours, plain),
        Result("hf-shared-kv", f"{meaning}after its `cache_kv` on the shared prompt, untimed", Goal(2.5), ours, kept),
    ]


def hf_direct(testbed: Testbed) -> list[Result]:
    """Measure the overhead of the pool over a transformers model that is called directly."""
    with ExitStack() as stack:
        model = str(smollm2_folder())
        stack.enter_context(
            testbed.workers("smollm2", model, "--backend", "hf", "--device", "cpu", "--kv-cache-bytes", "0")
        )
        ours = stack.enter_context(testbed.producer("smollm2"))
        peer = stack.enter_context(testbed.child("peers.hf_peer", model, "cpu", "float32"))
        samples = compare(testbed, ours, peer, _PROMPTS)
    meaning = (
        f"rows/s for distinct prompts of {_PROMPT_TOKENS} tokens, SmolLM2-135M float32, through the pool without a KV "
        "cache ÷ transformers called directly in batches of 64, on the CPU"
    )
    return [Result("hf-direct", meaning, None, *[Side(side, "rows/s", taken) for side, taken in samples.items()])]


def hf_long(testbed: Testbed) -> list[Result]:
    """Measure latencies of short prompts next to a long prompt, which the worker computes in chunks or in one step."""
    length = testbed.scaled(_LONG_TOKENS, _QUICK_LONG_TOKENS)
    with ExitStack() as stack:
        sides = {}
        for name, options in {"in chunks": (), "whole": ("--chunked-prefill-size", str(_LONG_TOKENS))}.items():
            served_as = name.replace(" ", "-")
            options = ("--backend", "hf", "--device", "cpu", *options)
            stack.enter_context(testbed.workers(served_as, str(smollm2_folder()), *options))
            sides[name] = stack.enter_context(testbed.producer(served_as))
        source = PromptSource()
        taken: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        for _ in range(min(testbed.repeats, _LONG_REPEATS)):
            for name, side in sides.items():
                # Draw a new prompt for each side: both sides serve the same model, so they share cached rows.
                (prompt,) = source.draw(1, length)
                taken[name].append(
                    side.request("with_short_prompts", within=900, prompt=prompt, short_tokens=_SHORT_TOKENS)
                )
    latency = f"latency in seconds of prompts of {_SHORT_TOKENS} tokens, one after the other,"
    option = f"`--chunked-prefill-size {_LONG_TOKENS}`"
    long = f"a prompt of {length:,} tokens, SmolLM2-135M f32, computed in chunks (default) ÷ in one step, {option}"
    figures: dict[str, tuple[str, Callable[[dict[str, Any]], float]]] = {
        "hf-long-median": (f"median {latency} next to {long}", lambda taken: statistics.median(taken["latencies"])),
        "hf-long-most": (f"maximum {latency} next to {long}", lambda taken: max(taken["latencies"])),
        "hf-long": (f"seconds for {long}, with short prompts next to it", lambda taken: taken["seconds"]),
    }
    return [
        Result(name, meaning, None, *[Side(side, "s", list(map(figure, answers))) for side, answers in taken.items()])
        for name, (meaning, figure) in figures.items()
    ]


def hf_waiting(bed: Testbed) -> list[Result]:
    """Measure the time of a step of the hf backend outside of its forward, while many prompts wait."""
    steps = str(bed.scaled(20, 3))
    taken = []
    for _ in range(bed.repeats):
        printed = run(sys.executable, "-m", "benchmarks.clients.hf_steps", steps)
        taken.append(statistics.median(map(float, printed.split())))
    meaning = (
        "processor ms of a step of the hf backend outside of its forward, with 64 waiting prompts that extend cached "
        "prompts of 2,000 tokens by one token, tiny model on a CPU ÷ one ms"
    )
    limit = Side("one ms", "ms", [1.0] * len(taken))
    return [Result("hf-waiting", meaning, Goal(1, at_most=True), Side("hf", "ms", taken), limit)]


class _Contest:
    """The pool and genlm-backend with one model, in turns; both receive the same prompts in a round."""

    def __init__(self, stack: ExitStack, testbed: Testbed) -> None:
        model = str(smollm2_folder())
        stack.enter_context(testbed.workers("smollm2", model, "--backend", "hf", "--device", "cpu"))
        self._pool = stack.enter_context(testbed.producer("smollm2"))
        self._peer = stack.enter_context(testbed.child("peers.genlm_peer", model, python=peers_python()))
        self._random = random.Random()
        self._request: dict[str, Any] = {}
        self._probe: list[float] = []

    def pool_random(self) -> float:
        """Rows per second for new random prompts."""
        self._request = {"prompts": self._draw(_PROMPTS, _PROMPT_TOKENS)}
        return self._take(self._pool, "together", _PROMPTS)

    def peer_random(self) -> float:
        """Rows per second for the prompts that the pool received last."""
        return self._take(self._peer, "together", _PROMPTS)

    def pool_shared(self, steps: int = _STEPS) -> float:
        """Rows per second for new contexts."""
        self._request = {"shared": self._draw(1, _SHARED_TOKENS)[0], "tokens": self._draw(_CONTEXTS, steps)}
        return self._take(self._pool, "extend", _CONTEXTS * steps)

    def peer_shared(self, steps: int = _STEPS, *, cache_kv: bool) -> float:
        """Rows per second for the contexts that the pool received last."""
        return self._take(self._peer, "extend", _CONTEXTS * steps, cache_kv=cache_kv)

    def _draw(self, number: int, length: int) -> list[Ids]:
        return [[self._random.randrange(_FIRST_ORDINARY_ID, FULL_V) for _ in range(length)] for _ in range(number)]

    def _take(self, side: Child, do: str, rows: int, **more: bool) -> float:
        answer = side.request(do, **self._request, **more)
        if side is self._pool:
            self._probe = answer["probe"]
        else:
            agree(self._probe, answer["probe"])
        return rows / float(answer["seconds"])


def smollm2_folder() -> Path:
    """The folder of SmolLM2 in float32, which the tests share; write the model if it is missing."""
    folder = REPOSITORY / ".cache" / "models" / "smollm2-float32"
    if not (folder / "config.json").exists():
        script = str(REPOSITORY / "examples" / "smollm2.py")
        # Use a separate process, so that torch does not stay in this process's memory.
        done = subprocess.run([sys.executable, script, str(folder)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise BenchmarkError(f"{script} failed to write the model: {done.stderr[-2000:]}")
    return folder
