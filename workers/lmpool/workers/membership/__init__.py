"""A worker's membership in a model: its heartbeat, and the adapters that all workers of the model serve.

This folder imports `execution`, `settings` and, to find adapters, `backends`.
"""
