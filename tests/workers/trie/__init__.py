"""Tests of trie workers."""
