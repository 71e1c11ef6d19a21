"""Tests of tries, their weights and their kernels."""
