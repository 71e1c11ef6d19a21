"""Fixtures for all tests of adapters."""

from tests.shared.broker.adapters.adapter_changes import short_memory  # noqa: F401
