"""Tests of row storage: connections, shared memory, and a server that evicts rows."""
