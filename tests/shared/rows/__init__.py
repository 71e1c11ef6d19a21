"""Tests of where rows live: connections to them, and a server that evicts them."""
