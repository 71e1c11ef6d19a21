"""What processes say to each other: prompts, jobs, queries, rows, names of keys; no input or output.

Everything may import it; it imports `errors` and `settings` only.
"""
