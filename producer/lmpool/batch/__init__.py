"""Process whole files: a pool computes a result for every line of an input; a run writes the results to shards.

`lmpool batch run` writes shards; `lmpool.batch.open` reads shards; `arq lmpool.batch.WorkerSettings` is a worker for
jobs of `lmpool batch submit`. A run uses only `lmpool.producer`, not the subpackages of `lmpool.producer`.
"""

from typing import Any

from lmpool.batch.shards import Answer, Batch
from lmpool.batch.shards import open_batch as open  # noqa: A004 The public name is lmpool.batch.open.

__all__ = ["Answer", "Batch", "open"]


def __getattr__(name: str) -> Any:
    if name != "WorkerSettings":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Import `jobs` only on demand: the module needs arq and a server.
    from lmpool.batch.jobs import worker_settings

    return worker_settings()
