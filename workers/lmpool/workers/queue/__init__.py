"""The queue of a model: reads jobs, keeps their leases, and publishes their rows.

Imports `execution`, `metrics` and `settings`.
"""
