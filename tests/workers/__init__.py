"""Tests of workers, their logs and their metrics."""
