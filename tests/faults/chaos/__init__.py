"""Chaos run: a pool of real processes under load, with random faults of its workers, connections and server.

    python -m tests.faults.chaos --seconds 180 --seed 7

Four synthetic workers, one of them slow, and three clients share one server with an append-only file. Half of the
workers and clients connect through a proxy. Clients send every kind of request, name an adapter that is replaced
during the run, and let contexts grow in lockstep. The seed determines a schedule of faults: the run kills and
freezes workers, often workers with a full lane (a lane is a worker's own job stream); it cuts, blocks and damages
connections; it restarts the server. Every result is compared with `lmpool.synthetic.synthetic_row`. At the end a table
lists results that were lost, wrong, late or computed twice, and leaked keys. The exit code is 0 if the outcome is
within the limits of `ChaosSettings` and every kind of request was sent.
"""
