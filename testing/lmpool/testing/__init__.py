"""A pool in memory for the tests of your programs: no server, no model, started in milliseconds.

`pool` is a context manager for any program; for pytest there are the fixtures of `lmpool.pytest_plugin`.
"""

from lmpool.testing.memory_pool import MemoryPool, MemoryWorker, SyntheticModel, pool

__all__ = ["MemoryPool", "MemoryWorker", "SyntheticModel", "pool"]
