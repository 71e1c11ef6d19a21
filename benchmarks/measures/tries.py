"""Compares lmpool's tries with genlm-backend's tries, and the rate of trie workers with the rate of plain redis-py."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.harness.comparison import alternated
from benchmarks.harness.pairs import Goal, Result, Side, Take
from benchmarks.harness.processes import BenchmarkError, Child, Skipped
from benchmarks.harness.tekken import N_ROWS, N_TOKENS, read_inputs, write_inputs
from benchmarks.harness.testbed import Testbed
from benchmarks.peers.environment import peers_python

_BATCH, _DEVICE_BATCH = 32, 256  # Rows of weights per call, on the CPU and on another torch device.
_GOALS = {"sum": 12.0, "max": 8.0}
_WITHIN_S = 600.0  # Max seconds until a process responds: genlm-backend is slow on a busy machine.
_TOLERANCE = 1e-4  # Max relative difference between the values of the two sides.
_PROBES = 200  # Number of nodes whose values are compared between the two sides.
_TASK = f"batches of {_BATCH}, tekken's first {N_TOKENS:,} tokens, values of all nodes as a numpy array"

_HEADER_BYTES = 16  # Bytes of the header that the pool adds to the numbers of a stored value.
_PROMPTS, _LONE_PROMPTS = 64, 1024  # Prompts with many requests each; prompts that are requested in rotation.
_CONCURRENCY = N_ROWS  # Requests in flight for the values of all nodes: one per row of weights.
_SMALL_CONCURRENCY = 512  # Requests in flight when each request is for the values of few nodes.


def kernels(testbed: Testbed) -> list[Result]:
    """Measure sums and maxima of the weights below all nodes, with one process per side."""
    peers = {"seq": "sequential", "par": "parallel"}
    with ExitStack() as stack:
        inputs = str(_inputs(testbed))
        ours = stack.enter_context(testbed.child("clients.trie_kernels", inputs))
        sides = {short: _peer(stack, testbed, inputs, kind) for short, kind in peers.items()}
        results = []
        for op, goal in _GOALS.items():
            _compare(op, ours, [*sides.values()], inputs)
            samples = alternated(
                {
                    "lmpool": _rows_per_second(ours, op, _BATCH, testbed.scaled(64, 8)),
                    **{name: _rows_per_second(peer, op, _BATCH, 4) for name, peer in sides.items()},
                },
                testbed.repeats,
            )
            for short, kind in peers.items():
                meaning = f"rows/s of lmpool's kernels, weight_{op} ÷ genlm-backend's {kind} trie, on the CPU; {_TASK}"
                lmpool, genlm = Side("lmpool", "rows/s", samples["lmpool"]), Side("genlm", "rows/s", samples[short])
                results.append(Result(f"trie-{op}-{short}", meaning, Goal(goal), lmpool, genlm))
        return [*results, _errors(ours, sides["par"], inputs, testbed.repeats)]


def _errors(ours: Child, peer: Child, inputs: str, rows: int) -> Result:
    """Relative errors of both sides' sums against float64 sums of the same weights."""
    tokens, weights = read_inputs(inputs)
    prefixes = [b"", *_some_prefixes(tokens)]
    below = [[index for index, token in enumerate(tokens) if token.startswith(prefix)] for prefix in prefixes]

    def errors(side: Child) -> list[float]:
        largest = []
        for row in range(rows):
            exact = [float(weights[row][indices].sum(dtype=np.float64)) for indices in below]
            names = [prefix.hex() for prefix in prefixes]
            values = side.request("probe", within=_WITHIN_S, op="sum", prefixes=names, row=row)
            largest.append(max(abs(value - sum_) / sum_ for value, sum_ in zip(values, exact, strict=True)))
        return largest

    meaning = (
        f"the largest relative error of weight_sum among the root and {len(prefixes) - 1} other nodes against float64 "
        f"sums, of genlm-backend's parallel trie ÷ of lmpool's kernels; a sample is one row of weights; tekken's first "
        f"{N_TOKENS:,} tokens"
    )
    sides = [Side(name, "of the sum", errors(side)) for name, side in (("genlm", peer), ("lmpool", ours))]
    return Result("trie-error-par", meaning, None, *sides)


