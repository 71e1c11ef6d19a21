"""Messages between processes (prompts, jobs, queries, rows) and the names of Redis keys, without any network access.

All other packages of lmpool may import this package. It imports `errors` and `settings` only.
"""
