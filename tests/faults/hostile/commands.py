"""Redis commands of a client that ignores all types."""

from __future__ import annotations

from typing import Any


def execute(redis: Any, *arguments: object) -> Any:
    """Run a command; fields may repeat, and names and values may be anything."""
    return redis.execute_command(*arguments)
