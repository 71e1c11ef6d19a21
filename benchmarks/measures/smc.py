"""Sequential Monte Carlo (SMC) with genlm-control: on a pool, and on genlm-backend in one process."""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import Any

from benchmarks.harness.comparison import alternated
from benchmarks.harness.pairs import Goal, Result, Side
from benchmarks.harness.processes import Child
from benchmarks.harness.testbed import Testbed
from benchmarks.measures.real_model import smollm2_folder
from benchmarks.peers.environment import peers_python

_PARTICLES, _STEPS = 16, 32  # Particles per run, and tokens per particle.
_WITHIN_S = 600.0  # Max seconds of a run.
_TOPICS = ["river", "winter", "garden", "letter", "market", "harbour", "window", "journey", "evening", "forest"]


def smc(testbed: Testbed) -> list[Result]:
    """Compare a process on the pool with a process on genlm-backend, and two concurrent processes with one process."""
    steps = testbed.scaled(_STEPS, 6)
    with ExitStack() as stack:
        model = str(smollm2_folder())
        stack.enter_context(testbed.workers("smollm2", model, "--backend", "hf", "--device", "cpu"))
        ours = [
            stack.enter_context(testbed.child("clients.smc_client", "smollm2", "--redis", testbed.url))
            for _ in range(2)
        ]
        peer = stack.enter_context(testbed.child("clients.smc_client", model, python=peers_python()))
        contest = _Contest(steps)
        samples = alternated(
            {
                "pool": lambda: contest.seconds(ours[:1], fresh=True),
                "genlm": lambda: contest.seconds([peer], fresh=False),
                "two": lambda: contest.seconds(ours, fresh=True),
            },
            testbed.repeats,
        )
    task = f"{_PARTICLES} particles x {steps} steps of AWRS under a regular expression, SmolLM2-135M f32"
    alone = (
        f"seconds of {task}, on a pool with one hf worker ÷ on genlm-backend's AsyncTransformer, same prompts and seeds"
    )
    two = f"seconds of two concurrent processes on one worker, each with its own prompt ÷ of one process; {task}"
    same = f"texts that both sides generated ÷ all texts; {task}"
    pool, genlm, both = (Side(name, "s", samples[name]) for name in ("pool", "genlm", "two"))
    # Count texts of the warm-up round too, because both sides had the same seeds.
    equal = Side("same", "texts", [share * _PARTICLES for share in contest.shares])
    return [
        Result("smc", alone, Goal(0.5, at_most=True), pool, genlm),
        Result("smc-two", two, Goal(1.6, at_most=True), both, pool),
        Result("smc-same", same, None, equal, Side("all", "texts", [float(_PARTICLES)] * len(contest.shares))),
    ]


class _Contest:
    """Runs both sides with the same prompts and seeds, in turns.

    Attributes:
        shares: share of texts that are equal on both sides, for each round.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._random = random.Random()
        self._requests: list[dict[str, Any]] = []
        self._texts: list[str] = []
        self.shares: list[float] = []

    def seconds(self, sides: list[Child], *, fresh: bool) -> float:
        """Seconds until all processes of `sides` end; `fresh` draws new prompts, else the last prompts are reused."""
        if fresh:
            self._requests = [self._draw() for _ in sides]
        for side, request in zip(sides, self._requests, strict=True):
            side.send("smc", **request, particles=_PARTICLES, steps=self._steps)
        answers = [side.receive(_WITHIN_S) for side in sides]
        if fresh:
            self._texts = answers[0]["texts"]
        else:
            pairs = list(zip(self._texts, answers[0]["texts"], strict=True))
            self.shares.append(sum(a == b for a, b in pairs) / len(pairs))
        return max(float(answer["seconds"]) for answer in answers)

    def _draw(self) -> dict[str, Any]:
        words = " ".join(self._random.choices(_TOPICS, k=6))
        return {"prompt": f"A story of the {words}: once upon a time there was", "seed": self._random.randrange(2**31)}
