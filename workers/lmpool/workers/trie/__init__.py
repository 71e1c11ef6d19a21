"""Trie workers: what their jobs name, fetched and kept, and the values of nodes.

Imports `backend`, `metrics` and `settings`.
"""
