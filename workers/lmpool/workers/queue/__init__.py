"""The queue of a model: consuming its jobs, and publishing their rows.

Imports `backend`, `metrics` and `settings`.
"""
