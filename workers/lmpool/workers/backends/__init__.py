"""The backends, one folder or file each, and their shared code. Only files of this folder import an engine.

A new backend is a class with the methods of `lmpool.workers.execution.contract.Backend`, its settings, and an entry
point of the group `lmpool.backends` in `pyproject.toml`. This folder imports the folder `execution`. Other folders find
a backend by its entry point.
"""
