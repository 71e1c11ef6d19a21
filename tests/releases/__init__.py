"""Pools with processes of two releases."""
