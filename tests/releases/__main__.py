"""Mixes two releases in one pool of real processes, under faults, and checks every result.

    python -m tests.releases --with last --seconds 600

Workers and clients of this checkout and of another release share a server. The run is a chaos run
(`tests.faults.chaos`) in which each process that starts draws its release, and one process after the other is replaced.
`--with last` mixes the newest tagged release; `--with next` mixes this checkout with one more field in each message and
with higher versions. The output has the counts of the chaos run, and the number of processes of each release. The exit
code is 0 if no request is lost, wrong or late, nothing is left behind, and both releases had workers and clients.
Without `--small`, workers and clients must also have been replaced, and batch runs finished and continued.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from tests.faults.chaos.__main__ import in_folders, run, untimed
from tests.faults.chaos.plan import draw_plan
from tests.faults.chaos.settings import ChaosSettings
from tests.releases.checkout import LAST, NEXT, ROOT, last_release, make_checkout
from tests.releases.fleet import ROLES, MixedFleet


def mix(settings: ChaosSettings, other: str, is_small: bool, folder: Path, hosts: tuple[Path, Path]) -> int:
    """Do one mixed run, print its report, and return the exit code."""
    checkout = make_checkout(other, folder / "other")
    plan, make_fleet = draw_plan(settings.seed, settings.seconds), partial(MixedFleet, other=checkout)
    report, fleet = asyncio.run(run(settings, plan, folder, hosts, make_fleet))
    faults = report.faults
    for role in ROLES:
        of_each = {name: fleet.started[role, root] for name, root in (("this release", ROOT), (other, checkout))}
        print(f"{role + ' processes':<17} {', '.join(f'{count} of {name}' for name, count in of_each.items())}")
        # A short run has time for one batch run only.
        faults += [f"no {role} of {name}" for name, count in of_each.items() if not count and role != "batch"]
    print(f"{'after SIGTERM':<17} {fleet.replaced['worker']} workers and {fleet.replaced['client']} clients replaced")
    batches = fleet.batches
    print(f"{'batch runs':<17} {batches.finished} finished, {batches.continued} times killed and continued")
    print(f"{'wrong batches':<17} {len(batches.wrong)}", *batches.wrong[:10])
    if not is_small:  # A short run may have no time for these events.
        events = {f"{role} replaced": fleet.replaced[role] for role in ("worker", "client")}
        events |= {"batch run finished": batches.finished, "batch run continued": batches.continued}
        faults += [f"no {event}" for event, count in events.items() if not count]
    print(report)
    if faults != report.faults:
        print("NOT ALLOWED:", ", ".join(faults))
    return 1 if faults or batches.wrong else 0


def main() -> int:
    """Do the mixed run that the command line describes."""
    parser = argparse.ArgumentParser(prog="python -m tests.releases", description=__doc__)
    parser.add_argument("--with", dest="other", default=LAST, help=f"{LAST}, {NEXT}, or a commit (default: {LAST})")
    parser.add_argument("--seconds", type=float, default=60, help="for how long clients ask (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="decides the faults and the releases (default: a new one)")
    parser.add_argument("--small", action="store_true", help="two workers and two clients: for a short run")
    parser.add_argument("--keep", action="store_true", help="keep the folder of logs and traces and print its path")
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    # Clients start at any time, also while the server restarts, so they wait for it. The processes that start delay
    # recoveries, and the rows in the memory of replaced workers are computed again.
    settings = ChaosSettings(
        seconds=given.seconds, seed=seed, partitions=2, when_absent="wait", most_leases=math.inf, most_twice=math.inf
    )
    if given.small:  # This run is a test, and other tests occupy the processors.
        settings = replace(untimed(settings), workers=2, clients=2, partitions=1)
    if given.other == LAST and not last_release():
        print(f"this clone has no tag and no history: mixing with {NEXT!r} instead of {LAST!r}")
        given.other = NEXT
    commit = f" ({last_release()})" if given.other == LAST else ""
    print(f"mixing with {given.other!r}{commit} for {given.seconds:g} s, seed {seed}", flush=True)
    return in_folders(partial(mix, settings, given.other, given.small), keep=given.keep)


if __name__ == "__main__":
    sys.exit(main())
