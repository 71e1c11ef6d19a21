"""Tests of what processes say to each other: bytes and names."""
