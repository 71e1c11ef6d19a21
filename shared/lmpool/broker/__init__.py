"""The Redis server: addresses, connections, the meanings of errors, and the scripts that run inside it (`lua/`).

This package imports `protocol` and the modules next to this folder. `rows`, producers and workers import this package.
"""
