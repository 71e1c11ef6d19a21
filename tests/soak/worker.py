"""The `lmpool` command of a soak run; the environment variable of a planted defect gives the backend this defect.

python -m tests.soak.worker worker syn --backend synthetic ...
"""

from __future__ import annotations

import faulthandler
import os
import signal

from lmpool import cli
from lmpool.workers.backends import synthetic
from lmpool.workers.execution.contract import Finished

PLANT_VARIABLE = "LMPOOL_SOAK_PLANT"
"""Environment variable: "rows" for rows of another seed, "descriptors" for a leaked descriptor per step, or both."""

_MAX_LEAKED = 500  # Max leaked descriptors, below the usual limit of a process.


class PlantedBackend(synthetic.SyntheticBackend):
    """A synthetic backend with the defects that the environment names."""

    def __init__(self, settings: synthetic.SyntheticSettings) -> None:
        super().__init__(settings)
        self._leaks = "descriptors" in os.environ[PLANT_VARIABLE]
        if "rows" in os.environ[PLANT_VARIABLE]:
            self._seed += 1

    def step(self) -> Finished:
        """See `Backend.step`."""
        if self._leaks and self._stats.steps < _MAX_LEAKED:
            os.dup(0)
        return super().step()


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)
    if PLANT_VARIABLE in os.environ:
        synthetic.SyntheticBackend = PlantedBackend  # type: ignore[misc]
    cli.main()
