"""Tests of the parts of a producer, without a pool."""
