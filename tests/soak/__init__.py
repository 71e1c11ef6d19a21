"""Soak run: hours of mixed traffic on real processes, with faults, an oracle, and ceilings for memory and descriptors.

    python -m tests.soak --hours 1 --seed 7

Three synthetic workers with a small vocabulary and two clients share one server with an append-only file. The faults
are those of `tests.faults.chaos`, more rarely, and six more: killed and frozen clients, removed rows, a server that is
short of memory, FLUSHALL, and a restart that loses everything. One worker and one client live for the whole run, so
that slow leaks become visible. Every value is compared with the row of `lmpool.synthetic`. The program prints a line
each minute and a table at the end, and each violation as JSON. The exit code is 1 after any violation.
"""
