"""The prompts that a worker holds, and the entries of the queue that ask for them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from lmpool.workers.backend.contract import BackendJob
from lmpool.workers.queue.consumer import Taken
from lmpool.workers.queue.unwanted import Doubtful

Asks = Mapping[bytes, Mapping[bytes, Taken]]
"""Digest of a prompt -> entry of the queue -> what it wants."""


def by_answer(asks: Asks) -> tuple[dict[bytes, dict[bytes, Taken]], set[bytes]]:
    """The entries that want each answer, and the answers that must replace what is stored."""
    entries: dict[bytes, dict[bytes, Taken]] = {}
    overwrite = set()
    for wants in asks.values():
        for entry, wanted in wants.items():
            entries.setdefault(wanted.digest, {})[entry] = wanted
            if wanted.overwrite:
                overwrite.add(wanted.digest)
    return entries, overwrite


def doubtful(asks: Asks) -> list[Doubtful]:
    """The jobs behind some asks, for a look whether somebody still waits for them."""
    wants = (one for ours in asks.values() for one in ours.items())
    return [Doubtful(entry, wanted.digest, wanted.fields) for entry, wanted in wants]


@dataclass(slots=True)
class Held:
    """A prompt that this worker holds.

    Attributes:
        job: what the backend is asked.
        entries: the queue entries that ask for it.
        is_damaged: what the cache has as its row cannot be read.
        since: monotonic time when the worker took it.
        looked_at: monotonic time of the last look whether somebody waits for it; 0 before the first.
    """

    job: BackendJob
    entries: dict[bytes, Taken] = field(default_factory=dict)
    is_damaged: bool = False
    since: float = field(default_factory=time.monotonic)
    looked_at: float = 0.0

    @property
    def is_only_asked(self) -> bool:
        """Whether nobody wants the row itself."""
        return all(wanted.ask is not None for wanted in self.entries.values())


class Holdings:
    """All that a worker holds: a prompt is there once, however many entries ask for it."""

    def __init__(self) -> None:
        self._held: dict[bytes, Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Held]:
        return iter(self._held.values())

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._held

    def __getitem__(self, digest: bytes) -> Held:
        return self._held[digest]

    def add(self, taken: Taken, job: BackendJob) -> bool:
        """Hold an entry; True when its prompt is a new one."""
        held = self._held.get(job.digest)
        is_new = held is None
        if held is None:
            held = self._held[job.digest] = Held(job)
        held.entries[taken.entry] = taken
        return is_new

    def all_entries(self) -> list[bytes]:
        """The entries of all that is held."""
        return [entry for held in self._held.values() for entry in held.entries]

    def entries(self, digests: Iterable[bytes]) -> dict[bytes, dict[bytes, Taken]]:
        """What asks for some prompts now: digest of the prompt -> entry -> what it wants."""
        return {digest: dict(self._held[digest].entries) for digest in digests if digest in self._held}

    def forget(self, digest: bytes, entries: Iterable[bytes]) -> bool:
        """Let go of entries that nobody waits for; True when none is left that asks for the prompt."""
        held = self._held[digest]
        for entry in entries:
            held.entries.pop(entry, None)
        if not held.entries:
            del self._held[digest]
        return not held.entries

    def release(self, ended: Mapping[bytes, Iterable[bytes]]) -> list[BackendJob]:
        """Let go of entries that were ended; returns the jobs of prompts that were asked for again meanwhile."""
        again = []
        for digest, entries in ended.items():
            held = self._held.get(digest)
            if held is None:
                continue  # The backend broke meanwhile, or nobody waits for it any more.
            for entry in entries:
                held.entries.pop(entry, None)
            if held.entries:
                again.append(held.job)
            else:
                del self._held[digest]
        return again