def build(testbed: Testbed) -> list[Result]:
    """Measure the time to build a trie."""
    with ExitStack() as stack:
        inputs = str(_inputs(testbed))
        ours = stack.enter_context(testbed.child("clients.trie_kernels", inputs))
        peer = stack.enter_context(testbed.child("peers.trie_peer", inputs, "sequential", python=peers_python()))
        samples = alternated(
            {
                "genlm": lambda: float(peer.request("build", times=1)),
                "lmpool": lambda: float(ours.request("build", times=testbed.scaled(8, 2))),
            },
            testbed.repeats,
        )
    meaning = (
        f"seconds to build genlm-backend's sequential trie ÷ lmpool's Trie from a list of byte strings; tekken's first "
        f"{N_TOKENS:,} tokens"
    )
    return [Result("trie-build", meaning, Goal(10), *[Side(name, "s", taken) for name, taken in samples.items()])]


def cuda(testbed: Testbed) -> list[Result]:
    """Measure sums and maxima of weights on a CUDA device."""
    for python in (sys.executable, peers_python()):
        if not _has_cuda(python):
            raise Skipped(f"torch finds no CUDA device in the environment {Path(python).parents[1].name}")
    return on_device(testbed, "cuda")


def on_device(testbed: Testbed, device: str) -> list[Result]:
    """Measure sums and maxima of weights on any torch device."""
    with ExitStack() as stack:
        inputs = str(_inputs(testbed))
        ours = stack.enter_context(testbed.child("clients.trie_kernels", inputs, device))
        peer = _peer(stack, testbed, inputs, "parallel", device)
        results = []
        for op in _GOALS:
            _compare(op, ours, [peer], inputs)
            samples = alternated(
                {name: _row_ms(side, op, testbed.scaled(4, 1)) for name, side in (("genlm", peer), ("lmpool", ours))},
                testbed.repeats,
            )
            meaning = (
                f"milliseconds per row of genlm-backend's parallel trie, weight_{op} ÷ lmpool's kernels, both on "
                f"{device}; batches of {_DEVICE_BATCH} on the device, values of all nodes as a numpy array; tekken's "
                f"first {N_TOKENS:,} tokens"
            )
            sides = [Side(name, "ms", taken) for name, taken in samples.items()]
            results.append(Result(f"trie-{device}-{op}", meaning, Goal(5), *sides))
    return results


def worker(testbed: Testbed) -> list[Result]:
    """Measure requests that send weights to a trie worker and receive the values of all nodes."""
    requests = testbed.scaled(1024, 256)
    with ExitStack() as stack:
        client = _client(stack, testbed, "tries")
        tokens, nodes, inner, _ = client.request("sizes")
        ends = [stack.enter_context(testbed.child("peers.trie_transport", testbed.url)) for _ in range(2)]
        client.request("prepare", prompts=1, lone=0)
        client.request("check")
        samples = alternated(
            {
                "pool": _requests_per_second(client, "full", requests),
                "ceiling": _ceiling(ends, requests, tokens, nodes),
                "ceiling of sent bytes": _ceiling(ends, requests, tokens, inner),
            },
            testbed.repeats,
        )
    pool, ceiling, sent = (Side(name.split(" of")[0], "requests/s", taken) for name, taken in samples.items())
    both = (
        f"weight_sum(ws) of all nodes, requests/s of one client process ({_CONCURRENCY} requests in flight, distinct "
        "weights) through one trie worker process ÷ "
    )
    full = (
        f"{both}the ceiling for the same bytes in both directions: one process SETs the weights ({tokens:,} numbers) "
        f"and GETs the values of all nodes ({nodes:,}), another GETs and SETs them, concurrently and without waiting "
        "for each other (redis-py asyncio, hiredis, uvloop, pipelines of 4 MiB). The pool sends the values of inner "
        "nodes only"
    )
    less = f"{both}a ceiling for the bytes that the pool sends: the weights, and the values of {inner:,} inner nodes"
    return [
        Result("trie-worker", full, Goal(0.6), pool, ceiling),
        Result("trie-worker-sent", less, None, pool, sent),
    ]


