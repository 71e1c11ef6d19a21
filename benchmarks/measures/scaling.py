"""How throughput grows with the number of workers, for new prompts and for prompts that extend earlier prompts.

A step of a synthetic worker takes 2 ms, and 1 ms more for each token that its simulated prefix cache does not hold.
Four workers are four times as fast only if each prompt goes to the worker that computed its prefix.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.harness.comparison import Ids, alternated
from benchmarks.harness.pairs import Goal, Result, Side, Take
from benchmarks.harness.processes import Child
from benchmarks.harness.testbed import Testbed
from benchmarks.measures.transport import TINY_V, rate

_WORKERS = 4  # Number of workers that are compared with one worker.
_WITHIN_S = 900.0  # Max seconds until a client process responds; the longest request takes minutes.

# Prompts that share no prefix: milliseconds per step, and requests in flight.
_STEP_MS, _CONCURRENCY = 20, 1024

# The next constants are for growing contexts, where new tokens take most of the time of a step.
_V = 256  # Vocabulary size: small, so that rows cost almost nothing.
_PREFIX_STEP_MS, _TOKEN_MS = 2, 1  # Milliseconds per step; additional milliseconds per new token.
_PREFIX_OPTIONS = ("--step-ms", str(_PREFIX_STEP_MS), "--token-ms", str(_TOKEN_MS))
_CONTEXT_TOKENS, _STEPS = 128, 24  # Initial tokens of a context, and tokens by which the context grows.
_CONTEXTS = (16, 128)  # Numbers of contexts that are measured.
_PROMPT_TOKENS = 64  # Tokens of a prompt that contexts share.
# The smaller particle filter: number of particles and steps.
_PARTICLES, _PARTICLE_STEPS = 128, 64
_MANY_PARTICLES, _MANY_STEPS, _MANY_WORKERS = 1000, 32, 8  # The larger particle filter: particles, steps, workers.
# 10 trees have 8 contexts each; the hot tree has 10 times as many contexts; each context grows by 64 tokens.
_TREES, _IN_A_TREE, _TIMES_AS_HOT, _TREE_STEPS = 10, 8, 10, 64

_FLEET, _FLEET_CLIENTS = 64, 32  # Workers and clients of the measure `fleet`: many more than the machine has cores.
_FLEET_STEP_MS, _FLEET_BATCH = 500, 16  # Milliseconds and prompts per step: the steps are long, so that cores are idle.
_FLEET_CONCURRENCY, _FLEET_WARM_S = 128, 4.0  # Requests in flight per client; seconds before the clock starts.

# A short lease: workers send a heartbeat, which has their counters, every fifth of a lease.
_LEASE = ("--lease-s", "5")


def distinct(testbed: Testbed) -> list[Result]:
    """Measure prompts that share no prefix."""
    rows = testbed.scaled(4096, 2048)
    with ExitStack() as stack:
        sides = _synthetic(stack, testbed, {"four": _WORKERS, "one": 1}, TINY_V, "--step-ms", str(_STEP_MS))
        samples = alternated(
            {
                f"{_WORKERS} workers": rate(sides["four"], rows * _WORKERS, _CONCURRENCY),
                "1 worker": rate(sides["one"], rows, _CONCURRENCY),
            },
            testbed.repeats,
        )
    meaning = (
        f"rows/s of {_WORKERS} synthetic workers with steps of {_STEP_MS} ms ÷ of one; one producer each with "
        f"{_CONCURRENCY:,} requests in flight, prompts without common prefixes; V = {TINY_V}"
    )
    return [_result("scaling-distinct", meaning, Goal(3.95), "rows/s", samples)]


def tokens(testbed: Testbed) -> list[Result]:
    """Count the tokens that a real backend computes for growing contexts."""
    results = []
    with ExitStack() as stack:
        model = str(write_llama(testbed.folder / "tiny-llama"))
        sides = {}
        for name, number in {"four": _WORKERS, "one": 1}.items():
            options = ("--backend", "hf", "--device", "cpu", *_LEASE)
            stack.enter_context(testbed.workers(name, model, *options, number=number))
            sides[name] = stack.enter_context(testbed.producer(name))
        for kind, what, goal in (
            ("tokens", f"{_CONTEXT_TOKENS} tokens each", Goal(1.1, at_most=True)),
            ("shared", f"the same {_CONTEXT_TOKENS} tokens", Goal(1.8, at_most=True)),
        ):
            for number in _CONTEXTS:
                roots = number if kind == "tokens" else 1
                takes: dict[str, Take] = {
                    name: partial(_tokens_to_grow, testbed, sides[side], side, number, roots)
                    for name, side in ((f"{_WORKERS} workers", "four"), ("1 worker", "one"))
                }
                meaning = (
                    f"tokens that {_WORKERS} hf workers compute for {number} contexts ÷ tokens that one worker "
                    f"computes; contexts begin with {what} and grow by one token {_STEPS} times, in lock step, from "
                    "one producer; a tiny Llama"
                )
                samples = alternated(takes, testbed.repeats)
                results.append(_result(f"scaling-{kind}-{number}", meaning, goal, "tokens", samples))
    return results


def lock_step(testbed: Testbed) -> list[Result]:
    """Measure contexts that grow in lock step: each request waits for the last row of all contexts."""
    steps, number = testbed.scaled(2 * _STEPS, _STEPS // 3), _CONTEXTS[-1]

    def take(side: Child) -> float:
        contexts = _draw_contexts(number, _PROMPT_TOKENS, steps)
        answer = side.request("grow", within=_WITHIN_S, contexts=contexts, steps=steps)
        return number * steps / float(answer["seconds"])

    with ExitStack() as stack:
        sides = _synthetic(stack, testbed, {"four": _WORKERS, "one": 1}, _V, *_PREFIX_OPTIONS)
        takes = {f"{_WORKERS} workers": partial(take, sides["four"]), "1 worker": partial(take, sides["one"])}
        samples = alternated(takes, testbed.repeats)
    meaning = (
        f"rows/s of one producer with {number} contexts of {_PROMPT_TOKENS} tokens that grow by one token {steps} "
        f"times in lock step, on {_WORKERS} synthetic workers ÷ on one; {_prefix_step()}"
    )
    return [_result("scaling-lock-step", meaning, Goal(3), "rows/s", samples)]


def particles(testbed: Testbed) -> list[Result]:
    """Measure a particle filter that resamples its contexts every second step."""
    results = []
    for number, workers, steps, goal in (
        (_PARTICLES, _WORKERS, testbed.scaled(_PARTICLE_STEPS, 8), Goal(2)),
        (_MANY_PARTICLES, _MANY_WORKERS, testbed.scaled(_MANY_STEPS, 4), Goal(3.6)),
    ):

        def take(side: Child, number: int = number, steps: int = steps) -> float:
            (prompt,) = _draw_contexts(1, _PROMPT_TOKENS, 0)
            return float(side.request("particles", within=_WITHIN_S, prompt=prompt, number=number, steps=steps))

        with ExitStack() as stack:
            sides = _synthetic(stack, testbed, {"many": workers, "one": 1}, _V, *_PREFIX_OPTIONS)
            takes = {f"{workers} workers": partial(take, sides["many"]), "1 worker": partial(take, sides["one"])}
            samples = alternated(takes, testbed.repeats)
        meaning = (
            f"rows/s of one producer with {number:,} particles x {steps} steps after a prompt of {_PROMPT_TOKENS} "
            f"tokens, resampled every second step by random weights, on {workers} synthetic workers ÷ on one; "
            f"{_prefix_step()}"
        )
        results.append(_result(f"scaling-particles-{number}", meaning, goal, "rows/s", samples))
    return results


def hot_tree(testbed: Testbed) -> list[Result]:
    """Measure contexts in trees of common prefixes; one tree has many more contexts than each other tree."""
    steps = testbed.scaled(_TREE_STEPS, _TREE_STEPS // 4)
    shares = [_IN_A_TREE * (_TIMES_AS_HOT if tree == 0 else 1) for tree in range(_TREES)]
    busiest, mean = [], []
    with ExitStack() as stack:
        sides = _synthetic(stack, testbed, {"four": _WORKERS}, _V, *_PREFIX_OPTIONS, *_LEASE)
        before = testbed.heartbeats("four")
        for _ in range(testbed.repeats):
            contexts = [ids for share in shares for ids in _draw_contexts(share, _PROMPT_TOKENS, steps, roots=1)]
            sides["four"].request("grow", within=_WITHIN_S, contexts=contexts, steps=steps)
            after = testbed.heartbeats("four")
            busy = [_busy_s(fields) - _busy_s(before[name]) for name, fields in after.items()]
            busiest.append(max(busy))
            mean.append(sum(busy) / len(busy))
            before = after
    meaning = (
        f"seconds of computation of the busiest of {_WORKERS} synthetic workers ÷ their mean, for {_TREES} trees of "
        f"contexts that grow by one token {steps} times in lock step, from one producer; the contexts of a tree share "
        f"{_PROMPT_TOKENS} tokens; one tree has {shares[0]} contexts, the others {shares[1]} each; {_prefix_step()}"
    )
    sides_of = Side("busiest", "s", busiest), Side("mean", "s", mean)
    return [Result("scaling-hot-tree", meaning, Goal(1.4, at_most=True), *sides_of)]


def fleet(testbed: Testbed) -> list[Result]:
    """Measure more workers and clients than the machine has cores, on one server."""
    seconds = testbed.scaled(20, 8)

    def take(clients: list[Child], weight: int) -> float:
        for client in clients:
            client.send("steady_load", concurrency=_FLEET_CONCURRENCY, warm_s=_FLEET_WARM_S, seconds=seconds)
        return weight * sum(int(client.receive(_WITHIN_S)) for client in clients) / seconds

    options = ("--step-ms", str(_FLEET_STEP_MS), "--max-batch", str(_FLEET_BATCH))
    with ExitStack() as stack:
        sides = _synthetic(stack, testbed, {"fleet": _FLEET, "one": 1}, TINY_V, *options)
        clients = [sides["fleet"], *(stack.enter_context(testbed.producer("fleet")) for _ in range(_FLEET_CLIENTS - 1))]
        takes = {
            f"{_FLEET} workers": partial(take, clients, 1),
            f"{_FLEET} times 1 worker": partial(take, [sides["one"]], _FLEET),
        }
        samples = alternated(takes, testbed.repeats)
    meaning = (
        f"rows/s of {_FLEET} synthetic workers with steps of {_FLEET_STEP_MS} ms and {_FLEET_BATCH} prompts, for "
        f"{_FLEET_CLIENTS} producers with {_FLEET_CONCURRENCY} requests in flight each ÷ {_FLEET} times the rows/s of "
        f"one worker for one producer; prompts without common prefixes; one process each; V = {TINY_V}"
    )
    return [_result("scaling-fleet", meaning, Goal(0.9), "rows/s", samples)]


def _synthetic(
    stack: ExitStack, testbed: Testbed, numbers: Mapping[str, int], vocab_size: int, *options: str
) -> dict[str, Child]:
    """Start a producer and `workers` synthetic workers per model; the rows of the models differ."""
    sides = {}
    for seed, (name, number) in enumerate(numbers.items()):
        more = ("--backend", "synthetic", "--vocab-size", str(vocab_size), "--seed", str(seed), *options)
        stack.enter_context(testbed.workers(name, name, *more, number=number))
        sides[name] = stack.enter_context(testbed.producer(name))
    return sides


def _result(name: str, meaning: str, goal: Goal, unit: str, samples: Mapping[str, list[float]]) -> Result:
    return Result(name, meaning, goal, *[Side(side, unit, taken) for side, taken in samples.items()])


def _prefix_step() -> str:
    return f"a step takes {_PREFIX_STEP_MS} ms and {_TOKEN_MS} ms a new token, V = {_V}"


def _draw_contexts(number: int, tokens: int, steps: int, roots: int | None = None) -> list[Ids]:
    """New contexts of `tokens + steps` tokens; `roots` is the number of distinct prefixes, None for one per context."""
    generator = np.random.default_rng()
    beginnings = generator.integers(0, _V, (roots or number, tokens))
    contexts = np.hstack([np.resize(beginnings, (number, tokens)), generator.integers(0, _V, (number, steps))])
    drawn: list[Ids] = contexts.tolist()
    return drawn


def _tokens_to_grow(testbed: Testbed, producer: Child, model: str, number: int, roots: int) -> float:
    """Tokens that the workers of a model compute for `number` contexts with `roots` distinct prefixes."""
    before = _computed(testbed.heartbeats(model))
    contexts = _draw_contexts(number, _CONTEXT_TOKENS, _STEPS, roots)
    producer.request("grow", within=_WITHIN_S, contexts=contexts, steps=_STEPS)
    return _computed(testbed.heartbeats(model)) - before


def _computed(workers: Mapping[str, Mapping[str, str]]) -> float:
    return sum(float(fields["tokens"]) - float(fields["reused"]) for fields in workers.values())


def _busy_s(fields: Mapping[str, str]) -> float:
    """Seconds for which a synthetic worker has slept in steps, from the counters of its heartbeat."""
    computed = float(fields["tokens"]) - float(fields["reused"])
    return (_PREFIX_STEP_MS * float(fields["steps"]) + _TOKEN_MS * computed) / 1000


def write_llama(
    folder: Path,
    *,
    vocab_size: int = _V,
    width: int = 32,
    heads: int = 4,
    layers: int = 2,
    max_tokens: int = 2 * _CONTEXT_TOKENS,
) -> Path:
    """Write a tiny Llama with random weights in the format of transformers."""
    # Import here: safetensors comes with the hf backend, which other measures do not need.
    from safetensors.numpy import save_file

    inner = 2 * width
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_hidden_layers": layers,
        "max_position_embeddings": max_tokens,
        "torch_dtype": "float32",
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (vocab_size, width),
        "lm_head": (vocab_size, width),
        "model.norm": (width,),
    }
    for layer in range(layers):
        within = f"model.layers.{layer}."
        shapes |= {f"{within}self_attn.{part}_proj": (width, width) for part in "qkvo"}
        shapes |= {f"{within}mlp.{part}_proj": (inner, width) for part in ("gate", "up")}
        shapes |= {f"{within}mlp.down_proj": (width, inner)}
        shapes |= {f"{within}{part}_layernorm": (width,) for part in ("input", "post_attention")}
    generator = np.random.default_rng(0)
    weights = {f"{name}.weight": generator.normal(0, 0.3, shape).astype("f4") for name, shape in shapes.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder
