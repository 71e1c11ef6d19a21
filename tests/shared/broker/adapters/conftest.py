"""Fixtures of all tests of this folder."""

from tests.shared.broker.adapters.adapter_changes import short_memory  # noqa: F401
