"""The Redis server: addresses, connections, the meanings of errors, and the scripts that run inside it (`lua/`).

Imports `protocol` and the files next to this folder. `rows`, producers and workers import it.
"""
