"""Tests of the parts of a producer, most of them without a pool."""
