"""Tests of what all processes share: a folder for each folder of `shared/lmpool`."""
