"""Being one of a model's workers: its heartbeat, and the adapters that all of them serve.

Imports `backend`, `metrics`, `settings` and, to find adapters, `backends`.
"""
