"""Tests of faults: clients, workers and servers crash or hang, clocks jump, and connections break."""
