"""The pool with a real model against genlm-backend in one process."""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.harness.pairs import Goal, Result, Side, Take, alternate
from benchmarks.harness.processes import REPOSITORY, BenchmarkError, Child, run
from benchmarks.harness.workplace import Workplace
from benchmarks.measures.asking import Asked, agree, compare
from benchmarks.measures.transport import FULL_V
from benchmarks.peers.environment import peers_python

Ids = list[int]

_PROMPTS, _PROMPT_TOKENS = 64, 32
_CONTEXTS, _SHARED_TOKENS, _STEPS = 16, 64, 16
_LONG_TOKENS, _QUICK_LONG_TOKENS, _SHORT_TOKENS, _LONG_REPEATS = 8192, 2048, 3, 2
_FIRST_ORDINARY_ID = 3


def hf_random(place: Workplace) -> list[Result]:
    """Prompts that share nothing."""
    with ExitStack() as stack:
        contest = _Contest(stack, place)
        sides: dict[str, Take] = {"pool": contest.pool_random, "peer": contest.peer_random}
        for take in sides.values():
            take()
        samples = alternate(sides, place.repeats)
    meaning = (
        f"rows/s for {_PROMPTS} random prompts of {_PROMPT_TOKENS} tokens, SmolLM2-135M f32, through the pool (one "
        f"producer, one hf worker) ÷ genlm-backend's AsyncTransformer (batch_size 64), the same prompts"
    )
    return [Result("hf-random", meaning, Goal(1.5), *[Side(side, "rows/s", taken) for side, taken in samples.items()])]


def hf_shared(place: Workplace) -> list[Result]:
    """Contexts that share a prompt and grow token by token."""
    with ExitStack() as stack:
        contest = _Contest(stack, place)
        # Two steps are enough to warm up: the peer as it comes takes half a minute for all.
        contest.pool_shared(2), contest.peer_shared(2, cache_kv=False), contest.peer_shared(2, cache_kv=True)
        samples = alternate(
            {
                "pool": contest.pool_shared,
                "as it comes": lambda: contest.peer_shared(cache_kv=False),
                "cache_kv": lambda: contest.peer_shared(cache_kv=True),
            },
            place.repeats,
        )
    meaning = (
        f"rows/s for {_CONTEXTS} contexts that share a prompt of {_SHARED_TOKENS} tokens and grow token by token, "
        f"{_STEPS} rows each, SmolLM2-135M f32, through the pool ÷ AsyncTransformer "
    )
    ours = Side("pool", "rows/s", samples["pool"])
    plain, kept = (Side(name, "rows/s", samples[name]) for name in ("as it comes", "cache_kv"))
    return [
        Result("hf-shared", f"{meaning}as it comes", Goal(10), ours, plain),
        Result("hf-shared-kv", f"{meaning}after its `cache_kv` on the shared prompt, untimed", Goal(2.5), ours, kept),
    ]


def hf_direct(place: Workplace) -> list[Result]:
    """What the pool costs beside a model of transformers called directly."""
    device = os.environ.get("LMPOOL_DEVICE", "cpu")
    dtype = "float32" if device == "cpu" else "bfloat16"
    with ExitStack() as stack:
        model = str(smollm2_folder())
        options = ("--backend", "hf", "--device", device, "--dtype", dtype, "--kv-cache-bytes", "0")
        stack.enter_context(place.workers("smollm2", model, *options))
        ours = stack.enter_context(place.producer("smollm2"))
        peer = stack.enter_context(place.child("peers.hf_peer", model, device, dtype))
        samples = compare(place, ours, peer, place.scaled(64 if device == "cpu" else 4096, 64), narrow=device != "cpu")
    meaning = (
        f"rows/s for distinct prompts of {_PROMPT_TOKENS} tokens, SmolLM2-135M {dtype}, through the pool without a KV "
        f"cache ÷ transformers called directly in batches of 64, on {device}"
    )
    return [Result("hf-direct", meaning, None, *[Side(side, "rows/s", taken) for side, taken in samples.items()])]


