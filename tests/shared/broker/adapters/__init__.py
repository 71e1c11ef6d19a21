"""Tests of adapters that are registered, changed and removed, with their own helpers."""
