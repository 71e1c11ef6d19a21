"""Lets tests run on engine releases newer than the supported range (`make test-engines-newest`).

`python -m tests.engines.newest` runs `lmpool` without the upper limit of the engine's version.
"""

from __future__ import annotations

import os

from lmpool.cli import main
from lmpool.workers.backends import settings

WANTED = os.environ.get("LMPOOL_TEST_NEWEST") == "1"


def accept() -> None:
    """Remove the upper limit of the engines' versions, if LMPOOL_TEST_NEWEST is 1."""
    if WANTED:
        settings.VLLM_VERSIONS = settings.VLLM_VERSIONS.partition(",")[0]
        settings.SGLANG_VERSIONS = settings.SGLANG_VERSIONS.partition(",")[0]


if __name__ == "__main__":
    accept()
    main()
