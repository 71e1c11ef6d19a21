"""Processes of a mixed pool: each worker and each client uses one of two releases, and is replaced again and again."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.faults.chaos.fleet import ASKING, SERVING, Fleet, Process
from tests.faults.chaos.settings import MODEL, ChaosSettings
from tests.releases.batches import Batches
from tests.releases.checkout import ROOT

ROLES = ("worker", "client", "batch")
_ROLL_S = (0.3, 2.5)  # Min and max seconds between two processes that are replaced on purpose.


class MixedFleet(Fleet):
    """A fleet of two releases. One process after the other gets SIGTERM and a successor of a drawn release.

    Args:
        other: the checkout of the other release.

    Attributes:
        started: role and checkout -> number of processes that were started.
        replaced: "worker" or "client" -> number of processes that got SIGTERM and ended without an error.
    """

    def __init__(
        self,
        settings: ChaosSettings,
        folder: Path,
        hosts: tuple[Path, Path],
        url: Callable[[int], str],
        prefix: str,
        *,
        other: Path,
    ) -> None:
        super().__init__(settings, folder, hosts, url, prefix)
        self._checkouts = (ROOT, other)
        self._draw = random.Random(settings.seed)
        self._end_at = self._roll_at = 0.0
        self._batches: Batches | None = None
        self.started: Counter[tuple[str, Path]] = Counter()
        self.replaced: Counter[str] = Counter()

    def root(self, role: str) -> Path:
        """Draw the release of a process; the first two of a role get different releases, so that each has each role."""
        first = {root for (name, root), count in self.started.items() if name == role and count}
        left = [root for root in self._checkouts if root not in first]
        root = self._draw.choice(left or self._checkouts)
        self.started[role, root] += 1
        return root

    def start(self) -> None:
        """See `Fleet.start`."""
        super().start()
        options = ["--model", MODEL, "--redis", self._url(0), "--prefix", self._prefix]
        options += ["--timeout", str(self._settings.timeout_s), "--wait"]
        self._batches = Batches(self._folder, self._settings.vocab_size, options, self._start_batch)
        self._roll_at = time.monotonic()
        self._end_at = self._roll_at + self._settings.seconds

    def _start_batch(self, number: int, command: list[str], log: Path) -> Process:
        return Process(number, command, log, self._folder, self._hosts[0], self.root("batch"))

    @property
    def batches(self) -> Batches:
        """The batch runs, after `start`."""
        assert self._batches is not None
        return self._batches

    @property
    def is_whole(self) -> bool:
        """Whether all workers and clients run. A client that has not begun to ask would be killed by SIGTERM."""
        is_running = self.batches.process.code in (None, 0)
        return (
            is_running
            and super().is_whole
            and all(client.code is None and client.says(ASKING) for client in self.clients)
        )

    def mend(self) -> None:
        """Replace the processes that have ended, and from time to time end one more."""
        self.replaced["worker"] += sum(worker.is_draining and worker.code == 0 for worker in self.workers)
        super().mend()
        self.batches.mend()
        for place, client in enumerate(self.clients):
            if client.code is not None:
                if client.code:
                    self.failed.append(f"client {client.number} ended with {client.code}: {client.last_words}")
                self.replaced["client"] += client.is_draining and client.code == 0
                self.clients[place] = self._start_client(place)
        if self._roll_at < time.monotonic() < self._end_at:
            self._roll_at = time.monotonic() + self._draw.uniform(*_ROLL_S)
            self._roll()

    def _roll(self) -> None:
        """Send SIGTERM to a worker, unless no other one works, or to a client; or kill the process of a batch run."""
        role = self._draw.choice(ROLES)
        if role == "batch":
            self.batches.kill()
            return
        # The first client puts adapters in service, so it stays.
        groups = {"worker": (self.workers, SERVING), "client": (self.clients[1:], ASKING)}
        processes, text = groups[role]
        ready = [process for process in processes if _is_ready(process, text)]
        if len(ready) > 1 or (ready and processes is not self.workers):
            process = self._draw.choice(ready)
            process.is_draining = True
            process.signal(signal.SIGTERM)

    def end_clients(self) -> None:
        """See `Fleet.end_clients`. The last batch run ends first."""
        self.batches.process.ends_within(self._settings.timeout_s)
        self.batches.check()
        self.failed += self.batches.failed
        super().end_clients()

    def kill(self) -> None:
        """See `Fleet.kill`."""
        if self._batches is not None:
            self._batches.process.signal(signal.SIGKILL)
            self._batches.process.ends_within(self._settings.timeout_s)
        super().kill()


def _is_ready(process: Process, text: str) -> bool:
    return process.code is None and not (process.is_frozen or process.is_draining) and process.says(text)
