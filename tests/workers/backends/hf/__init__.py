"""Tests of the hf backend."""
