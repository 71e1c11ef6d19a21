"""A pool in memory, for the tests of programs that use one: no server, no model, started in milliseconds.

`pool` is a context manager for any program; with pytest there are the fixtures of `lmpool.pytest_plugin`.
"""

from lmpool.testing.backend import SyntheticModel
from lmpool.testing.memory_pool import MemoryPool, MemoryWorker, pool

__all__ = ["MemoryPool", "MemoryWorker", "SyntheticModel", "pool"]
