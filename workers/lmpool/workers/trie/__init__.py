"""Trie workers: fetch and cache the inputs of trie queries, and compute the values of nodes.

Imports `execution`, `metrics` and `settings`.
"""
