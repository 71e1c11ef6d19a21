"""Chaos: a pool of real processes under load, with random faults of its workers, connections and server.

    python -m tests.faults.chaos --seconds 180 --seed 7

Four synthetic workers, one of them slow, and three clients share one server with an append-only file. Half of the
workers and clients connect through a proxy. Clients send every kind of request, name an adapter that is replaced
during the run, and let contexts grow in lockstep. The seed determines a schedule of faults: it kills and freezes
workers, also because their lanes are full; it cuts, blocks and damages connections; it restarts the server. Every
result is compared with `lmpool.synthetic.synthetic_row`. At the end a table lists results that were lost, wrong, late
or computed twice, and keys that were left. The exit code says whether that is allowed and whether every kind of
request was sent.
"""
