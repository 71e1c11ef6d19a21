"""Tests of backends, except the engines: see `tests/contract` and `tests/engines`."""
