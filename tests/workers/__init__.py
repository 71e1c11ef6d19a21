"""Tests of workers and of what they tell about themselves."""
