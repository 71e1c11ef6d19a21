"""Settings of a chaos run, and the limits of its outcome."""

from __future__ import annotations

from dataclasses import dataclass

MODEL = "syn"
"""What the workers serve."""


@dataclass(frozen=True, slots=True)
class ChaosSettings:
    """One run.

    Attributes:
        seconds: time for which clients send requests.
        seed: determines the schedule.
        workers: worker processes; a worker that has ended is replaced at once.
        clients: client processes.
        vocab_size: V.
        shm_bytes: shared memory of each worker: enough for some of the live rows.
        lease_s: short, so that a run has many recoveries. Long enough for a busy machine: a lease is also the time that
            either side waits for a reply.
        step_ms: duration of a backend's step. Workers are busy most of the time, so every fault hits prompts in flight.
        token_ms: additional duration for each token that is not in the worker's prefix cache.
        slow_ms: like `step_ms`, for the first worker: the others are idle while its lane is full.
        max_batch: prompts in a step.
        row_ttl_s: lifetime of rows: prompts are not repeated after this time.
        timeout_s: the deadline of each request.
        grace_s: delay after the deadline from which a request counts as late: clients share their processors.
        tasks: concurrent requests of a client, in addition to those of its groups.
        groups: groups of contexts of a client that grow in lockstep, as in a particle filter.
        particles: contexts in a group.
        context: tokens at the beginning of the contexts of a group.
        rounds: tokens by which contexts grow.
        pause_s: mean pause between two requests of a task.
        lulls_s: interval at which all tasks pause for a second: idle workers steal then.
        most_twice: share of the prompts that may be computed twice.
        most_leases: longest allowed recovery, in leases.
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
