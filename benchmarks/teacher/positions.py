"""Measures what a trainer requests from a teacher: given tokens at every position, and hidden states."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from benchmarks.harness.comparison import alternated
from benchmarks.harness.pairs import Goal, Result
from benchmarks.harness.processes import Child
from benchmarks.harness.testbed import Testbed
from benchmarks.measures.engine_measures import VLLM, pool, server
from benchmarks.measures.picks import TopTokens
from benchmarks.measures.real_model import smollm2_folder

_TARGETS = 64
_WHAT = f"positions/s with {_TARGETS} tokens of each position, the next token, logZ and the tail"


class _Targets(TopTokens):
    """Requests other tokens at each position of the same texts from two sides."""

    def _request(self, side: Child, do: str) -> dict[str, Any]:
        number = {"top": _TARGETS} if do == "top_tokens" else {} if do == "hidden_states" else {"count": _TARGETS}
        answer: dict[str, Any] = side.request(do, within=900, texts=self.texts, **number)
        return {"probe": [], **answer}


def hf(testbed: Testbed) -> list[Result]:
    """Compare the hf backend behind the pool with transformers called directly."""
    with ExitStack() as stack:
        model, targets = str(smollm2_folder()), _Targets(testbed)
        stack.enter_context(testbed.workers("smollm2", model, "--backend", "hf", "--device", "cpu"))
        client = stack.enter_context(testbed.producer("smollm2"))
        peer = stack.enter_context(testbed.child("peers.hf_peer", model, "cpu", "float32"))
        takes = {"pool": targets.new(client, "given_tokens"), "transformers": targets.same(peer, "given_tokens")}
        samples = alternated(takes, testbed.repeats)
    meaning = f"{_WHAT}, {targets.texts_meaning}, through the pool ÷ transformers and log_softmax in one process"
    return [Result("teacher-hf", meaning, Goal(0.9), *targets.sides(samples))]


def vllm(testbed: Testbed) -> list[Result]:
    """Compare vLLM behind the pool with its own server, and hidden states with top tokens."""
    with ExitStack() as stack:
        ours = pool(stack, testbed, "vllm", str(smollm2_folder()), *VLLM)
        peer, targets, top = server(stack, testbed), _Targets(testbed), TopTokens(testbed)
        takes = {"pool": targets.new(ours, "given_tokens"), "server": targets.same(peer, "top_tokens", agreeing=False)}
        given = alternated(takes, testbed.repeats)
        takes = {"hidden states": targets.new(ours, "hidden_states"), "top tokens": top.new(ours)}
        hidden = alternated(takes, testbed.repeats)
    by_server = f"vLLM's OpenAI server with prompt_logprobs={_TARGETS}, 16 concurrent requests, JSON parsed"
    return [
        Result("teacher-vllm", f"{_WHAT}, {targets.texts_meaning}, vLLM through the pool ÷ {by_server}", Goal(2),
               *targets.sides(given)),
        Result("hidden-vllm", f"positions/s of hidden states ÷ {top.meaning}, vLLM through the pool", Goal(1),
               *targets.sides(hidden)),
    ]  # fmt: skip
