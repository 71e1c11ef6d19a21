"""Helpers for tests in several folders; helpers for the tests of one folder are in that folder."""
