"""Servers for tests: with a settable clock, as a cluster, behind a proxy."""
