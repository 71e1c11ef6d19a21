"""Stands for the `lmpool` command: its synthetic backend writes down what it begins to compute.

    python -m tests.faults.chaos.worker worker syn --backend synthetic ...

Each process appends the digests of a step to a file of its own in the folder that `LMPOOL_CHAOS_TRACE` names, before
the step: what was written is there however the process ends, and what a killed worker had begun is counted too.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from itertools import islice
from pathlib import Path

from lmpool import cli
from lmpool.workers.backend.contract import Finished
from lmpool.workers.backends import synthetic

TRACE_VARIABLE = "LMPOOL_CHAOS_TRACE"


class TracedBackend(synthetic.SyntheticBackend):
    """The synthetic backend with a trace."""

    def __init__(self, settings: synthetic.SyntheticSettings) -> None:
        super().__init__(settings)
        path = Path(os.environ[TRACE_VARIABLE]) / f"{os.getpid()}.trace"
        self._trace = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def step(self) -> Finished:
        """See `Backend.step`."""
        os.write(self._trace, b"".join(islice(self._jobs, self._settings.max_batch)))
        return super().step()

    def close(self) -> None:
        """See `Backend.close`."""
        os.close(self._trace)
        super().close()


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)
    synthetic.SyntheticBackend = TracedBackend  # type: ignore[misc]
    cli.main()
