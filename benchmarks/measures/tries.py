"""lmpool's tries against genlm-backend's, and trie workers against what Redis and redis-py can carry."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.harness.pairs import Goal, Result, Side, Take
from benchmarks.harness.processes import BenchmarkError, Child, LeftOut
from benchmarks.harness.tekken import N_ROWS, N_TOKENS, read_inputs, write_inputs
from benchmarks.harness.workplace import Workplace
from benchmarks.measures.asking import alternated
from benchmarks.peers.environment import peers_python

_BATCH, _DEVICE_BATCH = 32, 256
_GOALS = {"sum": 12.0, "max": 8.0}
_WITHIN_S = 600.0
_TOLERANCE = 1e-4
_PROBES = 200
_WHAT = f"batches of {_BATCH}, tekken's first {N_TOKENS:,} tokens, values of all nodes as a numpy array"

# What a value of the pool has besides its numbers.
_HEADER_BYTES = 16
_PROMPTS, _LONE_PROMPTS = 64, 1024
_AT_ONCE = N_ROWS
_SMALL_AT_ONCE = 512


def kernels(place: Workplace) -> list[Result]:
    """Sums and maxima of the weights below all nodes, in one process each."""
    peers = {"seq": "sequential", "par": "parallel"}
    with ExitStack() as stack:
        inputs = str(_inputs(place))
        ours = stack.enter_context(place.child("clients.trie_kernels", inputs))
        sides = {short: _peer(stack, place, inputs, kind) for short, kind in peers.items()}
        results = []
        for op, goal in _GOALS.items():
            _compare(op, ours, [*sides.values()], inputs)
            samples = alternated(
                {
                    "lmpool": _rows_per_second(ours, op, _BATCH, place.scaled(64, 8)),
                    **{name: _rows_per_second(peer, op, _BATCH, 4) for name, peer in sides.items()},
                },
                place.repeats,
            )
            for short, kind in peers.items():
                meaning = f"rows/s of our kernels, weight_{op} ÷ genlm-backend's {kind} trie, on the CPU; {_WHAT}"
                lmpool, genlm = Side("lmpool", "rows/s", samples["lmpool"]), Side("genlm", "rows/s", samples[short])
                results.append(Result(f"trie-{op}-{short}", meaning, Goal(goal), lmpool, genlm))
        return [*results, _errors(ours, sides["par"], inputs, place.repeats)]


def _errors(ours: Child, peer: Child, inputs: str, rows: int) -> Result:
    """How far sums are from those of the same weights in float64."""
    tokens, weights = read_inputs(inputs)
    prefixes = [b"", *_some_prefixes(tokens)]
    below = [[index for index, token in enumerate(tokens) if token.startswith(prefix)] for prefix in prefixes]

    def errors(side: Child) -> list[float]:
        largest = []
        for row in range(rows):
            exact = [float(weights[row][indices].sum(dtype=np.float64)) for indices in below]
            names = [prefix.hex() for prefix in prefixes]
            values = side.ask("probe", within=_WITHIN_S, op="sum", prefixes=names, row=row)
            largest.append(max(abs(value - sum_) / sum_ for value, sum_ in zip(values, exact, strict=True)))
        return largest

    meaning = (
        f"the largest relative error of weight_sum among the root and {len(prefixes) - 1} other nodes, of "
        f"genlm-backend's parallel trie ÷ of our kernels, against sums in float64; a sample is a row of weights; "
        f"tekken's first {N_TOKENS:,} tokens"
    )
    sides = [Side(name, "of the sum", errors(side)) for name, side in (("genlm", peer), ("lmpool", ours))]
    return Result("trie-error-par", meaning, None, *sides)


def build(place: Workplace) -> list[Result]:
    """Making the trie."""
    with ExitStack() as stack:
        inputs = str(_inputs(place))
        ours = stack.enter_context(place.child("clients.trie_kernels", inputs))
        peer = stack.enter_context(place.child("peers.trie_peer", inputs, "sequential", python=peers_python()))
        samples = alternated(
            {
                "genlm": lambda: float(peer.ask("build", times=1)),
                "lmpool": lambda: float(ours.ask("build", times=place.scaled(8, 2))),
            },
            place.repeats,
        )
    meaning = (
        f"seconds in which genlm-backend makes its sequential trie ÷ lmpool's Trie from a list of byte strings; "
        f"tekken's first {N_TOKENS:,} tokens"
    )
    return [Result("trie-build", meaning, Goal(10), *[Side(name, "s", taken) for name, taken in samples.items()])]


def cuda(place: Workplace) -> list[Result]:
    """Sums and maxima on a device."""
    for python in (sys.executable, peers_python()):
        if not _has_cuda(python):
            raise LeftOut(f"torch finds no CUDA device in the environment {Path(python).parents[1].name}")
    return on_device(place, "cuda")


def on_device(place: Workplace, device: str) -> list[Result]:
    """As `cuda`, on any device of torch."""
    with ExitStack() as stack:
        inputs = str(_inputs(place))
        ours = stack.enter_context(place.child("clients.trie_kernels", inputs, device))
        peer = _peer(stack, place, inputs, "parallel", device)
        results = []
        for op in _GOALS:
            _compare(op, ours, [peer], inputs)
            samples = alternated(
                {name: _row_ms(side, op, place.scaled(4, 1)) for name, side in (("genlm", peer), ("lmpool", ours))},
                place.repeats,
            )
            meaning = (
                f"milliseconds a row of genlm-backend's parallel trie, weight_{op} ÷ our kernels, both on {device}; "
                f"batches of {_DEVICE_BATCH} that are on the device, values of all nodes as a numpy array; tekken's "
                f"first {N_TOKENS:,} tokens"
            )
            sides = [Side(name, "ms", taken) for name, taken in samples.items()]
            results.append(Result(f"trie-{device}-{op}", meaning, Goal(5), *sides))
    return results


def worker(place: Workplace) -> list[Result]:
    """Weights to a trie worker and the values of all nodes back."""
    requests = place.scaled(1024, 256)
    with ExitStack() as stack:
        client = _client(stack, place, "tries")
        tokens, nodes, inner, _ = client.ask("sizes")
        ends = [stack.enter_context(place.child("peers.trie_transport", place.url)) for _ in range(2)]
        client.ask("prepare", prompts=1, lone=0)
        client.ask("check")
        samples = alternated(
            {
                "pool": _requests_per_second(client, "full", requests),
                "ceiling": _ceiling(ends, requests, tokens, nodes),
                "ceiling of what is sent": _ceiling(ends, requests, tokens, inner),
            },
            place.repeats,
        )
    pool, ceiling, sent = (Side(name.split(" of")[0], "requests/s", taken) for name, taken in samples.items())
    both = (
        f"weight_sum(ws) of all nodes, requests/s of one client process ({_AT_ONCE} awaits under way, distinct "
        "weights) through one trie worker process ÷ "
    )
    full = (
        f"{both}the ceiling for the same bytes both ways: one process SETs the weights ({tokens:,} numbers) and GETs "
        f"the values of all nodes ({nodes:,}), another GETs and SETs them, both at once and without waiting for each "
        "other (redis-py asyncio, hiredis, uvloop, pipelines of 4 MiB). The pool sends those of inner nodes only"
    )
    less = f"{both}a ceiling that moves what the pool sends: the weights, and the values of {inner:,} inner nodes"
    return [
        Result("trie-worker", full, Goal(0.6), pool, ceiling),
        Result("trie-worker-sent", less, None, pool, sent),
    ]


def reference(place: Workplace) -> list[Result]:
    """Few nodes for prompts whose rows are in the pool, and weights sent for all nodes."""
    few, many = place.scaled(1024, 256), place.scaled(16_384, 2048)
    with ExitStack() as stack:
        client = _client(stack, place, "tries")
        fused = _client(stack, place, "fused", "--seed", "1", "--with-trie")
        children = client.ask("sizes")[3]
        for asked in (client, fused):
            asked.ask("prepare", prompts=_PROMPTS, lone=_LONE_PROMPTS)
            asked.ask("check")
        samples = alternated(
            {
                "all nodes": _requests_per_second(client, "full", few),
                "by reference": _requests_per_second(client, "by_reference", many, _SMALL_AT_ONCE),
                "other prompts": _requests_per_second(client, "by_lone_reference", few),
                "fused": _requests_per_second(fused, "by_reference", many, _SMALL_AT_ONCE),
            },
            place.repeats,
        )
    base, *others = (Side(name, "requests/s", taken) for name, taken in samples.items())
    cached = (
        f"weight_sum(prompt=, under=) through a trie worker on cached f32 rows of {_PROMPTS} prompts, never the same "
        f"pair of prompt and prefix (the prefixes with the most children, 8 to 256, {children} as a mean), "
        f"{_SMALL_AT_ONCE} awaits under way, requests/s ÷ weight_sum(ws) of all nodes, {_AT_ONCE} awaits under way"
    )
    again = f"as trie-ref, but each of {_LONE_PROMPTS:,} prompts in turn, so that no row has been swept lately"
    same = "as trie-ref, with the model worker itself answering (`--with-trie`)"
    return [
        Result(name, meaning, goal, side, base)
        for name, meaning, goal, side in zip(
            ("trie-ref", "trie-ref-cold", "trie-ref-fused"),
            (cached, again, same),
            (Goal(15), None, None),
            others,
            strict=True,
        )
    ]


def _inputs(place: Workplace) -> Path:
    path = place.folder / "tekken.npz"
    return path if path.exists() else write_inputs(place.folder)


def _peer(stack: ExitStack, place: Workplace, *arguments: str) -> Child:
    peer = stack.enter_context(place.child("peers.trie_peer", *arguments, python=peers_python()))
    peer.ask("build", within=_WITHIN_S, times=1)
    return peer


def _client(stack: ExitStack, place: Workplace, name: str, *options: str) -> Child:
    """A client, a model with the trie's vocabulary, and a trie worker if there is none yet."""
    model = ("--backend", "synthetic", "--vocab-size", str(N_TOKENS), *options)
    stack.enter_context(place.workers(name, name, *model))
    if "--with-trie" not in options:
        stack.enter_context(place.trie_worker())
    arguments = ("--redis", place.url, "--model", name, "--inputs", str(_inputs(place)))
    return stack.enter_context(place.child("clients.trie_client", *arguments))


