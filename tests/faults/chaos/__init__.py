"""Chaos: a pool of real processes under load while its workers, connections and server are struck at random.

    python -m tests.faults.chaos --seconds 180 --seed 7

Four synthetic workers, one of them slow, and three clients, half of either through a proxy, share one server with an
append-only file. Clients ask all there is to ask, name an adapter that is replaced meanwhile, and have contexts grow in
lock step. A schedule that the seed decides kills and freezes workers, also because their lanes are full, cuts, swallows
and damages connections, and restarts the server. Every answer is compared with what follows from
`lmpool.synthetic.synthetic_row`. In the end a table says what was lost, wrong, late, computed twice and left behind,
and the exit code whether that is allowed, and whether all that can be asked was.
"""
