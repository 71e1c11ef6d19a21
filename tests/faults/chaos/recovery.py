"""How long the pool needs to recover from what struck it.

A trouble hits at one time and ends at another. What has a length ends with it: a server that is away is back, new
connections are taken again. Killed and frozen workers, and connections that are cut or swallowed, are over when they
hit: nobody waits for them to come back. The recovery takes from that end until every request that had begun by then has
ended, and until, of each client, the first request that began after it has ended too. A trouble that hits before the
pool has recovered from the one before makes one of both, with the later of their ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tests.faults.chaos.tally import Request


class Trouble(NamedTuple):
    """When a trouble hit and when it was over, in seconds of the monotonic clock."""

    hit: float
    over: float


def recoveries(troubles: Sequence[Trouble], requests: Sequence[Request]) -> list[float]:
    """Seconds that each recovery took; requests that never ended are counted elsewhere."""
    clients: dict[int, list[Request]] = {}
    for request in sorted(requests, key=lambda request: request.began):
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
    """When all requests of a client that had begun by then, and the first one after, have ended."""
    last = over
    for request in requests:
        last = max(last, request.ended or over)
        if request.began > over:
            break
    return last


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share of all values do not exceed; 0 when there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
