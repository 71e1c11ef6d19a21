"""What a run of chaos is made of, and what it may show."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChaosSettings:
    """One run.

    Attributes:
        seconds: for how long clients ask.
        seed: decides the schedule.
        workers: worker processes; a killed one is replaced at once.
        clients: client processes.
        vocab_size: V.
        lease_s: short, so that a run has many recoveries. Long enough for a busy machine: a lease is also how long
            either side waits for a reply.
        step_ms: how long a step of the backend takes: workers are busy most of the time, so there is something to lose.
        max_batch: prompts in a step.
        row_ttl_s: lifetime of rows: prompts are not repeated for longer than that.
        timeout_s: the deadline of each request.
        grace_s: how much later a request may end before it counts as late: clients share their processors with others.
        tasks: requests that a client has under way at once.
        pause_s: mean pause between two requests of a task.
        most_twice: share of the prompts that may be computed twice.
        most_leases: recovery that is allowed, in leases.
    """

    seconds: float
    seed: int
    workers: int = 4
    clients: int = 3
    vocab_size: int = 2048
    lease_s: float = 3.0
    step_ms: float = 80.0
    max_batch: int = 8
    row_ttl_s: float = 60.0
    timeout_s: float = 30.0
    grace_s: float = 1.0
    tasks: int = 24
    pause_s: float = 0.15
    most_twice: float = 0.05
    most_leases: float = 2.0
