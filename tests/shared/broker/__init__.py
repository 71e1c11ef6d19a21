"""Tests of everything between lmpool and the Redis server: connections, replies, users and scripts."""
