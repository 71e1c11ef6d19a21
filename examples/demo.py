"""The demo: one server, one worker with a real model, three client processes that share its rows.

    python examples/demo.py MODEL_FOLDER [--backend vllm]

Each client requests the rows of 48 prompts: 16 English sentences, cut at three lengths. All clients have the same
prompts, so most rows come from the cache, or from another client's request in flight.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from lmpool.errors import LMPoolError
from lmpool.producer import Producer, SyncProducer
from lmpool.producer.tokenizer import PublishedTokenizer

CLIENTS = 3
# The default backend of `lmpool up`.
DEFAULT_BACKEND = "hf"
START_LIMIT_S = 120.0
SENTENCES = [
    "The capital of France is",
    "Water freezes at a temperature of zero degrees",
    "She opened the door and saw a",
    "The quick brown fox jumps over the lazy",
    "In the beginning there was nothing but",
    "To be or not to be, that is the",
    "The largest planet in our solar system is",
    "Once upon a time there was a little",
    "The opposite of hot is",
    "He drank a cup of coffee and read the",
    "Two plus two is equal to",
    "The sun rises in the east and sets in the",
    "My favorite season of the year is",
    "The first president of the United States was George",
    "A triangle has three sides and three",
    "They lived happily ever",
]


def prompts_of(tokenizer: PublishedTokenizer) -> list[list[int]]:
    """48 prompts: each sentence without its last two words, without its last word, and as a whole."""
    texts = [" ".join(sentence.split()[: len(sentence.split()) - cut]) for sentence in SENTENCES for cut in (2, 1, 0)]
    return [tokenizer.encode(text) for text in texts]


async def client() -> None:
    """Run one client process: wait for the start signal, send all requests at once, print the results as JSON."""
    async with Producer() as producer:
        tokenizer = await producer.tokenizer()
        prompts = prompts_of(tokenizer)
        print("ready", flush=True)
        sys.stdin.readline()
        started = time.perf_counter()
        rows = await producer.batch_logprobs(prompts)
        seconds = time.perf_counter() - started
        stats = producer.stats()
    best = [np.argsort(row)[::-1][:3] for row in rows[2::3]]
    words = [
        [(tokenizer.decode([int(token)]), float(np.exp(row[token]))) for token in tokens]
        for row, tokens in zip(rows[2::3], best, strict=True)
    ]
    shared = stats.cache_hits + stats.joined
    print(json.dumps({"asked": stats.requests, "computed": stats.computed, "shared": shared,
                      "seconds": seconds, "words": words}))  # fmt: skip


@contextmanager
def pool(given: argparse.Namespace, runtime: Path) -> Iterator[None]:
    """Run `lmpool up` with the model, in a new folder, so that your own pool is not affected."""
    command = _up(given)
    log = runtime / "up.log"
    with log.open("wb") as out:
        up = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + START_LIMIT_S
        while not _is_served():
            if up.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"lmpool up did not come up:\n{log.read_text()}")
            time.sleep(0.1)
        yield
    finally:
        up.send_signal(signal.SIGINT)
        up.wait(60)


def _up(given: argparse.Namespace) -> list[str]:
    lmpool = Path(sys.executable).with_name("lmpool")
    command = [sys.executable, "-m", given.launcher] if given.launcher else [str(lmpool)]
    backend = [] if given.backend == DEFAULT_BACKEND else ["--backend", given.backend]
    return [*command, "up", given.folder, "--name", "smollm2", *backend]


def _as_typed(command: list[str]) -> str:
    """The command line for a shell in this folder: relative paths, and only the name of a program that is in PATH."""
    program, *rest = command
    found = shutil.which(Path(program).name)
    here = Path.cwd()
    words = [Path(program).name, *rest] if found is not None and Path(found) == Path(program) else command
    paths = (Path(word) for word in words)
    return shlex.join(str(path.relative_to(here)) if path.is_relative_to(here) else str(path) for path in paths)


def _is_served() -> bool:
    try:
        SyncProducer("smollm2").close()
    except LMPoolError:
        return False
    return True


def ask_from_clients() -> list[dict[str, Any]]:
    """Start the client processes, send the start signal to all of them, and collect their results."""
    began = time.perf_counter()
    command = [sys.executable, *sys.argv, "--client"]
    clients = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(CLIENTS)
    ]
    try:
        for client in clients:
            assert client.stdout is not None
            if client.stdout.readline() != "ready\n":
                raise SystemExit("a client did not start")
        print(f"they are ready after {time.perf_counter() - began:.1f} s, and ask", flush=True)
        for client in clients:
            assert client.stdin is not None
            client.stdin.write("go\n")
            client.stdin.flush()
        return [json.loads(client.communicate(timeout=120)[0]) for client in clients]
    finally:
        for client in clients:
            if client.poll() is None:
                client.kill()


def show(results: list[dict[str, Any]]) -> None:
    """Print the most likely next words, and where each client got its rows."""
    console = Console()
    words = Table("sentence", title="What the model says")
    words.add_column("likeliest next words", no_wrap=True)
    for sentence, likeliest in zip(SENTENCES, results[0]["words"], strict=True):
        words.add_row(sentence, "  ".join(f"{word!r} {chance:.0%}" for word, chance in likeliest))
    console.print(words)
    table = Table("client", "asked", "queued for a worker", "from cache or shared", "seconds", title="Three processes")
    for number, result in enumerate(results, 1):
        counts = (result["asked"], result["computed"], result["shared"])
        table.add_row(str(number), *map(str, counts), f"{result['seconds']:.2f}")
    console.print(table)
    asked, computed = (sum(result[name] for result in results) for name in ("asked", "computed"))
    wall = max(result["seconds"] for result in results)
    console.print(f"asked {asked}, computed {computed}, served from the cache or a shared request {asked - computed}; "
                  f"all in {wall:.2f} s", soft_wrap=True)  # fmt: skip


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", help="folder of the model")
    parser.add_argument("--backend", default=DEFAULT_BACKEND, help="backend that computes the rows")
    parser.add_argument("--launcher", help="module to run instead of the command lmpool")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client:
        asyncio.run(client())
        return
    runtime = Path(tempfile.mkdtemp(prefix="lmpool-demo-"))
    os.environ["LMPOOL_RUNTIME_DIR"] = str(runtime / "run")
    os.environ.pop("LMPOOL_REDIS_URL", None)
    try:
        print("starting the server and a worker ...", flush=True)
        started = time.perf_counter()
        with pool(given, runtime):
            print(f"ready after {time.perf_counter() - started:.1f} s", flush=True)
            print(f"starting {CLIENTS} client processes, which import the client and open a tokenizer ...", flush=True)
            show(ask_from_clients())
        print(f"to serve it yourself: {_as_typed(_up(given))}")
    finally:
        shutil.rmtree(runtime, ignore_errors=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
