"""Tests of `lmpool http`."""
