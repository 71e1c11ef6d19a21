"""Processes of a mixed pool: each worker and each client uses one of two releases, and is replaced again and again."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.faults.chaos.fleet import ASKING, SERVING, Fleet, Process
from tests.faults.chaos.settings import ChaosSettings
from tests.releases.checkout import ROOT

ROLES = ("worker", "client")
_ROLL_S = (0.3, 2.5)  # Min and max seconds between two processes that are replaced on purpose.


class MixedFleet(Fleet):
    """A fleet of two releases. One process after the other gets SIGTERM and a successor of a drawn release.

    Args:
        other: the checkout of the other release.

    Attributes:
        started: role and checkout -> number of processes that were started.
        replaced: role -> number of processes that got SIGTERM and ended without an error.
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
        self._roll_at = time.monotonic()
        self._end_at = self._roll_at + self._settings.seconds

    @property
    def is_whole(self) -> bool:
        """Whether all workers and clients run. A client that has not begun to ask would be killed by SIGTERM."""
        return super().is_whole and all(client.code is None and client.says(ASKING) for client in self.clients)

    def mend(self) -> None:
        """Replace the processes that have ended, and from time to time end one more."""
        self.replaced["worker"] += sum(worker.is_draining and worker.code == 0 for worker in self.workers)
        super().mend()
        for place, client in enumerate(self.clients):
            if client.code is not None:
                if client.code:
                    self.failed.append(f"client {client.number} ended with {client.code}: {client.last_words}")
                self.replaced["client"] += 1
                self.clients[place] = self._start_client()
        if self._roll_at < time.monotonic() < self._end_at:
            self._roll_at = time.monotonic() + self._draw.uniform(*_ROLL_S)
            self._roll()

    def _roll(self) -> None:
        """Send SIGTERM to a process, unless it is the only one of its role that works."""
        # The first client puts adapters in service, so it stays.
        groups = {"worker": (self.workers, SERVING), "client": (self.clients[1:], ASKING)}
        processes, text = groups[self._draw.choice(ROLES)]
        ready = [process for process in processes if _is_ready(process, text)]
        if len(ready) > 1 or (ready and processes is not self.workers):
            process = self._draw.choice(ready)
            process.is_draining = True
            process.signal(signal.SIGTERM)


def _is_ready(process: Process, text: str) -> bool:
    return process.code is None and not (process.is_frozen or process.is_draining) and process.says(text)
