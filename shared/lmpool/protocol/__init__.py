"""Messages between processes (prompts, jobs, queries, rows) and the names of Redis keys, without any network access.

This package imports `errors` and `settings` only, and all other packages of lmpool may import this package.
"""
