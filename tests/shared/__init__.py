"""Tests of what all processes share: a room for each folder of `shared/lmpool`."""
