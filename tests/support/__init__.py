"""What the tests of several rooms share; no room's own helpers."""
