"""The queue of a model: reads jobs, keeps their leases, and publishes their rows.

This folder imports `execution`, `metrics` and `settings`.
"""
