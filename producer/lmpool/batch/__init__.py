"""Whole files: every line of an input is asked of a pool, and the answers go to shards that can be resumed and read.

The command `lmpool batch` writes them; `lmpool.batch.open` reads them. It asks by `lmpool.producer`, whose client side
it is a part of, and imports nothing of a producer's insides.
"""

from lmpool.batch.reader import Answer, Batch
from lmpool.batch.reader import open_batch as open  # noqa: A004 It is called lmpool.batch.open.

__all__ = ["Answer", "Batch", "open"]
