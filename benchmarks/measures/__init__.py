"""What is measured, and on which sides; `python -m benchmarks` runs it."""
