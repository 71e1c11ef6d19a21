"""`make bench-compare`: this pool against that of another commit."""
