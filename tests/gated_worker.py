"""A worker process whose model loads when a file appears, and whose event loop stands still at SIGUSR1."""

from __future__ import annotations

import dataclasses
import signal
import sys
import time
from pathlib import Path

from lmpool.server import Server
from lmpool.workers.backend import Backend
from lmpool.workers.backends.synthetic import SyntheticSettings
from lmpool.workers.serving import serve
from lmpool.workers.settings import WorkerSettings

BLOCKED_S = 2.0


@dataclasses.dataclass(frozen=True)
class GatedSettings(SyntheticSettings):
    """As those of the synthetic backend, with a gate."""

    gate: str = ""

    def open(self) -> Backend:
        """Wait for the gate."""
        while not Path(self.gate).exists():
            time.sleep(0.01)
        return SyntheticSettings.open(self)


def main(url: str, prefix: str, port: str, gate: str, lease_s: str = "1") -> None:
    """Serve until SIGTERM."""
    signal.signal(signal.SIGUSR1, lambda *_: time.sleep(BLOCKED_S))
    backend = GatedSettings("syn", vocab_size=512, step_ms=1500, gate=gate)
    serve(Server(url), backend, WorkerSettings(prefix=prefix, lease_s=float(lease_s), metrics_port=int(port)))


if __name__ == "__main__":
    main(*sys.argv[1:])
