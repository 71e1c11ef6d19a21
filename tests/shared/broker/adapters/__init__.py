"""Tests of adapters that are registered, changed and removed; only they use the helpers here."""
