"""Tests of what computes rows, but for the engines: see `tests/contract` and `tests/engines`."""
