"""Run simulations: `python -m tests.simulation --seed N` or `--first N --count M`."""

from __future__ import annotations

import os
import sys

if os.environ.get("PYTHONHASHSEED") != "0":  # The order of sets of byte strings depends on it.
    os.execve(
        sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"}
    )

from tests.simulation import isolation  # noqa: F401  first: see its docstring
from tests.simulation.run import main

sys.exit(main(sys.argv[1:]))
