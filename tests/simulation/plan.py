"""Draws what happens in the simulation of one seed: the pool, its faults and its requests."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from tests.simulation.faults import DISCONNECTING, FAULTS, GENTLE, HARMLESS, LOSSES, SILENT, WORKER_FAULTS

REQUESTS = 500
"""Requests of a simulation, unless the caller chooses another number."""

WORK_S = 30.0
"""Max seconds that the workers of a pool take for all prompts."""

_PROMPTS = 1.7  # Mean prompts of a request.
_LEASES = (2.0, 4.0, 8.0)  # Seconds.
_MAX_WORKERS, _MAX_CLIENTS, _MAX_BATCH = 4, 5, 8
_MAX_FAULTS = 12  # Faults of a simulation.
_GENTLE = 0.25  # Part of all simulations that have only faults that no client may notice, or that repeat no job.
_EVEN = 0.5  # Part of the gentle simulations in which the shares of the clients are compared.
_AGREED = 0.1  # Part of all simulations in which nothing prevents clients from sending a prompt to one partition.
_UPGRADED = 0.15  # Part of all simulations in which versions follow one another quickly.
_NEVER_S = 1e6  # Longer than any publication.
_UPGRADE_S = 12.0  # Seconds in which these faults begin.
_BAD_VERSIONS = 0.3  # Part of all versions that workers refuse.
_CALM = 0.15  # Part of all simulations that have no faults: no fault can explain a failure in them.
_LOADS_S = (5.0, 30.0, 60.0)  # Seconds in which the clients send their requests.
_STEPS_S = (0.003, 0.03, 0.1, 0.4)  # Mean seconds of a step.
_LOADS = (0.7, 1.2, 3.0)  # Requests of a second, as a part of those that the workers can compute in a second.
_IDLE = 0.25  # Part of all simulations whose load does not depend on the workers.

KINDS = {
    "row": 10, "batch": 3, "context": 4, "fresh": 1, "entries": 2, "topk": 2, "sample": 2, "score": 2, "generate": 1,
    "adapter": 3, "version": 2,
}  # fmt: skip
"""Kind of request -> its usual weight."""

REFUSED_WEIGHTS, BROKEN_WEIGHTS, FATAL_WEIGHTS = BAD_WEIGHTS = -1, 1, 2
"""Weights that a worker refuses at the load, weights with which prompts fail, and weights that end the worker.

