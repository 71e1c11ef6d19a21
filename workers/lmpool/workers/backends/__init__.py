"""The backends, a folder or a file each, and what they share. Only they import an engine.

They import torch too, as the torch kernels of tries and genlm's language model do, and nothing else.

A new backend is a class as `lmpool.workers.execution.contract` describes it, its settings in `settings.py`, and an
entry point of the group `lmpool.backends` in `pyproject.toml`. Imports `execution`; only entry points name a backend.
"""
