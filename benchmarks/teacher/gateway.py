"""Measures the gateway: against vLLM's own server, and against a `Producer` in the client's process."""

from __future__ import annotations

from contextlib import ExitStack

from benchmarks.harness.comparison import FULL_V, PromptSource, agree, alternated
from benchmarks.harness.pairs import Goal, Result, Side, Take
from benchmarks.harness.processes import Child, free_port
from benchmarks.harness.testbed import Testbed, own_command, wait_until
from benchmarks.measures.engine_measures import VLLM, completions_client, engine_command, is_healthy, server
from benchmarks.measures.picks import TopTokens
from benchmarks.measures.real_model import smollm2_folder

_READY_S = 60.0  # Max seconds until a gateway is ready.
# The engine's limits on both sides: the defaults of a worker and of vLLM's server differ.
_STEP_TOKENS, _MAX_SEQUENCES = 2048, 256
_BATCH, _BATCHES, _QUICK_BATCHES = 32, 128, 16  # Prompts per request of rows, and requests per sample.
_CONCURRENCY = 4  # Requests of rows in flight.
_TIMES = 4  # Requests of each batch in a sample of cached rows.


def vllm(testbed: Testbed) -> list[Result]:
    """Compare the gateway, with vLLM behind the pool, with vLLM's own server."""
    with ExitStack() as stack:
        command, environment = engine_command("vllm")
        limits = ("--max-batch-tokens", str(_STEP_TOKENS), "--max-batch", str(_MAX_SEQUENCES), "--sessions", "0")
        workers = testbed.workers(
            "smollm2", str(smollm2_folder()), *VLLM, *limits, command=command, environment=environment
        )
        stack.enter_context(workers)
        ours = completions_client(stack, testbed, _gateway(stack, testbed))
        peer = server(
            stack, testbed, "--max-num-batched-tokens", str(_STEP_TOKENS), "--max-num-seqs", str(_MAX_SEQUENCES)
        )
        top = TopTokens(testbed)
        samples = alternated({"gateway": top.new(ours), "server": top.same(peer)}, testbed.repeats)
    meaning = (
        f"{top.meaning}, `/v1/completions` with `prompt_logprobs`, 16 concurrent requests of new texts, JSON parsed, "
        f"the gateway of a pool with one vLLM worker ÷ vLLM's OpenAI server with the same engine, up to "
        f"{_STEP_TOKENS:,} tokens per step and {_MAX_SEQUENCES} sequences, and the same client"
    )
    return [Result("gateway-vllm", meaning, Goal(1.5), *top.sides(samples))]


def rows(testbed: Testbed) -> list[Result]:
    """Compare rows from the gateway with rows from a producer, new rows and rows in the pool's cache."""
    batches = testbed.scaled(_BATCHES, _QUICK_BATCHES)
    with ExitStack() as stack:
        stack.enter_context(testbed.workers("rows", "rows", "--backend", "synthetic", "--vocab-size", str(FULL_V)))
        testbed.wait_for_shared_memory("rows")
        urls = {"gateway": _gateway(stack, testbed), "producer": testbed.url}
        sides = {
            name: stack.enter_context(testbed.child("clients.row_batches", url, str(FULL_V)))
            for name, url in urls.items()
        }
        prompts = PromptSource().draw(_BATCH, 8)
        for ours, theirs in zip(*(side.request("rows", prompts=prompts) for side in sides.values()), strict=True):
            agree(ours, theirs, tolerance=0)
        new = alternated({name: _new(side, batches) for name, side in sides.items()}, testbed.repeats)
        cached = alternated({name: _again(side, batches) for name, side in sides.items()}, testbed.repeats)
    task = (
        f"in requests of {_BATCH} prompts of 32 tokens, {_CONCURRENCY} requests in flight, V = {FULL_V:,}, f32, "
        "`/v1/rows` of the gateway with .npy files ÷ `Producer.batch_logprobs` in the client's process; one "
        "synthetic worker, no caches of rows in the gateway and in the producer"
    )
    return [
        Result(name, f"{what} {task}", Goal(0.5), *[Side(side, "rows/s", taken) for side, taken in samples.items()])
        for name, what, samples in (
            ("gateway-rows", "new rows/s", new),
            ("gateway-rows-cached", "rows/s that the pool's cache has,", cached),
        )
    ]


def _new(side: Child, batches: int) -> Take:
    def take() -> float:
        seconds = float(side.request("new", batches=batches, size=_BATCH, concurrency=_CONCURRENCY))
        return batches * _BATCH / seconds

    return take


def _again(side: Child, batches: int) -> Take:
    """Rows per second of the batches that the side requested last."""

    def take() -> float:
        seconds = float(side.request("again", times=_TIMES, concurrency=_CONCURRENCY))
        return _TIMES * batches * _BATCH / seconds

    return take


def _gateway(stack: ExitStack, testbed: Testbed) -> str:
    """Start a gateway without a cache of rows; returns its URL."""
    port = free_port()
    options = ("--redis", testbed.url, "--port", str(port), "--cache-bytes", "0", "--timeout", "900")
    gateway = stack.enter_context(testbed.process("http", own_command(), "http", *options))
    wait_until(lambda: is_healthy(gateway, port), _READY_S, "the gateway")
    return f"http://127.0.0.1:{port}"
