"""Checks, without importing anything, that the newest engines still have what the in-process backends rely on."""