def reference(testbed: Testbed) -> list[Result]:
    """Compare requests for few nodes, about cached rows, with requests that send weights and receive all nodes."""
    few, many = testbed.scaled(1024, 256), testbed.scaled(16_384, 2048)
    with ExitStack() as stack:
        client = _client(stack, testbed, "tries")
        fused = _client(stack, testbed, "fused", "--seed", "1", "--with-trie")
        children = client.request("sizes")[3]
        for side in (client, fused):
            side.request("prepare", prompts=_PROMPTS, lone=_LONE_PROMPTS)
            side.request("check")
        samples = alternated(
            {
                "all nodes": _requests_per_second(client, "full", few),
                "by reference": _requests_per_second(client, "by_reference", many, _SMALL_CONCURRENCY),
                "other prompts": _requests_per_second(client, "by_lone_reference", few),
                "fused": _requests_per_second(fused, "by_reference", many, _SMALL_CONCURRENCY),
            },
            testbed.repeats,
        )
    base, *others = (Side(name, "requests/s", taken) for name, taken in samples.items())
    cached = (
        f"requests/s of weight_sum(prompt=, under=) through a trie worker on cached f32 rows of {_PROMPTS} prompts, "
        f"each pair of prompt and prefix once (the prefixes with the most children, 8 to 256, mean {children}), "
        f"{_SMALL_CONCURRENCY} requests in flight ÷ weight_sum(ws) of all nodes, {_CONCURRENCY} requests in flight"
    )
    again = f"like trie-ref, but {_LONE_PROMPTS:,} prompts in rotation, so that no recent request used the same row"
    same = "like trie-ref, but the model's worker computes the values (`--with-trie`)"
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


def _inputs(testbed: Testbed) -> Path:
    path = testbed.folder / "tekken.npz"
    return path if path.exists() else write_inputs(testbed.folder)


def _peer(stack: ExitStack, testbed: Testbed, *arguments: str) -> Child:
    peer = stack.enter_context(testbed.child("peers.trie_peer", *arguments, python=peers_python()))
    peer.request("build", within=_WITHIN_S, times=1)
    return peer


def _client(stack: ExitStack, testbed: Testbed, name: str, *options: str) -> Child:
    """Start a client, a worker with the trie's vocabulary, and a trie worker unless the first worker serves tries."""
    model = ("--backend", "synthetic", "--vocab-size", str(N_TOKENS), *options)
    stack.enter_context(testbed.workers(name, name, *model))
    if "--with-trie" not in options:
        stack.enter_context(testbed.trie_worker())
    arguments = ("--redis", testbed.url, "--model", name, "--inputs", str(_inputs(testbed)))
    return stack.enter_context(testbed.child("clients.trie_client", *arguments))


def _rows_per_second(side: Child, op: str, batch: int, times: int) -> Take:
    return lambda: batch * times / float(side.request("compute", within=_WITHIN_S, op=op, batch=batch, times=times))


def _row_ms(side: Child, op: str, times: int) -> Take:
    rate = _rows_per_second(side, op, _DEVICE_BATCH, times)
    return lambda: 1000 / rate()


def _requests_per_second(client: Child, do: str, requests: int, concurrency: int = _CONCURRENCY) -> Take:
    return lambda: requests / float(client.request(do, requests=requests, concurrency=concurrency))


def _ceiling(ends: Sequence[Child], requests: int, there: int, back: int) -> Take:
    """Requests per second of two processes that move all bytes of the requests through Redis."""
    sizes = {"there": 4 * there + _HEADER_BYTES, "back": 4 * back + _HEADER_BYTES}

    def take() -> float:
        # Store the values again: the server may have evicted the earlier values while the pool ran.
        ends[0].request("prime", **sizes)
        start = time.perf_counter()
        for end, do in zip(ends, ("client", "worker"), strict=True):
            end.send(do, requests=requests, **sizes)
        for end in ends:
            end.receive(_WITHIN_S)
        return requests / (time.perf_counter() - start)

    return take


def _compare(op: str, ours: Child, peers: Sequence[Child], inputs: str) -> None:
    """Raise BenchmarkError if the sides compute different values."""
    tokens = read_inputs(inputs).tokens
    prefixes = [prefix.hex() for prefix in _some_prefixes(tokens)]
    values = ours.request("probe", op=op, prefixes=prefixes)
    for peer in peers:
        peer_values = peer.request("probe", within=_WITHIN_S, op=op, prefixes=prefixes)
        for prefix, a, b in zip(prefixes, values, peer_values, strict=True):
            if abs(a - b) > _TOLERANCE * abs(b):
                raise BenchmarkError(f"the sides disagree on the {op} below {bytes.fromhex(prefix)!r}: {a} and {b}")


def _some_prefixes(tokens: Sequence[bytes]) -> list[bytes]:
    return [token[: 1 + index % len(token)] for index, token in enumerate(tokens[:: N_TOKENS // _PROBES])]


def _has_cuda(python: str) -> bool:
    code = "import torch; raise SystemExit(not torch.cuda.is_available())"
    return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0
