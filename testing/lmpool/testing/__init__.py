"""A pool in memory for the tests of your programs: it needs no server and no model, and starts in milliseconds.

Any program can use the context manager `pool`; pytest tests can use the fixtures of `lmpool.pytest_plugin`.
"""

from lmpool.testing.memory_pool import MemoryPool, MemoryWorker, SyntheticModel, pool

__all__ = ["MemoryPool", "MemoryWorker", "SyntheticModel", "pool"]
