"""Prompts of bulk clients that wait in a worker: behind all others, but not for ever."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice

from lmpool.workers.backend.contract import BackendJob

PATIENCE_STEPS = 16
"""Steps for which a prompt of bulk clients waits before the backend gets it beside others."""

# So much of a step, and one prompt at least, goes beside others once it has waited so long: twice what moves up then.
_SHARE = 8


class YieldingJobs:
    """Keeps the jobs of bulk clients from the backend as long as it has others to fill its next step with.

    Backends take what they hold in the order in which it came. So they are given of these what fills the next step, and
    where nobody else has asked lately as much as they have room for, which has them pack their steps better.

    Args:
        batch: prompts that make a full step.
    """

    def __init__(self, batch: int) -> None:
        self._batch = batch
        # In the order in which they came, with the step after which each has waited long enough.
        self._jobs: dict[bytes, tuple[BackendJob, int]] = {}
        self._step = 0
        self._last_other = -PATIENCE_STEPS

    def __len__(self) -> int:
        return len(self._jobs)

    def sort(self, jobs: Sequence[BackendJob]) -> Sequence[BackendJob]:
        """Keep those of some jobs that yield; returns the others, which the backend is to have now."""
        others = [job for job in jobs if not job.bulk]
        if others:
            self._last_other = self._step
        if len(others) == len(jobs):
            return jobs
        for job in jobs:
            if job.bulk:
                self._jobs[job.digest] = job, self._step + PATIENCE_STEPS
        return others

    def go_on(self, jobs: Sequence[BackendJob]) -> Sequence[BackendJob]:
        """As `sort`, of continuations that have begun: they go before all that wait here, and have waited enough."""
        others = [job for job in jobs if not job.bulk]
        if len(others) < len(jobs):
            self._jobs = {job.digest: (job, self._step) for job in jobs if job.bulk} | self._jobs
        return others

    def next(self, held: int, capacity: int) -> list[BackendJob]:
        """What the backend is to have before its next step, which no longer yields.

        Args:
            held: prompts that the backend holds.
            capacity: how many more it has room for.
        """
        self._step += 1
        if not self._jobs:
            return []
        if len(self._jobs) <= self._batch - held:
            return self.take(list(self._jobs))
        has_others = self._step - self._last_other <= PATIENCE_STEPS
        room = self._batch - held if has_others else max(capacity, self._batch - held)
        room_if_late = max(room, 1, self._batch // _SHARE)
        due: list[bytes] = []
        for digest, (_, patient_until) in islice(self._jobs.items(), room_if_late):
            if len(due) >= room and patient_until > self._step:
                break
            due.append(digest)
        return self.take(due)

    def take(self, digests: Collection[bytes]) -> list[BackendJob]:
        """Those of some prompts that have yielded so far; they do so no longer."""
        return [self._jobs.pop(digest)[0] for digest in digests if digest in self._jobs]

    def drop(self, digests: Collection[bytes]) -> None:
        """Forget prompts; unknown ones are ignored."""
        for digest in digests:
            self._jobs.pop(digest, None)
