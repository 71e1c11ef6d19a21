"""The Redis server: reaching it, talking to it, and what happens inside it (`lua/`).

Imports `protocol`; imported by `rows`, producers and workers.
"""
