"""How a model's workers add up: where each prompt is new, and where it extends one that a worker knows.

A synthetic worker's step takes some milliseconds and one more for each token that no prefix cache would hold, so four
of them have the work of one done in a quarter of the time only if prompts go where their beginnings are known.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.harness.pairs import Goal, Result, Side, Take
from benchmarks.harness.processes import Child
from benchmarks.harness.workplace import Workplace
from benchmarks.measures.asking import Ids, alternated
from benchmarks.measures.transport import TINY_V, rate

_WORKERS = 4
_WITHIN_S = 900.0

# Of prompts that have nothing in common.
_STEP_MS, _AT_ONCE = 20, 1024

# Of contexts that grow: most of a step is what its new tokens take.
_V = 256
_PREFIX_STEP_MS, _TOKEN_MS = 2, 1
_PREFIX_OPTIONS = ("--step-ms", str(_PREFIX_STEP_MS), "--token-ms", str(_TOKEN_MS))
_CONTEXT_TOKENS, _STEPS = 128, 24
_CONTEXTS = (16, 128)
_PROMPT_TOKENS = 64
_PARTICLES, _PARTICLE_STEPS = 128, 64
_MANY_PARTICLES, _MANY_STEPS, _EIGHT = 1000, 32, 8
_TREES, _IN_A_TREE, _TIMES_AS_HOT, _TREE_STEPS = 10, 8, 10, 64

_FLEET, _FLEET_CLIENTS = 64, 32
_FLEET_STEP_MS, _FLEET_BATCH = 500, 16
_FLEET_AT_ONCE, _FLEET_WARM_S = 128, 4.0

# Counters are read from heartbeats, which come every fifth of a lease.
_LEASE = ("--lease-s", "5")


def distinct(place: Workplace) -> list[Result]:
    """Prompts that have nothing in common."""
    rows = place.scaled(4096, 2048)
    with ExitStack() as stack:
        sides = _synthetic(stack, place, {"four": _WORKERS, "one": 1}, TINY_V, "--step-ms", str(_STEP_MS))
        samples = alternated(
            {
                f"{_WORKERS} workers": rate(sides["four"], rows * _WORKERS, _AT_ONCE),
                "1 worker": rate(sides["one"], rows, _AT_ONCE),
            },
            place.repeats,
        )
    meaning = (
        f"rows/s of {_WORKERS} synthetic workers with steps of {_STEP_MS} ms ÷ those of one, each asked by one "
        f"producer with {_AT_ONCE:,} awaits under way, prompts that have nothing in common; V = {TINY_V}"
    )
    return [_result("scaling-distinct", meaning, Goal(3.95), "rows/s", samples)]


def tokens(place: Workplace) -> list[Result]:
    """Tokens that a real backend computes when contexts grow."""
    results = []
    with ExitStack() as stack:
        model = str(_write_llama(place.folder / "tiny-llama"))
        sides = {}
        for name, number in {"four": _WORKERS, "one": 1}.items():
            options = ("--backend", "hf", "--device", "cpu", *_LEASE)
            stack.enter_context(place.workers(name, model, *options, number=number))
            sides[name] = stack.enter_context(place.producer(name))
        for kind, what, goal in (
            ("tokens", f"{_CONTEXT_TOKENS} tokens each", Goal(1.1, at_most=True)),
            ("shared", f"the same {_CONTEXT_TOKENS} tokens", Goal(1.8, at_most=True)),
        ):
            for number in _CONTEXTS:
                roots = number if kind == "tokens" else 1
                takes: dict[str, Take] = {
                    name: partial(_tokens_to_grow, place, sides[side], side, number, roots)
                    for name, side in ((f"{_WORKERS} workers", "four"), ("1 worker", "one"))
                }
                meaning = (
                    f"tokens that {_WORKERS} hf workers compute of {number} contexts ÷ those that one does; they begin "
                    f"with {what} and grow by a token {_STEPS} times, all asked at once by one producer; a tiny Llama"
                )
                samples = alternated(takes, place.repeats)
                results.append(_result(f"scaling-{kind}-{number}", meaning, goal, "tokens", samples))
    return results


def lock_step(place: Workplace) -> list[Result]:
    """Contexts that grow, all of them asked at once."""
    steps, number = place.scaled(2 * _STEPS, _STEPS // 3), _CONTEXTS[-1]

    def take(side: Child) -> float:
        contexts = _draw_contexts(number, _PROMPT_TOKENS, steps)
        answer = side.ask("grow", within=_WITHIN_S, contexts=contexts, steps=steps)
        return number * steps / float(answer["seconds"])

    with ExitStack() as stack:
        sides = _synthetic(stack, place, {"four": _WORKERS, "one": 1}, _V, *_PREFIX_OPTIONS)
        takes = {f"{_WORKERS} workers": partial(take, sides["four"]), "1 worker": partial(take, sides["one"])}
        samples = alternated(takes, place.repeats)
    meaning = (
        f"rows/s of one producer with {number} contexts of {_PROMPT_TOKENS} tokens that grow by a token {steps} times, "
        f"all asked at once, on {_WORKERS} synthetic workers ÷ on one; {_prefix_step()}"
    )
    return [_result("scaling-lock-step", meaning, Goal(3), "rows/s", samples)]


def particles(place: Workplace) -> list[Result]:
    """A particle filter, whose contexts are drawn anew every second step."""
    results = []
    for number, workers, steps, goal in (
        (_PARTICLES, _WORKERS, place.scaled(_PARTICLE_STEPS, 8), Goal(2)),
        (_MANY_PARTICLES, _EIGHT, place.scaled(_MANY_STEPS, 4), Goal(3.6)),
    ):

        def take(side: Child, number: int = number, steps: int = steps) -> float:
            (prompt,) = _draw_contexts(1, _PROMPT_TOKENS, 0)
            return float(side.ask("particles", within=_WITHIN_S, prompt=prompt, number=number, steps=steps))

        with ExitStack() as stack:
            sides = _synthetic(stack, place, {"many": workers, "one": 1}, _V, *_PREFIX_OPTIONS)
            takes = {f"{workers} workers": partial(take, sides["many"]), "1 worker": partial(take, sides["one"])}
            samples = alternated(takes, place.repeats)
        meaning = (
            f"rows/s of one producer with {number:,} particles x {steps} steps after a prompt of {_PROMPT_TOKENS} "
            f"tokens, resampled every second step by random weights, on {workers} synthetic workers ÷ on one; "
            f"{_prefix_step()}"
        )
        results.append(_result(f"scaling-particles-{number}", meaning, goal, "rows/s", samples))
    return results


def hot_tree(place: Workplace) -> list[Result]:
    """Contexts of which most begin with the same text."""
    steps = place.scaled(_TREE_STEPS, _TREE_STEPS // 4)
    shares = [_IN_A_TREE * (_TIMES_AS_HOT if tree == 0 else 1) for tree in range(_TREES)]
    busiest, mean = [], []
    with ExitStack() as stack:
        sides = _synthetic(stack, place, {"four": _WORKERS}, _V, *_PREFIX_OPTIONS, *_LEASE)
        before = place.heartbeats("four")
        for _ in range(place.repeats):
            contexts = [ids for share in shares for ids in _draw_contexts(share, _PROMPT_TOKENS, steps, roots=1)]
            sides["four"].ask("grow", within=_WITHIN_S, contexts=contexts, steps=steps)
            after = place.heartbeats("four")
            busy = [_busy_s(fields) - _busy_s(before[name]) for name, fields in after.items()]
            busiest.append(max(busy))
            mean.append(sum(busy) / len(busy))
            before = after
    meaning = (
        f"seconds that the busiest of {_WORKERS} synthetic workers computes ÷ those of their mean, for {_TREES} trees "
        f"of contexts that grow by a token {steps} times, all asked at once by one producer; one tree has {shares[0]} "
        f"contexts, each other {shares[1]}, after {_PROMPT_TOKENS} tokens that they share; {_prefix_step()}"
    )
    sides_of = Side("busiest", "s", busiest), Side("mean", "s", mean)
    return [Result("scaling-hot-tree", meaning, Goal(1.4, at_most=True), *sides_of)]


def fleet(place: Workplace) -> list[Result]:
    """More workers and clients than a machine has cores, on one server."""
    seconds = place.scaled(20, 8)

    def take(clients: list[Child], weight: int) -> float:
        for client in clients:
            client.send("steadily", at_once=_FLEET_AT_ONCE, warm_s=_FLEET_WARM_S, seconds=seconds)
        return weight * sum(int(client.receive(_WITHIN_S)) for client in clients) / seconds

    options = ("--step-ms", str(_FLEET_STEP_MS), "--max-batch", str(_FLEET_BATCH))
    with ExitStack() as stack:
        sides = _synthetic(stack, place, {"fleet": _FLEET, "one": 1}, TINY_V, *options)
        clients = [sides["fleet"], *(stack.enter_context(place.producer("fleet")) for _ in range(_FLEET_CLIENTS - 1))]
        takes = {
            f"{_FLEET} workers": partial(take, clients, 1),
            f"{_FLEET} times 1 worker": partial(take, [sides["one"]], _FLEET),
        }
        samples = alternated(takes, place.repeats)
    meaning = (
        f"rows/s of {_FLEET} synthetic workers with steps of {_FLEET_STEP_MS} ms, {_FLEET_BATCH} prompts each, asked "
        f"by {_FLEET_CLIENTS} producers with {_FLEET_AT_ONCE} awaits under way each ÷ {_FLEET} times those of one "
        f"worker, asked by one producer; prompts have nothing in common; all are processes of their own; V = {TINY_V}"
    )
    return [_result("scaling-fleet", meaning, Goal(0.9), "rows/s", samples)]


def _synthetic(
    stack: ExitStack, place: Workplace, numbers: Mapping[str, int], vocab_size: int, *options: str
) -> dict[str, Child]:
    """A producer for each model; a model has so many synthetic workers, and rows of its own."""
    sides = {}
    for seed, (name, number) in enumerate(numbers.items()):
        more = ("--backend", "synthetic", "--vocab-size", str(vocab_size), "--seed", str(seed), *options)
        stack.enter_context(place.workers(name, name, *more, number=number))
        sides[name] = stack.enter_context(place.producer(name))
    return sides


def _result(name: str, meaning: str, goal: Goal, unit: str, samples: Mapping[str, list[float]]) -> Result:
    return Result(name, meaning, goal, *[Side(side, unit, taken) for side, taken in samples.items()])


def _prefix_step() -> str:
    return f"a step takes {_PREFIX_STEP_MS} ms and {_TOKEN_MS} ms a new token, V = {_V}"


def _draw_contexts(number: int, tokens: int, steps: int, roots: int | None = None) -> list[Ids]:
    """Contexts that nobody has asked before, of so many tokens and the steps by which they grow.

    Args:
        number: of contexts.
        tokens: that they begin with.
        steps: tokens that follow.
        roots: how many beginnings they share; None for each its own.
    """
    generator = np.random.default_rng()
    beginnings = generator.integers(0, _V, (roots or number, tokens))
    contexts = np.hstack([np.resize(beginnings, (number, tokens)), generator.integers(0, _V, (number, steps))])
    drawn: list[Ids] = contexts.tolist()
    return drawn


def _tokens_to_grow(place: Workplace, producer: Child, model: str, number: int, roots: int) -> float:
    """Tokens that the workers of a model compute for contexts that begin with so many different prompts."""
    before = _computed(place.heartbeats(model))
    contexts = _draw_contexts(number, _CONTEXT_TOKENS, _STEPS, roots)
    producer.ask("grow", within=_WITHIN_S, contexts=contexts, steps=_STEPS)
    return _computed(place.heartbeats(model)) - before


def _computed(workers: Mapping[str, Mapping[str, str]]) -> float:
    return sum(float(fields["tokens"]) - float(fields["reused"]) for fields in workers.values())


def _busy_s(fields: Mapping[str, str]) -> float:
    """Seconds that a synthetic worker has pretended to compute, by its heartbeat."""
    computed = float(fields["tokens"]) - float(fields["reused"])
    return (_PREFIX_STEP_MS * float(fields["steps"]) + _TOKEN_MS * computed) / 1000


def _write_llama(folder: Path) -> Path:
    """Write a Llama with random weights that computes next to nothing, as transformers reads it."""
    # It comes with the hf backend, which other measures need not have.
    from safetensors.numpy import save_file

    width, inner, heads, layers = 32, 64, 4, 2
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _V,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_hidden_layers": layers,
        "max_position_embeddings": 2 * _CONTEXT_TOKENS,
        "torch_dtype": "float32",
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (_V, width),
        "lm_head": (_V, width),
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
