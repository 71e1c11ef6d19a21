"""Chaos: a pool of real processes under load while its workers, connections and server are struck at random.

    python -m tests.faults.chaos --seconds 180 --seed 7

Four synthetic workers and three clients, half of either through a proxy, share one server with an append-only file.
A schedule that the seed decides kills and freezes workers, cuts, swallows and damages connections, and restarts the
server. Every row is compared with `lmpool.synthetic.synthetic_row`. In the end a table says what was lost, wrong, late,
computed twice and left behind, and the exit code whether that is allowed.
"""
