"""Runs Redis commands without the client library's types, for tests that write arbitrary values."""

from __future__ import annotations

from typing import Any


def execute(redis: Any, *arguments: object) -> Any:
    """Run a Redis command whose fields may repeat, and whose names and values may have any type."""
    return redis.execute_command(*arguments)
