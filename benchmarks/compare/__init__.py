"""`make bench-compare`: the pool of this checkout against the pool of another commit."""
