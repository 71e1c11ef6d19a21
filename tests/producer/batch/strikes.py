"""Kill who takes part in a run, wherever that stands, and compare what comes out in the end to the last byte.

    python -m tests.producer.batch.strikes --rounds 10 [--victims client worker server] [--seed N]

A round kills one process by SIGKILL once some shards are in place, a random number of them, and has the run end: a
client is started again with the same command, another worker takes the place of a worker, and a server is started
again with what its append-only file has.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from lmpool.embedded import EmbeddedServer
from tests.producer.batch.runs import begin, content, draw_texts, write_texts
from tests.support.pool import Pool, WorkerProcess, until

LINES, SHARD_LINES = 600, 50
_WORKER = ("--lease-s", 1, "--step-ms", 20, "--max-batch", 8)
_OPTIONS = ("--what", "topk:8", "--shard-lines", SHARD_LINES, "--concurrency", 32)


class Arena:
    """A server of its own, two workers, an input, and what must come out.

    Args:
        folder: for all of it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server = EmbeddedServer(memory_bytes=1 << 28, folder=folder / "s", appendonly=True)
        self._server.start()
        self._pool = Pool(self._server.url, "strikes", folder)
        self._workers = [self._pool.start(*_WORKER) for _ in range(2)]
        self._source = write_texts(folder / "in.jsonl", draw_texts(LINES))
        whole = self._begin(folder / "whole")
        assert whole.wait() == 0, whole.text
        self._wanted = content(folder / "whole")
        self._rounds = 0

    def _begin(self, output: Path) -> WorkerProcess:
        return begin(self._pool, self._source, output, *_OPTIONS)

    def round(self, victim: str, after: int) -> None:
        """Kill one process when so many shards are in place, and compare what comes out."""
        self._rounds += 1
        output = self._folder / f"out-{self._rounds}"
        client = self._begin(output)

        def is_so_far() -> bool:
            assert client.is_running, client.text
            return len(list(output.glob("shard-*[0-9].jsonl"))) >= after

        until(is_so_far, f"{after} shards are in place")
        strikes: dict[str, Callable[[], WorkerProcess]] = {
            "client": lambda: self._strike_client(client, output),
            "worker": lambda: self._strike_worker(client),
            "server": lambda: self._strike_server(client),
        }
        client = strikes[victim]()
        assert client.wait() == 0, client.text
        assert content(output) == self._wanted

    def _strike_client(self, client: WorkerProcess, output: Path) -> WorkerProcess:
        client.end()
        return self._begin(output)

    def _strike_worker(self, client: WorkerProcess) -> WorkerProcess:
        self._workers.pop(0).end()
        self._workers.append(self._pool.start(*_WORKER))
        return client

    def _strike_server(self, client: WorkerProcess) -> WorkerProcess:
        os.kill(self._server.pid, signal.SIGKILL)
        self._server.stop()
        self._server.start()
        return client

    def end(self) -> None:
        """End all processes."""
        self._pool.end()
        self._server.stop()


VICTIMS = ("client", "worker", "server")


def strike(folder: Path, victims: Sequence[str], rounds: int, seed: int) -> None:
    """So many rounds for each of the victims."""
    generator = random.Random(seed)
    arena = Arena(folder)
    try:
        for number in range(rounds):
            for victim in victims:
                after = generator.randrange(1, LINES // SHARD_LINES - 2)
                print(f"round {number + 1}: {victim} after {after} shards", flush=True)
                arena.round(victim, after)
    finally:
        arena.end()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=VICTIMS)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    given = parser.parse_args()
    print(f"seed {given.seed}")
    with tempfile.TemporaryDirectory(prefix="lmp") as folder:
        os.environ["LMPOOL_RUNTIME_DIR"] = f"{folder}/run"
        strike(Path(folder), given.victims, given.rounds, given.seed)
    print("all outputs are the same to the last byte")


if __name__ == "__main__":
    main()
