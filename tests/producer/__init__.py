"""Tests of producers as users meet them, on pools of real processes."""
