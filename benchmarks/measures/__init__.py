"""The measures of the benchmark: each runs two sides in turns and returns ratios. `python -m benchmarks` runs them."""
