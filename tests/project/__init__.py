"""Tests of the project itself: its layers, package, pages, examples and tools."""
