"""The measures: each runs two sides in turns and returns ratios. `python -m benchmarks` runs them."""
