"""Tests of producers through their public API, on pools of real processes."""