def _rows_per_second(side: Child, op: str, batch: int, times: int) -> Take:
    return lambda: batch * times / float(side.ask("compute", within=_WITHIN_S, op=op, batch=batch, times=times))


def _row_ms(side: Child, op: str, times: int) -> Take:
    rate = _rows_per_second(side, op, _DEVICE_BATCH, times)
    return lambda: 1000 / rate()


def _requests_per_second(client: Child, do: str, requests: int, at_once: int = _AT_ONCE) -> Take:
    return lambda: requests / float(client.ask(do, requests=requests, at_once=at_once))


def _ceiling(ends: Sequence[Child], requests: int, there: int, back: int) -> Take:
    """Requests a second, by the time that both ends take together."""
    sizes = {"there": 4 * there + _HEADER_BYTES, "back": 4 * back + _HEADER_BYTES}

    def take() -> float:
        # The pool's values may have pushed the last ones out of the server.
        ends[0].ask("prime", **sizes)
        start = time.perf_counter()
        for end, do in zip(ends, ("ask", "answer"), strict=True):
            end.send(do, requests=requests, **sizes)
        for end in ends:
            end.receive(_WITHIN_S)
        return requests / (time.perf_counter() - start)

    return take


def _compare(op: str, ours: Child, peers: Sequence[Child], inputs: str) -> None:
    """See that all sides compute the same.

    Raises:
        BenchmarkError: they do not.
    """
    tokens = read_inputs(inputs).tokens
    prefixes = [prefix.hex() for prefix in _some_prefixes(tokens)]
    values = ours.ask("probe", op=op, prefixes=prefixes)
    for peer in peers:
        peer_values = peer.ask("probe", within=_WITHIN_S, op=op, prefixes=prefixes)
        for prefix, a, b in zip(prefixes, values, peer_values, strict=True):
            if abs(a - b) > _TOLERANCE * abs(b):
                raise BenchmarkError(f"the sides disagree on the {op} below {bytes.fromhex(prefix)!r}: {a} and {b}")


def _some_prefixes(tokens: Sequence[bytes]) -> list[bytes]:
    return [token[: 1 + index % len(token)] for index, token in enumerate(tokens[:: N_TOKENS // _PROBES])]


def _has_cuda(python: str) -> bool:
    code = "import torch; raise SystemExit(not torch.cuda.is_available())"
    return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0
