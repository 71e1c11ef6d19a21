"""Counts from the logs of a chaos run: outcomes of requests, rows computed, and recovery times.

A fault has a start and an end. A fault with a duration ends when the server runs or accepts connections again. A kill,
a freeze, and a cut or blocked connection end when they start, because no process waits for their end. The recovery
lasts from the end of the fault until every request that began before this end has ended, and until the first later
request of each client has ended. A fault that occurs before the pool has recovered from the previous fault is merged
with the previous fault, and the later of both ends counts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from lmpool.errors import AdapterRefused
from lmpool.protocol.job import DIGEST_SIZE
from tests.faults.chaos.load import ADAPTED, CHANGE, OK, WRONG

_REFUSED = re.compile(rf"{AdapterRefused.__name__}: a worker cannot load .* terminated while it loaded this adapter")
"""An allowed error of adapter changes and requests: a worker was killed or frozen while it loaded the adapter."""


class Request(NamedTuple):
    """One request: start and end in seconds of the monotonic clock, and outcome; `ended` is None without an end."""

    client: int
    began: float
    ended: float | None
    outcome: str
    kind: str = "row"

    @property
    def is_ok(self) -> bool:
        """Whether the client received the right result."""
        return self.outcome.partition(" ")[0] == OK

    @property
    def is_refused(self) -> bool:
        """Whether the request's adapter is in quarantine, because a worker terminated while it loaded the adapter."""
        return self.kind in (CHANGE, ADAPTED) and _REFUSED.match(self.outcome) is not None


@dataclass(slots=True)
class Tally:
    """Numbers of the requests of a run, by outcome.

    Attributes:
        requests: all requests of the run.
        lost: number of requests that ended with an exception, or never ended.
        wrong: number of results that differ in any bit, or belong to an adapter that was not in service.
        late: number of requests that ended after their deadline.
        refused: number of requests that failed because a worker terminated while it loaded their adapter.
        kinds: kind of request -> number of right results.
        reasons: text of an exception -> number of requests that ended with it.
        wrongs: the requests with a wrong result.
    """

    requests: list[Request]
    lost: int = 0
    wrong: int = 0
    late: int = 0
    refused: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, int] = field(default_factory=dict)
    wrongs: list[Request] = field(default_factory=list)


def read_requests(log: Path, client: int) -> list[Request]:
    """Read the request log of a client."""
    began: dict[str, tuple[float, str]] = {}
    ended: dict[str, tuple[float, str]] = {}
    for line in log.read_text().splitlines():
        event, number, at, text = line.split(" ", 3)
        (began if event == "b" else ended)[number] = (float(at), text)
    requests = []
    for number, (start, kind) in began.items():
        end, outcome = ended.get(number, (None, "never ended"))
        requests.append(Request(client, start, end, outcome, kind))
    return requests


def count(requests: list[Request], deadline_s: float) -> Tally:
    """Count requests by outcome; a request of more than `deadline_s` seconds is late."""
    tally = Tally(requests)
    changes = sorted((request for request in requests if request.kind == CHANGE), key=lambda request: request.began)
    for request in requests:
        if request.outcome.startswith(WRONG) or is_stale(request, changes):
            tally.wrong += 1
            tally.wrongs.append(request)
        elif request.is_ok:
            tally.kinds[request.kind] += 1
        elif request.is_refused:
            tally.refused += 1
        else:
            tally.lost += 1
            tally.reasons[request.outcome] = tally.reasons.get(request.outcome, 0) + 1
        if request.ended is not None and request.ended - request.began > deadline_s:
            tally.late += 1
    return tally


def is_stale(request: Request, changes: Sequence[Request]) -> bool:
    """Whether a row was computed with an adapter that was not in service when the row was requested.

    Args:
        request: its outcome has the number of the adapter after `OK`.
        changes: the requests that put adapters in service, in order; some may have failed.
    """
    if request.kind != ADAPTED or not request.is_ok:
        return False
    number = int(request.outcome.split(" ")[1])
    if number >= len(changes):
        return True
    before, after = changes[number], changes[number + 1 :]
    is_early = request.ended is not None and request.ended < before.began
    is_over = any(change.is_ok and (change.ended or 0.0) < request.began for change in after)
    return before.is_refused or is_early or is_over


class Computed(NamedTuple):
    """Number of rows that workers began to compute, and number of different prompts."""

    rows: int
    prompts: int

    @property
    def twice(self) -> float:
        """Share of prompts computed twice: rows minus prompts, divided by prompts."""
        return (self.rows - self.prompts) / max(1, self.prompts)


def count_computed(traces: Iterable[Path]) -> Computed:
    """Count the rows and the different prompts in the trace files of workers."""
    rows, prompts = 0, set()
    for trace in traces:
        data = trace.read_bytes()
        digests = [data[at : at + DIGEST_SIZE] for at in range(0, len(data), DIGEST_SIZE)]
        rows += len(digests)
        prompts.update(digests)
    return Computed(rows, len(prompts))


class Trouble(NamedTuple):
    """Start and end of a fault, in seconds of the monotonic clock."""

    hit: float
    over: float


def recoveries(troubles: Sequence[Trouble], requests: Sequence[Request]) -> list[float]:
    """Seconds of each recovery from a fault; requests that never ended are ignored, because `Tally.lost` counts them.

    Requests that change an adapter are ignored too: they wait until no client uses the replaced adapter.
    """
    clients: dict[int, list[Request]] = {}
    for request in sorted(requests, key=lambda request: request.began):
        if request.kind != CHANGE:
            clients.setdefault(request.client, []).append(request)
    seconds: list[float] = []
    over = recovered = float("-inf")
    for trouble in sorted(troubles):
        if trouble.hit < recovered:
            over = max(over, trouble.over)
            seconds.pop()
        else:
            over = trouble.over
        recovered = max([over, *(_recovered(over, client_requests) for client_requests in clients.values())])
        seconds.append(recovered - over)
    return seconds


def _recovered(over: float, requests: Sequence[Request]) -> float:
    """The time when all requests that a client sent before `over`, and its first request after `over`, have ended."""
    last = over
    for request in requests:
        last = max(last, request.ended or over)
        if request.began > over:
            break
    return last


def percentile(values: Sequence[float], share: float) -> float:
    """Percentile: the value that `share` of all values do not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
