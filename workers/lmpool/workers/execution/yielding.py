"""Jobs that wait in a worker while others go first: those of bulk clients, and continuations between two steps."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from lmpool.workers.execution.contract import BackendJob

PATIENCE_STEPS = 16
"""Steps for which a prompt of bulk clients waits before the backend gets it next to others."""

QUIET_S = 60.0
"""Seconds after the last interactive prompt until bulk clients count as alone: a person asks again within a minute."""

MAX_BULK_TOKENS = 2048
"""Tokens of bulk prompts that the backend must compute at once next to interactive clients; one prompt may have more.

Engines compute prompts in the order in which they get them, so an interactive prompt waits for these tokens: about one
step of a GPU.
"""

# The part of a step, and one prompt at least, that goes next to others once it has waited so long: twice what moves up
# then.
_SHARE = 8


class _Bulk(NamedTuple):
    """A job of bulk clients that waits.

    Attributes:
        job: the job.
        patient_until: the step after which it has waited long enough.
        grows: it is a continuation.
        tokens: that the backend must compute for it.
    """

    job: BackendJob
    patient_until: int
    grows: bool
    tokens: int


class YieldingJobs:
    """Keeps jobs from the backend while it has others to fill its next step with.

    Rows that interactive clients wait for never wait here. Continuations of interactive clients come next: each step
    gets those that began first, as far as rows leave them slots, and half a batch in any case. So continuations hold a
    batch of the backend at most, and a row waits for one of their steps, however many tokens they draw. Jobs of bulk
    clients come last. Where no interactive client has sent a prompt lately, the backend gets as many of them as it has
    capacity for, because it can pack its steps better then.

    Args:
        batch: prompts that make a full step.
    """

    def __init__(self, batch: int) -> None:
        self._batch = batch
        # Both in the order in which they came; continuations that have begun stand before the others.
        self._growing: dict[bytes, BackendJob] = {}
        self._bulk: dict[bytes, _Bulk] = {}
        self._step = 0
        self._interactive_at = float("-inf")

    def __len__(self) -> int:
        return len(self._growing) + len(self._bulk)

    def sort(self, jobs: Sequence[BackendJob]) -> Sequence[BackendJob]:
        """Keep those of some new jobs that yield; returns the others, which the backend must get now."""
        rows = [job for job in jobs if not job.bulk and job.generate is None]
        if rows:
            self._interactive_at = time.monotonic()
        if len(rows) == len(jobs):
            return jobs
        for job in jobs:
            if job.bulk:
                patient_until, grows = self._step + PATIENCE_STEPS, job.generate is not None
                self._bulk[job.digest] = _Bulk(job, patient_until, grows, len(job.ids) // 4)
            elif job.generate is not None:
                self._interactive_at = time.monotonic()
                self._growing[job.digest] = job
        return rows

    def go_on(self, jobs: Iterable[BackendJob]) -> None:
        """Keep continuations that have begun until the next step: before the others of their kind."""
        growing = {job.digest: job for job in jobs if not job.bulk}
        # The backend has the keys and values of all but the last token.
        bulk = {job.digest: _Bulk(job, self._step, grows=True, tokens=1) for job in jobs if job.bulk}
        if growing:
            self._interactive_at = time.monotonic()
            self._growing = growing | self._growing
        if bulk:
            self._bulk = bulk | self._bulk

    def next(self, held: int, growing: int, bulk_tokens: int, capacity: int) -> list[BackendJob]:
        """The jobs that the backend must get before its next step.

        Args:
            held: prompts that the backend holds.
            growing: continuations among them.
            bulk_tokens: tokens that the bulk prompts among them still need.
            capacity: how many more prompts the backend accepts.
        """
        self._step += 1
        due: list[BackendJob] = []
        if self._growing:
            count = max(self._batch - held, max(1, self._batch // 2) - growing)
            due = self.take(list(islice(self._growing, max(0, count))))
        if self._bulk:
            held += len(due)
            due += self.take(self._next_bulk(self._batch - held, bulk_tokens, capacity - len(due)))
        return due

    def _next_bulk(self, free: int, tokens: int, capacity: int) -> list[bytes]:
        is_alone = time.monotonic() - self._interactive_at > QUIET_S
        room, most_tokens = (max(free, capacity), None) if is_alone else (free, MAX_BULK_TOKENS)
        room_if_late = max(room, 1, self._batch // _SHARE)
        due: list[bytes] = []
        for digest, (_, patient_until, _, size) in islice(self._bulk.items(), room_if_late):
            if len(due) >= room and patient_until > self._step:
                break
            # A prompt that is longer than the limit goes alone.
            if most_tokens is not None and tokens and tokens + size > most_tokens:
                break
            tokens += size
            due.append(digest)
        return due

    def take(self, digests: Collection[bytes]) -> list[BackendJob]:
        """Those of some prompts that wait here; they do so no longer."""
        taken = [self._growing.pop(digest) for digest in digests if digest in self._growing]
        return taken + [self._bulk.pop(digest).job for digest in digests if digest in self._bulk]

    def promote(self, digests: Collection[bytes]) -> list[BackendJob]:
        """Have jobs of bulk clients be interactive ones; returns the rows, which the backend must get now."""
        rows = []
        self._interactive_at = time.monotonic()
        for digest in digests:
            if (waiting := self._bulk.pop(digest, None)) is not None:
                job = waiting.job._replace(bulk=False)
                if waiting.grows:
                    self._growing[digest] = job
                else:
                    rows.append(job)
        return rows

    def drop(self, digests: Collection[bytes]) -> None:
        """Discard prompts; unknown ones are ignored."""
        for digest in digests:
            self._growing.pop(digest, None)
            self._bulk.pop(digest, None)
