"""Tests of `lmpool.testing`."""
