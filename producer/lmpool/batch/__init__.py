"""Whole files: every line of an input is asked of a pool, and the answers go to shards that can be resumed and read.

The command `lmpool batch` writes them; `lmpool.batch.open` reads them; `arq lmpool.batch.WorkerSettings` is a worker
for those that were submitted. It asks by `lmpool.producer`, and imports nothing of a producer's insides.
"""

from typing import Any

from lmpool.batch.reader import Answer, Batch
from lmpool.batch.reader import open_batch as open  # noqa: A004 It is called lmpool.batch.open.

__all__ = ["Answer", "Batch", "open"]


def __getattr__(name: str) -> Any:
    if name != "WorkerSettings":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Only now: it needs arq, and a server.
    from lmpool.batch.jobs import worker_settings

    return worker_settings()
