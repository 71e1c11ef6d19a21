"""Tests of messages between processes: their bytes, and the names of keys."""
