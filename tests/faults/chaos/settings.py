"""What a run of chaos is made of, and what it may show."""

from __future__ import annotations

from dataclasses import dataclass

MODEL = "syn"
"""What the workers serve."""


@dataclass(frozen=True, slots=True)
class ChaosSettings:
    """One run.

    Attributes:
        seconds: for how long clients ask.
        seed: decides the schedule.
        workers: worker processes; one that has ended is replaced at once.
        clients: client processes.
        vocab_size: V.
        shm_bytes: of shared memory that each worker has: enough for some of the rows that live.
        lease_s: short, so that a run has many recoveries. Long enough for a busy machine: a lease is also how long
            either side waits for a reply.
        step_ms: how long a step of the backend takes: workers are busy most of the time, so there is something to lose.
        token_ms: how much longer it takes for each token that is not in the worker's prefix cache.
        slow_ms: as `step_ms`, of the first worker: the others have nothing to do while its lane is full.
        max_batch: prompts in a step.
        row_ttl_s: lifetime of rows: prompts are not repeated for longer than that.
        timeout_s: the deadline of each request.
        grace_s: how much later a request may end before it counts as late: clients share their processors with others.
        tasks: requests that a client has under way at once, beside those of its groups.
        groups: of contexts that a client has grow in lock step, as a particle filter does.
        particles: contexts in a group.
        context: tokens that the contexts of a group begin with.
        rounds: tokens by which they grow.
        pause_s: mean pause between two requests of a task.
        lulls_s: how often tasks pause all together, for a second: workers that have nothing to do steal.
        most_twice: share of the prompts that may be computed twice.
        most_leases: recovery that is allowed, in leases.
    """

    seconds: float
    seed: int
    workers: int = 4
    clients: int = 3
    vocab_size: int = 2048
    shm_bytes: int = 1 << 25
    lease_s: float = 3.0
    step_ms: float = 80.0
    token_ms: float = 0.5
    slow_ms: float = 240.0
    max_batch: int = 8
    row_ttl_s: float = 60.0
    timeout_s: float = 30.0
    grace_s: float = 1.0
    tasks: int = 22
    groups: int = 2
    particles: int = 8
    context: int = 48
    rounds: int = 16
    pause_s: float = 0.15
    lulls_s: float = 5.0
    most_twice: float = 0.05
    most_leases: float = 2.0
