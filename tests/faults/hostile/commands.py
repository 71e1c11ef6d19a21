"""Commands as somebody sends them who keeps to no types."""

from __future__ import annotations

from typing import Any


def execute(redis: Any, *arguments: object) -> Any:
    """Run a command; fields may come twice, and names and values may be anything."""
    return redis.execute_command(*arguments)
