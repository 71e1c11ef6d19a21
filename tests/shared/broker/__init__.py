"""Tests of the Redis server: reaching it, what it answers, what happens inside it."""
