"""Less than a row against the row."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

from benchmarks.harness.pairs import Goal, Result, Side, Take, alternate
from benchmarks.harness.processes import Child
from benchmarks.harness.workplace import Workplace
from benchmarks.measures.asking import Asked, agree, alternated
from benchmarks.measures.real_model import smollm2_folder
from benchmarks.measures.transport import FULL_V

_TARGETS = 4
_AT_ONCE = 256
_PROMPT, _CONTINUATION = 32, 64
_CONTINUATIONS, _GENERATED = 16, 32
_SMALL_V, _STEP_MS = 8192, 2
_MIN_V = 49_152
_TEXTS, _TEXT_TOKENS, _TOP = 64, 128, 32
_PREFIX_REPEATS = 2


def targets(place: Workplace) -> list[Result]:
    """A few entries of cached rows."""
    with ExitStack() as stack:
        stack.enter_context(
            place.workers("synthetic", "synthetic", "--backend", "synthetic", "--vocab-size", str(FULL_V))
        )
        client = stack.enter_context(place.producer("synthetic", "--cache-bytes", "0"))
        rows, times = 512, place.scaled(16, 4)
        client.ask("new", rows=rows, at_once=64)
        samples = alternated(
            {
                "entries": lambda: (
                    times * rows / float(client.ask("entries", times=times, at_once=_AT_ONCE, count=_TARGETS))
                ),
                "rows": lambda: times * rows / 4 / float(client.ask("again", times=times // 4, at_once=_AT_ONCE)),
            },
            place.repeats,
        )
    meaning = (
        f"requests/s for {_TARGETS} entries of cached float32 rows of V = {FULL_V:,}, {_AT_ONCE} awaits under way ÷ "
        "the same for full rows, which are not kept by the producer"
    )
    sides = [Side(name, "requests/s", taken) for name, taken in samples.items()]
    return [Result("targets", meaning, Goal(8), *sides)]


def score(place: Workplace) -> list[Result]:
    """What a continuation scores, against the row of the same prompt."""
    asked = Asked()
    with ExitStack() as stack:
        stack.enter_context(place.workers("smollm2", str(smollm2_folder()), "--backend", "hf", "--device", "cpu"))
        client = stack.enter_context(place.producer("smollm2"))
        count, length = place.scaled(10, 3), _PROMPT + _CONTINUATION
        samples = alternated(
            {
                "score": lambda: float(client.ask("scored", prompts=asked.fresh(count, length), tokens=_CONTINUATION)),
                "row": lambda: float(client.ask("row_of", prompts=asked.fresh(count, length))),
            },
            place.repeats,
        )
    meaning = (
        f"seconds until the {_CONTINUATION} tokens after a prompt of {_PROMPT} are scored, one request alone, "
        f"SmolLM2-135M f32 ÷ those for one row of a prompt of {length} tokens"
    )
    sides = [Side(name, "s", taken) for name, taken in samples.items()]
    return [Result("score", meaning, Goal(1.5, at_most=True), *sides)]


def generate(place: Workplace) -> list[Result]:
    """Continuations in one request each, against a request for each of their tokens."""
    asked, results = Asked(), []
    for name, goal, described, options in (
        ("generate", Goal(1.05), "SmolLM2-135M f32, hf", (str(smollm2_folder()), "--backend", "hf", "--device", "cpu")),
        (
            "generate-fast",
            Goal(2),
            f"synthetic rows of V = {_SMALL_V:,}, steps of {_STEP_MS} ms",
            ("synthetic", "--backend", "synthetic", "--vocab-size", str(_SMALL_V), "--step-ms", str(_STEP_MS)),
        ),
    ):
        with ExitStack() as stack:
            stack.enter_context(place.workers(name, *options))
            client = stack.enter_context(place.producer(name))

            vocab_size = _SMALL_V if name == "generate-fast" else _MIN_V

            def rate(call: str, client: Any, vocab_size: int) -> float:
                prompts = [[token % vocab_size for token in ids] for ids in asked.fresh(_CONTINUATIONS, _PROMPT)]
                return _CONTINUATIONS * _GENERATED / float(client.ask(call, prompts=prompts, tokens=_GENERATED))

            ways = {"generate": "generated", "sample": "sampled"}
            samples = alternated(
                {side: partial(rate, call, client, vocab_size) for side, call in ways.items()}, place.repeats
            )
        meaning = (
            f"tokens/s of {_CONTINUATIONS} continuations of {_GENERATED} tokens at once, {described} ÷ the same by one "
            "`sample` for each token"
        )
        results.append(Result(name, meaning, goal, *[Side(side, "tokens/s", taken) for side, taken in samples.items()]))
    return results


def positions(place: Workplace) -> list[Result]:
    """The likeliest tokens at every position of texts: from one forward, from one a position, and without the pool."""
    with ExitStack() as stack:
        model = str(smollm2_folder())
        stack.enter_context(place.workers("smollm2", model, "--backend", "hf", "--device", "cpu"))
        client = stack.enter_context(place.producer("smollm2"))
        peer = stack.enter_context(place.child("peers.hf_peer", model, "cpu", "float32"))
        told = Told(place)
        direct = alternated({"positions": told.new(client), "transformers": told.same(peer)}, place.repeats)
        # New texts for both: each would find keys and values that the other has left.
        takes = {"positions": told.new(client), "prefixes": told.new(client, "told_by_prefixes")}
        prefixes = alternate(takes, min(place.repeats, _PREFIX_REPEATS))
    by_prefix = (
        f"asked at once ÷ the same by a prompt for each position, 32 texts in lock step; {_PREFIX_REPEATS} samples"
    )
    by_peer = "through the pool ÷ transformers in batches of 16 texts, log_softmax and topk in one process"
    return [
        Result("positions", f"{told.meaning}, {by_prefix}", Goal(3), *told.sides(prefixes)),
        Result("positions-direct", f"{told.meaning}, {by_peer}", Goal(0.9), *told.sides(direct)),
    ]


class Told:
    """Has two sides tell the likeliest tokens at every position of the same texts, and sees that they agree."""

    def __init__(self, place: Workplace) -> None:
        self._asked = Asked()
        self._number = place.scaled(_TEXTS, 4)
        self._probe: list[float] = []

    @property
    def meaning(self) -> str:
        """What is counted."""
        return (
            f"positions/s, of each the {_TOP} likeliest tokens, for {_TEXTS} texts of {_TEXT_TOKENS} tokens, "
            "SmolLM2-135M f32"
        )

    def new(self, side: Child, do: str = "told") -> Take:
        """Positions per second of new texts."""

        def take() -> float:
            self._asked.fresh(self._number, _TEXT_TOKENS)
            answer = self._ask(side, do)
            self._probe = answer["probe"]
            return self._rate(answer)

        return take

    def same(self, side: Child, do: str = "told") -> Take:
        """Positions per second of the texts that the other side had."""

        def take() -> float:
            answer = self._ask(side, do)
            agree(self._probe, answer["probe"])
            return self._rate(answer)

        return take

    def sides(self, samples: dict[str, list[float]]) -> list[Side]:
        """The sides of a result."""
        return [Side(name, "positions/s", taken) for name, taken in samples.items()]

    def _ask(self, side: Child, do: str) -> dict[str, Any]:
        answer: dict[str, Any] = side.ask(do, within=900, texts=self._asked.last, top=_TOP)
        return answer

    def _rate(self, answer: dict[str, Any]) -> float:
        return self._number * _TEXT_TOKENS / float(answer["seconds"])
