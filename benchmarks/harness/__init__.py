"""Code that all benchmarks share (child processes, pairs of samples, reports); imports no other benchmark folder."""
