"""The backends, a folder or a file each, and what they share. Only they import an engine.

A new one: a class as `lmpool.workers.backend.contract` describes it, its settings in `settings.py`, and an entry point
of the group `lmpool.backends` in `pyproject.toml`. Imports `backend`; nothing but the entry points names a backend.
"""
