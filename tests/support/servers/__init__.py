"""Servers for tests: with a clock that is set, as a cluster, behind a proxy."""
