"""`make bench-compare BASE=<commit>`: check that the pool is not slower than at an earlier commit.

Each of the two pools has its own environment, server, workers and client process. The pools run in turns; a waiting
pool is idle. Both clients run the same program, and both servers run the same binary. All packages except lmpool have
the same version in both environments.
"""

from __future__ import annotations

import argparse
import math
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NoReturn

from redis.exceptions import RedisError

from benchmarks.compare.environments import Environment
from benchmarks.compare.measures import DEFAULT_MEASURES, MEASURES, Burst, Measure, Pool
from benchmarks.harness.pairs import Interval, show
from benchmarks.harness.processes import BenchmarkError
from benchmarks.harness.report import BEST_COMMIT
from benchmarks.harness.testbed import MEMORY_BYTES, Testbed, open_testbed
from lmpool.errors import LMPoolError

_TOLERANCE = 0.02  # A ratio of rates down to 0.98 counts as not worse.
_ROUNDS = 5  # Number of rounds; each round starts new processes.
_MIN_PAIRS = 6  # With fewer pairs, all ratios lie on one side of the true median in over 5 % of the runs.
_QUICK_PAIRS = 2  # Pairs per measure in a quick run.
_QUICK_MEMORY_BYTES = 256 * 2**20  # The server's memory limit in a quick run.

Pair = tuple[Burst, Burst]
"""A burst of the new pool, and a burst of the base pool."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare two pools and print ratios; return 1 if a measure is worse, 2 if a measure failed, 130 on Ctrl-C."""
    given = _parse(arguments)
    try:
        return _run(given)
    except KeyboardInterrupt:
        return 130
    except (BenchmarkError, LMPoolError, RedisError, OSError) as error:
        print(f"cannot compare: {error}", file=sys.stderr)
        return 2


def _run(given: argparse.Namespace) -> int:
    measures = {name: MEASURES[name] for name in given.measures}
    extra = "hf" if any(measure.extra == "hf" for measure in measures.values()) else "worker"
    new, base = (
        Environment.existing(python) if python else Environment.of(commit, extra)
        for commit, python in ((given.new, given.new_python), (given.base, given.base_python))
    )
    print(f"new:  {new.commit}\nbase: {base.commit}", flush=True)
    memory = _QUICK_MEMORY_BYTES if given.quick else MEMORY_BYTES
    worse = failed = 0
    with ExitStack() as stack:
        testbeds = [stack.enter_context(open_testbed(1, given.quick, memory)) for _ in range(2)]
        for name, measure in measures.items():
            pairs = given.pairs or (_QUICK_PAIRS if given.quick else measure.pairs)
            try:
                rounds = _take(measure, pairs, list(zip(testbeds, (new, base), strict=True)))
            except (BenchmarkError, LMPoolError, RedisError, OSError) as error:
                failed += 1
                print(f"{name}: failed: {error}", file=sys.stderr, flush=True)
                continue
            print(summary(name, measure, rounds), flush=True)
            worse += verdict(rounds) == "worse"
    return 1 if worse else 2 if failed else 0