def hf_long(place: Workplace) -> list[Result]:
    """How long short prompts wait beside a long one, which is computed in chunks or whole."""
    length = place.scaled(_LONG_TOKENS, _QUICK_LONG_TOKENS)
    with ExitStack() as stack:
        sides = {}
        for name, options in {"in chunks": (), "whole": ("--chunked-prefill-size", str(_LONG_TOKENS))}.items():
            served_as = name.replace(" ", "-")
            options = ("--backend", "hf", "--device", "cpu", *options)
            stack.enter_context(place.workers(served_as, str(smollm2_folder()), *options))
            sides[name] = stack.enter_context(place.producer(served_as))
        asked = Asked()
        taken: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        for _ in range(min(place.repeats, _LONG_REPEATS)):
            for name, side in sides.items():
                # One for each side: it is the same model, and the rows of both are in one cache.
                (prompt,) = asked.fresh(1, length)
                taken[name].append(side.ask("beside", within=900, prompt=prompt, short_tokens=_SHORT_TOKENS))
    waits = f"seconds that a prompt of {_SHORT_TOKENS} tokens waits, one after the other,"
    option = f"`--chunked-prefill-size {_LONG_TOKENS}`"
    beside = f"a prompt of {length:,} tokens, SmolLM2-135M f32, in chunks as usual ÷ whole, by {option}"
    figures: dict[str, tuple[str, Callable[[dict[str, Any]], float]]] = {
        "hf-long-median": (f"median {waits} beside {beside}", lambda taken: statistics.median(taken["waits"])),
        "hf-long-most": (f"most {waits} beside {beside}", lambda taken: max(taken["waits"])),
        "hf-long": (f"seconds for {beside}, with short ones beside it", lambda taken: taken["seconds"]),
    }
    return [
        Result(name, meaning, None, *[Side(side, "s", list(map(figure, answers))) for side, answers in taken.items()])
        for name, (meaning, figure) in figures.items()
    ]


def hf_waiting(place: Workplace) -> list[Result]:
    """The time of a step of the hf backend outside of its forward, with many waiting prompts."""
    steps = str(place.scaled(20, 3))
    taken = []
    for _ in range(place.repeats):
        printed = run(sys.executable, "-m", "benchmarks.clients.hf_steps", steps)
        taken.append(statistics.median(map(float, printed.split())))
    meaning = (
        "processor ms of a step of the hf backend outside of its forward, with 64 waiting prompts that extend cached "
        "prompts of 2,000 tokens by one token, tiny model on a CPU ÷ one ms"
    )
    limit = Side("one ms", "ms", [1.0] * len(taken))
    return [Result("hf-waiting", meaning, Goal(1, at_most=True), Side("hf", "ms", taken), limit)]


class _Contest:
    """Both sides with the model loaded, never busy at the same time; both are asked the same prompts in a round.

    Args:
        stack: ends the processes.
        place: where.
    """

    def __init__(self, stack: ExitStack, place: Workplace) -> None:
        model = str(smollm2_folder())
        stack.enter_context(place.workers("smollm2", model, "--backend", "hf", "--device", "cpu"))
        self._pool = stack.enter_context(place.producer("smollm2"))
        self._peer = stack.enter_context(place.child("peers.genlm_peer", model, python=peers_python()))
        self._random = random.Random()
        self._asked: dict[str, Any] = {}
        self._probe: list[float] = []

    def pool_random(self) -> float:
        """Rows per second for new random prompts."""
        self._asked = {"prompts": self._draw(_PROMPTS, _PROMPT_TOKENS)}
        return self._take(self._pool, "together", _PROMPTS)

    def peer_random(self) -> float:
        """Rows per second for the prompts that the pool had."""
        return self._take(self._peer, "together", _PROMPTS)

    def pool_shared(self, steps: int = _STEPS) -> float:
        """Rows per second for new contexts."""
        self._asked = {"shared": self._draw(1, _SHARED_TOKENS)[0], "tokens": self._draw(_CONTEXTS, steps)}
        return self._take(self._pool, "extend", _CONTEXTS * steps)

    def peer_shared(self, steps: int = _STEPS, *, cache_kv: bool) -> float:
        """Rows per second for the contexts that the pool had."""
        return self._take(self._peer, "extend", _CONTEXTS * steps, cache_kv=cache_kv)

    def _draw(self, number: int, length: int) -> list[Ids]:
        return [[self._random.randrange(_FIRST_ORDINARY_ID, FULL_V) for _ in range(length)] for _ in range(number)]

    def _take(self, side: Child, do: str, rows: int, **more: bool) -> float:
        answer = side.ask(do, **self._asked, **more)
        if side is self._pool:
            self._probe = answer["probe"]
        else:
            agree(self._probe, answer["probe"])
        return rows / float(answer["seconds"])


def smollm2_folder() -> Path:
    """SmolLM2 in float32, in the folder that the tests use too; written when it is not there."""
    folder = REPOSITORY / ".cache" / "models" / "smollm2-float32"
    if not (folder / "config.json").exists():
        script = str(REPOSITORY / "examples" / "smollm2.py")
        # In a process of its own, so that torch does not stay in this one's memory.
        done = subprocess.run([sys.executable, script, str(folder)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise BenchmarkError(f"the model cannot be written: {done.stderr[-2000:]}")
    return folder
