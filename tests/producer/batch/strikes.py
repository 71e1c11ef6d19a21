"""Kills processes during batch runs, and compares the final outputs byte for byte.

    python -m tests.producer.batch.strikes --rounds 10 [--victims client worker arq server] [--seed N]

A round kills one process by SIGKILL after a random number of shards, and then lets the run end. A killed client is
started again with the same command, a killed worker is replaced, and a killed server is started again with its
append-only file. For the victim `arq`, one of two processes of `lmpool batch worker` is killed (this needs arq:
`PYTHONPATH=<folder of arq>`). The program prints how many texts were computed more than once.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lmpool.cli import main as run_command
from lmpool.embedded import EmbeddedServer
from lmpool.workers.backends.synthetic import SyntheticBackend
from lmpool.workers.execution.contract import BackendJob
from tests.producer.batch.runs import arguments, begin, content, draw_texts, write_texts
from tests.support.pool import Pool, WorkerProcess, lmpool_command, run_lmpool, until

LINES, SHARD_LINES = 600, 50
_WORKER = ("--lease-s", 1, "--step-ms", 20, "--max-batch", 8)
_COUNT = "--count-texts"
_OPTIONS = ("--what", "topk:8", "--shard-lines", SHARD_LINES, "--concurrency", 32)


class Arena:
    """A server, two workers, an input, and the expected output.

    Args:
        folder: folder for the files of all rounds.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server = EmbeddedServer(memory_bytes=1 << 28, folder=folder / "s", appendonly=True)
        self._server.start()
        self._pool = Pool(self._server.url, "strikes", folder)
        self._computed = folder / "computed"
        self._computed.touch()
        self._workers = [self._start_worker() for _ in range(2)]
        self._source = write_texts(folder / "in.jsonl", draw_texts(LINES))
        whole = self._begin(folder / "whole")
        assert whole.wait() == 0, whole.text
        # The size is the number of computed texts; equal texts are computed once.
        self._needed = self._computed.stat().st_size
        self._wanted = content(folder / "whole")
        self._rounds = 0

    def _start_worker(self) -> WorkerProcess:
        counted = [sys.executable, "-m", "tests.producer.batch.strikes", _COUNT, str(self._computed)]
        return self._pool.start(*_WORKER, command=lambda: counted)

    def _begin(self, output: Path) -> WorkerProcess:
        return begin(self._pool, self._source, output, *_OPTIONS)

    def round(self, victim: str, after: int) -> int:
        """Kill one process when `after` shards are in place, let the run end, and compare its output.

        Returns:
            Number of computed texts, minus the number that an undisturbed run computes.
        """
        self._rounds += 1
        output = self._folder / f"out-{self._rounds}"
        before = self._computed.stat().st_size
        if victim == "arq":
            self._round_of_jobs(output, after)
        else:
            self._round_of_run(victim, output, after)
        assert content(output) == self._wanted
        return self._computed.stat().st_size - before - self._needed

    def _round_of_run(self, victim: str, output: Path, after: int) -> None:
        client = self._begin(output)
        self._until_in_place(output, after, [client])
        strikes: dict[str, Callable[[], WorkerProcess]] = {
            "client": lambda: self._strike_client(client, output),
            "worker": lambda: self._strike_worker(client),
            "server": lambda: self._strike_server(client),
        }
        client = strikes[victim]()
        assert client.wait() == 0, client.text

    def _round_of_jobs(self, output: Path, after: int) -> None:
        printed = run_lmpool("batch", "submit", *arguments(self._pool, self._source, output, *_OPTIONS)[2:])
        assert printed.returncode == 0, printed.stderr
        workers = [self._begin_jobs() for _ in range(2)]
        self._until_in_place(output, after, workers)
        workers.pop(0).end()
        workers.append(self._begin_jobs("--burst"))
        assert workers[-1].wait() == 0, workers[-1].text
        until(lambda: b'"finished": true' in (output / "manifest.json").read_bytes(), "the run is summed up")
        workers[0].signal(signal.SIGTERM)
        assert workers[0].wait() == 0, workers[0].text
        for left in output.rglob("*.tmp"):  # Files of the killed worker; a next run would remove them.
            left.unlink()

    def _begin_jobs(self, *options: str) -> WorkerProcess:
        command = [*lmpool_command(), "batch", "worker", "--jobs", "2", "--lease-s", "1", "--redis", self._pool.url]
        command += ["--files", str(self._folder)]
        return WorkerProcess([*command, *options], self._folder / f"arq-{len(list(self._folder.glob('arq-*')))}.log")

    def _until_in_place(self, output: Path, after: int, processes: Sequence[WorkerProcess]) -> None:
        def is_so_far() -> bool:
            assert all(process.is_running for process in processes), [process.text for process in processes]
            return len(list(output.glob("shard-*[0-9].jsonl"))) >= after

        until(is_so_far, f"{after} shards are in place")

    def _strike_client(self, client: WorkerProcess, output: Path) -> WorkerProcess:
        client.end()
        return self._begin(output)

    def _strike_worker(self, client: WorkerProcess) -> WorkerProcess:
        self._workers.pop(0).end()
        self._workers.append(self._start_worker())
        return client

    def _strike_server(self, client: WorkerProcess) -> WorkerProcess:
        os.kill(self._server.pid, signal.SIGKILL)
        self._server.stop()
        self._server.start()
        return client

    def end(self) -> None:
        """End the server and all workers."""
        self._pool.end()
        self._server.stop()


VICTIMS = ("client", "worker", "server", *(("arq",) if find_spec("arq") else ()))


def strike(folder: Path, victims: Sequence[str], rounds: int, seed: int) -> dict[str, list[int]]:
    """Run some rounds for each victim; return how many texts each round computed more than once."""
    generator = random.Random(seed)
    again: dict[str, list[int]] = {victim: [] for victim in victims}
    arena = Arena(folder)
    try:
        for number in range(rounds):
            for victim in victims:
                after = generator.randrange(1, LINES // SHARD_LINES - 2)
                again[victim].append(arena.round(victim, after))
                print(
                    f"round {number + 1}: {victim} after {after} shards: {again[victim][-1]} texts computed again",
                    flush=True,
                )
    finally:
        arena.end()
    return again


def _count_texts(file: Path) -> None:
    """Add a byte to a file for each text that this process computes, so that killed processes are counted too."""
    compute = SyntheticBackend._vectors
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND)

    def counted(backend: SyntheticBackend, jobs: list[BackendJob], failures: dict[bytes, str]) -> Any:
        os.write(descriptor, b"." * sum(job.positions is not None for job in jobs))
        return compute(backend, jobs, failures)

    SyntheticBackend._vectors = counted  # type: ignore[method-assign, assignment]


def main() -> None:
    """Run the rounds that the command line describes, and print the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=VICTIMS)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    given = parser.parse_args()
    print(f"seed {given.seed}")
    with tempfile.TemporaryDirectory(prefix="lmp") as folder:
        os.environ["LMPOOL_RUNTIME_DIR"] = f"{folder}/run"
        again = strike(Path(folder), given.victims, given.rounds, given.seed)
    print(f"all outputs are the same to the last byte; of {LINES} texts, {SHARD_LINES} a shard, computed again:")
    for victim, texts in again.items():
        shards = [f"{count / SHARD_LINES:.1f}" for count in texts]
        print(f"{victim}: {sum(texts) / len(texts):.0f} on average, {max(texts)} at most; as shards {' '.join(shards)}")


if __name__ == "__main__":
    if sys.argv[1:2] == [_COUNT]:
        del sys.argv[1]
        _count_texts(Path(sys.argv.pop(1)))
        run_command()
    main()
