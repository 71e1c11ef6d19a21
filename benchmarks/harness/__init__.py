"""What all benchmarks share: processes, their protocol, pairs, reports; imports no other folder here."""
