"""Draws the schedule of a chaos run: which fault occurs when."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum

from tests.support.servers.proxy import Way

_FIRST_S = 2.0
_QUIET_AT_THE_END_S = 1.0


class Kind(Enum):
    """The kinds of faults, with the texts that describe them."""

    KILL = "kill workers"
    KILL_FULL = "kill a worker with a full lane"
    DRAIN = "SIGTERM to a worker with a full lane"
    FREEZE = "freeze a worker"
    FREEZE_FULL = "freeze a worker with a full lane"
    STALL = "freeze a worker with a full lane, for less than a lease"
    JUNK = "junk for shared memory"
    UNLINK = "remove the socket of a worker's shared memory"
    LOSE_LANES = "delete the lengths of the lanes"
    KILL_CONNECTIONS = "CLIENT KILL"
    RESTART = "restart the server"
    CRASH = "kill the server"
    CUT = "cut the proxy"
    REFUSE = "refuse connections"
    SWALLOW = "swallow"
    DROP = "drop bytes"
    TRUNCATE = "truncate"
    DELAY = "delay"


_LASTING = {
    Kind.FREEZE: (0.3, 6.0),
    Kind.FREEZE_FULL: (4.0, 7.0),
    Kind.STALL: (0.5, 2.0),
    Kind.RESTART: (0.0, 0.5),
    Kind.CRASH: (0.0, 0.5),
    Kind.REFUSE: (0.1, 1.5),
    Kind.DELAY: (0.3, 2.0),
}
"""Kinds of faults with a duration -> min and max seconds."""


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault of the schedule.

    Attributes:
        at: seconds from the start of the run to the fault.
        kind: kind of the fault.
        lasts: duration in seconds; 0 for a fault without a duration.
        share: share of the workers or connections that the fault affects.
        way: direction of the bytes that the fault affects.
        number: a random number from which the fault draws its choices, such as the worker that it hits.
    """

    at: float
    kind: Kind
    lasts: float
    share: float
    way: Way
    number: int

    def __str__(self) -> str:
        length = f" for {self.lasts:.1f} s" if self.lasts else ""
        return (
            f"{self.at:6.1f} s  {self.kind.value}{length}, share {self.share:.2f}, {self.way.value}, no. {self.number}"
        )


def draw_plan(seed: int, seconds: float) -> list[Strike]:
    """Draw the faults of a run: bursts of one to three faults, with pauses of up to seven seconds between bursts."""
    draw = random.Random(seed)
    plan: list[Strike] = []
    kinds: list[Kind] = []
    at = _FIRST_S
    while True:
        for _ in range(draw.choice((1, 1, 2, 3))):
            if at > seconds - _QUIET_AT_THE_END_S:
                return plan
            if not kinds:  # Shuffle all kinds again, so that each kind occurs equally often.
                kinds = list(Kind)
                draw.shuffle(kinds)
            kind = kinds.pop()
            lasts = draw.uniform(*_LASTING[kind]) if kind in _LASTING else 0.0
            plan.append(
                Strike(at, kind, lasts, draw.choice((0.3, 0.6, 1.0)), draw.choice(list(Way)), draw.randrange(1000))
            )
            at += draw.uniform(0.1, 1.2)
        at += draw.uniform(0.5, 7.0)
