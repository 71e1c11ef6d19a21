"""Processes that use the pool, or parts of it, like a user's program. The measures start them by module name."""
