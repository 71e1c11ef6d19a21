"""Tests of what breaks and hangs: clients, workers, servers, clocks and the way between them."""
