"""Tests of the Redis server: connections, replies and scripts."""
