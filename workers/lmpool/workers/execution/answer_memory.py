"""Memory of answers: jobs wait whose answers would take too much of it, beside those that are not published yet."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.row import width_of
from lmpool.workers.execution.contract import BackendJob

MAX_BYTES = 256 * 2**20
"""Of answers that are computed, or about to be, and not published."""

_SMALL_BYTES = 64 * 2**10
_NUMBER_BYTES = 4


class AnswerMemory:
    """Holds jobs back from the backend while answers take up memory.

    A worker has a few batches of prompts at most, whose rows are all of one size. But what is wanted of positions, or
    of the head, may take 8 MiB each. What takes little of it never waits. All of it happens in the event loop.

    Args:
        info: what the backend serves.
    """

    def __init__(self, info: ModelInfo) -> None:
        self._info = info
        # Each in the order in which they came; a job is in one of them. Not plain dicts: the first of one is found ever
        # more slowly as others before it are removed.
        self._waiting: OrderedDict[bytes, BackendJob] = OrderedDict()
        self._waiting_bulk: OrderedDict[bytes, BackendJob] = OrderedDict()
        # Of one prompt several, where it is computed again before its last answer is published.
        self._taken: dict[bytes, list[int]] = {}
        self._taken_bytes = 0

    def admit(self, jobs: Sequence[BackendJob]) -> Sequence[BackendJob]:
        """Those of some jobs that the backend may have now; the others wait."""
        large = {job.digest: job for job in jobs if job.is_for_answer and self._bytes_of(job) > _SMALL_BYTES}
        if not large:
            return jobs
        for digest, job in large.items():
            (self._waiting_bulk if job.bulk else self._waiting)[digest] = job
        return [*(job for job in jobs if job.digest not in large), *self._next()]

    def free(self, digests: Iterable[bytes]) -> list[BackendJob]:
        """Note that answers are published; returns what the backend may have now."""
        if not self._taken:
            return []
        for digest in digests:
            if sizes := self._taken.get(digest):
                self._taken_bytes -= sizes.pop()
                if not sizes:
                    del self._taken[digest]
        return self._next()

    def drop(self, digests: Iterable[bytes]) -> list[BackendJob]:
        """Note that nobody waits for answers any more; returns what the backend may have now."""
        for digest in digests:
            self._taken_bytes -= sum(self._taken.pop(digest, ()))
            self._waiting.pop(digest, None)
            self._waiting_bulk.pop(digest, None)
        return self._next()

    def promote(self, digests: Iterable[bytes]) -> None:
        """Have prompts go before those of bulk clients, behind the others that wait."""
        for digest in digests:
            if (job := self._waiting_bulk.pop(digest, None)) is not None:
                self._waiting[digest] = job._replace(bulk=False)

    def _next(self) -> list[BackendJob]:
        """Those that wait and have room, those of bulk clients last; one has room in any case."""
        admitted: list[BackendJob] = []
        while waiting := self._waiting or self._waiting_bulk:
            digest = next(iter(waiting))
            size = self._bytes_of(waiting[digest])
            if self._taken and self._taken_bytes + size > MAX_BYTES:
                break
            self._taken.setdefault(digest, []).append(size)
            self._taken_bytes += size
            admitted.append(waiting.pop(digest))
        return admitted

    def _bytes_of(self, job: BackendJob) -> int:
        """Of the answer to a job that wants no row."""
        info, numbers = self._info, 0
        if job.positions is not None:
            numbers = len(job.span) * job.positions.width(info.vocab_size)
        elif job.generate is not None:
            numbers = 2 * job.generate.most
        elif job.head is not None:
            is_whole = job.head.part == "bias"
            numbers = info.vocab_size if is_whole else job.head.count * width_of(info.hidden, info.dtype)
        return _NUMBER_BYTES * numbers
