"""What became of the requests, and how often rows were computed, from what the processes wrote down."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from lmpool.protocol.prompt import DIGEST_SIZE


class Request(NamedTuple):
    """One request: when it began and ended, in seconds of the monotonic clock, and how; it may not have ended."""

    client: int
    began: float
    ended: float | None
    outcome: str


@dataclass(slots=True)
class Tally:
    """All requests of a run, counted.

    Attributes:
        requests: all of them.
        lost: those that ended in no row: with an exception, or not at all.
        wrong: those whose row differs in any bit.
        late: those that ended after their deadline.
        reasons: exceptions, with how often.
    """

    requests: list[Request]
    lost: int = 0
    wrong: int = 0
    late: int = 0
    reasons: dict[str, int] = field(default_factory=dict)


def read_requests(log: Path, client: int) -> list[Request]:
    """The requests that a client has written down."""
    began: dict[str, float] = {}
    ended: dict[str, tuple[float, str]] = {}
    for line in log.read_text().splitlines():
        event, number, at, *outcome = line.split(" ", 3)
        if event == "b":
            began[number] = float(at)
        else:
            ended[number] = (float(at), outcome[0])
    return [Request(client, start, *ended.get(number, (None, "never ended"))) for number, start in began.items()]


def count(requests: list[Request], deadline_s: float) -> Tally:
    """Count requests; `deadline_s` is the seconds that each may take."""
    tally = Tally(requests)
    for request in requests:
        if request.outcome == "wrong":
            tally.wrong += 1
        elif request.outcome != "ok":
            tally.lost += 1
            tally.reasons[request.outcome] = tally.reasons.get(request.outcome, 0) + 1
        if request.ended is not None and request.ended - request.began > deadline_s:
            tally.late += 1
    return tally


class Computed(NamedTuple):
    """Rows that workers began to compute, and how many prompts these are."""

    rows: int
    prompts: int

    @property
    def twice(self) -> float:
        """Rows beyond one for each prompt, as a share of the prompts."""
        return (self.rows - self.prompts) / max(1, self.prompts)


def count_computed(traces: Iterable[Path]) -> Computed:
    """Count what workers have written down."""
    rows, prompts = 0, set()
    for trace in traces:
        data = trace.read_bytes()
        digests = [data[at : at + DIGEST_SIZE] for at in range(0, len(data), DIGEST_SIZE)]
        rows += len(digests)
        prompts.update(digests)
    return Computed(rows, len(prompts))
