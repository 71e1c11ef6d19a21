"""Trie workers: fetching and caching what trie queries name, and computing the values of nodes.

Imports `backend`, `metrics` and `settings`.
"""
