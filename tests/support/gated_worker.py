"""A worker process that waits for a file (its gate) when it loads its model and in each step.

SIGVTALRM blocks the worker's event loop until SIGUSR2.
"""

from __future__ import annotations

import dataclasses
import signal
import sys
from pathlib import Path

from lmpool.broker.server import Server
from lmpool.workers.backends.synthetic import SyntheticSettings
from lmpool.workers.cli.serve import serve
from lmpool.workers.execution.contract import Backend
from lmpool.workers.settings import WorkerSettings
from tests.support.gate import Gate, GatedBackend


@dataclasses.dataclass(frozen=True)
class GatedSettings(SyntheticSettings):
    """Settings of the synthetic backend, with a gate."""

    gate: str = ""

    def open(self) -> Backend:
        """Wait at the gate, then create the backend."""
        gate = Gate(Path(self.gate))
        gate.wait()
        return GatedBackend(gate)


def main(url: str, prefix: str, port: str, gate: str, lease_s: str = "15") -> None:
    """Run the worker until SIGTERM."""
    # Block SIGUSR2 before other threads exist: all threads inherit this, so only `sigwait` gets the signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    signal.signal(signal.SIGVTALRM, lambda *_: signal.sigwait([signal.SIGUSR2]))
    backend = GatedSettings("syn", vocab_size=512, gate=gate)
    serve(Server(url), backend, WorkerSettings(prefix=prefix, lease_s=float(lease_s), metrics_port=int(port)))


if __name__ == "__main__":
    main(*sys.argv[1:])
