"""Processes that use the pool or parts of it, as users would write them; `harness` starts them by name."""
