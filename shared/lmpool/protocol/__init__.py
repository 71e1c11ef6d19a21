"""Messages between processes: prompts, jobs, queries, rows and the names of keys; no input or output.

Everything may import it. It imports `errors` and `settings` only.
"""
