"""Compares requests for parts of a row (entries, scores, samples, top-k) with requests for whole rows."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

from benchmarks.harness.comparison import FULL_V, PromptSource, agree, alternated
from benchmarks.harness.pairs import Goal, Result, Side, Take, alternate
from benchmarks.harness.processes import Child
from benchmarks.harness.testbed import Testbed
from benchmarks.measures.real_model import smollm2_folder

_TARGETS = 4  # Number of entries that are requested of each row.
_CONCURRENCY = 256  # Number of requests in flight.
_PROMPT, _CONTINUATION = 32, 64  # Tokens of a prompt, and of the continuation that is scored.
_CONTINUATIONS, _GENERATED = 16, 32  # Number of concurrent continuations; tokens per continuation.
_SMALL_V, _STEP_MS = 8192, 2  # Vocabulary size, and milliseconds per step, of the fast synthetic model.
_TEXTS, _TEXT_TOKENS, _TOP = 64, 128, 32  # Number of texts; tokens per text; top-k tokens per position.
_PREFIX_REPEATS = 2  # Number of samples that send a request per position: each sample takes half a minute.


def targets(testbed: Testbed) -> list[Result]:
    """Measure requests for a few entries of cached rows."""
    with ExitStack() as stack:
        stack.enter_context(
            testbed.workers("synthetic", "synthetic", "--backend", "synthetic", "--vocab-size", str(FULL_V))
        )
        client = stack.enter_context(testbed.producer("synthetic", "--cache-bytes", "0"))
        rows, times = 512, testbed.scaled(16, 4)
        client.request("new", rows=rows, concurrency=64)
        samples = alternated(
            {
                "entries": lambda: (
                    times
                    * rows
                    / float(client.request("entries", times=times, concurrency=_CONCURRENCY, count=_TARGETS))
                ),
                "rows": lambda: (
                    times * rows / 4 / float(client.request("again", times=times // 4, concurrency=_CONCURRENCY))
                ),
            },
            testbed.repeats,
        )
    meaning = (
        f"requests/s for {_TARGETS} entries of cached float32 rows of V = {FULL_V:,}, {_CONCURRENCY} requests in "
        "flight ÷ the same for full rows, which the producer does not cache"
    )
    sides = [Side(name, "requests/s", taken) for name, taken in samples.items()]
    return [Result("targets", meaning, Goal(8), *sides)]


def score(testbed: Testbed) -> list[Result]:
    """Compare the time to score a continuation with the time to compute the row of the same prompt."""
    source = PromptSource()
    with ExitStack() as stack:
        stack.enter_context(testbed.workers("smollm2", str(smollm2_folder()), "--backend", "hf", "--device", "cpu"))
        client = stack.enter_context(testbed.producer("smollm2"))
        count, length = testbed.scaled(10, 3), _PROMPT + _CONTINUATION
        samples = alternated(
            {
                "score": lambda: float(
                    client.request("scored", prompts=source.draw(count, length), tokens=_CONTINUATION)
                ),
                "row": lambda: float(client.request("row_of", prompts=source.draw(count, length))),
            },
            testbed.repeats,
        )
    meaning = (
        f"seconds to score {_CONTINUATION} tokens after a prompt of {_PROMPT}, one request alone, SmolLM2-135M f32 ÷ "
        f"seconds for one row of a prompt of {length} tokens"
    )
    sides = [Side(name, "s", taken) for name, taken in samples.items()]
    return [Result("score", meaning, Goal(1.5, at_most=True), *sides)]


def generate(testbed: Testbed) -> list[Result]:
    """Compare one request per continuation with one request per token."""
    source, results = PromptSource(), []
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
            stack.enter_context(testbed.workers(name, *options))
            client = stack.enter_context(testbed.producer(name))

            vocab_size = _SMALL_V if name == "generate-fast" else FULL_V

            def rate(call: str, client: Any, vocab_size: int) -> float:
                prompts = [[token % vocab_size for token in ids] for ids in source.draw(_CONTINUATIONS, _PROMPT)]
                return _CONTINUATIONS * _GENERATED / float(client.request(call, prompts=prompts, tokens=_GENERATED))

            ways = {"generate": "generated", "sample": "sampled"}
            samples = alternated(
                {side: partial(rate, call, client, vocab_size) for side, call in ways.items()}, testbed.repeats
            )
        meaning = (
            f"tokens/s of {_CONTINUATIONS} concurrent continuations of {_GENERATED} tokens, {described} ÷ the same "
            "with one `sample` per token"
        )
        results.append(Result(name, meaning, goal, *[Side(side, "tokens/s", taken) for side, taken in samples.items()]))
    return results


def positions(testbed: Testbed) -> list[Result]:
    """Compare ways to get the top-k tokens at every position: a request per text, a request per position, no pool."""
    with ExitStack() as stack:
        model = str(smollm2_folder())
        stack.enter_context(testbed.workers("smollm2", model, "--backend", "hf", "--device", "cpu"))
        client = stack.enter_context(testbed.producer("smollm2"))
        peer = stack.enter_context(testbed.child("peers.hf_peer", model, "cpu", "float32"))
        top_tokens = TopTokens(testbed)
        direct = alternated(
            {"positions": top_tokens.new(client), "transformers": top_tokens.same(peer)}, testbed.repeats
        )
        # Draw new texts for each side: otherwise a side could use keys and values that the other side cached.
        takes = {"positions": top_tokens.new(client), "prefixes": top_tokens.new(client, "top_tokens_by_prefix")}
        prefixes = alternate(takes, min(testbed.repeats, _PREFIX_REPEATS))
    by_prefix = f"one request per text ÷ one prompt per position, 32 texts in lock step; {_PREFIX_REPEATS} samples"
    by_peer = "through the pool ÷ transformers in batches of 16 texts, log_softmax and topk in one process"
    return [
        Result("positions", f"{top_tokens.meaning}, {by_prefix}", Goal(3), *top_tokens.sides(prefixes)),
        Result("positions-direct", f"{top_tokens.meaning}, {by_peer}", Goal(0.9), *top_tokens.sides(direct)),
    ]


class TopTokens:
    """Requests the top-k tokens at every position of the same texts from two sides, and checks that they agree."""

    def __init__(self, testbed: Testbed) -> None:
        self._source = PromptSource()
        self._number = testbed.scaled(_TEXTS, 4)
        self._probe: list[float] = []

    @property
    def meaning(self) -> str:
        """The beginning of the sentence that defines a measure."""
        return f"positions/s with top-{_TOP} of {self.texts_meaning}"

    @property
    def texts_meaning(self) -> str:
        """What the texts and the model are."""
        return f"{_TEXTS} texts of {_TEXT_TOKENS} tokens, SmolLM2-135M f32"

    @property
    def texts(self) -> list[list[int]]:
        """The texts that were drawn last."""
        return self._source.last

    def new(self, side: Child, do: str = "top_tokens") -> Take:
        """Positions per second of new texts."""

        def take() -> float:
            self._source.draw(self._number, _TEXT_TOKENS)
            answer = self._request(side, do)
            self._probe = answer["probe"]
            return self._rate(answer)

        return take

    def same(self, side: Child, do: str = "top_tokens", *, agreeing: bool = True) -> Take:
        """Positions per second of the texts that the other side received last; `agreeing`: compare the values."""

        def take() -> float:
            answer = self._request(side, do)
            if agreeing:
                agree(self._probe, answer["probe"])
            return self._rate(answer)

        return take

    def sides(self, samples: dict[str, list[float]]) -> list[Side]:
        """The two sides of a `Result`, from their samples."""
        return [Side(name, "positions/s", taken) for name, taken in samples.items()]

    def _request(self, side: Child, do: str) -> dict[str, Any]:
        answer: dict[str, Any] = side.request(do, within=900, texts=self._source.last, top=_TOP)
        return answer

    def _rate(self, answer: dict[str, Any]) -> float:
        return self._number * _TEXT_TOKENS / float(answer["seconds"])
