"""The Redis server: reaching it, talking to it, and what happens inside it (`lua/`).

Imports `protocol` and the files beside this folder; imported by `rows`, producers and workers.
"""
