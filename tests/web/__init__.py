"""Tests of the service `lmpool web`, over HTTP and in a real browser."""
