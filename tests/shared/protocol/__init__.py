"""Tests of the messages between processes: the bytes of messages, and the names of Redis keys."""
