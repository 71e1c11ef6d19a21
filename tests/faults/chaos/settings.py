"""Settings of a chaos run, and the limits that its outcome must not exceed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MODEL = "syn"
"""Name of the model that the workers serve."""


@dataclass(frozen=True, slots=True)
class ChaosSettings:
    """Settings of one chaos run.

    Attributes:
        seconds: time for which clients send requests.
        seed: determines the schedule of faults.
        workers: number of worker processes; a worker that has ended is replaced at once.
        partitions: number of partitions of the model's queue.
        clients: number of client processes.
        vocab_size: number of tokens of the model's vocabulary.
        shm_bytes: shared memory of each worker, enough for only some of the live rows.
        lease_s: lease of the workers, short so that a run has many recoveries. It must be long enough for a busy
            machine, because workers and clients also wait for a reply of the server for this long.
        step_ms: duration of a backend's step. Workers are busy most of the time, so every fault hits prompts in flight.
        token_ms: additional duration of a step for each token that is not in the worker's prefix cache.
        slow_ms: duration of a step of the first worker, so that other workers are idle while its lane is full.
        max_batch: max number of prompts in a step.
        row_ttl_s: lifetime of rows in Redis; clients do not repeat a prompt after this time.
        timeout_s: the deadline of each request.
        when_absent: what clients do while no server or worker is there, as of `Producer`: "raise" or "wait".
        grace_s: a request that ends more than this after its deadline counts as late; busy processors delay clients.
        tasks: concurrent requests of a client, without the requests of its groups.
        groups: number of groups of contexts of a client; contexts grow in lockstep, as in a particle filter.
        particles: number of contexts in a group.
        context: number of tokens with which all contexts of a group begin.
        rounds: number of tokens by which the contexts of a group grow.
        pause_s: mean pause between two requests of a task.
        lulls_s: interval at which all tasks pause for a second, so that workers become idle and steal jobs.
        most_twice: max share of the prompts that may be computed twice.
        most_leases: max duration of a recovery, in leases.
    """

    seconds: float
    seed: int
    workers: int = 4
    partitions: int = 1
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
    when_absent: Literal["raise", "wait"] = "raise"
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
