"""A pool in memory for the tests of your programs: it needs no server and no model, and starts in milliseconds.

`pool` is a context manager for any program; for pytest there are the fixtures of `lmpool.pytest_plugin`.
"""

from lmpool.testing.memory_pool import MemoryPool, MemoryWorker, SyntheticModel, pool

__all__ = ["MemoryPool", "MemoryWorker", "SyntheticModel", "pool"]
