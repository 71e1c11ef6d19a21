"""Rows where they are stored: in Redis, and in shared memory of one machine.

Imports `protocol` and `broker`; producers and workers import it.
"""