def _take(measure: Measure, pairs: int, sides: Sequence[tuple[Testbed, Environment]]) -> list[list[Pair]]:
    """Take pairs of bursts in rounds. Each round starts new processes, as two processes differ in speed."""
    for testbed, _ in sides:
        testbed.refill()
    rounds = []
    for number in range(min(_ROUNDS, pairs)):
        with ExitStack() as stack:
            pools = [Pool(testbed, environment, measure) for testbed, environment in sides]
            for pool in _in_turn(pools, number):
                stack.enter_context(pool.open())
            # Spread the pairs over the rounds; two rounds differ by at most one pair.
            rounds.append(
                [_pair(pools, number + index) for index in range(pairs // _ROUNDS + (number < pairs % _ROUNDS))]
            )
    return rounds


def _pair(pools: Sequence[Pool], number: int) -> Pair:
    arguments = pools[0].draw()
    taken = {pool: pool.burst(arguments) for pool in _in_turn(pools, number)}
    return taken[pools[0]], taken[pools[1]]


def _in_turn(pools: Sequence[Pool], number: int) -> Sequence[Pool]:
    """Alternate the orders A B and B A, so that a change of the machine during a pair affects both sides alike."""
    return pools if number % 2 == 0 else pools[::-1]


def _ratios(rounds: Sequence[Sequence[Pair]]) -> Interval:
    return Interval.of([[new.rate / base.rate for new, base in pairs] for pairs in rounds])


def verdict(rounds: Sequence[Sequence[Pair]]) -> str:
    """The verdict on a measure, from the confidence interval of the ratios of its rates."""
    ratio = _ratios(rounds)
    if sum(map(len, rounds)) < _MIN_PAIRS:
        return f"cannot tell from fewer than {_MIN_PAIRS} pairs"
    if ratio.high < 1 - _TOLERANCE:
        return "worse"
    if ratio.low < 1 - _TOLERANCE:
        return "cannot tell: run more pairs, or use a quieter machine"
    return "better" if ratio.low > 1 else "no worse"


def summary(name: str, measure: Measure, rounds: Sequence[Sequence[Pair]]) -> str:
    """The printed lines of a measure: its verdict, the medians of its rates, and the processor time per process."""
    ratio = _ratios(rounds)
    lines = [
        f"{name}: {ratio} of {sum(map(len, rounds))} pairs in {len(rounds)} rounds: {verdict(rounds)}",
        f"  {measure.meaning}: {_medians(rounds, lambda burst: burst.rate)}",
    ]
    return "\n".join([*lines, *(_processor_line(process, rounds) for process in rounds[0][0][0].processor)])


def _processor_line(process: str, rounds: Sequence[Sequence[Pair]]) -> str:
    def used(burst: Burst) -> float:
        return burst.processor[process]

    if math.isnan(used(rounds[0][0][0])):
        return f"  processor time, {process}: unknown on {sys.platform}"
    if not all(used(base) for pairs in rounds for _, base in pairs):
        # Some kernels count in ticks of 10 ms; in a burst, a server that stores few rows may use less than one tick.
        return f"  processor time, {process}: less than one clock tick; µs per row: {_medians(rounds, used)}"
    ratio = Interval.of([[used(new) / used(base) for new, base in pairs] for pairs in rounds])
    return f"  processor time, {process}: {ratio}; µs per row: {_medians(rounds, used)}"


def _medians(rounds: Sequence[Sequence[Pair]], figure: Callable[[Burst], float]) -> str:
    all_pairs = [pair for pairs in rounds for pair in pairs]
    new, base = (statistics.median(figure(pair[side]) for pair in all_pairs) for side in range(2))
    return f"new {show(new)}, base {show(base)}"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description="Compare the pool of this checkout with the pool of an earlier commit. Ratios are new ÷ base with "
        "a 95 % confidence interval: of rates (more is better), and of processor time per row (less is better).",
    )
    parser.add_argument(
        "base", nargs="?", default=BEST_COMMIT, help="commit (default: %(default)s, the fastest so far)"
    )
    parser.add_argument("--new", default="", metavar="COMMIT", help="commit to compare (default: the working tree)")
    parser.add_argument(
        "--measures",
        nargs="+",
        choices=MEASURES,
        default=DEFAULT_MEASURES,
        metavar="NAME",
        help=f"choose from {', '.join(MEASURES)} (default: {', '.join(DEFAULT_MEASURES)})",
    )
    parser.add_argument("--pairs", type=int, help="pairs of bursts per measure (default: 10 or 40, by measure)")
    parser.add_argument("--quick", action="store_true", help="small bursts, to check that everything runs")
    for side in ("base", "new"):
        parser.add_argument(
            f"--{side}-python", metavar="PATH", help=f"interpreter of an existing environment of {side}"
        )
    given = parser.parse_args(arguments)
    if given.pairs is not None and given.pairs < 1:
        parser.error(f"--pairs is {given.pairs}; it must be at least 1")
    return given


def _exit(number: int, frame: object) -> NoReturn:
    """Exit with an exception on SIGTERM, so that the context managers end all processes."""
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _exit)
    sys.exit(main())
