"""Redis servers for tests: with a settable clock, as a cluster, or behind a proxy."""
