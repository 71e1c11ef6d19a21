"""Taking jobs from the queue, and publishing their rows.

Imports `backend`, `metrics` and `settings`.
"""
