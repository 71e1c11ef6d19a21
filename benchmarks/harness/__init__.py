"""Code that all benchmarks share: processes and their protocol, pairs, reports. Imports no other folder here."""