The weights of good versions are 1001, 1002 and so on."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        at: virtual time at which it begins.
        kind: a key of `FAULTS`.
        seed: of the draws that the fault makes when it begins, such as which worker it hits.
    """

    at: float
    kind: str
    seed: int

    def __str__(self) -> str:
        return f"{self.kind} at {self.at:.3f} s"


@dataclass(frozen=True, slots=True)
class Plan:
    """The draws of one seed.

    Attributes:
        seed: the seed.
        requests: number of requests of all clients together.
        lease_s: lease of the workers.
        workers: number of workers.
        is_supervised: whether `lmpool up` runs the workers.
        batch: prompts in a step.
        step_s: range of the seconds of a step.
        vocab_size: V.
        queue_limit: see `WorkerSettings`.
        partitions: min partitions of the model's queue.
        encoding: encoding of the rows.
        clients: for each client whether it is a bulk client.
        weights: kind of request -> weight.
        pause_s: mean pause between two requests of a client.
        bursts: number of new prompts that the first client sends at once, in place of its first request; 0 for none.
        short: part of the requests with a deadline of less than a second.
        cancelled: part of the requests that are cancelled.
        changes: number of adapters that are put in service, and of versions that are published.
        gap_s: max seconds before a version is published.
        overlap_s: seconds after which the next version may be published, although the previous one is not served.
        bad_versions: number of a version that workers refuse -> its weights, one of `BAD_WEIGHTS`.
        lines: number of texts of a run over a file; 0 for no run.
        deadly: number of prompts that end each worker that computes them.
        faults: in the order of their times.
    """

    seed: int
    requests: int
    lease_s: float
    workers: int
    is_supervised: bool
    batch: int
    step_s: tuple[float, float]
    vocab_size: int
    queue_limit: int
    partitions: int
    encoding: str
    clients: tuple[bool, ...]
    weights: dict[str, float]
    pause_s: float
    bursts: int
    short: float
    cancelled: float
    changes: tuple[int, int]
    gap_s: float
    overlap_s: float
    bad_versions: dict[int, int]
    lines: int
    deadly: int
    faults: tuple[Fault, ...] = ()

    @property
    def is_gentle(self) -> bool:
        """Whether no fault permits a slow request or a job that is delivered twice."""
        return all(fault.kind in GENTLE for fault in self.faults) and not self.ends_loads

    @property
    def ends_loads(self) -> bool:
        """Whether a version ends the workers that load it."""
        return FATAL_WEIGHTS in self.bad_versions.values()

    @property
    def is_connected(self) -> bool:
        """Whether each command reaches the server, and each reply its sender."""
        return not any(fault.kind in DISCONNECTING for fault in self.faults)

    @property
    def is_silent(self) -> bool:
        """Whether no fault changes anything for clients."""
        return all(fault.kind in SILENT for fault in self.faults) and not self.ends_loads

    @property
    def is_even(self) -> bool:
        """Whether only other prompts, and workers that drain, delay a prompt."""
        return self.is_gentle and not self.deadly and not any(self.changes)

    @property
    def can_end_steps(self) -> int:
        """Number of faults after which a job may be delivered again."""
        faults = sum(fault.kind not in GENTLE and fault.kind not in HARMLESS for fault in self.faults)
        return faults + int(self.ends_loads)


def draw_plan(seed: int, requests: int = REQUESTS) -> Plan:
    """Draw the plan of a seed, which leaves out some kinds of faults and requests, so that others are frequent."""
    draw = Random(f"plan {seed}")
    weights: dict[str, float] = {kind: weight for kind, weight in KINDS.items() if draw.random() < 0.6}
    weights["row"] = KINDS["row"]
    kinds = [kind for kind in FAULTS if draw.random() < 0.35]
    is_gentle, is_even = draw.random() < _GENTLE, draw.random() < _EVEN
    is_even = is_even and is_gentle
    if is_gentle:
        kinds = list(draw.choice((SILENT, GENTLE, GENTLE + HARMLESS)))
    changes = draw.randrange(4) * ("adapter" in weights), draw.randrange(4) * ("version" in weights)
    bursts, deadly = draw.choice((0, 0, 150)), draw.choice((0, 0, 0, 1, 2))
    partitions, queue_limit = draw.choice((1, 1, 2)), draw.choice((30, 1000, 100_000))
    if is_even:  # An interactive client sends many prompts at once, to a queue with one partition that takes them all.
        changes, bursts, deadly, partitions, queue_limit = (0, 0), 150, 0, 1, 100_000
    workers, batch = draw.randrange(1, _MAX_WORKERS + 1), draw.randrange(1, _MAX_BATCH + 1)
    workers = min(2, workers) if is_even else workers  # The streams of many workers take the prompts of all clients.
    if draw.random() < _AGREED:
        kinds, changes, deadly, partitions, queue_limit, workers = list(SILENT), (0, 0), 0, 2, 100_000, max(2, workers)
    gap_s, overlap_s, is_upgraded = 10.0, _NEVER_S, draw.random() < _UPGRADED
    if is_upgraded:
        kinds, changes = list(draw.choice((SILENT, WORKER_FAULTS, WORKER_FAULTS + LOSSES))), (0, 3)
        # If two workers serve a model, clients use a new version as soon as one of them serves it. A third one can get
        # the turn of a stopped one.
        workers = 2 if kinds == list(SILENT) else 3
        gap_s, overlap_s = draw.choice(((0.1, 0.3), (3.0, _NEVER_S)))  # Publications overlap, or follow one another.
        deadly, weights["version"] = 0, KINDS["version"]
    lines = draw.choice((0, 0, 40)) if not changes[1] else 0  # A run is refused if the weights change.
    is_supervised = draw.random() < 0.4
    # Faults that could do nothing would count as an excuse for failures.
    unable = [*([] if is_supervised else ["kill supervisor"]), *([] if lines else ["kill run"])]
    kinds = [kind for kind in kinds if kind not in unable]
    # Bulk clients send many prompts at once.
    first = 0.0 if is_even else 0.7 if bursts else 0.3
    clients = tuple(draw.random() < (0.3 if number else first) for number in range(draw.randrange(1, _MAX_CLIENTS + 1)))
    lease_s = draw.choice(_LEASES)
    # A pool with few slots has short steps, so that it computes all prompts within `WORK_S`.
    step_s = min(draw.choice(_STEPS_S), lease_s / 5, WORK_S * workers * batch / (_PROMPTS * requests))
    work_s = _PROMPTS * requests * step_s / (workers * batch)
    seconds = draw.choice(_LOADS_S) if draw.random() < _IDLE else min(60.0, max(3.0, work_s / draw.choice(_LOADS)))
    count = 0 if draw.random() < _CALM or not kinds else draw.randrange(1, _MAX_FAULTS + 1)
    fault_s = _UPGRADE_S if is_upgraded else 1.2 * seconds
    faults = [Fault(draw.uniform(0.3, fault_s), draw.choice(kinds), draw.getrandbits(32)) for _ in range(count)]
    return Plan(
        seed=seed,
        requests=requests,
        lease_s=lease_s,
        workers=workers,
        is_supervised=is_supervised,
        batch=batch,
        step_s=(step_s / 2, 1.5 * step_s),
        vocab_size=draw.choice((16, 40)),
        queue_limit=queue_limit,
        partitions=partitions,
        encoding=draw.choice(("f32", "bf16")),
        clients=clients,
        weights=weights,
        pause_s=seconds * len(clients) / requests,
        bursts=bursts,
        short=draw.choice((0.0, 0.05, 0.3)),
        cancelled=draw.choice((0.0, 0.05, 0.3)),
        changes=changes,
        gap_s=gap_s,
        overlap_s=overlap_s,
        bad_versions={
            number: draw.choice(BAD_WEIGHTS) for number in range(1, 1 + changes[1]) if draw.random() < _BAD_VERSIONS
        },
        lines=lines,
        deadly=deadly,
        faults=tuple(sorted(faults, key=lambda fault: fault.at)),
    )
