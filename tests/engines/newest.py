"""Runs on releases of the engines that are newer than what the backends are made for (`make test-engines-newest`).

`python -m tests.engines.newest` is `lmpool` that takes them.
"""

from __future__ import annotations

import os

from lmpool.cli import main
from lmpool.workers.backends import settings

WANTED = os.environ.get("LMPOOL_TEST_NEWEST") == "1"


def accept() -> None:
    """Have the backends take every newer version of their engines, in a run that is about these."""
    if WANTED:
        settings.VLLM_BELOW, settings.SGLANG_BELOW = (1_000_000, 0), (1_000_000, 0, 0)


if __name__ == "__main__":
    accept()
    main()
