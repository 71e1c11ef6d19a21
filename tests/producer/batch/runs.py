"""Helpers for the tests of `lmpool batch`: inputs, runs in this process, and expected outputs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lmpool.batch.folder import SUBMISSION, Folder, Input, Manifest, Model, Options
from lmpool.batch.run import BatchSettings, Outcome, Progress, run_batch
from lmpool.producer import Producer
from lmpool.synthetic import synthetic_row
from tests.support.pool import Pool, V, WorkerProcess, lmpool_command, run_lmpool

Array = np.ndarray[Any, np.dtype[Any]]


def write_lines(path: Path, lines: Iterable[Mapping[str, Any] | str]) -> Path:
    """Write a JSONL file; a line is an object, or a string that is written unchanged."""
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("".join(f"{text}\n" for text in texts), "utf-8", "surrogatepass")
    return path


def draw_texts(count: int, seed: int = 0, longest: int = 6) -> list[list[int]]:
    """Draw the token ids of texts of several lengths."""
    generator = np.random.default_rng(seed)
    return [generator.integers(1, V, generator.integers(1, longest + 1)).tolist() for _ in range(count)]


def write_texts(path: Path, texts: Iterable[list[int]]) -> Path:
    """Write a JSONL file with a line for each text."""
    return write_lines(path, ({"custom_id": f"text-{number}", "ids": ids} for number, ids in enumerate(texts)))


def rows_of(ids: list[int], start: int = 0, seed: int = 0) -> Array:
    """Return the rows of a text's positions by the synthetic model, (n, V)."""
    return np.stack([synthetic_row(ids[: at + 1], vocab_size=V, seed=seed) for at in range(start, len(ids))])


def manifest_of(suffix: str, shards: int = 1) -> Manifest:
    """Return the manifest of a run whose shards have the format of a file suffix."""
    model = Model("syn", "f", "synthetic", "", "float32", "f32", False, V, "", "")
    return Manifest(1, "0", Input("in", "jsonl", 1, 1, "d"), model, Options("rows", 0, suffix, 10), {}, shards)


def begun_folder(path: Path, suffix: str = "jsonl") -> tuple[Folder, Manifest]:
    """Make an output folder with a manifest; return both."""
    path.mkdir(exist_ok=True)
    folder = Folder(path)
    return folder, folder.begin(manifest_of(suffix))


def content(folder: Path) -> dict[str, bytes]:
    """Paths in an output folder -> contents, without the lock, the notes of shards, and `submit`'s arguments."""
    others = ("lock", "done/", SUBMISSION)
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if not name.startswith(others)}


def errors(folder: Path) -> list[tuple[int, str | None, str]]:
    """List the lines that have no result: line number, custom id, reason."""
    lines = (folder / "errors.jsonl").read_text("utf-8").splitlines()
    return [tuple(json.loads(line).values()) for line in lines]


async def run(producer: Producer, source: Path | str, output: Path | str, what: str, **settings: Any) -> Outcome:
    """Do a batch run in this process."""
    return await run_batch(producer, source, output, BatchSettings(what, **settings), Progress())


def arguments(pool: Pool, source: Path | str, output: Path | str, *options: str | int | float) -> list[str]:
    """The command line of a batch run, without the word `lmpool`."""
    return ["batch", "run", str(source), str(output), "--redis", pool.url, "--prefix", pool.prefix, *map(str, options)]


def begin(pool: Pool, source: Path | str, output: Path | str, *options: str | int | float) -> WorkerProcess:
    """Start a batch run as a process."""
    command = [*lmpool_command(), *arguments(pool, source, output, *options)]
    return WorkerProcess(command, pool.folder / f"{Path(output).name}.log")


def batch(pool: Pool, command: str, *arguments: str | Path) -> str:
    """Run a command of `lmpool batch`; return its output."""
    ended = run_lmpool("batch", command, *map(str, arguments), "--redis", pool.url)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def worker(pool: Pool, *options: str) -> WorkerProcess:
    """Start a worker of arq's jobs."""
    command = [*lmpool_command(), "batch", "worker", "--lease-s", "2", "--redis", pool.url, "--files", str(pool.folder)]
    return WorkerProcess([*command, *options], pool.folder / f"arq-{len(list(pool.folder.glob('arq-*')))}.log")


async def run_until_empty(pool: Pool) -> WorkerProcess:
    """Run a worker of arq's jobs until no job is queued."""
    process = worker(pool, "--burst")
    assert await asyncio.to_thread(process.wait) == 0, process.text
    return process
