"""Tests of faults: crashed and hanging clients, workers and servers, clocks that jump, and broken networks."""
