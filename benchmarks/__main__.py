"""`python -m benchmarks [NAME …]`: run measures, print the results, and write the report."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from redis.exceptions import RedisError

from benchmarks.fleet.__main__ import main as fleet
from benchmarks.harness.pairs import Result
from benchmarks.harness.processes import BenchmarkError, Skipped
from benchmarks.harness.report import Failures, describe_run, write_page
from benchmarks.harness.testbed import Testbed, open_testbed
from benchmarks.measures import (
    bulk,
    devices,
    engine_measures,
    interference,
    job_queue,
    latency,
    picks,
    real_model,
    scaling,
    smc,
    transport,
    tries,
)
from benchmarks.peers.environment import peers_python, versions
from benchmarks.teacher import divergences, gateway, positions
from benchmarks.teacher import versions as weight_versions
from lmpool.errors import LMPoolError

_POOL: dict[str, Callable[[Testbed], list[Result]]] = {
    "new-f32": transport.new_f32,
    "new-f32-large": transport.new_f32_large,
    "new-bf16": transport.new_bf16,
    "cached": transport.cached,
    "tiny": transport.tiny,
    "row-link": transport.row_link,
    "new-direct": transport.new_direct,
    "alone": latency.alone,
    "arq": job_queue.arq,
    "priority": interference.with_bulk_run,
    "priority-alone": interference.bulk_alone,
    "hf-random": real_model.hf_random,
    "hf-shared": real_model.hf_shared,
    "hf-direct": real_model.hf_direct,
    "hf-long": real_model.hf_long,
    "hf-waiting": real_model.hf_waiting,
    "bulk-run": bulk.bulk_run,
    "bulk-memory": bulk.bulk_memory,
    "web-pages": interference.web_pages,
}
_SCALING: dict[str, Callable[[Testbed], list[Result]]] = {
    "scaling-distinct": scaling.distinct,
    "scaling-tokens": scaling.tokens,
    "scaling-lock-step": scaling.lock_step,
    "scaling-particles": scaling.particles,
    "scaling-hot-tree": scaling.hot_tree,
    "scaling-fleet": scaling.fleet,
}
_ENGINES: dict[str, Callable[[Testbed], list[Result]]] = {
    "vllm-random": engine_measures.vllm_random,
    "vllm-grow": engine_measures.vllm_grow,
    "vllm-sessions": engine_measures.vllm_sessions,
    "vllm-http": engine_measures.vllm_http,
    "vllm-positions": engine_measures.vllm_positions,
    "vllm-overhead": engine_measures.vllm_overhead,
    "vllm-tensor": engine_measures.vllm_tensor,
    "sglang-random": engine_measures.sglang_random,
    "sglang-grow": engine_measures.sglang_grow,
}
_TRIES: dict[str, Callable[[Testbed], list[Result]]] = {
    "trie-kernels": tries.kernels,
    "trie-build": tries.build,
    "trie-worker": tries.worker,
    "trie-ref": tries.reference,
    "trie-cuda": tries.cuda,
}
_GENLM: dict[str, Callable[[Testbed], list[Result]]] = {
    "targets": picks.targets,
    "score": picks.score,
    "generate": picks.generate,
    "positions": picks.positions,
    "smc": smc.smc,
}
_TEACHER: dict[str, Callable[[Testbed], list[Result]]] = {
    "teacher-hf": positions.hf,
    "teacher-vllm": positions.vllm,
    "gateway-vllm": gateway.vllm,
    "gateway-rows": gateway.rows,
    "divergence": divergences.divergence,
    "weights": weight_versions.weights,
    "weights-rolling": weight_versions.weights_rolling,
}
_DEVICES = {f"hf-{size}": devices.measured(size) for size in ("1b", "8b")}
_GROUPS = {
    "pool": _POOL,
    "scaling": _SCALING,
    "engines": _ENGINES,
    "tries": _TRIES,
    "genlm": _GENLM,
    "teacher": _TEACHER,
    "devices": _DEVICES,
}
_MEASURES = {**_POOL, **_SCALING, **_ENGINES, **_TRIES, **_GENLM, **_TEACHER, **_DEVICES}
# The measures that need the environment of the compared projects (peers).
_WITH_PEERS = ("arq", "hf-random", "hf-shared", "trie-kernels", "trie-build", "trie-cuda", "smc")
_REPEATS, _QUICK_REPEATS = 5, 2  # Number of samples of each side, in a full run and in a quick run.


def main(arguments: Sequence[str] | None = None) -> int:
    """Run measures; return 0 if all measures ran, even below their goals, 1 if a measure failed, 130 on Ctrl-C."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["fleet"]:  # A program of its own, with options of its own.
        return fleet(words[1:])
    given = _parse(words)
    signal.signal(signal.SIGTERM, _exit)
    try:
        return _run(given.names, given.repeats, given.quick, given.write)
    except KeyboardInterrupt:
        return 130


def _run(names: Sequence[str], repeats: int, quick: bool, write: Path | None) -> int:
    results: list[Result] = []
    failures = Failures({}, {})
    with open_testbed(repeats, quick) as testbed:
        facts = describe_run(testbed.url, _versions_of_peers(names))
        for name in names:
            print(f"measuring {name}", file=sys.stderr, flush=True)
            try:
                testbed.refill()
                measured = _MEASURES[name](testbed)
            except Skipped as reason:
                failures.skipped[name] = str(reason)
                print(f"{name}: skipped: {reason}", file=sys.stderr, flush=True)
                continue
            except (BenchmarkError, LMPoolError, RedisError, OSError) as error:
                failures.failed[name] = str(error)
                print(f"{name}: failed: {error}", file=sys.stderr, flush=True)
                continue
            results += measured
            print(*measured, sep="\n", flush=True)
    for name, fact in facts.items():
        print(f"{name}: {fact}")
    if write is not None:
        write_page(write, results, failures, facts, repeats)
    return 1 if failures.failed else 0


def _versions_of_peers(names: Sequence[str]) -> dict[str, str]:
    """Versions of the compared projects (peers) if a measure needs them; builds their environment if it is missing."""
    if not any(name in _WITH_PEERS for name in names):
        return {}
    try:
        return versions(peers_python())
    except BenchmarkError as error:
        print(f"the peers' environment is missing: {error}", file=sys.stderr, flush=True)
        return {}  # Report no versions: the measures that need the peers fail with the same error.


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure the pool against its peers.")
    known = (*_GROUPS, *_MEASURES)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"groups or measures: {', '.join(known)} (default: all)"
    )
    parser.add_argument("--quick", action="store_true", help="small samples, to check that everything runs")
    parser.add_argument(
        "--repeats", type=int, help=f"samples of each side (default: {_REPEATS}, quick: {_QUICK_REPEATS})"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the report of one group to FILE")
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.names if name not in known]:
        parser.error(f"unknown measures: {', '.join(unknown)}; choose from {', '.join(known)}")
    if given.write is not None and (given.quick or len(given.names) != 1 or given.names[0] not in _GROUPS):
        parser.error(f"--write needs exactly one group ({', '.join(_GROUPS)}) and no --quick")
    given.names = [measure for name in given.names or _GROUPS for measure in _GROUPS.get(name, {name: None})]
    given.repeats = given.repeats or (_QUICK_REPEATS if given.quick else _REPEATS)
    if given.repeats < 1:
        parser.error(f"--repeats is {given.repeats}; it must be at least 1")
    return given


def _exit(number: int, frame: object) -> NoReturn:
    """Exit with an exception on SIGTERM, so that the context managers end all processes."""
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
