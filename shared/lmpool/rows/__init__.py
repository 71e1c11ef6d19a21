"""Storage of rows: in Redis, and in shared memory of one machine.

This package imports `protocol` and `broker`; producers and workers import this package.
"""
